"""The loop. `train` is what every rank executes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from signal import SIGINT, Signals
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
import yaml

from ithaka.attention.kernels import agree_on_kernel, resolve_kernel
from ithaka.checkpoint import files, save
from ithaka.config import CONFIG_FORMAT, ConfigError, embedded_model, shell_command, to_dict, with_absolute_paths
from ithaka.data.open import data_facts, epoch_steps, open_data
from ithaka.data.stream import Batch
from ithaka.data.tokenizer import Tokenizer, load_tokenizer
from ithaka.dist.agree import SharedError, gather_objects, raise_on_all_ranks
from ithaka.dist.mesh import Mesh, default_device, make_mesh, set_timeouts, start_process_group
from ithaka.dist.rank import is_local_rank_0
from ithaka.exits import ExitCode, TransientError, exit_code_for
from ithaka.launch import Outcome, catch_stop_signals, exit_rank, handle_stop_signal
from ithaka.layer.store import Store
from ithaka.measure import EvalText, check_prompts, flatten_metrics, measure_all, read_text
from ithaka.model.batch import count_pairs
from ithaka.model.build import build_model, has_weights
from ithaka.phases import listening, phase
from ithaka.plan.hardware import DISK_BYTES_S, peak_flops
from ithaka.plan.show import format_bytes
from ithaka.preflight.memory import can_save_in_background, store_host_bytes
from ithaka.preflight.ranks import check_same_inputs
from ithaka.preflight.resume import use_intact_checkpoint
from ithaka.preflight.run import Run
from ithaka.train.console import Console, Record, format_count, host_peak_bytes, read_metrics, status, step_flops
from ithaka.train.heartbeat import Heartbeat, Limits, PhaseTracker, SlowRanks, validation_seconds
from ithaka.train.step import StepResult, learning_rate, make_optimizer, train_step, validation_loss
from ithaka.train.track import Ending, Trackers
from ithaka.train.watch import OutOfMemoryTracker, Watch, explain_out_of_memory, ran_out_of_memory

LEAST_NORMS = 20  # before a gradient can be a spike
MOST_SKIPPED = 2  # batches in a row
SHORT_S = 120.0  # of validation before the first step
LATE_S, LATE_SHARE = 1.0, 0.05  # of a step that waits for a slow disk


class Diverged(RuntimeError):
    """Loss or gradient is no longer finite, or spikes."""

    exit_code = ExitCode.DIVERGED


class OutOfMemoryError(RuntimeError):
    """Memory ran out on the device or the host, or room in the store."""

    exit_code = ExitCode.OUT_OF_MEMORY


class GracefulShutdown:
    """After SIGTERM or SIGUSR1, leave within train.grace_s: after the step and its checkpoint if they end in time, else
    at once. A save in progress keeps the full grace period to end in."""

    def __init__(self, run: Run) -> None:
        self.run, self.seconds = run, run.config.train.grace_s
        self.step_start, self.step_s = 0.0, 0.0  # by time.monotonic(); seconds of the last step
        self.saver: save.Saver | None = None  # once training starts
        self.timer: Timer | None = None

    def asked(self, number: int, again: bool) -> None:
        if number != SIGINT and not self._is_writing and self._needed_s > self.seconds:
            self.leave(number)
        handle_stop_signal(number, again)
        if number != SIGINT:
            self.timer = Timer(self.seconds, self.leave, [number])
            self.timer.daemon = True
            self.timer.start()

    @property
    def _is_writing(self) -> bool:
        return self.saver is not None and self.saver.in_progress and not self.saver.is_done

    @property
    def _needed_s(self) -> float:
        """Estimated seconds until the current step is done and saved."""
        save_s = self.saver.seconds if self.saver is not None else 0.0
        return self.step_start + self.step_s + save_s - time.monotonic()

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def leave(self, number: int) -> None:
        words = (
            f"{Signals(number).name}: the step and its checkpoint do not finish within train.grace_s={self.seconds:g}."
        )
        exit_rank(Outcome(ExitCode.SIGNALED + number, f"{words} {files.describe_last(self.run.run_dir)}", shared=True))


class Trainer:
    """Model, optimizer and data of one run on this rank, and its progress."""

    def __init__(self, run: Run, mesh: Mesh) -> None:
        """Restores the place in the data; `load` restores model and optimizer. Does not communicate."""
        self.run, self.config, self.mesh = run, run.config, mesh
        self.step = self.tokens = self.first_step = 0  # first_step: of this process
        self.data_facts: dict[str, str] = {}
        self.lock: int | None = None  # of the run directory, on rank 0
        self.saver: save.Saver
        self.console: Console | None = None
        self.text: EvalText | None = None  # to evaluate on
        self.norms: deque[float] = deque(maxlen=100)  # of the last steps' gradients
        self.skipped = 0  # batches in a row
        self.met_unlabelled = False  # a step without a label
        self.best: tuple[float, int] | None = None  # lowest validation loss, and its step
        self.stale = 0  # validations since
        self.epochs = run.config.train.epochs
        self.saved_at = time.monotonic()  # or skipped
        self.places: dict[str, Any] = {}  # in data of other entries
        config = run.config
        torch.manual_seed(config.train.seed + mesh.rank)
        self.kernel = resolve_kernel(run.layout.kernel, mesh.device, _dtype(run), run.shape.head_dim).name
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
            self.places = state.get("places", {}) | {state["data"]["data"]: state["data"]}
            place = self.places.pop(self.data.fingerprint(), None)
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
        """Start a save, which ends in the background where host memory has room for it; `saver.finish` waits."""
        self.saved_at = time.monotonic()
        norms = list(self.norms) if self.config.train.spike else []
        state = {"step": self.step, "tokens": self.tokens, "data": self.data.state_dict(), "norms": norms}
        state |= {"global_batch": self.global_batch, "best": self.best, "stale": self.stale}
        state |= {"epochs": self.epochs, "steps": self.config.train.steps}
        state |= {"places": self.places} if self.places else {}
        names = "rope_parameters", "max_position_embeddings"  # which change with model.rope, also within a run
        state["positions"] = {name: getattr(self.model.config, name) for name in names}
        self.saver.save(self.model, self.optimizer, state)

    def skip_save(self) -> None:
        """Report the save that is due and was not started because another one is in progress."""
        self.saved_at, saver = time.monotonic(), self.saver
        so_far = f"that of step {saver.step} is still being written after {self.saved_at - saver.started_at:.0f} s"
        way = "Save less often (train.save_minutes, train.save_every) or to faster storage."
        if self.console is not None:
            words = f"No checkpoint after step {self.step}: {so_far}. {way}"
            self.console.event(self.step, words, save_in_progress=saver.step)

    def improves(self, val_loss: float | None) -> bool:
        """Whether it is the lowest so far, for patience and the best checkpoint."""
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
        by_time = minutes > 0 and time.monotonic() - self.saved_at >= 60 * minutes
        return self.mesh.rank == 0 and (by_time or self.due(self.config.train.save_every))

    def accepts(self, loss: float, norm: float) -> bool:
        """Whether a step with these may change the weights."""
        spike = self.config.train.spike
        limit = spike * statistics.median(self.norms) if spike and len(self.norms) >= LEAST_NORMS else math.inf
        return math.isfinite(loss) and math.isfinite(norm) and norm <= limit

    def _skip_or_stop(self, result: StepResult, batches: Sequence[Batch]) -> None:
        """Of a step that is as bad when it is computed again."""
        self.skipped += 1
        what = f"step {self.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}, twice"
        if self.config.train.bad_step == "stop" or self.skipped > MOST_SKIPPED:
            with suppress(save.CheckpointError):
                self.saver.finish()
            raise Diverged(
                f"{what}. {files.describe_last(self.run.run_dir)} Try a lower optim.lr or more optim.warmup_steps."
            )
        own = [_starts(batch, self.tokenizer) for batch in batches] if self.mesh.cp_rank == 0 else []
        documents = [start for starts in gather_objects(own) for each in starts for start in each]
        self.tell(f"{what}. Its batch is skipped; {len(documents)} documents", skipped_documents=documents)

    def _report_unlabelled(self) -> None:
        """Once: with positions of format 4, there may be many such steps until their round ends."""
        if not self.met_unlabelled:
            words = f"step {self.step + 1}: no rank has a token to train; no update, and such steps do not count"
            self.tell(words, unlabelled=True)
        self.met_unlabelled = True

    def _suspect(self, first: StepResult) -> None:
        """Name the ranks where a step was bad that was not when it was computed again."""
        ranks = gather_objects((f"rank {self.mesh.rank} on {socket.gethostname()}", *(first.refused or ())))
        # A bad forward shows in the loss of its own ranks, and then in the gradients of all.
        bad = [name for name, loss, _ in ranks if not math.isfinite(loss)]
        bad = bad or [name for name, _, norm in ranks if not math.isfinite(norm)]
        bad = bad or [max(ranks, key=lambda entry: entry[2])[0]]  # a spike: the largest share
        who = f"the hardware of {', '.join(bad)} may be failing"
        if len(bad) == len(ranks) > 1:
            who = "hardware may be failing, and which cannot be told: all ranks were hit"
        what = f"step {self.step + 1}: loss {first.loss}, gradient norm {first.grad_norm}, but not when computed again"
        self.tell(f"{what}: {who}", suspected=bad)

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
        return moved_bytes / busy_s if late_s > max(LATE_S, LATE_SHARE * step_s) else 0.0

    @property
    def planned_disk_bytes_s(self) -> float:
        """This rank's share."""
        return DISK_BYTES_S / self.run.hardware.gpus_per_node

    def tell(self, words: str, **values: Any) -> None:
        if self.console is not None:
            self.console.event(self.step + 1, words, **values)

    def advance(self, batches: Sequence[Batch]) -> tuple[StepResult, float, int] | None:
        """One step on this rank's micro-batches: its result, learning rate and input tokens over all ranks. None: the
        batch was skipped, and the step does not count."""
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
            self._suspect(first)
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
        """What is evaluated on; None: nothing is."""
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

    def due(self, every: int) -> bool:
        """Whether something done every so many steps (0: only at the end) is done after this one."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)


def train(run: Run, only_profile: bool = False) -> int:
    """The whole run on this rank, with torchrun's variables set (or none, for a single process).

    Returns the exit code: DONE after the last step, SIGNALED + signal when asked to stop, after saving. Raises
    ConfigError, TransientError, OutOfMemoryError, CheckpointError or Diverged with all that the user needs to know.
    `only_profile`: nothing is saved."""
    witness, grace = OutOfMemoryTracker(default_device()), GracefulShutdown(run)
    place, limits = PhaseTracker(witness.device), Limits.of(run)
    start_process_group()
    limits = Limits(*map(max, zip(*(vars(each).values() for each in gather_objects(limits)), strict=True)))
    beat = Heartbeat(place, limits, run.run_dir)
    with catch_stop_signals(grace.asked) as stop, listening(witness), listening(place):
        try:
            beat.start()
            set_timeouts(2 * limits.longest)
            trainer = prepare(run)
            set_timeouts(2 * limits.longest)  # for groups created since
            asked = _train(trainer, stop, grace, beat, only_profile)
            beat.close()
        except Exception as error:
            beat.wait_for_verdict(error, stop)
            code = ExitCode.OUT_OF_MEMORY if ran_out_of_memory(error) else exit_code_for(error)
            beat.close(f"{type(error).__name__}: {error}"[:2000], code)
            if not ran_out_of_memory(error):
                raise
            words = explain_out_of_memory(run, error, witness, str(run.config.model.path or run.run_dir / "model"))
            raise OutOfMemoryError(f"{words}\n{files.describe_last(run.run_dir)}") from error
        finally:
            grace.close()
    return ExitCode.SIGNALED + asked if asked else ExitCode.DONE


def validate_only(run: Run) -> None:
    """The validation loss of a model or a run, printed by rank 0. The run directory stays as it is."""
    start_process_group()
    tokens = run.run_dir / "tokens"
    had_tokens = tokens.exists()
    trainer = prepare(run, trains=False)
    count = run.config.train.validate_sequences
    loss, sources = trainer.validate()
    trainer.data.close(remove=not had_tokens)
    if loss is None:
        way = "set data.validation_path, data.validation_fraction or train.validate_sequences"
        raise SharedError(f"--evaluate-only: nothing is held out for validation; {way}")
    if trainer.mesh.rank == 0:
        what = f"{run.run_dir}, step {trainer.step}" if run.checkpoint else run.config.model.path or "embedded model"
        for name, value in {"validation loss": loss, "perplexity": math.exp(loss), **sources}.items():
            print(f"{name:<16} {value:.4f}", flush=True)
        print(f"of {what}, over up to {count} sequences of {run.config.data.context} tokens", flush=True)


def prepare(run: Run, trains: bool = True) -> Trainer:
    """Do all that can be refused before anything is written; a refusal is raised on all ranks."""
    start_process_group()
    run = use_intact_checkpoint(run)
    if run.checkpoint is not None and files.read_state(run.checkpoint)["step"] < run.config.start:
        way = "remove the damaged ones, and resume again"
        raise SharedError(f"checkpoint {run.checkpoint} is of an earlier entry of curriculum; {way}")
    mesh = make_mesh(run.layout.cp, ring=run.layout.ring, replicas=run.layout.replicas)
    _set_determinism(run.config.train.deterministic)
    if run.layout.kernel == "auto":  # one given by name is refused with the rest, if it does not work
        kernel = agree_on_kernel("auto", mesh.device, _dtype(run), run.shape.head_dim)
        run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, kernel=kernel))
    trainer = raise_on_all_ranks(Trainer, run, mesh)
    settings = run.config.train
    keeps_best = settings.keep_best or settings.patience > 0
    trainer.saver = save.Saver(run.run_dir, settings.keep_last, can_save_in_background(run), keeps_best)
    check_same_inputs(run.config, trainer.data, trainer.tokenizer.fingerprint)
    if not trains:
        trainer.load() if run.checkpoint is not None else None
        return trainer
    _decide_steps(trainer)
    trainer.text = raise_on_all_ranks(trainer.read_evaluation)
    trainer.data_facts = raise_on_all_ranks(_data_facts, trainer)
    if run.checkpoint is not None:
        trainer.load()
    raise_on_all_ranks(_write_run_dir, trainer)
    return trainer


def _dtype(run: Run) -> torch.dtype:
    return getattr(torch, run.layout.dtype or "float32")


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it fills every buffer
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as cuBLAS asks for it, before its first call


def _starts(batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """The first words of each document of a batch."""
    starts = []
    for ids, documents in zip(batch.input_ids, batch.document_ids, strict=True):
        lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        starts += [tokenizer.decode(part[:32].tolist()) for part in ids.split(lengths)]
    return starts


def _decide_steps(trainer: Trainer) -> None:
    """train.steps of train.epochs: as when the run began, or by what rank 0 reads of the data."""
    run, config = trainer.run, trainer.config
    if config.train.epochs is None:
        return
    before = files.read_state(run.checkpoint) if run.checkpoint is not None else {}
    steps = before["steps"] if before.get("epochs") == config.train.epochs else None
    if steps is None:
        epochs, batch = config.train.epochs, trainer.global_batch
        own = raise_on_all_ranks(lambda: epoch_steps(trainer.data, epochs, batch) if trainer.mesh.rank == 0 else 0)
        steps = gather_objects(own)[0]
    train = dataclasses.replace(config.train, steps=steps, epochs=None)
    optim = dataclasses.replace(config.optim, decay_steps=config.optim.decay_steps or steps)
    trainer.config = dataclasses.replace(config, train=train, optim=optim)
    trainer.run = dataclasses.replace(run, config=trainer.config)


def _data_facts(trainer: Trainer) -> dict[str, str]:
    """What will be trained on, in words. Rank 0 reads it."""
    if trainer.mesh.rank != 0:
        return {}
    train, data = trainer.config.train, trainer.data
    num_sequences = (train.steps - trainer.config.start) * trainer.global_batch
    try:
        with status("reading the data"):
            return data_facts(data, num_sequences)
    except (ConfigError, TransientError):
        data.close(remove=True)
        raise


def _write_run_dir(trainer: Trainer) -> None:
    """The resolved configuration, and what export needs besides weights. Rank 0 writes it and locks the directory."""
    if trainer.mesh.rank != 0:
        return
    run, folder = trainer.run, trainer.run.run_dir / "model"
    run.run_dir.mkdir(parents=True, exist_ok=True)
    trainer.lock = files.lock_run_dir(run.run_dir)
    settings = run.saved_config or yaml.safe_dump(with_absolute_paths(to_dict(run.config)), sort_keys=False)
    # First: it marks the directory as a run's, in which --resume auto may start again.
    files.write_atomic(run.run_dir / "config.yaml", f"format: {CONFIG_FORMAT}\n{settings}")
    files.write_atomic(run.run_dir / "data.json", json.dumps(trainer.data_facts, indent=1))
    folder.mkdir(exist_ok=True)
    adapter = getattr(trainer.model, "peft_config", {}).get("default")
    for part in (adapter, trainer.model.config, trainer.model.generation_config, trainer.tokenizer.hf):
        if part is not None:
            part.save_pretrained(folder)
    own = (run.config.model.path or folder) / "generation_config.json"
    if own.is_file() and own.parent != folder:
        shutil.copy(own, folder)


def _train(trainer: Trainer, stop: list[Signals], grace: GracefulShutdown, beat: Heartbeat, only_profile: bool) -> int:
    """Train up to train.steps, or to the end of the step in which any rank was asked to stop. Returns the signal that
    asked, or 0."""
    run, settings, mesh = trainer.run, trainer.config.train, trainer.mesh
    tracks = mesh.rank == 0 and not only_profile and bool(settings.track)
    trackers = raise_on_all_ranks(lambda: Trackers(run.run_dir, run.config, trainer.step) if tracks else None)
    console = Console(run.run_dir, trainer.config.ends[-1], trainer.step, trackers, mesh.rank == 0)
    asked, told_disk, trainer.console = 0, False, console
    ending: Ending = "failed"
    try:
        console.facts("ithaka", _header(trainer) | {"time-outs": beat.limits.words})
        slow, grace.saver = SlowRanks(), trainer.saver
        watch = Watch(run, trainer.model, trainer.optimizer, mesh, console, only_profile)
        planned_s = validation_seconds(run)
        if trainer.step == 0 and settings.validate_every and planned_s > SHORT_S:
            console.say(f"No validation before the first step: it would take about {planned_s / 60:.0f} minutes")
        elif trainer.step == 0 and settings.validate_every:
            with console.doing("validation before the first step"):
                val_loss, val_sources = trainer.validate()
            _, _, peaks, _ = _agree(stop, trainer)
            console.step(Record(0, None, val_loss, None, None, 0, 0, None, None, None, *peaks, sources=val_sources))
        while not trainer.done and not asked:
            start = time.perf_counter()
            grace.step_start, beat.place.step = time.monotonic(), trainer.step + 1
            with phase("data"):
                batches = [trainer.data.next_batch() for _ in range(settings.accumulate)]
            with watch.step(trainer.step + 1):
                advanced = trainer.advance(batches)
                step_s = grace.step_s = time.perf_counter() - start
            if advanced is None:
                continue
            result, lr, num_tokens = advanced
            val_loss, sources, better = None, result.source_losses, False
            if trainer.due(settings.validate_every):
                with console.doing("validation"):
                    val_loss, val_sources = trainer.validate()
                sources, better = sources | val_sources, trainer.improves(val_loss)
            if trainer.text is not None and trainer.due(trainer.config.evaluate.every):
                with console.doing("evaluation"):
                    sources = sources | trainer.evaluate()
            work, full = trainer.attention_work(batches)
            earlier, (attention_s, pauses) = watch.device_peak_bytes, beat.place.end_step(full)
            of_rank = trainer.slow_disk(step_s), attention_s, work, *pauses
            asked, (save, saved), peaks, of_ranks = _agree(stop, trainer, earlier, of_rank)
            disks, attention, works, *all_pauses = of_ranks
            _set_limits(beat, beat.limits.measured(*map(max, all_pauses)))
            if late := slow.add(attention, works):
                shown = ", ".join(f"rank {rank} takes {times:.2f} times" for rank, times in late.items())
                console.event(trainer.step, f"Slow: {shown} the median rank's seconds in attention", slow_ranks=late)
            if any(disks) and not told_disk:
                told_disk = True
                _tell_slow_disks(trainer, disks)
            speed = num_tokens / step_s, step_s, _mfu(trainer, num_tokens, result.num_pairs, step_s)
            losses = result.loss, val_loss, lr, result.grad_norm
            counts, ring = (trainer.tokens, result.label_tokens), (result.balance, result.ring_bytes)
            console.step(Record(trainer.step, *losses, *counts, *speed, *peaks, *ring, sources))
            last, best = bool(asked) or trainer.done, better and trainer.saver.keep_best
            # The best weights and those of a run that ends cannot be saved later: wait for the save in progress.
            if save and trainer.saver.in_progress and not (saved or last or best):
                trainer.skip_save()
                save = False
            save |= best
            if save or saved or last:
                _finish_save(trainer, console)
            if not only_profile and (save or last):
                with console.doing("saving"):
                    trainer.save()
                    if last:
                        trainer.saver.finish()
        ending = "finished" if trainer.done else "killed"
    except KeyboardInterrupt:
        ending = "killed"
        raise
    finally:
        console.close(ending)
        trainer.data.close(
            remove=only_profile or (trainer.done and trainer.config.entry + 1 == len(trainer.config.ends))
        )
        if trainer.lock is not None:
            os.close(trainer.lock)
    if not trainer.done and not only_profile:
        again = shell_command("train", "--resume", run.run_dir)
        console.say(f"Stopped as asked after step {trainer.step}; resume with: {again}")
    elif console.active and not only_profile:
        of = run.config.curriculum and f"entry {run.config.entry + 1} of {len(run.config.ends)} "
        console.facts(f"{of or ''}done", _summary(trainer, read_metrics(run.run_dir / "metrics.jsonl")))
    return 0 if trainer.done else asked


def _set_limits(beat: Heartbeat, limits: Limits) -> None:
    """Collectives must not time out before the heartbeat, which can name the rank that hangs."""
    if limits.longest > beat.limits.longest:
        set_timeouts(2 * limits.longest)
    beat.limits = limits


def _finish_save(trainer: Trainer, console: Console) -> None:
    """Wait for the save in progress. If it failed, the run continues: the disk may have room for the next one."""
    with console.doing("saving"):
        try:
            trainer.saver.finish()
        except save.CheckpointError as error:
            last = files.describe_last(trainer.run.run_dir)
            console.say(f"{error}. {last} The run continues and saves again when due.")


def _agree(
    stop: list[Signals], trainer: Trainer, earlier_peak: int = 0, of_rank: tuple[float, ...] = ()
) -> tuple[int, tuple[bool, bool], tuple[int | None, int], list[list[float]]]:
    """The signal that asked any rank to stop, or 0; whether a save is due, and whether one has ended; the largest
    memory peaks (device, host); and each of `of_rank`, on every rank. One all-gather on the host, after each step, so
    that all ranks do the same."""
    mesh = trainer.mesh
    on_gpu = mesh.device.type == "cuda"
    device_peak = max(torch.cuda.max_memory_allocated(mesh.device), earlier_peak) if on_gpu else 0
    mine = [stop[0] if stop else 0, trainer.save_is_due, trainer.saver.is_done, device_peak, host_peak_bytes()]
    own = torch.tensor([*mine, *of_rank], dtype=torch.float64)  # which holds bytes exactly
    shared = [torch.empty_like(own) for _ in range(mesh.world_size)]
    dist.all_gather(shared, own)
    of_ranks = torch.stack(shared)
    asked, save, saved, device_peak, host_peak = map(int, of_ranks[:, : len(mine)].amax(0).tolist())
    peaks = device_peak if on_gpu else None, host_peak
    return asked, (bool(save), bool(saved)), peaks, of_ranks[:, len(mine) :].t().tolist()


def _tell_slow_disks(trainer: Trainer, rates: list[float]) -> None:
    slow, folder = {rank: rate for rank, rate in enumerate(rates) if rate}, trainer.store.disk.directory
    rank = min(slow, key=lambda rank: slow[rank])
    planned_rate = format_bytes(trainer.planned_disk_bytes_s)
    what = f"rank {rank} moves {format_bytes(slow[rank])}/s to and from {folder}, {planned_rate}/s planned"
    trainer.tell(f"Slow disk: {len(slow)} of {len(rates)} ranks wait for it; {what}", slow_disks=slow)


def _mfu(trainer: Trainer, num_tokens: int, num_pairs: int, step_s: float) -> float | None:
    device, shape = trainer.mesh.device, trainer.run.shape
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None:
        return None
    # An embedding is read, not multiplied, unless it is the output head as well.
    lookup_only = 0 if shape.tied else shape.vocab * shape.hidden
    # Of a frozen weight two products are computed, of a trained one three.
    matmul_params = trainer.num_params - lookup_only
    matmul_params -= max(0, matmul_params - trainer.num_trained) // 3
    flops = step_flops(matmul_params, num_tokens, shape.heads * shape.head_dim, num_pairs)
    return flops / (step_s * peak * trainer.mesh.world_size)


def _header(trainer: Trainer) -> dict[str, str]:
    config, mesh, model = trainer.config, trainer.mesh, trainer.model
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    tokens = trainer.global_batch * config.data.context
    frozen = trainer.num_trained < trainer.num_params
    size = (
        format_count(trainer.num_params)
        + f" parameters{f', {format_count(trainer.num_trained)} trained' if frozen else ''}"
    )
    ulysses, ring = mesh.ulysses_group.size(), mesh.ring_group.size()
    source = config.model.path or embedded_model(config.model.embedded)
    random = ", random weights" * (trainer.run.checkpoint is None and not has_weights(source))
    facts = {
        "model": f"{config.model.path or model.config.model_type}, {size}{random}",
        "ranks": f"{mesh.world_size} ({device}) = {mesh.dp_size} data x {mesh.cp_size} context parallel"
        + f" ({ulysses} Ulysses x {ring} ring)" * (ring > 1),
        "context": f"{config.data.context} tokens, {tokens} per step, {config.train.steps - config.start} steps",
        "attention": f"kernel {trainer.kernel}{_planned_kernel(trainer)}",
        "run": f"{trainer.run.run_dir}{f', resumed after step {trainer.step}' if trainer.step else ''}",
        "saving": _saving(trainer),
    }
    if config.curriculum:
        facts["entry"] = f"{config.entry + 1} of {len(config.ends)}, steps {config.start + 1} to {config.train.steps}"
    if config.model.rope is not None:
        values = {name.removeprefix("rope_"): value for name, value in model.config.rope_parameters.items()}
        values |= {name: f"({len(value)})" for name, value in values.items() if isinstance(value, list)}
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        facts["rope"] = f"{shown}, for {model.config.max_position_embeddings} positions"
    return facts | trainer.data_facts | dict(trainer.run.changed)


def _planned_kernel(trainer: Trainer) -> str:
    """The kernel that was planned with, if another one runs."""
    expected = trainer.run.plan.hardware.gpu.kernel if trainer.run.plan else ""
    return f", planned with {expected}" if expected not in ("", trainer.kernel) else ""


def _saving(trainer: Trainer) -> str:
    settings, room = trainer.config.train, format_bytes(trainer.run.saved_bytes)
    every = [f"{settings.save_minutes:g} minutes"] * (settings.save_minutes > 0)
    every += [f"{settings.save_every} steps"] * (settings.save_every > 0)
    way = f"in the background, from {room} of host memory per node"
    if not trainer.saver.background:
        way = f"in the foreground: {room} of host memory per node are not free for a copy"
    return f"{'every ' + ' and '.join(every) if every else 'at the end'}, {way}"


def _summary(trainer: Trainer, records: list[dict[str, Any]]) -> dict[str, str]:
    run_dir, more, optim = trainer.run.run_dir, 2 * trainer.step, trainer.config.optim
    # Since the run was resumed: with other settings, validation before may have been of other text.
    since = (r["val_loss"] for r in records if r["step"] >= trainer.first_step)
    losses = [f"{loss:.4f}" for loss in since if loss is not None]
    rates = [r["tokens_per_s"] for r in records if r["tokens_per_s"]]
    facts = {"validation loss": " -> ".join([losses[0], *losses[1:][-1:]])} if losses else {}
    if trainer.best is not None and trainer.saver.keep_best:
        loss, step = trainer.best
        facts["best"] = f"{loss:.4f} after step {step}: {shell_command('export', run_dir, 'OUT_DIR', '--step', step)}"
    if trainer.step < trainer.config.train.steps:
        facts["stopped early"] = f"after step {trainer.step}: {trainer.stale} validations in a row were not lower"
    facts["speed"] = f"{format_count(statistics.median(rates))} tokens/s (median step)"
    facts["export"] = shell_command("export", run_dir, "OUT_DIR")
    if trainer.config.adapter is not None and (path := trainer.config.model.path) is not None and path.is_dir():
        facts["merged"] = shell_command("export", run_dir, "OUT_DIR", "--merge")
    if trainer.config.curriculum:
        return facts
    facts["train longer"] = shell_command("train", "--resume", run_dir, "--set", f"train.steps={more}")
    if optim.schedule == "cosine" and optim.warmup_steps < (optim.decay_steps or trainer.step) <= trainer.step:
        facts["lr"] = f"stays as it is then; for a longer cosine add --set optim.decay_steps={more}"
    return facts
