"""What this machine gives: attention's rates, a device's, and those between ranks.

Random data, a warm-up, then calls back to back for several seconds; the median of the second half counts,
since a chip that has just woken up is faster than one that has been working.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ithaka.attention.blocks import attention, attention_backward, default_blocks
from ithaka.attention.kernels import resolve_kernel
from ithaka.dist.exchange import all_gather
from ithaka.dist.mesh import default_device, make_node_groups
from ithaka.layout import default_dtype
from ithaka.plan.hardware import GPUS, gpu_named

CALLS_AHEAD = 8  # of the host before the device


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """This machine's device, and the precision that training takes there."""
    device = default_device()
    return device, getattr(torch, default_dtype(device.type == "cuda"))


@dataclass(frozen=True)
class AttentionCase:
    """Causal attention. `documents` equal ones share the tokens; blocks=None: `default_blocks`."""

    kernel: str
    tokens: int
    blocks: tuple[int, int] | None = None
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    documents: int = 1

    @property
    def docs(self) -> tuple[int, ...]:
        return tuple(i * self.tokens // self.documents for i in range(self.documents + 1))

    @property
    def flops(self) -> int:
        """Of the forward pass: 4 K for every row and visible key; a row sees half of its document on average."""
        seen = sum((stop - start) ** 2 // 2 for start, stop in zip(self.docs, self.docs[1:], strict=False))
        return 4 * self.head_dim * self.heads * seen


def measure_attention(case: AttentionCase, device: torch.device, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """One row of the table: the case as it ran, seconds and TFLOP/s."""
    kernel, longest = resolve_kernel(case.kernel, device, dtype, case.head_dim), -(-case.tokens // case.documents)
    block_q, block_kv = case.blocks or default_blocks(device, kernel, case.head_dim * dtype.itemsize, longest)
    how: dict[str, Any] = {"docs": case.docs, "kernel": kernel.name, "blocks": case.blocks}
    how |= {"scale": case.head_dim**-0.5, "causal": True, "window": None}
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, dout = (torch.randn(case.tokens, n, case.head_dim, device=device, dtype=dtype) for n in heads)
    forward_s = sustained(lambda: attention(q, k, v, **how), device, seconds)
    # dq is written over `out`, which is renewed untimed.
    out, lse = attention(q, k, v, **how)
    fresh = out.clone()
    backward_s = sustained(
        lambda: attention_backward(dout, q, k, v, fresh, lse, **how),
        device,
        seconds,
        before=lambda: fresh.copy_(out),
    )
    return {
        **asdict(case),
        "kernel": kernel.name,
        "blocks": f"{block_q}x{block_kv}",
        "forward_s": forward_s,
        "forward_tflops": case.flops / forward_s / 1e12,
        "backward_s": backward_s,
        "backward_tflops": 2.5 * case.flops / backward_s / 1e12,
    }


def sustained(
    call: Callable[[], object],
    device: torch.device,
    seconds: float,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median seconds of a call in the second half of `seconds` of calls; at least three after a warm-up.

    Calls follow one another as in training: on a GPU the host runs some ahead. `before` runs before each call, untimed.
    seconds=0 is one call after the warm-up, for lengths that take minutes.
    """
    on_gpu = device.type == "cuda"
    call()
    calls: list[tuple[_Moment, _Moment]] = []
    begin = time.perf_counter()
    while len(calls) < (3 if seconds else 1) or time.perf_counter() - begin < seconds:
        before()
        started = _Moment(on_gpu)
        call()
        calls.append((started, _Moment(on_gpu)))
        calls[max(0, len(calls) - CALLS_AHEAD)][1].wait()
    return statistics.median(stop.since(start) for start, stop in calls[len(calls) // 2 :])


class _Moment:
    """When the work given to the device so far is done."""

    def __init__(self, on_gpu: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self.at = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def since(self, start: "_Moment") -> float:
        if self.event is None or start.event is None:
            return self.at - start.at
        self.event.synchronize()
        return start.event.elapsed_time(self.event) / 1e3


def measure_device(device: torch.device, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """The fields of `plan.hardware.Gpu`; links to other devices are not measured.

    Measured on a square matmul, attention over one head of 128, and copies."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    side, tokens, num_bytes = (8192, 2**18, 2**30) if gpu else (1024, 2**11, 2**26)
    name = gpu.name if gpu else "CPU"
    attended = measure_attention(AttentionCase("auto", tokens), device, dtype, seconds)
    a_nn, b_nn, into_nn = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(3))
    matmul_s = sustained(lambda: torch.mm(a_nn, b_nn, out=into_nn), device, seconds)
    source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
    copy_s = pcie_s = sustained(lambda: target.copy_(source), device, seconds)
    if gpu:  # the slower direction
        pinned = torch.ones(num_bytes // 4).pin_memory()
        copies = (lambda: target.copy_(pinned, non_blocking=True), lambda: pinned.copy_(source, non_blocking=True))
        pcie_s = max(sustained(copy, device, seconds) for copy in copies)
    values = {
        "matmul_flops": 2 * side**3 / matmul_s,
        "attention_forward_flops": attended["forward_tflops"] * 1e12,
        "attention_backward_flops": attended["backward_tflops"] * 1e12,
        "memory_bytes_s": 2 * num_bytes / copy_s,  # read and written
        "pcie_bytes_s": num_bytes / pcie_s,
        "kernel": attended["kernel"],
    }
    known = gpu_named(name) if gpu else GPUS["CPU"]
    values["link_bytes_s"] = known.link_bytes_s if known else values["pcie_bytes_s"]
    values["memory_bytes"] = gpu.total_memory if gpu else psutil.virtual_memory().total
    links = f"{known.name}'s" if known else "as over PCIe"
    told = f"ithaka bench device, {str(dtype).removeprefix('torch.')}; link_bytes_s is not measured: {links}"
    return {"name": name, **values, "source": told}


NETWORK_CALLS = 5  # the median counts


def measure_network(device: torch.device, mebibytes: int) -> list[dict[str, Any]]:
    """Rows of bytes per second that a rank sends to the others, in and between nodes, all ranks at once.

    The slowest rank counts. send/recv: to the next rank, from the one before.
    """
    rows = []
    for where, group in make_node_groups(device).items():
        for what, (num_bytes, call) in _calls(group, device, mebibytes).items() if group.size() > 1 else ():
            slowest_s = torch.tensor(_together_s(call, device))
            dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
            figures = {"ranks": group.size(), "GB/s": num_bytes / float(slowest_s) / 1e9}
            rows.append({"what": what, "where": where, **figures})
    return rows


def _calls(
    group: dist.ProcessGroup, device: torch.device, mebibytes: int
) -> dict[str, tuple[int, Callable[[], object]]]:
    """(bytes that a rank sends, the call) by name."""
    n, rank = group.size(), group.rank()
    own, received = (torch.ones(mebibytes * 2**18 // n * n, device=device) for _ in range(2))
    following, before = (dist.get_global_rank(group, (rank + step) % n) for step in (1, -1))

    def shift() -> None:
        sends = [dist.P2POp(dist.isend, own, following, group), dist.P2POp(dist.irecv, received, before, group)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    shared = own.nbytes * (n - 1) // n
    return {
        "all-to-all": (shared, lambda: dist.all_to_all_single(received, own, group=group)),
        "all-gather": (shared, lambda: all_gather(received, own[: len(own) // n], group=group)),
        "send/recv": (own.nbytes, shift),
    }


def _together_s(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call that all ranks make as often."""
    taken, done = [], torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(1 + NETWORK_CALLS):
        done()
        dist.barrier()
        started = time.perf_counter()
        call()
        done()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def network_figures(rows: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """For `--gpu-file`: the slower of all-to-all and send/recv in and between nodes; the rest as the GPU is known."""
    known = gpu_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else GPUS["CPU"]
    fields = {"inside a node": "link_bytes_s", "between nodes": "network_bytes_s"}
    values: dict[str, Any] = {"based_on": known.name, "name": known.name} if known else {}
    for where, field in fields.items():
        rates = [row["GB/s"] * 1e9 for row in rows if row["where"] == where and row["what"] != "all-gather"]
        values |= {field: min(rates)} if rates else {}
    return {**values, "source": f"ithaka bench network, {dist.get_world_size()} ranks; other rates: the table's"}
