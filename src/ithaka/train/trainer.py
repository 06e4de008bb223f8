"""Build or resume a run on this rank: its model, optimizer and data; steps, validation, evaluation and saves."""

import dataclasses
import json
import math
import os
import shutil
import socket
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import yaml

from ithaka.attention.choose import agree_on_kernel, kernel_for
from ithaka.checkpoint import files, save
from ithaka.comm.agree import SharedError, ask_rank_0, gather_objects, raise_on_all_ranks
from ithaka.comm.mesh import Mesh, make_mesh, start_process_group
from ithaka.config import (
    CONFIG_FORMAT,
    AdapterConfig,
    ConfigError,
    embedded_model,
    to_dict,
    with_absolute_paths,
    write_atomic,
)
from ithaka.config.units import format_json, plural
from ithaka.data.batch import Batch
from ithaka.data.cache import decide_fills
from ithaka.data.documents.images import PROCESSOR_FILES
from ithaka.data.find import FoundData, find_data
from ithaka.data.open import describe_data, epoch_steps, open_data
from ithaka.data.tokenizer import load_tokenizer
from ithaka.evaluate.tasks import EvalText, check_prompts, flatten_metrics, measure_all, read_text
from ithaka.exits import ExitCode, TransientError
from ithaka.layer.store import Store
from ithaka.log.console import Console, status
from ithaka.log.metrics import note_startup
from ithaka.model.build import build_model, has_weights
from ithaka.model.distillation import distill
from ithaka.model.optimizers import make_optimizer
from ithaka.ops.divergence import Criterion
from ithaka.ops.fourbit import packed_weights
from ithaka.phases import phase
from ithaka.plan.hardware import join_kernels
from ithaka.roots.decoder import ParallelOutput
from ithaka.run.resolve import Run, can_save_in_background, input_slabs, store_host_bytes
from ithaka.run.validate import check_same_inputs, fingerprint_weights
from ithaka.train.preferences import DPO
from ithaka.train.step import StepResult, learning_rate, train_step, validation_loss
from ithaka.weights.load import check_finite

MIN_NORMS = 20  # steps before a gradient norm can count as a spike
MAX_SKIPPED = 2  # batches in a row


class Diverged(RuntimeError):
    """Loss or gradient is no longer finite, or spikes."""

    exit_code = ExitCode.DIVERGED


class Trainer:
    """Model, optimizer and data of one run on this rank, and its progress."""

    def __init__(self, run: Run, mesh: Mesh, fills_cache: bool = True, found: FoundData | None = None) -> None:
        """Restores the data position; `load` restores model and optimizer. Does not communicate."""
        self.run, self.config, self.mesh = run, run.config, mesh
        self.step = self.tokens = self.first_step = 0  # first_step: of this process
        self.global_batch = run.config.train.batch * run.config.train.accumulate * mesh.dp_size
        self.contexts = run.config.evaluate.contexts or (run.config.data.context,)  # to evaluate at
        self.data_summary: dict[str, str] = {}
        self.lock: int | None = None  # of the run directory; rank 0 only
        self.saver: save.Saver
        self.console: Console  # once training starts
        self.device_name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
        self.text: EvalText | None = None  # to evaluate on
        self.norms: deque[float] = deque(maxlen=100)  # gradient norms of the last steps
        self.skipped = 0  # batches in a row
        self.best: tuple[float, int] | None = None  # lowest validation loss, and its step
        self.stale = 0  # validations since
        self.epochs = run.config.train.epochs
        self.last_save_at, self.last_save_step = time.monotonic(), 0  # or skipped
        self.data_positions: dict[str, Any] = {}  # in data of other entries
        config = run.config
        torch.manual_seed(config.train.seed + mesh.rank)
        kinds = run.shape.attention_kinds
        kernel = agree_on_kernel(run.layout.kernel, mesh.device, compute_dtype(run), kinds)
        self.kernel = join_kernels(kernel_for(kernel, kind) for kind in kinds)
        self.store = Store(mesh.device, host_bytes=store_host_bytes(run), disk_path=config.memory.disk_path)
        num_bytes, num_inputs = input_slabs(run)
        if num_inputs:
            self.store.pin_ahead(num_bytes, num_inputs)  # while the model is built
        source = config.model.path or embedded_model(config.model.embedded)
        self.random_weights = run.checkpoint is None and not has_weights(source)
        with phase("building the model"), status("building the model"):
            build = partial(
                build_model,
                source,
                mesh,
                run.layout,
                seed=config.train.seed,
                vocab_size=run.shape.vocab,
                rope=config.model.rope,
                context=config.data.context,
            )
            self.model = build(store=self.store, adapter=config.adapter)
            self.dpo: DPO | None = None
            if config.loss.type == "dpo":
                reference = build(trains=False).requires_grad_(False).eval() if run.shape.reference else None
                self.dpo = DPO(config.loss, self.model, mesh, reference)
            self.teacher = self._build_teacher(build) if config.loss.type == "distill" else None
        note_startup("model")
        self.model.ithaka_loss = config.loss.import_function()
        self.optimizer = make_optimizer(self.model, config.optim)
        packed = packed_weights(self.model).values()
        self.num_params = sum(param.numel() for param in self.model.parameters())
        self.num_params += sum(weight.shape.numel() - weight.packed.numel() for weight in packed)
        self.num_trained = sum(param.numel() for param in self.model.parameters() if param.requires_grad)
        with status("opening the data"):
            self.tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.chat_template)
            steps = config.train.steps - max(run.last_step, config.start) if config.train.epochs is None else None
            self.data = open_data(
                config.data,
                tokenizer=self.tokenizer,
                seed=config.train.seed,
                dp_rank=mesh.dp_rank,
                dp_size=mesh.dp_size,
                cp=(mesh.cp_rank, mesh.cp_size),
                batch=config.train.batch,
                accumulate=config.train.accumulate,
                steps=steps,
                validate_sequences=config.train.validate_sequences,
                cache_dir=run.run_dir / "tokens",
                fills_cache=fills_cache,
                shares_prefixes=not self.model.ithaka_root.why_no_parents(),
                found=found,
            )
        if run.checkpoint is not None:
            state = files.read_state(run.checkpoint)
            self.data_positions = state.get("places", {}) | {state["data"]["data"]: state["data"]}
            place = self.data_positions.pop(self.data.fingerprint(), None)
            self.data.check_format(place or state["data"])
            if place is not None or not (config.curriculum and state["step"] == config.start):
                self.data.load_state_dict(place or state["data"])

    def _build_teacher(self, build: Callable[..., Any]) -> Any:
        """Return another frozen model, a frozen copy, or None if the model teaches without its adapter."""
        if (path := self.config.loss.teacher_path) is None:
            return build(trains=False).requires_grad_(False).eval() if self.run.shape.reference else None
        layout = dataclasses.replace(self.run.layout.for_teacher(), kernel=self.config.attention.kernel)
        packing = AdapterConfig(base=self.config.loss.teacher_base)
        return build_model(path, self.mesh, layout, packing=packing, trains=False).requires_grad_(False).eval()

    def _distill(self, batch: Batch, num_items: int) -> ParallelOutput:
        loss = self.config.loss
        how: Any = {name: getattr(loss, name) for name in Criterion._fields}
        teacher = batch.teacher if loss.is_stored else self.teacher
        return distill(self.model, teacher, **batch.inputs, num_items_in_batch=num_items, **how)

    @phase("loading the checkpoint")
    def load(self) -> None:
        """Restore model and optimizer. The data position was restored earlier, where it can fail."""
        assert self.run.checkpoint is not None
        with status("loading the checkpoint"):
            state = save.load_checkpoint(self.run.checkpoint, self.model, self.optimizer)
        self.step, self.tokens, self.first_step = state["step"], state["tokens"], state["step"] + 1
        self.last_save_step = self.step
        self.norms.extend(state.get("norms", []))
        self.best, self.stale = files.read_best(state)
        if (before := state.get("global_batch", self.global_batch)) != self.global_batch:
            sequences = plural(self.global_batch, "sequence")
            words = f"{sequences} per step (was {before}); train.global_batch={before} keeps them"
            self.data_summary["batch"] = words

    @phase("saving")
    def save(self) -> None:
        """Start a save, in the background if host memory allows; `saver.finish` waits for it."""
        self.last_save_at, self.last_save_step = time.monotonic(), self.step
        norms = list(self.norms) if self.config.train.spike else []
        state = {"step": self.step, "tokens": self.tokens, "data": self.data.state_dict(), "norms": norms}
        state |= {"global_batch": self.global_batch, "best": self.best, "stale": self.stale}
        state |= {"epochs": self.epochs, "steps": self.config.train.steps}
        state |= {"places": self.data_positions} if self.data_positions else {}
        names = "rope_parameters", "max_position_embeddings"  # these change with model.rope, even within a run
        text = self.model.config.get_text_config()  # Nemotron-H has no RoPE
        state["positions"] = {name: getattr(text, name) for name in names if hasattr(text, name)}
        self.saver.save(self.model, self.optimizer, state)

    def skip_save(self) -> None:
        """Report a due save that is skipped because another one is in progress."""
        self.last_save_at, self.last_save_step, saver = time.monotonic(), self.step, self.saver
        written_s = self.last_save_at - saver.started_at
        so_far = f"the one of step {saver.step} is still being written after {written_s:.0f} s"
        fix = "Save less often (train.save_minutes, train.save_every) or to faster storage."
        message = f"No checkpoint after step {self.step}: {so_far}. {fix}"
        self.console.event(self.step, message, save_in_progress=saver.step)

    def record_validation(self, val_loss: float | None) -> bool:
        """Update the best loss and patience. Returns whether this loss is the lowest so far; a non-finite loss never
        is."""
        if val_loss is None:
            return False
        better = math.isfinite(val_loss) and (self.best is None or val_loss < self.best[0])
        self.best, self.stale = ((val_loss, self.step), 0) if better else (self.best, self.stale + 1)
        return better

    @property
    def done(self) -> bool:
        settings = self.config.train
        return self.step >= settings.steps or 0 < settings.patience <= self.stale

    @property
    def save_is_due(self) -> bool:
        """Whether a save is due, by the clock of rank 0. After a skipped batch the step is still the last one."""
        minutes = self.config.train.save_minutes
        by_time = minutes > 0 and time.monotonic() - self.last_save_at >= 60 * minutes
        by_step = self.step != self.last_save_step and self.is_due(self.config.train.save_every)
        return self.mesh.rank == 0 and (by_time or by_step)

    def accepts(self, loss: float, norm: float) -> bool:
        """Whether to update the weights: loss and norm are finite, and the norm is not a spike."""
        spike = self.config.train.spike
        limit = spike * statistics.median(self.norms) if spike and len(self.norms) >= MIN_NORMS else math.inf
        return math.isfinite(loss) and math.isfinite(norm) and norm <= limit

    def _skip_or_stop(self, result: StepResult, batches: Sequence[Batch]) -> None:
        """Skip the batch, or stop: the step failed twice."""
        is_first = self.step + 1 == max(1, self.first_step)
        if is_first and not math.isfinite(result.loss + result.grad_norm):
            self.check_loaded_weights()
        self.skipped += 1
        what = f"step {self.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}, twice"
        if self.config.train.bad_step == "stop" or self.skipped > MAX_SKIPPED:
            with suppress(save.CheckpointError):
                self.saver.finish()
            fix = "Try a lower optim.lr or more optim.warmup_steps."
            raise Diverged(f"{what}. {files.describe_last(self.run.run_dir)} {fix}")
        own = self._document_starts(batches) if self.mesh.cp_rank == 0 else []
        documents = [start for starts in gather_objects(own) for start in starts]
        message = f"{what}. Its batch is skipped; {plural(len(documents), 'document')}"
        self.console.event(self.step + 1, message, skipped_documents=documents)

    def check_loaded_weights(self) -> None:
        """SharedError if a weight is not finite. Call it, on every rank, once a loss before the first update is not."""
        path, checkpoint = self.config.model.path, self.run.checkpoint
        source = f"model.path={path}" if checkpoint is None else f"checkpoint {checkpoint}"
        check_finite(self.model, source, path if path is not None and path.is_dir() else None)

    def _document_starts(self, batches: Sequence[Batch]) -> list[str]:
        """Return the beginning of each document."""
        starts = []
        for batch in batches:
            for ids, documents in zip(batch.input_ids, batch.document_ids, strict=True):
                lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
                starts += [self.tokenizer.decode(part[:32].tolist()) for part in ids.split(lengths)]
        return starts

    def _report_suspects(self, first: StepResult) -> None:
        """A step was bad once and good when recomputed: name the ranks whose hardware may be failing."""
        ranks = gather_objects((f"rank {self.mesh.rank} on {socket.gethostname()}", *(first.refused or ())))
        # A bad forward shows in the loss of its ranks, and then in the gradients of all ranks.
        bad = [name for name, loss, _ in ranks if not math.isfinite(loss)]
        bad = bad or [name for name, _, norm in ranks if not math.isfinite(norm)]
        bad = bad or [max(ranks, key=lambda entry: entry[2])[0]]  # a spike: the largest share
        who = f"the hardware of {', '.join(bad)} may be failing"
        if len(bad) == len(ranks) > 1:
            who = "hardware may be failing, but all ranks were affected"
        what = f"step {self.step + 1}: loss {first.loss}, gradient norm {first.grad_norm}, but not when computed again"
        self.console.event(self.step + 1, f"{what}: {who}", suspected=bad)

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
            seed_and_step=(config.train.seed, self.step + 1),
            accepts=self.accepts,
            dpo=self.dpo,
            distill=self._distill if config.loss.type == "distill" else None,
        )
        result = compute()
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
        return validation_loss(self.model, batches, self.mesh, self.data.source_names, self.dpo)

    def read_evaluation(self) -> EvalText | None:
        """Read the text to evaluate on; None if evaluation is off."""
        how = self.config.evaluate
        if not how.every:
            return None
        text = read_text(how.data, self.tokenizer, max(self.contexts), how.documents, where="evaluate.data")
        if how.samples:
            check_prompts(text, self.tokenizer, self.contexts)
        return text

    @phase("evaluation")
    def evaluate(self) -> dict[str, float]:
        """Measure the model, and return the figures. Rank 0 also writes them to the run directory."""
        assert self.text is not None
        found = measure_all(self.model, self.tokenizer, self.text, self.contexts, self.config.evaluate.samples)
        self.model.train()
        self.model.reshard()  # after forward, the root keeps its parameters gathered for backward
        if self.mesh.rank == 0:
            folder = self.run.run_dir / "evaluations"
            words = format_json({"model": f"{self.run.run_dir}, step {self.step}", **found}, indent=2)
            with self.console.writing("evaluation"):
                folder.mkdir(exist_ok=True)
                write_atomic(folder / f"step-{self.step}.json", words)
        return flatten_metrics(found)

    def is_due(self, every: int) -> bool:
        """Whether an action with interval `every` (0: only at the end) is due after this step."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)


# ---- before the first step


def prepare(run: Run, trains: bool = True) -> Trainer:
    """Build the trainer and run every check that can fail before anything is written; errors reach all ranks."""
    start_process_group()
    if run.checkpoint is not None:
        run = dataclasses.replace(run, checkpoint=files.find_intact_checkpoint(run.checkpoint))
        if run.last_step < run.config.start:
            fix = "remove the damaged ones, and resume again"
            raise SharedError(f"checkpoint {run.checkpoint} is of an earlier entry of curriculum; {fix}")
    mesh = make_mesh(run.layout.cp, ring=run.layout.ring, replicas=run.layout.replicas)
    _set_determinism(run.config.train.deterministic)
    _settle_matmuls()
    if run.layout.kernel == "auto":  # a named kernel that does not work raises an error with the other checks
        kernel = agree_on_kernel("auto", mesh.device, compute_dtype(run), run.shape.attention_kinds)
        run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, kernel=kernel))
    note_startup("attention kernel")
    found = ask_rank_0(find_data, run.config.data, run.datasets)
    trainer = raise_on_all_ranks(Trainer, run, mesh, decide_fills(run.run_dir / "tokens"), found)
    settings = run.config.train
    keeps_best = settings.keep_best or settings.patience > 0
    trainer.saver = save.Saver(run.run_dir, settings.keep_last, can_save_in_background(run), keeps_best)
    check_same_inputs(run.config, trainer.data, trainer.tokenizer.fingerprint)
    if not trains:
        trainer.load() if run.checkpoint is not None else None
        return trainer
    _decide_steps(trainer)
    trainer.text = raise_on_all_ranks(trainer.read_evaluation)
    trainer.data_summary = raise_on_all_ranks(_describe_data, trainer)
    note_startup("data")
    if run.checkpoint is not None:
        trainer.load()
    raise_on_all_ranks(_write_run_dir, trainer)
    return trainer


def compute_dtype(run: Run) -> torch.dtype:
    return getattr(torch, run.layout.dtype or "float32")


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it fills every buffer
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it before its first call


def _settle_matmuls() -> None:
    """On an Arm CPU without bf16, PyTorch switches from oneDNN to BLAS, in fp32 too, at the first bf16 linear layer or
    `a @ b.T`. Trigger it before the first step, or a resumed run would compute its first step with oneDNN again."""
    ones = torch.ones(32, 32, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.functional.linear(ones, ones)


def _decide_steps(trainer: Trainer) -> None:
    """Convert train.epochs to train.steps: from the checkpoint, or by counting the data on rank 0."""
    run, config = trainer.run, trainer.config
    if config.train.epochs is None:
        return
    before = files.read_state(run.checkpoint) if run.checkpoint is not None else {}
    steps = before["steps"] if before.get("epochs") == config.train.epochs else None
    if steps is None:
        epochs, batch = config.train.epochs, trainer.global_batch
        steps = ask_rank_0(epoch_steps, trainer.data, epochs, batch)
    train = dataclasses.replace(config.train, steps=steps, epochs=None)
    optim = dataclasses.replace(config.optim, decay_steps=config.optim.decay_steps or steps)
    trainer.config = dataclasses.replace(config, train=train, optim=optim)
    trainer.run = dataclasses.replace(run, config=trainer.config)


def _describe_data(trainer: Trainer) -> dict[str, str]:
    """Describe the training data, on rank 0."""
    if trainer.mesh.rank != 0:
        return {}
    train, data = trainer.config.train, trainer.data
    num_sequences = (train.steps - trainer.config.start) * trainer.global_batch
    try:
        with status("reading the data"):
            return describe_data(data, num_sequences)
    except (ConfigError, TransientError):
        data.close(remove=True)
        raise


def _write_run_dir(trainer: Trainer) -> None:
    """On rank 0, lock the run directory and write the resolved configuration and the files that export needs."""
    if trainer.mesh.rank != 0:
        return
    run, folder = trainer.run, trainer.run.run_dir / "model"
    run.run_dir.mkdir(parents=True, exist_ok=True)
    trainer.lock = files.lock_run_dir(run.run_dir)
    settings = run.saved_config or yaml.safe_dump(with_absolute_paths(to_dict(run.config)), sort_keys=False)
    # First: it marks the directory as a run's, in which --resume auto may start again.
    write_atomic(run.run_dir / "config.yaml", f"format: {CONFIG_FORMAT}\n{settings}")
    base = fingerprint_weights(run.config.model.path) if run.needs_base else ""
    files.write_pins(run.run_dir, run.commits, base, fingerprint_weights(run.config.loss.teacher_path))
    write_atomic(run.run_dir / "data.json", json.dumps(trainer.data_summary, indent=1))
    folder.mkdir(exist_ok=True)
    adapter = getattr(trainer.model, "peft_config", {}).get("default")
    for part in (adapter, trainer.model.config, trainer.model.generation_config, trainer.tokenizer.hf):
        if part is not None:
            part.save_pretrained(folder)
    path = trainer.config.model.path
    for file in [path / name for name in PROCESSOR_FILES] if path is not None else []:
        if file.is_file():
            shutil.copy(file, folder)
    own = (run.config.model.path or folder) / "generation_config.json"
    if own.is_file() and own.parent != folder:
        shutil.copy(own, folder)
