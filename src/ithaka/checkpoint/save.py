"""Save and load a run's state: weights, optimizer moments, RNG states and progress.

Tensors go through torch.distributed.checkpoint, everything else is JSON (state.json).
"""

import io
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from ithaka.checkpoint.checkpoints import (
    checksum,
    format_hash,
    is_visible,
    latest_name,
    new_hash,
    prune,
    publish,
    read_state,
    restore_names,
    step_name,
)
from ithaka.checkpoint.safe_load import load_into, read_index
from ithaka.comm.agree import (
    RankError,
    SharedTransientError,
    ask_rank_0,
    gather_objects,
    raise_first,
)
from ithaka.comm.mesh import default_device, use_device
from ithaka.exits import causes, exit_code_for, is_out_of_memory
from ithaka.facts.sizes import MOMENT_BLOCK, has_moment_blocks
from ithaka.foreign.torch_core import pytree
from ithaka.foreign.torch_fsdp import with_local
from ithaka.layer.slabs import Slab
from ithaka.phases import phase
from ithaka.weights.adapters import find_active_adapter

MAX_FILES = 8  # per rank, written in parallel; smaller states use fewer
MIN_FILE_BYTES = 2**28

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A rank cannot write or read a checkpoint. Raised on every rank."""

    shared = True


@contextmanager
def _unwrap_errors(what: str) -> Iterator[None]:
    """Raise CheckpointError for torch's CheckpointException, which is not an Exception."""
    try:
        yield
    except dcp.CheckpointException as wrapper:
        rank, (error, _) = next(iter(wrapper.failures.items()))
        if is_out_of_memory(error):
            raise error from None
        raise CheckpointError(f"{what}: rank {rank}: {type(error).__name__}: {error}") from error


def _rng_tensors(rank: int) -> dict[str, Tensor]:
    """Torch's generators, the only global ones in use. The data has its own state."""
    states = {f"{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def trained_weights(model: nn.Module, keeps_frozen: bool = False) -> dict[str, Any]:
    """Weights and persistent buffers, without frozen weights unless `keeps_frozen`. With an
    adapter, only trained weights: all others come with the base model."""
    weights = get_model_state_dict(model)
    params = dict(model.named_parameters(remove_duplicate=False))  # a tied weight under both names
    left_out = {name for name, param in params.items() if not param.requires_grad}
    if find_active_adapter(model):
        left_out |= weights.keys() - params.keys()
    elif keeps_frozen:
        left_out = set()
    return {name: t for name, t in weights.items() if name not in left_out}


def _trained_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run resumes and is exported without the model's files, so it also saves what transformers
    freezes: the expert biases of AFMoE, for example."""
    return trained_weights(model, keeps_frozen=True), get_optimizer_state_dict(model, optimizer)


def plain_moments(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors of an optimizer's state. Moments in 8 bits become codes and scales, both sharded
    by rows."""
    moments = [
        value for each in state.values() for value in each.values() if isinstance(value, DTensor)
    ]
    if not any(hasattr(value.to_local(), "codes") for value in moments):
        return state
    plain: dict[str, Any] = {}
    for name, each in state.items():
        plain[name] = {key: _split_moment(value) for key, value in each.items()}
    return plain


def _split_moment(value: object) -> object:
    if not isinstance(value, DTensor) or not has_moment_blocks(value.shape):
        return value
    local = value.to_local()
    row_blocks = value.numel() // len(value) // MOMENT_BLOCK
    # A rank without rows has neither.
    codes = getattr(local, "codes", local.byte())
    scale = getattr(local, "scale", local.float())
    return {
        "codes": _shard_like(value, codes, value.shape),
        "scale": _shard_like(
            value, scale.view(-1, row_blocks), torch.Size((len(value), row_blocks))
        ),
    }


def _shard_like(sharded: DTensor, local: Tensor, shape: torch.Size) -> DTensor:
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=shape,
        stride=local.stride(),
    )


def unsaved_states(states: Iterable[str], saved: Iterable[str]) -> set[str]:
    """Those of the parameters in `states` without an optimizer state among the tensors `saved` in a
    checkpoint: they had no gradient yet, such as an encoder's before the first image."""
    with_state = {name.rpartition(".")[0] for name in saved}
    return {name for name in states if f"moments.{name}" not in with_state}


def drop_states(model: nn.Module, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Remove states that `get_optimizer_state_dict` made for parameters without a gradient."""
    params = dict(model.named_parameters())
    for name in names:
        optimizer.state.pop(params[name], None)


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Fill the model, the optimizer and the RNG from a checkpoint, and return its state.json.
    Collective.

    With another number of ranks, tensors are resharded and RNG states are not restored: those
    belong to ranks."""
    state = read_state(path)
    rank = dist.get_rank()
    weights, optim = _trained_state(model, optimizer)
    index = ask_rank_0(read_index, path)
    moments = plain_moments(optim["state"])
    unsaved = unsaved_states(moments, index.tensors)
    moments = {name: moment for name, moment in moments.items() if name not in unsaved}
    tensors: dict[str, Any] = {"model": weights, "moments": moments}
    if state["world_size"] == dist.get_world_size():
        own = _rng_tensors(rank)
        tensors["rng"] = {key: rng for key, rng in own.items() if f"rng.{key}" in index.tensors}
    _gather_results(f"checkpoint {path} cannot be read", lambda: load_into(tensors, path, index))
    options = StateDictOptions(strict=False)  # an adapter's base is not in it
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=optim, options=options
    )
    drop_states(model, optimizer, unsaved)
    for key, rng in tensors.get("rng", {}).items():
        if key.endswith(".cuda"):
            torch.cuda.set_rng_state(rng)
        else:
            torch.set_rng_state(rng)
    return state


class _HashedFile(io.BufferedWriter):
    """A new file, whose checksum is computed while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.hash = new_hash()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return super().write(data)


class _Files(FileSystem):
    """Opens files for the writing threads, and keeps their checksums, and errors they drop."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.checksums = dict[str, str]()
        self.errors = list[BaseException]()

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        """`write_data` raises errors of open files, after it has waited for all threads."""
        is_open = False
        try:
            use_device(self.device)  # in a new thread
            with _HashedFile(Path(path)) as file:
                is_open = True
                yield file
            self.checksums[Path(path).name] = format_hash(file.hash)
        except Exception as error:
            self.errors.append(error)
            is_metadata = Path(path).suffix == ".tmp"  # PyTorch would publish it incomplete
            if not is_open or is_metadata:
                raise


class _Writer(dcp.FileSystemWriter):
    """Writes several files at once, one per thread, and computes their checksums.

    Raises the system's error if a file cannot be written; PyTorch replaces it by one about a
    position in the file, and does not send causes to other ranks."""

    def __init__(self, path: Path, num_bytes: int, device: torch.device) -> None:
        num_threads = min(MAX_FILES, 1 + num_bytes // MIN_FILE_BYTES)
        super().__init__(path, sync_files=True, thread_count=num_threads)
        self.fs = self.files = _Files(device)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future:
        try:
            results = super().write_data(plan, planner)
        except Exception as raised:
            self.files.errors.append(raised)
        if self.files.errors:
            error = self.files.errors[0]
            system_errors = (cause for cause in causes(error) if isinstance(cause, OSError))
            raise next(system_errors, error) from None
        if len(results.value()) != len(plan.items):
            raise OSError("a thread wrote no file")
        return results


class Saver:
    """Writes one checkpoint at a time, in a thread. With `background`, `save` returns once the
    state is copied to host memory; else it blocks. Has its own process group, so every rank
    constructs it."""

    def __init__(
        self, run_dir: Path, keep_last: int, background: bool, keep_best: bool = False
    ) -> None:
        self.run_dir = run_dir
        self.keep_last = keep_last
        self.background = background
        self.keep_best = keep_best
        self.group = dist.new_group(backend="gloo")
        # Of the last save: its duration, the size of its files, its step and start (monotonic).
        self.seconds = 0.0
        self.num_bytes = 0
        self.step = 0
        self.started_at = 0.0
        self._host_copies: dict[str, Slab] = {}
        self._in_progress: Future[None] | None = None

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Start a save. Collective, and none may be in progress. `state` is JSON with an int
        "step"; rank 0's is written. `finish` reports the result."""
        assert not self.in_progress
        weights, optim = _trained_state(model, optimizer)
        # Not the optimizer's hyperparameters: they come from the config, and the learning rate from
        # the step.
        tensors = {
            "model": weights,
            "moments": plain_moments(optim["state"]),
            "rng": _rng_tensors(dist.get_rank()),
        }
        done = Future[None]()
        device = default_device()
        self._in_progress = done
        self.step = state["step"]
        self.started_at = time.monotonic()

        def write(tensors: dict[str, Any]) -> None:
            try:
                use_device(device)
                self._write(tensors, state)
                self.seconds = time.monotonic() - self.started_at
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        if self.background:
            tensors = self._copy_to_host(tensors)
        Thread(target=write, args=(tensors,), daemon=True, name="saving").start()
        if not self.background:
            wait([done])

    @property
    def in_progress(self) -> bool:
        """Whether a save was started and `finish` has not been called. The same on every rank."""
        return self._in_progress is not None

    @property
    def is_done(self) -> bool:
        """Whether this rank has written its part of the save in progress. Ranks may differ."""
        return self._in_progress is not None and self._in_progress.done()

    @phase("saving")
    def finish(self) -> None:
        """Wait for the save in progress, if any. If it failed, raise CheckpointError or
        SharedTransientError on every rank."""
        save = self._in_progress
        self._in_progress = None
        if save is not None:
            save.result()

    def _copy_to_host(self, tensors: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        """Copy to host buffers (pinned if there is a GPU) that are reused from save to save."""
        copies = dict[str, Any]()
        for key, value in tensors.items():
            if isinstance(value, dict):
                copies[key] = self._copy_to_host(value, f"{prefix}{key}.")
                continue
            local = value.to_local() if isinstance(value, DTensor) else value
            slab = self._host_copies.get(prefix + key)
            if slab is None:
                slab = Slab(local.nbytes, pin=torch.cuda.is_available())
                self._host_copies[prefix + key] = slab
            copy = slab.view(local.shape, local.dtype).copy_(local, non_blocking=True)
            copies[key] = with_local(value, copy) if isinstance(value, DTensor) else copy
        if not prefix and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _write(self, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        """Write to a temporary directory; once rank 0 sees all files, it publishes them."""
        rank = dist.get_rank()
        root = self.run_dir / "checkpoints"
        final = root / step_name(state["step"])
        temporary = root / f".tmp-{final.name}"
        what = f"checkpoint {final} cannot be written"

        def make_directory() -> None:
            root.mkdir(parents=True, exist_ok=True)
            restore_names(root)
            for stale in root.glob(".tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            temporary.mkdir()

        def own_files() -> dict[str, tuple[int, str]]:
            files = sorted(temporary.glob(f"__{rank}_*"))
            if rank == 0:
                files.insert(0, temporary / ".metadata")
            return {
                file.name: (file.stat().st_size, written.get(file.name) or checksum(file))
                for file in files
            }

        def publish_when_visible() -> str | None:
            for writer, files in enumerate(files_of_ranks):
                for name, (num_bytes, _) in files.items():
                    if is_visible(temporary / name, num_bytes):
                        continue
                    missing = f"rank 0 does not see {temporary / name}, which rank {writer} wrote"
                    if latest_name(self.run_dir):
                        # The nodes do share the directory, so a later save may succeed.
                        raise TimeoutError(missing)
                    return missing
            all_files = {name: file for files in files_of_ranks for name, file in files.items()}
            publish(temporary, final, state, all_files)
            best = state["best"][1] if self.keep_best and state["best"] else 0
            prune(root, state["step"], self.keep_last, best)
            return None

        _gather_results(what, make_directory if rank == 0 else _do_nothing, self.group)
        try:
            with _unwrap_errors(what):
                writer = _Writer(temporary, bytes_to_save(tensors), default_device())
                dcp.save(tensors, storage_writer=writer, process_group=self.group)
        except CheckpointError:
            if rank == 0:  # the disk may be full, and the next save may be far off
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        written = writer.files.checksums
        files_of_ranks = _gather_results(what, own_files, self.group)
        sizes = (num_bytes for files in files_of_ranks for num_bytes, _ in files.values())
        self.num_bytes = sum(sizes)
        finish = publish_when_visible if rank == 0 else _do_nothing
        missing, *_ = _gather_results(what, finish, self.group)
        if missing is not None:
            fix = "start again, or put it on a file system that all nodes share"
            raise SharedTransientError(f"train.run_dir={self.run_dir}: {missing}; {fix}")


def _gather_results(
    what: str, function: Callable[[], T], group: dist.ProcessGroup | None = None
) -> list[T]:
    """Return the results of all ranks. If one raises, raise CheckpointError on all."""
    result = failure = None
    try:
        result = function()
    except Exception as error:
        failure = RankError(
            CheckpointError, f"{type(error).__name__}: {error}", exit_code=exit_code_for(error)
        )
    results, failures = zip(*gather_objects((result, failure), group), strict=True)
    raise_first(failures, what)
    return list(results)


def bytes_to_save(tensors: dict[str, Any]) -> int:
    """Return the bytes that this rank has of nested tensors."""
    leaves = (value for value in pytree.tree_leaves(tensors) if isinstance(value, Tensor))
    return sum((leaf.to_local() if isinstance(leaf, DTensor) else leaf).nbytes for leaf in leaves)


def _do_nothing() -> None: ...
