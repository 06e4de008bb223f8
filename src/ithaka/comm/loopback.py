"""A process group that runs one process as one rank of N, with collectives as local copies.

Shapes, buffers and kernels are those of a real run; received values are not. They are finite and
random, never zero or uninitialized, because a GPU's speed depends on its data.
"""

import torch
import torch.distributed as dist
from torch.futures import Future

from ithaka.foreign.torch_distributed import make_work
from ithaka.phases import count

BACKEND = "loopback"


class LoopbackGroup(dist.ProcessGroup):
    """Defines the collectives under their names in both torch 2.11 and 2.13."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._size = size
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name  # C++ stores the name in the backend, which this group does not have

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def _count(self, what: str, full: torch.Tensor) -> None:
        """Report the bytes that this rank sends of `full`: all but its own share."""
        count(f"{what} of {self._size} ranks", full.nbytes * (self._size - 1) // self._size)

    def allreduce(self, tensors, opts=None):  # type: ignore[override]
        self._count("all-reduce", tensors[0])
        return _completed_work(tensors)

    def barrier(self, opts=None):
        return _completed_work([])

    def allgather(self, outputs, inputs, opts=None):
        for gathered, own in zip(outputs, inputs, strict=True):
            for output in gathered:
                output.detach().copy_(own)
        return _completed_work(outputs)

    def all_gather_single(self, output, own, opts=None):
        self._count("all-gather", output)
        row = own.detach().reshape(1, -1)
        output.detach().view(self._size, -1).copy_(row.expand(self._size, -1))
        return _completed_work([output])

    def reduce_scatter_single(self, output, full, opts=None):
        self._count("reduce-scatter", full)
        output.detach().copy_(full.detach().view(-1)[: output.numel()].view_as(output))
        return _completed_work([output])

    def all_to_all_single(self, output, own, output_splits=None, input_splits=None, opts=None):
        """Fill the output with copies of the input; in a ring, their sizes may differ."""
        self._count("all-to-all", own)
        output = output.detach()
        own = own.detach()
        if len(own) == 0:
            output.normal_()
        else:
            repeats, rest = divmod(len(output), len(own))
            output[: len(output) - rest].unflatten(0, (repeats, len(own))).copy_(own)
            output[len(output) - rest :].copy_(own[:rest])
        return _completed_work([output])

    broadcast = allreduce  # type: ignore[assignment]
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def start_loopback(num_ranks: int, rank: int = 0) -> None:
    """Initialize torch.distributed with this process as one of `num_ranks`."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND,
            lambda _, rank, size, __: LoopbackGroup(rank, size),
            devices=["cpu", "cuda", "meta"],
        )
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=num_ranks)


def _completed_work(result) -> dist.Work:
    future: Future = Future()
    future.set_result(result)
    return make_work(future)
