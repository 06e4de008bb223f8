"""The loop.  `run` is what every rank executes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ithaka.config import Config, ConfigError, embedded_model, to_yaml
from ithaka.data.open import data_facts, load_tokenizer, open_data
from ithaka.data.stream import Batch, TrainData
from ithaka.data.tokenizer import Tokenizer
from ithaka.dist.mesh import Mesh, default_device, end_process_group, make_mesh, start_process_group
from ithaka.layout import layout_of
from ithaka.memory.store import Store
from ithaka.model.build import build_model
from ithaka.ops.kernels import resolve_kernel
from ithaka.phases import listening, phase
from ithaka.plan.hardware import peak_flops
from ithaka.plan.host import Host, this_host
from ithaka.plan.show import size
from ithaka.train import checkpoint
from ithaka.train.budget import store_host_bytes
from ithaka.train.check import model_shape
from ithaka.train.console import (
    Console,
    Record,
    amount,
    check_tensorboard,
    host_peak_bytes,
    read_metrics,
    step_flops,
    visible,
)
from ithaka.train.optim import learning_rate, make_optimizer
from ithaka.train.planned import check_ranks_agree
from ithaka.train.resume import changes, history, same_validation_after, settings_of_run, to_go_on_from
from ithaka.train.shortage import Shortage, Witness, explain, headline, is_shortage, plan_of_run
from ithaka.train.status import status
from ithaka.train.step import StepResult, sample, train_step, validation_loss
from ithaka.train.stop import StopRequest
from ithaka.train.together import gathered, together
from ithaka.train.watch import Watch, write_facts

SAMPLE_PROMPT_TOKENS = 64
SAMPLE_NEW_TOKENS = 128
SAMPLE_MAX_PARAMS = {"cuda": 1_000_000_000, "cpu": 20_000_000}  # above: minutes, without a cache


class Diverged(RuntimeError):
    """Loss or gradient is not finite any more."""


class OutOfMemoryError(RuntimeError):
    """The launcher turns it into exit code 3."""


class Trainer:
    """Model, optimizer and data of one run on this rank, and how far it is."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: PreTrainedModel,
        data: TrainData,
        tokenizer: Tokenizer | None,
        changed: dict[str, str] | None = None,
    ):
        """`changed`: the settings that differ from those of the run that goes on, in words."""
        assert config.train.run_dir is not None, "resolved before the ranks start: one name for all of them"
        self.config, self.mesh, self.model, self.data, self.tokenizer = config, mesh, model, data, tokenizer
        self.run_dir, self.changed = config.train.run_dir, changed or {}
        self.optimizer = make_optimizer(model, config.optim)
        self.windows = model_shape(config).windows
        self.step = 0
        self.tokens = 0
        self.saved_step = 0
        self.data_facts: dict[str, str] = {}

    @phase("loading the checkpoint")
    def load(self, path: Path) -> None:
        """Of the data, the place is set already: it can be refused."""
        with status("loading the checkpoint"):
            state = checkpoint.load(path, self.model, self.optimizer)
        self.step = self.saved_step = state["step"]
        self.tokens = state["tokens"]

    @phase("saving")
    def save(self) -> None:
        """Does nothing when this step is saved already."""
        if self.saved_step == self.step:
            return
        state = {"step": self.step, "tokens": self.tokens, "data": self.data.state_dict()}
        checkpoint.save(self.run_dir, self.model, self.optimizer, state, self.config.train.keep_last)
        self.saved_step = self.step

    def next_batches(self) -> list[Batch]:
        """This rank's micro-batches of the next step."""
        return [self.data.next_batch() for _ in range(self.config.train.accumulate)]

    def advance(self, batches: Sequence[Batch] | None = None) -> tuple[StepResult, float, int]:
        """One step, on the next batches unless given: its result, learning rate and input tokens over all ranks."""
        batches = batches or self.next_batches()
        lr = learning_rate(self.step, self.config.optim, self.config.train.steps)
        clip_norm = self.config.optim.clip_norm
        result = train_step(
            self.model,
            self.optimizer,
            batches,
            lr=lr,
            clip_norm=clip_norm,
            mesh=self.mesh,
            windows=self.windows,
        )
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise Diverged(
                f"step {self.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}. "
                f"{_last_checkpoint(self.config)} Try a lower optim.lr or more optim.warmup_steps."
            )
        num_tokens = sum(batch.input_ids.numel() for batch in batches) * self.mesh.dp_size
        self.step += 1
        self.tokens += num_tokens
        return result, lr, num_tokens

    @phase("validation")
    def validate(self) -> float | None:
        batches = self.data.validation_batches(self.config.train.validate_sequences)
        return validation_loss(self.model, batches, self.mesh)

    def due(self, every: int) -> bool:
        """Whether something done every so many steps (0: only at the end) is done after this one."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)


def run(config: Config, resume: Path | None = None, only_profile: bool = False) -> None:
    """The whole run on this rank, with torchrun's variables set (or none, for a single process).

    `config` is resolved (train.run_dir set); `resume` is the run directory to go on from.  Returns when all
    steps are done, or when asked to stop, after saving.  Raises ConfigError, OutOfMemoryError, CheckpointError or
    Diverged with all that the user needs to know.  `only_profile`: nothing is saved, and no sample is taken."""
    ours = not dist.is_initialized()
    witness, host = Witness(default_device()), this_host(config.memory.disk_path)
    with StopRequest() as stop, listening(witness):
        try:
            trainer = prepare(config, resume)
            witness.know(trainer.model, trainer.optimizer)
            train(trainer, stop, only_profile)
        except Exception as error:
            if not is_shortage(error):
                raise
            raise OutOfMemoryError(_explain_shortage(config, error, witness, host)) from error
    # Only after success: with a rank gone this would wait for it.
    if ours:
        end_process_group()


def prepare(config: Config, resume: Path | None) -> Trainer:
    """Everything that can refuse the configuration comes before anything is written, and is refused on all ranks."""
    start_process_group()
    together(check_ranks_agree, gathered(config))
    mesh = make_mesh(config.parallel.cp_of(dist.get_world_size()))
    found = together(_found, config, resume)
    trainer = together(_build, config, mesh, found)
    trainer.data_facts = together(_data_facts, trainer)
    if found is not None:
        trainer.load(found)
    together(_write_run_dir, trainer)
    return trainer


def _found(config: Config, resume: Path | None) -> Path | None:
    if config.train.tensorboard:
        check_tensorboard()
    return to_go_on_from(resume, config) if resume is not None else None


def _build(config: Config, mesh: Mesh, found: Path | None = None) -> Trainer:
    """Model and data of this rank, the data at the place of the checkpoint; nothing is communicated."""
    torch.manual_seed(config.train.seed + mesh.rank)
    source = config.model.path or embedded_model(config.model.embedded)
    on_gpu, shape = mesh.device.type == "cuda", model_shape(config)
    budget = store_host_bytes(config, shape, mesh.cp_size, mesh.world_size, on_gpu)
    layout = layout_of(config, shape.num_layers, mesh.world_size, on_gpu)
    store = Store(mesh.device, host_bytes=budget, disk_path=config.memory.disk_path)
    kernel_of(config, mesh)  # refused here, before anything is written
    with phase("building the model"), status("building the model"):
        model = build_model(source, mesh, layout, store=store, seed=config.train.seed)
    with status("opening the data"):
        tokenizer = load_tokenizer(config.data, config.model.path)
        run_dir = config.train.run_dir
        assert run_dir is not None
        data = open_data(
            config.data,
            tokenizer=tokenizer,
            seed=config.train.seed,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            batch=config.train.batch,
            vocab_size=model.config.vocab_size,
            eos_id=_eos_id(model.config) if tokenizer is None else None,
            cache_dir=run_dir / "tokens",
            fills_cache=os.environ.get("LOCAL_RANK", "0") == "0",
        )
    if found is None:
        return Trainer(config, mesh, model, data, tokenizer)
    data.load_state_dict(checkpoint.read_state(found)["data"])
    return Trainer(config, mesh, model, data, tokenizer, changes(settings_of_run(found.parents[1]), config))


def kernel_of(config: Config, mesh: Mesh) -> str:
    """The attention kernel that this device will run."""
    shape = model_shape(config)
    layout = layout_of(config, shape.num_layers, mesh.world_size, mesh.device.type == "cuda")
    return resolve_kernel(layout.kernel, mesh.device, getattr(torch, layout.dtype or "float32"), shape.head_dim).name


def _eos_id(model_config: Any) -> int | None:
    eos = model_config.eos_token_id
    return eos[0] if isinstance(eos, list) and eos else eos


def _data_facts(trainer: Trainer) -> dict[str, str]:
    """What will be trained on, in words.  Rank 0 reads it."""
    if trainer.mesh.rank != 0:
        return {}
    config = trainer.config
    num_sequences = config.train.steps * config.train.accumulate * config.train.batch * trainer.mesh.dp_size
    try:
        with status("reading the data"):
            return data_facts(config.data, trainer.data, trainer.tokenizer).lines(num_sequences)
    except ConfigError:
        trainer.data.close(remove=True)
        raise


def _write_run_dir(trainer: Trainer) -> None:
    """The resolved configuration, and what export needs besides weights.  Rank 0 does it."""
    if trainer.mesh.rank != 0:
        return
    folder = trainer.run_dir / "model"
    folder.mkdir(parents=True, exist_ok=True)
    told = history(trainer.run_dir, trainer.step, trainer.changed) if trainer.step else ""
    checkpoint.write_atomic(trainer.run_dir / "config.yaml", told + to_yaml(trainer.config))
    trainer.model.config.save_pretrained(folder)
    if getattr(trainer.model, "generation_config", None) is not None:
        trainer.model.generation_config.save_pretrained(folder)
    if trainer.tokenizer is not None:
        trainer.tokenizer.save_pretrained(folder)


def train(trainer: Trainer, stop: StopRequest, only_profile: bool = False) -> None:
    """From where `trainer` is to train.steps, or to the first step after which any rank was asked to stop."""
    settings = trainer.config.train
    active = trainer.mesh.rank == 0
    console = Console(trainer.run_dir, settings.steps, trainer.step, settings.tensorboard, active)
    try:
        console.facts("ithaka", _header(trainer))
        console.start_progress(trainer.step)
        asked = _steps(trainer, stop, console, save=not only_profile)
        console.stop_progress()
        if only_profile:
            return
        if asked and trainer.step < settings.steps:
            console.say(f"Stopped as asked after step {trainer.step}, which is saved.")
            console.say(f"Go on with: ithaka train --resume {trainer.run_dir}")
        else:
            _finish(trainer, console)
    finally:
        console.close()
        trainer.data.close(remove=only_profile or trainer.step >= settings.steps)


def _steps(trainer: Trainer, stop: StopRequest, console: Console, save: bool) -> bool:
    """Trains, validates, saves; returns whether a stop was asked for."""
    settings = trainer.config.train
    watch = Watch(trainer.config, trainer.model, trainer.optimizer, trainer.mesh, console)
    if console.active:
        write_facts(trainer.run_dir, watch.job, trainer.mesh)
    if trainer.step == 0 and settings.validate_every:
        with console.doing("validation before the first step"):
            val_loss = trainer.validate()
        _, peaks = _agree(stop, trainer.mesh)
        console.step(Record(0, None, val_loss, None, None, 0, 0, None, None, None, *peaks))
    asked, first = False, trainer.step + 1
    while trainer.step < settings.steps and not asked:
        start = time.perf_counter()
        with console.doing("first step", again_s=None) if trainer.step < first else nullcontext():
            batches = trainer.next_batches()
            with watch.step(trainer.step + 1, batches):
                result, lr, num_tokens = trainer.advance(batches)
                step_s = time.perf_counter() - start
        val_loss = None
        if trainer.due(settings.validate_every):
            with console.doing("validation"):
                val_loss = trainer.validate()
        asked, (device_peak, host_peak) = _agree(stop, trainer.mesh, watch.device_peak_bytes)
        console.step(
            Record(
                step=trainer.step,
                loss=result.loss,
                val_loss=val_loss,
                lr=lr,
                grad_norm=result.grad_norm,
                tokens=trainer.tokens,
                label_tokens=result.label_tokens,
                tokens_per_s=num_tokens / step_s,
                step_s=step_s,
                mfu=_mfu(trainer, num_tokens, result.num_pairs, step_s),
                device_peak_bytes=device_peak,
                host_peak_bytes=host_peak,
            )
        )
        if save and (asked or trainer.due(settings.save_every)):
            with console.doing("saving"):
                trainer.save()
    return asked


def _agree(stop: StopRequest, mesh: Mesh, earlier_peak: int = 0) -> tuple[bool, tuple[int | None, int]]:
    """Whether any rank was asked to stop, and the largest memory peaks (device, host).  One all-reduce on the
    host, after each step, so that all ranks stop after the same one."""
    on_gpu = mesh.device.type == "cuda"
    device_peak = max(torch.cuda.max_memory_allocated(mesh.device), earlier_peak) if on_gpu else 0
    shared = torch.tensor([stop.asked_at is not None, device_peak, host_peak_bytes()], dtype=torch.int64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    asked, device_peak, host_peak = shared.tolist()
    return bool(asked), (device_peak if on_gpu else None, host_peak)


# What is said about a run


def _num_params(model: PreTrainedModel) -> int:
    return sum(param.numel() for param in model.parameters())


def _mfu(trainer: Trainer, num_tokens: int, num_pairs: int, step_s: float) -> float | None:
    device = trainer.mesh.device
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None:
        return None
    shape = model_shape(trainer.config)
    # An embedding is read, not multiplied, unless it is the output head as well.
    lookup_only = 0 if shape.tied else shape.vocab * shape.hidden
    num_params = _num_params(trainer.model) - lookup_only
    flops = step_flops(num_params, num_tokens, shape.heads * shape.head_dim, num_pairs)
    return flops / (step_s * peak * trainer.mesh.world_size)


def _header(trainer: Trainer) -> dict[str, str]:
    config, mesh = trainer.config, trainer.mesh
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    tokens = config.train.batch * config.train.accumulate * mesh.dp_size * config.data.context
    model = trainer.model
    facts = {
        "model": f"{config.model.path or model.config.model_type}, {amount(_num_params(model))} parameters",
        "ranks": f"{mesh.world_size} ({device}) = {mesh.dp_size} data x {mesh.cp_size} context parallel",
        "context": f"{config.data.context} tokens, {tokens} per step, {config.train.steps} steps",
        "attention": f"kernel {kernel_of(config, mesh)}",
        "run": str(trainer.run_dir),
    }
    if trainer.step:
        facts["resumed"] = f"after step {trainer.step}"
        facts["lr"] = _rate_from_here(config, trainer.step)
    facts |= trainer.data_facts | trainer.changed
    return facts


def _rate_from_here(config: Config, step: int) -> str:
    """Of the first step after `step`, and how to have another."""
    optim, steps = config.optim, config.train.steps
    rate = f"{learning_rate(step, optim, steps):.2e} at step {step + 1}"
    if optim.schedule == "constant":
        return rate
    end = optim.decay_steps or steps
    rate += f", {'on' if step < end else 'after'} the cosine that ends at step {end}"
    return rate if end == steps else f"{rate}; to end it at {steps} give --set optim.decay_steps={steps}"


def _finish(trainer: Trainer, console: Console) -> None:
    with console.doing("writing a sample"):
        text = _sample_text(trainer)
    if not console.active:
        return
    records = read_metrics(trainer.run_dir / "metrics.jsonl")
    console.facts("done", _summary(trainer, records))
    console.say(text)
    checkpoint.write_atomic(trainer.run_dir / "sample.txt", text)


def _summary(trainer: Trainer, records: list[dict[str, Any]]) -> dict[str, str]:
    first = same_validation_after(trainer.run_dir)
    losses = [f"{r['val_loss']:.4f}" for r in records if r["val_loss"] is not None and r["step"] > first]
    rates = [r["tokens_per_s"] for r in records if r["tokens_per_s"]]
    # Each part of a resumed run has peaks of its own.
    device_peak = max(r["device_peak_bytes"] or 0 for r in records)
    device = f"device {size(device_peak)}, " if device_peak else ""
    host_peak = max(r["host_peak_bytes"] for r in records)
    facts = {"validation loss": " -> ".join([losses[0], *losses[1:][-1:]])} if losses else {}
    if rates:
        facts["speed"] = f"{amount(sorted(rates)[len(rates) // 2])} tokens/s (median step)"
    facts["peak memory"] = f"{device}host {size(host_peak)} per rank"
    facts["export"] = f"ithaka export {trainer.run_dir} OUT_DIR"
    more = 2 * trainer.step
    facts["train longer"] = f"ithaka train --resume {trainer.run_dir} --set train.steps={more}"
    if trainer.config.optim.schedule == "cosine":
        rate = learning_rate(trainer.step, trainer.config.optim, trainer.config.train.steps)
        facts["lr"] = f"stays at {rate:.2e} then; for a longer cosine add --set optim.decay_steps={more}"
    return facts


def _prompt(trainer: Trainer) -> list[int]:
    """The first tokens of the first sequence held out, or of the training data where nothing is."""
    held_out = trainer.data.validation_sequences(max(trainer.config.train.validate_sequences, 1))
    ids_S = held_out[0].ids if held_out else trainer.data.next_batch().input_ids[0]
    return [int(token) for token in ids_S[: min(SAMPLE_PROMPT_TOKENS, len(ids_S) // 2)]]


def _last_checkpoint(config: Config) -> str:
    run_dir = config.train.run_dir
    assert run_dir is not None
    latest = run_dir / "latest"
    if not latest.exists():
        return "There is no checkpoint yet."
    return f"The last checkpoint is {run_dir / 'checkpoints' / latest.read_text().strip()}."


def _explain_shortage(config: Config, error: Exception, witness: Witness, host: Host) -> str:
    """Never fails: whatever goes wrong in here, the run has ended for want of memory."""
    try:
        words = _shortage_in_words(config, error, witness, host)
    except Exception as failure:
        words = f"{headline(error, witness)}\nNo other settings were found ({type(failure).__name__}: {failure})"
    try:
        return f"{words}\n{_last_checkpoint(config)}"
    except Exception as failure:
        return f"{words}\nThe last checkpoint cannot be named ({type(failure).__name__}: {failure})"


def _shortage_in_words(config: Config, error: Exception, witness: Witness, host: Host) -> str:
    witness.measure()  # first: what is told without a plan has it too
    run_dir = config.train.run_dir
    assert run_dir is not None
    saved = (run_dir / "latest").exists()
    again = f"ithaka train --resume {run_dir}" if saved else "the same command with another --run-dir and"
    return explain(Shortage(error, witness, plan_of_run(config, witness.device, host)), again)


def _sample_text(trainer: Trainer) -> str:
    """A continuation of the beginning of the validation set, or why there is none.  Every rank takes part."""
    num_params = _num_params(trainer.model)
    if num_params > SAMPLE_MAX_PARAMS[trainer.mesh.device.type]:
        return f"No sample: {amount(num_params)} parameters take too long without a cache; export the model."
    if trainer.tokenizer is None:
        return "No sample: there is no tokenizer to write it with."
    prompt = _prompt(trainer)
    room = trainer.config.data.context - len(prompt)
    tokens = sample(
        trainer.model,
        prompt,
        min(SAMPLE_NEW_TOKENS, room),
        trainer.mesh,
        seed=trainer.config.train.seed,
        stop=trainer.tokenizer.eos_id,
    )
    decode = trainer.tokenizer.decode
    return f"Sample, continuing {decode(prompt)!r}:\n{visible(decode(tokens))}"
