"""One run on this rank: its parts and its progress; steps, validation, evaluation and saves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ithaka.checkpoint import checkpoints, save
from ithaka.comm.mesh import Mesh
from ithaka.config import write_atomic
from ithaka.config.units import format_json, plural
from ithaka.data.batch import Batch
from ithaka.evaluate.tasks import EvalText, flatten_metrics, measure_all
from ithaka.log.console import Console, status
from ithaka.phases import phase
from ithaka.run.validated import Run
from ithaka.train.bad_steps import BadSteps, check_loaded_weights
from ithaka.train.objectives import pack_for_training
from ithaka.train.parts import Parts
from ithaka.train.preferences import DPO
from ithaka.train.step import StepResult, learning_rate, train_step, validation_loss


@dataclass(frozen=True)
class Update:
    """A step that counts."""

    result: StepResult
    lr: float
    num_tokens: int  # input tokens of all ranks


@dataclass(frozen=True)
class Validation:
    """What validation and evaluation measured after a step, if they were due."""

    loss: float | None = None
    figures: dict[str, float] = field(default_factory=dict)  # by source, and of the evaluation
    is_best: bool = False  # the lowest loss so far


class Trainer:
    """Trains the parts of a run on this rank, and knows how far it is."""

    def __init__(self, run: Run, mesh: Mesh, parts: Parts, saver: save.Saver) -> None:
        self.run = run
        self.config = run.config
        self.mesh = mesh
        self.model = parts.model
        self.teacher = parts.teacher
        self.objective = parts.objective
        self.optimizer = parts.optimizer
        self.store = parts.store
        self.kernel = parts.kernel
        self.random_weights = parts.random_weights
        self.num_params = parts.num_params
        self.num_trained = parts.num_trained
        self.tokenizer = parts.tokenizer
        self.data = parts.data
        self.data_positions = parts.data_positions
        self.started_at = parts.started_at
        self.saver = saver
        self.bad_steps = BadSteps(run, mesh, parts.tokenizer, saver)
        self.console: Console  # once training starts
        self.lock: int | None = None  # of the run directory; rank 0 only
        self.data_summary: dict[str, str] = {}
        self.text: EvalText | None = None  # to evaluate on
        self.contexts = run.config.evaluate.contexts or (run.config.data.context,)  # to evaluate at
        self.global_batch = run.config.train.batch * run.config.train.accumulate * mesh.dp_size
        self.epochs = run.config.train.epochs
        self.device_name = "CPU"
        if mesh.device.type == "cuda":
            self.device_name = torch.cuda.get_device_name(mesh.device)
        self.step = 0
        self.tokens = 0
        self.first_step = 0  # of this process
        self.best: tuple[float, int] | None = None  # lowest validation loss, and its step
        self.stale = 0  # validations since

    # ---- what is due

    @property
    def done(self) -> bool:
        settings = self.config.train
        return self.step >= settings.steps or 0 < settings.patience <= self.stale

    def is_due(self, every: int) -> bool:
        """Whether an action with interval `every` (0: only at the end) is due after this step."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    # ---- one step

    def next_batches(self) -> list[Batch]:
        """Return this rank's micro-batches of the next step, packed."""
        batches = [self.data.next_batch() for _ in range(self.config.train.accumulate)]
        windows = self.run.shape.windows
        return [pack_for_training(batch, self.mesh, windows) for batch in batches]

    def advance(self, batches: Sequence[Batch]) -> Update | None:
        """Train on this rank's micro-batches. Returns None if they were skipped: no step."""
        number = self.step + 1
        lr = learning_rate(
            self.step - self.run.entry.schedule_start, self.config.optim, self.config.train.steps
        )
        result = self._train_step(batches, lr)
        if result.refused is not None:
            first = result
            result = self._train_step(batches, lr)
            if result.refused is not None:
                is_first = number == max(1, self.first_step)
                if is_first and not math.isfinite(result.loss + result.grad_norm):
                    check_loaded_weights(self.model, self.run)
                self.bad_steps.skip_or_stop(number, result, batches, self.console)
                return None
            self.bad_steps.report_suspects(number, first, self.console)
        self.bad_steps.note_good(result.grad_norm)
        num_tokens = sum(batch.input_ids.numel() for batch in batches) * self.mesh.dp_size
        self.step = number
        self.tokens += num_tokens
        return Update(result, lr, num_tokens)

    def _train_step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        return train_step(
            self.model,
            self.optimizer,
            batches,
            lr=lr,
            clip_norm=self.config.optim.clip_norm,
            mesh=self.mesh,
            objective=self.objective,
            source_names=self.data.source_names,
            seed_and_step=(self.config.train.seed, self.step + 1),
            accepts=self.bad_steps.accepts,
        )

    # ---- validation and evaluation

    def validate_if_due(self) -> Validation:
        loss = None
        figures = dict[str, float]()
        is_best = False
        if self.is_due(self.config.train.validate_every):
            with self.console.show_activity("validation"):
                loss, figures = self.validate()
            is_best = self.record_validation(loss)
            if loss is not None and not math.isfinite(loss):
                what = f"step {self.step}: the validation loss is {loss}"
                message = f"{what}, which does not count as lower"
                self.console.event(self.step, message, val_loss=str(loss))
        if self.text is not None and self.is_due(self.config.evaluate.every):
            with self.console.show_activity("evaluation"):
                figures = figures | self.evaluate()
        return Validation(loss, figures, is_best)

    @phase("validation")
    def validate(self) -> tuple[float | None, dict[str, float]]:
        """Return the loss, or None without labels, and that of each source."""
        batches = self.data.validation_batches(self.config.train.validate_sequences)
        dpo = self.objective if isinstance(self.objective, DPO) else None
        return validation_loss(self.model, batches, self.mesh, self.data.source_names, dpo)

    def record_validation(self, val_loss: float | None) -> bool:
        """Update the best loss and patience. Returns whether this loss is the lowest so far; a
        non-finite loss never is."""
        if val_loss is None:
            return False
        better = math.isfinite(val_loss) and (self.best is None or val_loss < self.best[0])
        if better:
            self.best = (val_loss, self.step)
        self.stale = 0 if better else self.stale + 1
        return better

    @phase("evaluation")
    def evaluate(self) -> dict[str, float]:
        """Return what is measured of the model. Rank 0 also writes it to the run directory."""
        assert self.text is not None
        samples = self.config.evaluate.samples
        found = measure_all(self.model, self.tokenizer, self.text, self.contexts, samples)
        self.model.train()
        self.model.reshard()  # after forward, the root keeps its parameters gathered for backward
        if self.mesh.rank == 0:
            folder = self.run.run_dir / "evaluations"
            name = f"{self.run.run_dir}, step {self.step}"
            with self.console.writing("evaluation"):
                folder.mkdir(exist_ok=True)
                text = format_json({"model": name, **found}, indent=2)
                write_atomic(folder / f"step-{self.step}.json", text)
        return flatten_metrics(found)

    # ---- save and load

    @phase("saving")
    def save(self) -> None:
        """Start a save, in the background if host memory allows; `saver.finish` waits for it."""
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "data": self.data.state_dict(),
            "norms": list(self.bad_steps.norms) if self.config.train.spike else [],
            "global_batch": self.global_batch,
            "best": self.best,
            "stale": self.stale,
            "epochs": self.epochs,
            "steps": self.config.train.steps,
        }
        if self.data_positions:
            state["places"] = self.data_positions
        # These change with model.rope, even within a run; Nemotron-H has none.
        names = ("rope_parameters", "max_position_embeddings")
        text = self.model.config.get_text_config()
        state["positions"] = {name: getattr(text, name) for name in names if hasattr(text, name)}
        self.saver.save(self.model, self.optimizer, state)

    @phase("loading the checkpoint")
    def load(self) -> None:
        """Restore model and optimizer; the data position was restored with the data."""
        assert self.run.checkpoint is not None
        with status("loading the checkpoint"):
            state = save.load_checkpoint(self.run.checkpoint, self.model, self.optimizer)
        self.step = state["step"]
        self.tokens = state["tokens"]
        self.first_step = self.step + 1
        self.bad_steps.norms.extend(state.get("norms", []))
        self.best, self.stale = checkpoints.read_best(state)
        before = state.get("global_batch", self.global_batch)
        if before != self.global_batch:
            sequences = plural(self.global_batch, "sequence")
            words = f"{sequences} per step (was {before}); train.global_batch={before} keeps them"
            self.data_summary["batch"] = words
