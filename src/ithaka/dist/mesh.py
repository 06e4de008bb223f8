"""The only file that makes process groups: data-parallel x context-parallel, with FSDP2 over the same ranks."""

import gc
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ithaka.dist.exchange import ALONE
from ithaka.layout import check_parallelism


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid of ranks.

    `cp` = ring * ulysses ranks share a sequence; those of one cp group are neighbours, and so are those of one Ulysses
    group in it. Ranks with the same place in their Ulysses groups are a ring.
    """

    fsdp: DeviceMesh  # parameters are sharded over its last axis, and replicated over the one before, if there is one
    rank: int
    world_size: int
    cp_group: dist.ProcessGroup
    cp_rank: int
    cp_size: int
    ulysses_group: dist.ProcessGroup  # exchange tokens for heads
    ring_group: dist.ProcessGroup  # have the same heads of different tokens
    dp_rank: int
    dp_size: int
    device: torch.device


def make_mesh(
    cp: int = 1, device: torch.device | str | None = None, *, ring: int = 1, replicas: int = 1
) -> Mesh:
    """Initialises torch.distributed if nobody has, and lays out dp x cp, cp = ring x ulysses. `replicas` of the model
    are each sharded over neighbouring ranks."""
    chosen = torch.device(device) if device is not None else default_device()
    start_process_group(chosen)
    world_size = dist.get_world_size()
    check_parallelism(world_size, cp=cp, ring=ring, replicas=replicas)
    fsdp = init_device_mesh(chosen.type, (world_size,), mesh_dim_names=("fsdp",))
    if replicas > 1:
        sizes = (replicas, world_size // replicas)
        fsdp = init_device_mesh(chosen.type, sizes, mesh_dim_names=("replicas", "fsdp"))
    grid = init_device_mesh(chosen.type, (world_size // cp, cp), mesh_dim_names=("dp", "cp"))
    ulysses_group, ring_group = grid.get_group("cp"), ALONE
    if ring > 1:
        lengths = (world_size // cp, ring, cp // ring)
        of_ring = init_device_mesh(chosen.type, lengths, mesh_dim_names=("dp", "ring", "ulysses"))
        ulysses_group, ring_group = of_ring.get_group("ulysses"), of_ring.get_group("ring")
    return Mesh(
        fsdp=fsdp,
        rank=dist.get_rank(),
        world_size=world_size,
        cp_group=grid.get_group("cp"),
        cp_rank=grid.get_local_rank("cp"),
        cp_size=cp,
        ulysses_group=ulysses_group,
        ring_group=ring_group,
        dp_rank=grid.get_local_rank("dp"),
        dp_size=world_size // cp,
        device=chosen,
    )


def node_groups(device: torch.device) -> dict[str, dist.ProcessGroup]:
    """The ranks of this node, and those with the same place in all nodes."""
    start_process_group(device)
    world_size = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    names = ("between nodes", "inside a node")
    grid = init_device_mesh(device.type, (world_size // per_node, per_node), mesh_dim_names=names)
    return {name: grid.get_group(name) for name in reversed(names)}


def default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def use_device(device: torch.device) -> None:
    """Make `device` this thread's current one. A new thread starts on GPU 0, and would open a context there."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def start_process_group(device: torch.device | None = None) -> None:
    """Initialises torch.distributed from torchrun's variables, or alone; does nothing if it is initialised."""
    if dist.is_initialized():
        return
    device = device or default_device()
    # gloo beside NCCL: checkpoints and collectives on host data need a CPU backend.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that NCCL's flight recorder remembers
    if "RANK" in os.environ:
        _warn_of_shared_store(os.environ)
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _warn_of_shared_store(environment: Mapping[str, str]) -> None:
    restarts, shares = environment.get("TORCHELASTIC_MAX_RESTARTS", "0"), "TORCHELASTIC_USE_AGENT_STORE"
    if environment["RANK"] == "0" and restarts != "0" and environment.get(shares) == "True":
        warnings.warn(
            f"torchrun --max-restarts={restarts} may hang when it starts ranks again, which find addresses of those before "
            "in the store that it keeps; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it, and use --rdzv-backend c10d",
            stacklevel=3,
        )


def set_timeouts(seconds: float) -> None:
    """Of every group there is: by default NCCL's end a run after ten minutes, and gloo's after thirty."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.size() > 1:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def free_memory() -> None:
    """Give back what objects that are gone had: a model and its optimizer refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def end_subgroups() -> None:
    """Destroy all process groups but the default one, in the order of their creation. Every rank calls it."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
