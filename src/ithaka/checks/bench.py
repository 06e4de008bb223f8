"""Measure this machine: attention, one device, and the network between ranks.

Random data, a warm-up, then back-to-back calls for several seconds. Report the median of the second
half: an idle chip starts at a higher clock than it sustains.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ithaka.attention.blocks import (
    AttentionSpec,
    attention,
    attention_backward,
    default_blocks,
)
from ithaka.attention.choose import resolve_kernel
from ithaka.comm.agree import gather_objects
from ithaka.comm.exchange import all_gather, reduce_scatter
from ithaka.comm.mesh import default_device, make_node_groups
from ithaka.config import ConfigError
from ithaka.config.units import format_bytes
from ithaka.device_memory import free_bytes
from ithaka.facts.dtypes import default_dtype
from ithaka.plan.hardware import GPUS, gpu_named
from ithaka.plan.shape import StepShape
from ithaka.profile.timeline import DeviceTimeline

MAX_CALLS_IN_FLIGHT = 8  # queued on the device
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # by type of device


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """This machine's device and its training dtype."""
    device = default_device()
    return device, getattr(torch, default_dtype(device.type == "cuda"))


@dataclass(frozen=True)
class AttentionCase:
    """Causal attention over `documents` packed documents of equal length."""

    kernel: str
    tokens: int
    blocks: tuple[int, int] | None = None  # None: `default_blocks`
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    documents: int = 1
    window: int | None = None  # tokens that a query attends to, with its own

    @property
    def docs(self) -> tuple[int, ...]:
        return tuple(i * self.tokens // self.documents for i in range(self.documents + 1))

    @property
    def flops(self) -> int:
        """Forward FLOPs: 4 * head_dim per query and visible key."""
        work = StepShape(self.tokens, document_tokens=-(-self.tokens // self.documents))
        return int(4 * self.head_dim * self.heads * work.pairs(self.window))


def measure_attention(
    case: AttentionCase, device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, Any]:
    """One table row: the case with its resolved kernel and blocks, seconds and TFLOP/s."""
    kernel = resolve_kernel(case.kernel, device, dtype, case.head_dim)
    longest = -(-case.tokens // case.documents)
    reach = min(longest, case.window or longest)
    row_bytes = case.head_dim * dtype.itemsize
    block_q, block_kv = case.blocks or default_blocks(device, kernel, row_bytes, reach)
    options = AttentionSpec(
        docs=case.docs,
        kernel=kernel.name,
        blocks=case.blocks,
        scale=case.head_dim**-0.5,
        causal=True,
        window=case.window,
    )
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    num_bytes = (sum(heads) + case.heads) * case.tokens * row_bytes  # with the output
    room = free_bytes(device)
    if num_bytes > room:
        rule = f"needs {format_bytes(num_bytes)}, and {format_bytes(room)} are free"
        raise ConfigError(f"--tokens={case.tokens} {rule}; use fewer tokens or heads")
    q, k, v, dout = (
        torch.randn(case.tokens, n, case.head_dim, device=device, dtype=dtype) for n in heads
    )
    forward_s = measure_sustained(lambda: attention(q, k, v, **options), device, seconds)
    # Backward overwrites `out` with dq; restore it outside the timing.
    out, lse = attention(q, k, v, **options)
    out_copy = out.clone()
    backward_s = measure_sustained(
        lambda: attention_backward(dout, q, k, v, out_copy, lse, **options),
        device,
        seconds,
        before=lambda: out_copy.copy_(out),
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


def measure_sustained(
    call: Callable[[], object],
    device: torch.device,
    seconds: float,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median seconds per call in the second half of `seconds` of calls, at least three, after a
    warm-up. As in training, several calls are in flight on a GPU. `before` runs before each call,
    untimed. seconds=0: one call after the warm-up, for lengths that take minutes."""
    timeline = DeviceTimeline[None](device)
    calls: list[tuple[Any, Any]] = []
    call()
    begin = time.perf_counter()
    least = 3 if seconds else 1
    while len(calls) < least or time.perf_counter() - begin < seconds:
        before()
        started = timeline.mark()
        call()
        calls.append((started, timeline.mark()))
        if timeline.on_gpu:
            calls[max(0, len(calls) - MAX_CALLS_IN_FLIGHT)][1].synchronize()
    if timeline.on_gpu:
        calls[-1][1].synchronize()
    return statistics.median(timeline.seconds(*marks) for marks in calls[len(calls) // 2 :])


def measure_device(device: torch.device, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Measure the fields of `plan.hardware.Gpu`, except links to other devices. Runs a square
    matmul, attention with one head of 128, and copies."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    side = 8192 if gpu else 1024
    tokens = 2**18 if gpu else 2**11
    num_bytes = COPY_BYTES[device.type]
    name = gpu.name if gpu else "CPU"
    attention_row = measure_attention(AttentionCase("auto", tokens), device, dtype, seconds)
    a_nn, b_nn, out_nn = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(3))
    matmul_s = measure_sustained(lambda: torch.mm(a_nn, b_nn, out=out_nn), device, seconds)
    source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
    copy_s = measure_sustained(lambda: target.copy_(source), device, seconds)
    values = {
        "matmul_flops": 2 * side**3 / matmul_s,
        "attention_forward_flops": attention_row["forward_tflops"] * 1e12,
        "attention_backward_flops": attention_row["backward_tflops"] * 1e12,
        "memory_bytes_s": 2 * num_bytes / copy_s,  # read and written
        "pcie_bytes_s": measure_host_copies(device, seconds),
        "kernel": attention_row["kernel"],
    }
    known = gpu_named(name) if gpu else GPUS["CPU"]
    values["link_bytes_s"] = known.link_bytes_s if known else values["pcie_bytes_s"]
    values["memory_bytes"] = gpu.total_memory if gpu else psutil.virtual_memory().total
    links = f"taken from {known.name}" if known else "assumed equal to PCIe"
    origin = f"ithaka bench device, {str(dtype).removeprefix('torch.')}"
    note = f"{origin}; link_bytes_s is not measured: {links}"
    return {"name": name, **values, "source": note}


def measure_host_copies(device: torch.device, seconds: float) -> float:
    """Bytes per second to or from the host, whichever is slower. Ranks share a node's memory: under
    `ithaka selftest`, all copy at once."""
    num_bytes = COPY_BYTES[device.type]
    own = torch.ones(num_bytes // 4, device=device)
    host = torch.ones(num_bytes // 4)
    if device.type == "cuda":
        host = host.pin_memory()
    to_device = measure_sustained(lambda: own.copy_(host, non_blocking=True), device, seconds)
    to_host = measure_sustained(lambda: host.copy_(own, non_blocking=True), device, seconds)
    return num_bytes / max(to_device, to_host)


NETWORK_CALLS = 5  # per measurement; the median is reported
# collectives of a layer's activations; the others are FSDP2's
EXCHANGES = ("all-to-all", "send/recv")


def measure_network(device: torch.device, mebibytes: int) -> list[dict[str, Any]]:
    """Measure the slowest rank's bandwidth within and between nodes, with all ranks sending at
    once. send/recv: send to the next rank, receive from the previous one."""
    rows = []
    for where, group in make_node_groups(device).items():
        if group.size() == 1:
            continue
        for what, (num_bytes, call) in _network_calls(group, device, mebibytes).items():
            seconds = gather_objects(_measure_collective(call, device))
            row = {
                "what": what,
                "where": where,
                "ranks": group.size(),
                "GB/s": num_bytes / max(seconds) / 1e9,
                "slowest rank": seconds.index(max(seconds)),
            }
            rows.append(row)
    return rows


def _network_calls(
    group: dist.ProcessGroup, device: torch.device, mebibytes: int
) -> dict[str, tuple[int, Callable[[], object]]]:
    """(bytes sent per rank, call) by name."""
    n = group.size()
    rank = group.rank()
    sent, received = (torch.ones(mebibytes * 2**18 // n * n, device=device) for _ in range(2))
    share = len(sent) // n
    next_rank = dist.get_global_rank(group, (rank + 1) % n)
    previous_rank = dist.get_global_rank(group, (rank - 1) % n)

    def shift() -> None:
        ops = [
            dist.P2POp(dist.isend, sent, next_rank, group),
            dist.P2POp(dist.irecv, received, previous_rank, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    remote_bytes = sent.nbytes * (n - 1) // n
    return {
        "all-to-all": (remote_bytes, lambda: dist.all_to_all_single(received, sent, group=group)),
        "all-gather": (remote_bytes, lambda: all_gather(received, sent[:share], group=group)),
        "reduce-scatter": (
            remote_bytes,
            lambda: reduce_scatter(received[:share], sent, group=group),
        ),
        "send/recv": (sent.nbytes, shift),
    }


def _measure_collective(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds per call. Collective: a fixed number of calls on every rank."""
    seconds = []
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(1 + NETWORK_CALLS):
        synchronize()
        dist.barrier()
        started = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def network_figures(rows: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Rates for `--gpu-file`: the slower of all-to-all and send/recv; others from the GPU table."""
    known = gpu_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else GPUS["CPU"]
    fields = {"inside a node": "link_bytes_s", "between nodes": "network_bytes_s"}
    values: dict[str, Any] = {"based_on": known.name, "name": known.name} if known else {}
    for where, field in fields.items():
        exchanges = (row for row in rows if row["where"] == where and row["what"] in EXCHANGES)
        rates = [row["GB/s"] * 1e9 for row in exchanges]
        if rates:
            values[field] = min(rates)
    origin = f"ithaka bench network, {dist.get_world_size()} ranks"
    return values | {"source": f"{origin}; other rates from the GPU table"}
