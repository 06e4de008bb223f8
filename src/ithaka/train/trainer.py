"""Model, optimizer and data of one run on this rank: steps, validation, evaluation and saves."""

from __future__ import annotations

import json
import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ithaka.attention.kernels import resolve_kernel
from ithaka.checkpoint import files, save
from ithaka.config import embedded_model
from ithaka.data.open import open_data
from ithaka.data.stream import Batch
from ithaka.data.tokenizer import Tokenizer, load_tokenizer
from ithaka.dist.agree import gather_objects
from ithaka.dist.mesh import Mesh
from ithaka.dist.rank import is_local_rank_0
from ithaka.exits import ExitCode
from ithaka.layer.store import Store
from ithaka.measure import EvalText, check_prompts, flatten_metrics, measure_all, read_text
from ithaka.model.batch import count_pairs
from ithaka.model.build import build_model
from ithaka.phases import phase
from ithaka.plan.hardware import DISK_BYTES_S
from ithaka.preflight.run import Run, store_host_bytes
from ithaka.train.console import Console, status
from ithaka.train.step import StepResult, learning_rate, make_optimizer, train_step, validation_loss

MIN_NORMS = 20  # steps before a gradient norm can count as a spike
MAX_SKIPPED = 2  # batches in a row
SLOW_DISK_S, SLOW_DISK_SHARE = 1.0, 0.05  # report the disk when a step waits longer


class Diverged(RuntimeError):
    """Loss or gradient is no longer finite, or spikes."""

    exit_code = ExitCode.DIVERGED


class Trainer:
    """Model, optimizer and data of one run on this rank, and its progress."""

    def __init__(self, run: Run, mesh: Mesh) -> None:
        """Restores the place in the data; `load` restores model and optimizer. Does not communicate."""
        self.run, self.config, self.mesh = run, run.config, mesh
        self.step = self.tokens = self.first_step = 0  # first_step: of this process
        self.data_facts: dict[str, str] = {}
        self.lock: int | None = None  # on the run directory; rank 0 only
        self.saver: save.Saver
        self.console: Console | None = None
        self.text: EvalText | None = None  # to evaluate on
        self.norms: deque[float] = deque(maxlen=100)  # gradient norms of the last steps
        self.skipped = 0  # batches in a row
        self.reported_unlabelled = False  # a step without a label
        self.best: tuple[float, int] | None = None  # lowest validation loss, and its step
        self.stale = 0  # validations since
        self.epochs = run.config.train.epochs
        self.last_save_at = time.monotonic()  # or skipped
        self.data_positions: dict[str, Any] = {}  # in data of other entries
        config = run.config
        torch.manual_seed(config.train.seed + mesh.rank)
        self.kernel = resolve_kernel(run.layout.kernel, mesh.device, compute_dtype(run), run.shape.head_dim).name
        self.store = Store(mesh.device, host_bytes=store_host_bytes(run), disk_path=config.memory.disk_path)
        with phase("building the model"), status("building the model"):
            source = config.model.path or embedded_model(config.model.embedded)
            self.model = build_model(
                source,
                mesh,
                run.layout,
                store=self.store,
                seed=config.train.seed,
                vocab_size=run.shape.vocab,
                adapter=config.adapter,
                rope=config.model.rope,
                context=config.data.context,
            )
        self.optimizer = make_optimizer(self.model, config.optim)
        self.num_params = sum(param.numel() for param in self.model.parameters())
        self.num_trained = sum(param.numel() for param in self.model.parameters() if param.requires_grad)
        with status("opening the data"):
            self.tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.chat_template)
            self.data = open_data(
                config.data,
                tokenizer=self.tokenizer,
                seed=config.train.seed,
                dp_rank=mesh.dp_rank,
                dp_size=mesh.dp_size,
                batch=config.train.batch,
                accumulate=config.train.accumulate,
                steps=config.train.steps - max(run.last_step, config.start) if config.train.epochs is None else None,
                validate_sequences=config.train.validate_sequences,
                cache_dir=run.run_dir / "tokens",
                fills_cache=is_local_rank_0(),
            )
        if run.checkpoint is not None:
            state = files.read_state(run.checkpoint)
            self.data_positions = state.get("places", {}) | {state["data"]["data"]: state["data"]}
            place = self.data_positions.pop(self.data.fingerprint(), None)
            if place is not None or not (config.curriculum and state["step"] == config.start):
                self.data.load_state_dict(place or state["data"])

    @phase("loading the checkpoint")
    def load(self) -> None:
        """The data position was restored earlier, where it can fail."""
        assert self.run.checkpoint is not None
        with status("loading the checkpoint"):
            state = save.load_checkpoint(self.run.checkpoint, self.model, self.optimizer)
        self.step, self.tokens, self.first_step = state["step"], state["tokens"], state["step"] + 1
        self.norms.extend(state.get("norms", []))
        self.best, self.stale = tuple(state.get("best") or ()) or None, state.get("stale", 0)
        if (before := state.get("global_batch", self.global_batch)) != self.global_batch:
            words = f"{self.global_batch} sequences per step (was {before}); train.global_batch={before} keeps them"
            self.data_facts["batch"] = words

    @property
    def global_batch(self) -> int:
        return self.config.train.batch * self.config.train.accumulate * self.mesh.dp_size

    @phase("saving")
    def save(self) -> None:
        """Start a save, in the background if host memory allows; `saver.finish` waits for it."""
        self.last_save_at = time.monotonic()
        norms = list(self.norms) if self.config.train.spike else []
        state = {"step": self.step, "tokens": self.tokens, "data": self.data.state_dict(), "norms": norms}
        state |= {"global_batch": self.global_batch, "best": self.best, "stale": self.stale}
        state |= {"epochs": self.epochs, "steps": self.config.train.steps}
        state |= {"places": self.data_positions} if self.data_positions else {}
        names = "rope_parameters", "max_position_embeddings"  # which change with model.rope, also within a run
        state["positions"] = {name: getattr(self.model.config, name) for name in names}
        self.saver.save(self.model, self.optimizer, state)

    def skip_save(self) -> None:
        """Report a due save that is skipped because another one is in progress."""
        self.last_save_at, saver = time.monotonic(), self.saver
        so_far = (
            f"the one of step {saver.step} is still being written after {self.last_save_at - saver.started_at:.0f} s"
        )
        way = "Save less often (train.save_minutes, train.save_every) or to faster storage."
        if self.console is not None:
            words = f"No checkpoint after step {self.step}: {so_far}. {way}"
            self.console.event(self.step, words, save_in_progress=saver.step)

    def record_validation(self, val_loss: float | None) -> bool:
        """Update the best loss and patience. Returns whether this loss is the lowest so far."""
        if val_loss is None:
            return False
        better = self.best is None or val_loss < self.best[0]
        self.best, self.stale = ((val_loss, self.step), 0) if better else (self.best, self.stale + 1)
        return better

    @property
    def done(self) -> bool:
        settings = self.config.train
        return self.step >= settings.steps or 0 < settings.patience <= self.stale

    @property
    def save_is_due(self) -> bool:
        """On rank 0, whose clock counts for all."""
        minutes = self.config.train.save_minutes
        by_time = minutes > 0 and time.monotonic() - self.last_save_at >= 60 * minutes
        return self.mesh.rank == 0 and (by_time or self.is_due(self.config.train.save_every))

    def accepts(self, loss: float, norm: float) -> bool:
        """Whether to update the weights: loss and norm are finite, and the norm is not a spike."""
        spike = self.config.train.spike
        limit = spike * statistics.median(self.norms) if spike and len(self.norms) >= MIN_NORMS else math.inf
        return math.isfinite(loss) and math.isfinite(norm) and norm <= limit

    def _skip_or_stop(self, result: StepResult, batches: Sequence[Batch]) -> None:
        """Skip the batch, or stop: the step failed twice."""
        self.skipped += 1
        what = f"step {self.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}, twice"
        if self.config.train.bad_step == "stop" or self.skipped > MAX_SKIPPED:
            with suppress(save.CheckpointError):
                self.saver.finish()
            raise Diverged(
                f"{what}. {files.describe_last(self.run.run_dir)} Try a lower optim.lr or more optim.warmup_steps."
            )
        own = [_document_starts(batch, self.tokenizer) for batch in batches] if self.mesh.cp_rank == 0 else []
        documents = [start for starts in gather_objects(own) for each in starts for start in each]
        self.report(f"{what}. Its batch is skipped; {len(documents)} documents", skipped_documents=documents)

    def _report_unlabelled(self) -> None:
        """Report the first step without a label."""
        if not self.reported_unlabelled:
            message = f"step {self.step + 1}: no rank has a token to train; no update, and such steps do not count"
            self.report(message, unlabelled=True)
        self.reported_unlabelled = True

    def _report_suspects(self, first: StepResult) -> None:
        """A step was bad once and good when recomputed: name the ranks whose hardware may be failing."""
        ranks = gather_objects((f"rank {self.mesh.rank} on {socket.gethostname()}", *(first.refused or ())))
        # A bad forward shows in the loss of its own ranks, and then in the gradients of all.
        bad = [name for name, loss, _ in ranks if not math.isfinite(loss)]
        bad = bad or [name for name, _, norm in ranks if not math.isfinite(norm)]
        bad = bad or [max(ranks, key=lambda entry: entry[2])[0]]  # a spike: the largest share
        who = f"the hardware of {', '.join(bad)} may be failing"
        if len(bad) == len(ranks) > 1:
            who = "hardware may be failing, but all ranks were affected"
        what = f"step {self.step + 1}: loss {first.loss}, gradient norm {first.grad_norm}, but not when computed again"
        self.report(f"{what}: {who}", suspected=bad)

    def attention_work(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Query-key pairs of this rank's heads in a step; and how many times as many it would have, without windows, if
        every sequence were a single document."""
        ulysses, rank, heads = self.mesh.ulysses_group.size(), self.mesh.ulysses_group.rank(), self.run.shape.heads
        own_heads = (rank + 1) * heads // ulysses - rank * heads // ulysses
        own = sum(count_pairs(batch.document_ids, self.run.shape.windows) for batch in batches)
        seen = sum(count_pairs(batch.document_ids, [None]) for batch in batches)
        return float(own * own_heads), max(1.0, len(batches) * self.run.work.pairs(None) / seen)

    def slow_disk(self, step_s: float) -> float:
        """Bytes per second of the disk tier in this step, if the step waited longer for it than planned; else 0."""
        moved_bytes, busy_s, waited_s = self.store.disk_use()
        late_s = min(waited_s, busy_s - moved_bytes / self.planned_disk_bytes_s)
        return moved_bytes / busy_s if late_s > max(SLOW_DISK_S, SLOW_DISK_SHARE * step_s) else 0.0

    @property
    def planned_disk_bytes_s(self) -> float:
        """This rank's share."""
        return DISK_BYTES_S / self.run.hardware.gpus_per_node

    def report(self, words: str, **values: Any) -> None:
        if self.console is not None:
            self.console.event(self.step + 1, words, **values)

    def advance(self, batches: Sequence[Batch]) -> tuple[StepResult, float, int] | None:
        """Train on this rank's micro-batches. Returns the result, the learning rate and the input tokens of all ranks;
        None if the batch was skipped and the step does not count."""
        config = self.config
        lr = learning_rate(self.step - config.schedule_start, config.optim, config.train.steps)
        compute = partial(
            train_step,
            self.model,
            self.optimizer,
            batches,
            lr=lr,
            clip_norm=config.optim.clip_norm,
            mesh=self.mesh,
            windows=self.run.shape.windows,
            source_names=self.data.source_names,
            accepts=self.accepts,
        )
        result = compute()
        if not result.label_tokens:
            self._report_unlabelled()
            return None
        if result.refused is not None:
            first, result = result, compute()
            if result.refused is not None:
                self._skip_or_stop(result, batches)
                return None
            self._report_suspects(first)
        self.norms.append(result.grad_norm)
        self.skipped = 0
        num_tokens = sum(batch.input_ids.numel() for batch in batches) * self.mesh.dp_size
        self.step += 1
        self.tokens += num_tokens
        return result, lr, num_tokens

    @phase("validation")
    def validate(self) -> tuple[float | None, dict[str, float]]:
        batches = self.data.validation_batches(self.config.train.validate_sequences)
        return validation_loss(self.model, batches, self.mesh, self.data.source_names)

    def read_evaluation(self) -> EvalText | None:
        """Text for the evaluation, or None if evaluation is off."""
        how = self.config.evaluate
        if not how.every:
            return None
        text = read_text(how.data, self.tokenizer, max(self.contexts), how.documents, where="evaluate.data")
        check_prompts(text, self.tokenizer, self.contexts)
        return text

    @property
    def contexts(self) -> tuple[int, ...]:
        return self.config.evaluate.contexts or (self.config.data.context,)

    @phase("evaluation")
    def evaluate(self) -> dict[str, float]:
        """Measure the model, and return the figures. Rank 0 also writes them to the run directory."""
        assert self.text is not None and self.console is not None
        found = measure_all(self.model, self.tokenizer, self.text, self.contexts, self.config.evaluate.samples)
        self.model.train()
        self.model.reshard()  # a root keeps its gathered parameters after forward, expecting a backward
        if self.mesh.rank == 0:
            folder = self.run.run_dir / "evaluations"
            words = json.dumps({"model": f"{self.run.run_dir}, step {self.step}", **found}, indent=2)
            with self.console.writing("evaluation"):
                folder.mkdir(exist_ok=True)
                files.write_atomic(folder / f"step-{self.step}.json", words)
        return flatten_metrics(found)

    def is_due(self, every: int) -> bool:
        """Whether an action with interval `every` (0: only at the end) is due after this step."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)


def _document_starts(batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """The beginning of each document in a batch."""
    starts = []
    for ids, documents in zip(batch.input_ids, batch.document_ids, strict=True):
        lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        starts += [tokenizer.decode(part[:32].tolist()) for part in ids.split(lengths)]
    return starts


def compute_dtype(run: Run) -> torch.dtype:
    return getattr(torch, run.layout.dtype or "float32")
