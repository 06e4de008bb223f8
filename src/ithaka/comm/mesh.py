"""Process groups: data parallel x context parallel, with FSDP2 over the same ranks. No other file
creates groups."""

import gc
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ithaka.comm.exchange import SINGLE_RANK
from ithaka.config import ConfigError, renaming
from ithaka.facts.sizes import RESERVE_BYTES
from ithaka.foreign.torch_core import configure_allocator
from ithaka.foreign.torch_distributed import all_groups, set_group_timeout
from ithaka.layout import Layout, check_parallelism

# set by users
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
MAX_FIXED_BYTES = 2**30  # in segments of fixed size, which fragment, without a warning


@dataclass(frozen=True)
class Mesh:
    """This process's position in the grid of ranks. cp = ring * ulysses ranks share a sequence. A
    cp group has consecutive ranks, and so has each Ulysses group in it. Ranks at the same position
    in their Ulysses groups form a ring."""

    fsdp: DeviceMesh  # shards parameters over the last axis, replicates over the first of two
    rank: int
    world_size: int
    cp_group: dist.ProcessGroup
    cp_rank: int
    cp_size: int
    ulysses_group: dist.ProcessGroup  # exchanges tokens for heads
    ring_group: dist.ProcessGroup  # has the same heads of different tokens
    dp_rank: int
    dp_size: int
    device: torch.device

    @property
    def replicas(self) -> int:
        return self.fsdp.size(0) if self.fsdp.ndim > 1 else 1


@renaming({"parallel.": ""})
def make_mesh(
    cp: int = 1, device: torch.device | str | None = None, *, ring: int = 1, replicas: int = 1
) -> Mesh:
    """Create the dp x cp mesh, cp = ring x ulysses, and initialize torch.distributed if necessary.
    FSDP2 shards each of the `replicas` of the model over consecutive ranks."""
    try:
        device = torch.device(device) if device is not None else default_device()
    except RuntimeError:
        raise ConfigError(
            f"device={device!r} is not a device of torch; use 'cuda' or 'cpu', or leave it out"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={device} needs an NVIDIA GPU, and this machine has none; leave it out"
        )
    start_process_group(device)
    if device.type == "cuda":
        _reserve_nccl_memory(device)
    world_size = dist.get_world_size()
    check_parallelism(world_size, cp=cp, ring=ring, replicas=replicas)
    dp = world_size // cp

    def make_grid(**axes: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    if replicas > 1:
        fsdp = make_grid(replicas=replicas, fsdp=world_size // replicas)
    else:
        fsdp = make_grid(fsdp=world_size)
    grid = make_grid(dp=dp, cp=cp)
    ulysses_group = grid.get_group("cp")
    ring_group = SINGLE_RANK
    if ring > 1:
        ring_grid = make_grid(dp=dp, ring=ring, ulysses=cp // ring)
        ulysses_group = ring_grid.get_group("ulysses")
        ring_group = ring_grid.get_group("ring")
    return Mesh(
        fsdp,
        dist.get_rank(),
        world_size,
        cp_group=grid.get_group("cp"),
        cp_rank=grid.get_local_rank("cp"),
        cp_size=cp,
        ulysses_group=ulysses_group,
        ring_group=ring_group,
        dp_rank=grid.get_local_rank("dp"),
        dp_size=dp,
        device=device,
    )


def resolve_layout(
    cp: int | None, ring: int | None, mesh: Mesh | None, layout: Layout | None
) -> Layout:
    """Return the layout, or one with every technique off. Raises ConfigError for sizes that
    conflict with it."""
    of_mesh: dict[str, Any] = {}
    if mesh:
        of_mesh = {"cp": mesh.cp_size, "ring": mesh.ring_group.size(), "replicas": mesh.replicas}
    chosen = {name: value for name, value in {"cp": cp, "ring": ring}.items() if value is not None}
    layout = layout or Layout(**(of_mesh | chosen))
    sizes = chosen | {f"mesh.{name}": value for name, value in of_mesh.items()}
    for name, value in sizes.items():
        field = name.removeprefix("mesh.")
        expected = getattr(layout, field)
        if value != expected:
            raise ConfigError(
                f"{name}={value} conflicts with layout.{field}={expected}; set one of them"
            )
    return layout


def make_node_groups(device: torch.device) -> dict[str, dist.ProcessGroup]:
    """Return the group of this node's ranks, and that of the same local rank on every node."""
    start_process_group(device)
    world_size = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    names = ("between nodes", "inside a node")
    grid = init_device_mesh(device.type, (world_size // per_node, per_node), mesh_dim_names=names)
    return {name: grid.get_group(name) for name in reversed(names)}


def default_device() -> torch.device:
    """This rank's GPU, which becomes the current device, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    _use_expandable_segments()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@cache
def _use_expandable_segments() -> None:
    """Let the CUDA allocator grow its segments, unless the user has configured it: segments of
    fixed size fragment, and a plan that fits may then run out of memory. Not in the environment,
    which torch may have read, and children inherit."""
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    configure_allocator("expandable_segments:True")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    num_bytes = sum(map(torch.cuda.memory_reserved, devices))
    if num_bytes > MAX_FIXED_BYTES:
        warnings.warn(
            f"{num_bytes / 2**30:.1f} GiB of GPU memory were allocated before ithaka configured "
            "the allocator, and may fragment; set PYTORCH_ALLOC_CONF=expandable_segments:True in "
            "the environment",
            stacklevel=2,
        )


def _reserve_nccl_memory(device: torch.device) -> None:
    """Limit the CUDA allocator's cache, unless the user has, and let NCCL take the default group's
    memory now: its first all-reduce would be at the end of a forward pass."""
    if torch.cuda.get_per_process_memory_fraction(device.index) == 1:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1 - RESERVE_BYTES / total_bytes, device.index)
    dist.all_reduce(torch.zeros((), device=device))


def use_device(device: torch.device) -> None:
    """Set this thread's CUDA device. A new thread starts on GPU 0 and would create a context
    there."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def start_process_group(device: torch.device | None = None) -> None:
    """Initialize torch.distributed from torchrun's variables, or as a single rank, unless it is
    initialized."""
    if dist.is_initialized():
        return
    device = device or default_device()
    # NCCL and gloo: checkpoints and collectives on host data need a CPU backend.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # entries of NCCL's flight recorder
    if "RANK" in os.environ:
        _warn_about_shared_store(os.environ)
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _warn_about_shared_store(environment: Mapping[str, str]) -> None:
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shares_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if environment["RANK"] == "0" and restarts != "0" and shares_store:
        warnings.warn(
            f"torchrun --max-restarts={restarts} may hang after a restart: the rendezvous store "
            "still has the addresses of the previous ranks; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and use --rdzv-backend c10d",
            stacklevel=3,
        )


def set_timeouts(seconds: float) -> None:
    """Set the timeout of every group. The defaults are 10 minutes for NCCL and 30 for gloo."""
    for group in all_groups():
        if group.size() > 1:
            set_group_timeout(group, timedelta(seconds=seconds))


def free_memory() -> None:
    """Collect reference cycles (a model and its optimizer form one) and release the CUDA cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def destroy_subgroups() -> None:
    """Destroy all process groups but the default one, in creation order. Collective."""
    for group in all_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
