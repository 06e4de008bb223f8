"""Checkpoints of a run, and their export to a Hugging Face directory.

    RUN_DIR/model/                       config, generation config, tokenizer: what export needs besides the weights
    RUN_DIR/checkpoints/step-00000100/   torch.distributed.checkpoint files and state.json
    RUN_DIR/latest                       one line, the name of the newest complete checkpoint

A checkpoint is written under a name that begins with a dot, synced, renamed, and only then named by `latest`;
so whenever a run is killed, `latest` names a complete one.  Every rank must see the same RUN_DIR.  Each file has a
checksum in state.json, checked before a run goes on, is called finished or is exported; instead of a damaged one
the one before it is taken.

A resumed run may change any setting but train.run_dir, train.seed, and what would give other tokens or weights of
another shape. With another context or other steps, no document is skipped or repeated.

Tensors and RNG states go through torch.distributed.checkpoint, all else is JSON.  torch's own index (`.metadata`) is a
pickle: safe_load.py reads it without running code from it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from ithaka.config import (
    Config,
    ConfigError,
    check_output,
    explicit_settings,
    format_value,
    load_config,
    to_dict,
    with_absolute_paths,
)
from ithaka.dist.agree import RankError, SharedTransientError, gather_objects, raise_first
from ithaka.dist.mesh import default_device, use_device
from ithaka.dist.rank import is_rank_0
from ithaka.exits import TransientError, is_out_of_memory, is_transient
from ithaka.layer.store import Slab
from ithaka.layout import format_choices
from ithaka.model.adapters import adapter_tensor_name, merge_adapter
from ithaka.phases import phase
from ithaka.plan.shape import ModelShape, read_shape
from ithaka.train.safe_load import SafeReader, load_into

CHECKPOINT_FORMAT = 1
SHARING_S = 60.0  # in which a shared file system must show one node's files to another
STATE_FILE = "state.json"
step_name = "step-{:08d}".format
T = TypeVar("T")


def _do_nothing() -> None: ...


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read, on some rank; every rank raises it."""

    shared = True


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """torch raises one rank's error on all ranks, but wrapped in something that is no Exception."""
    try:
        yield
    except dcp.CheckpointException as wrapped:
        rank, (error, _) = next(iter(wrapped.failures.items()))
        if is_out_of_memory(error):
            raise error from None
        raise CheckpointError(f"{what}: rank {rank}: {type(error).__name__}: {error}") from wrapped


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, text: str) -> None:
    """Replaces `path` by a file with `text`: after a crash it holds the old text or the new, nothing between."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def _rng_tensors(rank: int) -> dict[str, Tensor]:
    """Torch's generators on this rank.  ithaka draws from no other global one; data order has its own state."""
    states = {f"{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def _trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and optimizer state, without frozen weights: a run with an adapter reads those from model.path again."""
    weights, optim = get_state_dict(model, optimizer)
    params = dict(model.named_parameters(remove_duplicate=False))  # a tied weight under both its names
    return {name: t for name, t in weights.items() if name not in params or params[name].requires_grad}, optim


class Saver:
    """Writes one checkpoint at a time, in a thread: in the background where host memory has room for a copy of the
    state, else `save` blocks. Uses its own process group; constructed by every rank."""

    def __init__(self, run_dir: Path, keep_last: int, background: bool, keep_best: bool = False) -> None:
        self.run_dir, self.keep_last, self.background, self.keep_best = run_dir, keep_last, background, keep_best
        self.group = dist.new_group(backend="gloo")
        self.seconds = 0.0  # taken by the last save
        self.step, self.started_at = 0, 0.0  # last save; by time.monotonic()
        self._copies: dict[str, Slab] = {}
        self._in_progress: Future[None] | None = None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Start a save. Every rank calls it after the same step, with none in progress. `state` is JSON with an int
        "step"; rank 0's is stored. `finish` reports the result."""
        assert not self.in_progress
        weights, optim = _trained_state(model, optimizer)
        # Without the optimizer's hyperparameters: they come from the config, and the rate from the step.
        tensors = {"model": weights, "moments": optim["state"], "rng": _rng_tensors(dist.get_rank())}
        done, device = Future[None](), default_device()
        self._in_progress = done
        self.step, self.started_at = state["step"], time.monotonic()

        def write(tensors: dict[str, Any]) -> None:
            start = time.monotonic()
            try:
                use_device(device)
                self._write(tensors, state)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
            self.seconds = time.monotonic() - start

        if self.background:
            tensors = self._copied(tensors)
        Thread(target=write, args=(tensors,), daemon=True, name="saving").start()
        if not self.background:
            wait([done])

    @property
    def in_progress(self) -> bool:
        """Whether a save was started and `finish` not called yet: the same on every rank after a step."""
        return self._in_progress is not None

    @property
    def is_done(self) -> bool:
        """Whether this rank has written its part of the save in progress; ranks may differ."""
        return self._in_progress is not None and self._in_progress.done()

    @phase("saving")
    def finish(self) -> None:
        """Wait for the save in progress, if any. If it failed, raise CheckpointError or SharedTransientError on every
        rank."""
        save, self._in_progress = self._in_progress, None
        if save is not None:
            save.result()

    def _copied(self, tensors: dict[str, Any], name: str = "") -> dict[str, Any]:
        """A copy in host memory (page-locked if there is a GPU), which is reused from save to save."""
        copies = dict[str, Any]()
        for key, value in tensors.items():
            if isinstance(value, dict):
                copies[key] = self._copied(value, f"{name}{key}.")
                continue
            local = value.to_local() if isinstance(value, DTensor) else value
            slab = self._copies.get(name + key)
            if slab is None:
                slab = self._copies[name + key] = Slab(local.nbytes, pin=torch.cuda.is_available())
            copy = slab.view(local.shape, local.dtype).copy_(local, non_blocking=True)
            copies[key] = DTensor(copy, value._spec, requires_grad=False) if isinstance(value, DTensor) else copy
        if not name and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _write(self, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        """Written under a name with a dot, seen whole by rank 0, renamed, and then named by `latest`."""
        rank, root = dist.get_rank(), self.run_dir / "checkpoints"
        final = root / step_name(state["step"])
        temporary, what = root / f".tmp-{final.name}", f"checkpoint {final} cannot be written"

        def make_room() -> None:
            root.mkdir(parents=True, exist_ok=True)
            for stale in root.glob(".tmp-*"):
                shutil.rmtree(stale)
            temporary.mkdir()

        def own_files() -> dict[str, tuple[int, str]]:
            own = [temporary / ".metadata"] * (rank == 0) + sorted(temporary.glob(f"__{rank}_*"))
            return {file.name: (file.stat().st_size, checksum(file)) for file in own}

        self._gather(what, make_room if rank == 0 else _do_nothing)
        with _explained(what):
            writer = dcp.FileSystemWriter(temporary, sync_files=True)
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
        written = self._gather(what, own_files)

        def publish() -> str | None:
            for other, files in enumerate(written):
                for name, (num_bytes, _) in files.items():
                    if _is_seen(temporary / name, num_bytes):
                        continue
                    unseen = f"rank 0 does not see {temporary / name}, which rank {other} wrote"
                    if latest_name(self.run_dir):  # the nodes do share the directory: the run can save again later
                        raise TimeoutError(unseen)
                    return unseen
            files = {name: entry for own in written for name, entry in own.items()}
            record = {"format": CHECKPOINT_FORMAT, "world_size": dist.get_world_size(), **state}
            record["file_bytes"] = {name: num_bytes for name, (num_bytes, _) in files.items()}
            record["checksums"] = {name: digest for name, (_, digest) in files.items()}
            record["checksums"][STATE_FILE] = _state_checksum(record)
            write_atomic(temporary / STATE_FILE, json.dumps(record, indent=1))
            if final.exists():  # left by a run that went on from an earlier checkpoint
                shutil.rmtree(final)
            os.rename(temporary, final)
            _sync_directory(root)
            write_atomic(self.run_dir / "latest", final.name + "\n")
            best = state["best"][1] if self.keep_best and state.get("best") else 0
            _prune(root, state["step"], self.keep_last, best)
            return None

        unseen = self._gather(what, publish if rank == 0 else _do_nothing)[0]
        if unseen is not None:
            way = "start again, or put it on a file system that all nodes share"
            raise SharedTransientError(f"train.run_dir={self.run_dir}: {unseen}; {way}")

    def _gather(self, what: str, function: Callable[[], T]) -> list[T]:
        """Call `function` on every rank and return all results. If it raises on any rank, raise CheckpointError on
        all."""
        result = failure = None
        try:
            result = function()
        except Exception as error:
            failure = RankError(CheckpointError, f"{type(error).__name__}: {error}")
        results, failures = zip(*gather_objects((result, failure), self.group), strict=True)
        raise_first(failures, what)
        return list(results)


def checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]


def _state_checksum(state: dict[str, Any]) -> str:
    """Of all that state.json holds but this checksum itself."""
    checksums = {name: digest for name, digest in state["checksums"].items() if name != STATE_FILE}
    words = json.dumps({**state, "checksums": checksums})
    return hashlib.blake2b(words.encode()).hexdigest()[:32]


def _is_seen(file: Path, num_bytes: int) -> bool:
    """A shared file system may show other nodes' files late."""
    deadline = time.monotonic() + SHARING_S
    while not (file.is_file() and file.stat().st_size == num_bytes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _prune(root: Path, step: int, keep_last: int, best: int = 0) -> None:
    """Checkpoints beyond `step` stay: they are another continuation, which the user may still want."""
    for path in [path for path in sorted(root.glob("step-*")) if path.name <= step_name(step)][:-keep_last]:
        if path.name != step_name(best):
            shutil.rmtree(path)


def find_problem(path: Path) -> str | None:
    """Why the checkpoint at `path` cannot be used, or None: state.json is as it was written, every file is there with
    the size it was written with, and torch's index can be read."""
    try:
        state = read_state(path)
        if (found := state.get("format")) != CHECKPOINT_FORMAT:
            rule = f"its format is {found}, and this ithaka reads {CHECKPOINT_FORMAT}; use the ithaka that wrote it"
            raise ConfigError(f"checkpoint {path} cannot be used: {rule}")
        own = state.get("checksums", {}).get(STATE_FILE)  # none: of an earlier version
        if own is not None and own != _state_checksum(state):
            return f"file {STATE_FILE} does not hold what was written"
        for name, num_bytes in state["file_bytes"].items():
            if (path / name).stat().st_size != num_bytes:
                return f"file {name} does not have the {num_bytes} bytes that were written"
        SafeReader(path).read_metadata()
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        _check_readable(path, error)
        return f"{type(error).__name__}: {error}"
    return None


def find_damage(path: Path, share: int = 0, of: int = 1) -> str | None:
    """What of the checkpoint's files is not as it was written, by their checksums; looks at every `of`-th of them."""
    try:  # another run in this directory may be removing it
        sums = sorted(read_state(path).get("checksums", {}).items())
        wrong = [name for name, digest in sums[share::of] if name != STATE_FILE and checksum(path / name) != digest]
    except OSError as error:
        _check_readable(path, error)
        return f"{type(error).__name__}: {error}"
    return f"file {wrong[0]} does not hold what was written" if wrong else None


def _check_readable(path: Path, error: Exception) -> None:
    """Raise TransientError if `error` says nothing about the checkpoint itself: an earlier one must not replace it."""
    if is_transient(error):
        words = f"checkpoint {path} cannot be read now ({error}); check its disk, and start again"
        raise TransientError(words) from error


def find_checkpoint(run_dir: Path, before: Path | None = None) -> Path:
    """The checkpoint named by RUN_DIR/latest, or the newest one before it (or before `before`) if it cannot be used,
    which rank 0 says. ConfigError if there is none."""
    if not run_dir.is_dir():
        raise ConfigError(f"run directory {run_dir} does not exist; give the directory of an earlier run")
    name = latest_name(run_dir)
    paths = sorted((run_dir / "checkpoints").glob("step-*"), reverse=True)
    known = [path for path in paths if (path < before if before else path.name <= (name or path.name))]
    if name and before is None and name not in (path.name for path in known):
        known.insert(0, run_dir / "checkpoints" / name)
    for path in known:
        if (reason := find_problem(path)) is None:
            return path
        report_damage(path, reason)
    raise ConfigError(
        f"run directory {run_dir} has no{' other' * (before is not None)} checkpoint that can be used; start anew"
    )


def of_step(run_dir: Path, step: int) -> Path:
    """The checkpoint of that step. ConfigError if there is none, or it cannot be used."""
    path = run_dir / "checkpoints" / step_name(step)
    if not path.is_dir():
        steps = [int(each.name.removeprefix("step-")) for each in sorted(path.parent.glob("step-*"))]
        raise ConfigError(
            f"--step={step}: {run_dir} has no such checkpoint; use {format_choices(steps) or 'another run'}"
        )
    if reason := find_problem(path) or find_damage(path):
        raise ConfigError(f"--step={step}: {path} cannot be used: {reason}; use another step")
    return path


def find_intact(run_dir: Path) -> Path:
    """As `find`, but with every file as it was written."""
    found = find_checkpoint(run_dir)
    while reason := find_damage(found):
        report_damage(found, reason)
        found = find_checkpoint(run_dir, before=found)
    return found


def report_damage(path: Path, reason: str) -> None:
    if is_rank_0():
        print(f"Checkpoint {path} cannot be used: {reason}. The one before it is taken.", file=sys.stderr, flush=True)


def newest_checkpoint(run_dir: Path | None) -> Path | None:
    """The checkpoint of the latest step, complete as all are, though it may be damaged."""
    return max(run_dir.glob("checkpoints/step-*"), default=None) if run_dir is not None else None


def latest_name(run_dir: Path) -> str:
    """The name of the newest complete checkpoint, or ""."""
    file = run_dir / "latest"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def describe_last(run_dir: Path) -> str:
    """The last checkpoint, in a sentence."""
    name = latest_name(run_dir)
    return f"The last checkpoint is {run_dir / 'checkpoints' / name}." if name else "There is no checkpoint yet."


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / STATE_FILE).read_text(encoding="utf-8"))


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Called by every rank: fills model, optimizer and RNG from the checkpoint and returns its state.

    Shards are cut anew when the number of ranks differs; RNG states belong to ranks, so then the generators
    keep the seeds they have."""
    state, rank = read_state(path), dist.get_rank()
    weights, optim = _trained_state(model, optimizer)
    tensors: dict[str, Any] = {"model": weights, "moments": optim["state"]}
    if state["world_size"] == dist.get_world_size():
        saved = SafeReader(path).read_metadata().state_dict_metadata
        tensors["rng"] = {k: v for k, v in _rng_tensors(rank).items() if f"rng.{k}" in saved}
    with _explained(f"checkpoint {path} cannot be read"):
        load_into(tensors, path)
    options = StateDictOptions(strict=False)  # frozen weights are not in it
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim, options=options)
    for key, rng in tensors.get("rng", {}).items():
        (torch.cuda.set_rng_state if key.endswith(".cuda") else torch.set_rng_state)(rng)
    return state


def lock_run_dir(run_dir: Path, kind: int = fcntl.LOCK_EX) -> int:
    """Lock the run directory until it is closed or the process ends; TransientError if another run holds the lock."""
    directory = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(directory, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        words = f"train.run_dir={run_dir} is in use by another run; wait for its end, or stop it"
        raise TransientError(words) from None
    except OSError:  # a file system without locks
        pass
    return directory


def resume_point(run_dir: Path, config: Config, shape: ModelShape) -> tuple[Path, dict[str, str]]:
    """The latest checkpoint, and the settings that differ from the run's, by name, each in words.

    Refuses what is known before the data is opened; the data itself refuses the rest."""
    os.close(lock_run_dir(run_dir, fcntl.LOCK_SH))  # shared: under torchrun every rank asks
    before, found = load_config(run_dir / "config.yaml"), find_checkpoint(run_dir)
    seed, saved = config.train.seed, run_dir / "model"
    model = f"path={config.model.path}" if config.model.path else f"embedded={config.model.embedded}"
    if seed != before.train.seed:
        why = f"is not the run's {before.train.seed}, which the order of its data comes from"
        raise ConfigError(f"train.seed={seed} {why}; leave it out")
    if (saved / "config.json").is_file() and read_shape(saved / "config.json") != shape.with_adapter(None):
        why = f"has another shape than the model of {run_dir}"
        raise ConfigError(f"model.{model} {why}; leave it out, or start a new run")
    changed, old = {}, with_absolute_paths(to_dict(before.at(max(0, read_state(found)["step"] - 1))))
    # A curriculum is planned anew for each entry, and its file has nothing of that.
    known = explicit_settings(run_dir / "config.yaml") if before.curriculum else None
    for section, values in with_absolute_paths(to_dict(config)).items():
        for key, value in (values or {}).items() if section != "curriculum" else ():
            if known is not None and f"{section}.{key}" not in known:
                continue
            was = (old[section] or {}).get(key)
            if value != was and section == "adapter":
                raise ConfigError(
                    f"adapter.{key}={format_value(value)} is not the run's {format_value(was)}; leave it out"
                )
            if value != was and (section, key) != ("train", "run_dir"):  # which may have moved
                changed[f"{section}.{key}"] = f"{format_value(value)} (was {format_value(was)})"
    return found, changed


def export(run_dir: Path, out_dir: Path, merge: bool = False, step: int | None = None, force: bool = False) -> Path:
    """Write a checkpoint of `run_dir`, the latest or that of `step`, as a Hugging Face directory; return `out_dir`.

    One process, without a process group; the whole model passes through host memory.  Weights keep the
    precision of the master weights (float32 in a usual run), so logits are those of the trained model.
    Of a run with an adapter, it writes the adapter in PEFT's format, or with `merge` the base model with the adapter
    merged in float32 and rounded to the base's own precision."""
    from transformers.utils import logging  # late: only export needs it

    logging.disable_progress_bar()

    check_output("OUT_DIR", out_dir, force, folder=True)
    out_dir, folder = out_dir.absolute(), run_dir / "model"
    found = find_intact(run_dir) if step is None else of_step(run_dir, step)
    if merge and not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"--merge: {run_dir} trained no adapter; leave it out")
    weights = {
        name.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in SafeReader(found).read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no process group is wanted
    load_into({"model": weights}, found, no_dist=True)
    with tempfile.TemporaryDirectory(prefix="ithaka-export-") as name:
        folder = Path(shutil.copytree(folder, Path(name) / "model"))
        _write_export(run_dir, found, folder, out_dir, weights, merge)
    return out_dir


def _write_export(
    run_dir: Path, found: Path, folder: Path, out_dir: Path, weights: dict[str, Tensor], merge: bool
) -> None:
    """`folder`: a copy of RUN_DIR/model, whose positions may be of a later step than the checkpoint `found`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    state, file = read_state(found), folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | state.get("positions", {})))
    others = ["config.json"]  # of the folder's files, those that are not exported
    if (folder / "adapter_config.json").is_file():
        settings = load_config(run_dir / "config.yaml").at(state["step"] - 1).model
        if settings.rope is not None and not merge:
            others = []  # the adapter's base needs the run's config.json as well
        others.append("adapter_config.json" if merge else "generation_config.json")
        _export_adapter(settings.path, folder, out_dir, weights, merge)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        model.save_pretrained(out_dir)  # its config.json names the dtype, and its generation config is made up
    shutil.copytree(folder, out_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*others))


def _export_adapter(base: Path | None, folder: Path, out_dir: Path, weights: dict[str, Tensor], merge: bool) -> None:
    tensors = {adapter_tensor_name(name): tensor for name, tensor in weights.items()}
    if not merge:
        out_dir.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out_dir / "adapter_model.safetensors", metadata={"format": "pt"})
        return
    if base is None or not base.is_dir():
        way = "put it there, or leave --merge out and merge with PEFT"
        raise ConfigError(f"--merge needs the base model, and model.path={base} of the run is no directory; {way}")
    merge_adapter(base, folder, tensors, out_dir)
