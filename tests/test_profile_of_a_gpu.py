"""The GPU's parts of a profile, on made-up events: an allocator's history, and a trace with two streams."""

from pathlib import Path

import pytest
import torch

from ithaka import phases
from ithaka.profile.cuda import AllocatorHistory, _Seen
from ithaka.profile.shapes import Shapes
from ithaka.profile.times import Annotations, times_of
from ithaka.train.watch import what_to_record

OURS = str(Path(phases.__file__).parent / "model" / "layer.py")
FSDP = str(Path(torch.__file__).parent / "distributed" / "fsdp" / "_fully_shard" / "_fsdp_collectives.py")
MIB = 2**20


def event(action: str, time_us: int, address: int, size: int, context: int, *frames: tuple[str, int, str]) -> dict:
    named = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
    return {
        "action": action,
        "time_us": time_us,
        "addr": address,
        "size": size,
        "frames": named,
        "user_metadata": str(context),
    }


def history(events: list[dict], seen: dict[int, list[_Seen]], shapes: Shapes | None = None) -> AllocatorHistory:
    made = AllocatorHistory(torch.device("cuda", 0), shapes)
    made._before, made._start_ns = {1: 4 * MIB, 2: MIB}, 1_000_000
    made._contexts = [((), "other"), (("layer 0", "backward", "mlp"), "MLP tile")]
    made._context_ns = [0, 1_000_000]
    made.ledger.marks = [(1_000_000, ("layer 0", "backward", "mlp"))]
    made.snapshot, made._seen = {"device_traces": [events]}, seen
    made._fill()
    return made


def test_history_becomes_holders():
    events = [
        event("alloc", 2_000, 3, 8 * MIB, 1, (OURS, 77, "_mlp")),
        event("alloc", 3_000, 4, 2 * MIB, 1, (FSDP, 9, "foreach_reduce"), (OURS, 5, "x")),
        event("free_requested", 4_000, 3, 8 * MIB, 1),
        event("alloc", 5_000, 3, 3 * MIB - 100, 1, (OURS, 88, "again")),  # the same address again
        event("free_requested", 6_000, 1, 4 * MIB, 1),
    ]
    seen = {
        1: [_Seen(1_000_100, (1024, 1024), "float32", "parameters")],
        3: [_Seen(5_100_000, (3, MIB // 4), "float32", "gradients")],
    }
    shapes = Shapes(torch.device("cuda", 0))
    shapes.note(((2, MIB), "float32"), 8 * MIB, "ithaka/model/layer.py:77 in _mlp", ("layer 3", "backward", "mlp"))
    ledger = history(events, seen, shapes).ledger
    assert ledger.peak_bytes == 15 * MIB
    assert ledger.phase_at(ledger.peak_ns) == ("layer 0", "backward", "mlp")
    at_peak = {h.holder: h for h in ledger.live_at_peak()}
    assert {name: h.num_bytes // MIB for name, h in at_peak.items()} == {
        "MLP tile": 8,
        "parameters": 4,
        "gradients": 2,
        "other": 1,
    }
    assert at_peak["MLP tile"].shape == (2, MIB)
    assert at_peak["MLP tile"].line == "ithaka/model/layer.py:77 in _mlp"
    assert at_peak["parameters"].shape == (1024, 1024)
    left = {h.line: h for h in _live_at_the_end(ledger)}
    assert left["ithaka/model/layer.py:88 in again"].num_bytes == 3 * MIB, "rounded as the allocator does"
    assert left["ithaka/model/layer.py:88 in again"].holder == "gradients", "tagged after it was made"


def test_shape_is_told_by_bytes_alone_only_where_all_were_alike():
    """C++ makes a gradient tile that Python never sees, in a phase where it saw tensors of that size."""
    seen_in = ("layer 3", "backward", "mlp")
    shapes = Shapes(torch.device("cuda", 0))
    shapes.note(((4, MIB), "bfloat16"), 8 * MIB, "a line", seen_in)
    shapes.note(((4, MIB), "bfloat16"), 8 * MIB, "another", seen_in)
    assert shapes.find("a third", 8 * MIB, ("layer 0", "backward", "mlp")) == ((4, MIB), "bfloat16")
    assert shapes.find("a third", 8 * MIB, ("layer 0", "forward", "mlp")) == ((), "")
    shapes.note(((2, MIB), "float32"), 8 * MIB, "a fourth", seen_in)
    assert shapes.find("a third", 8 * MIB, ("layer 0", "backward", "mlp")) == ((), "")
    assert shapes.find("a fourth", 8 * MIB, ("layer 0", "backward", "mlp")) == ((2, MIB), "float32")


def test_times_come_from_the_step_before_when_there_is_one():
    kinds = [what_to_record(number, 3, in_two=number > 1) for number in range(1, 7)]
    assert kinds == [None, "times", "profile", None, "times", "profile"]
    assert [what_to_record(n, 2, in_two=n > 1) for n in (1, 2)] == [None, "profile"], "the first step is no measure"
    assert [what_to_record(n, 1, in_two=True) for n in (1, 2)] == ["profile", "profile"]
    assert what_to_record(5, 0, in_two=True) is None


def _live_at_the_end(ledger):
    from ithaka.profile.ledger import _live_after

    return _live_after(ledger.changes, ledger.holdings)


def span(cat: str, name: str, start: float, stop: float, correlation: int | None = None) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": start, "dur": stop - start, "args": args}


def test_every_instant_of_two_streams_counts_once():
    """Layer 0 launches a kernel, a collective and a copy that run long after the host has left it."""
    second = 1e6
    events = [
        span("user_annotation", "ithaka step", 0, 2 * second),
        span("user_annotation", "ithaka: layer 0", 0, 1 * second),
        span("user_annotation", "ithaka: layer 0/forward", 0, 1 * second),
        span("user_annotation", "ithaka: layer 1", 1 * second, 2 * second),
        span("cuda_runtime", "cudaLaunchKernel", 0.1 * second, 0.2 * second, 1),
        span("cuda_runtime", "cudaLaunchKernel", 0.2 * second, 0.3 * second, 2),
        span("cuda_runtime", "cudaMemcpyAsync", 0.3 * second, 0.4 * second, 3),
        span("cuda_runtime", "cudaLaunchKernel", 1.5 * second, 1.6 * second, 4),
        span("kernel", "gemm", 1 * second, 4 * second, 1),
        span("kernel", "ncclDevKernel_SendRecv", 3 * second, 6 * second, 2),
        span("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 2 * second, 7 * second, 3),
        span("kernel", "gemm", 8 * second, 9 * second, 4),
    ]
    times = times_of({"traceEvents": events})
    assert times.wall_s == pytest.approx(9)
    assert times.totals == pytest.approx({"compute": 4, "exchange": 2, "copies": 1, "idle": 2})
    assert times.hidden == pytest.approx({"exchange": 1, "copies": 2})
    assert times.phases[("layer 0", "forward")]["compute"] == pytest.approx(3)
    assert times.phases[("layer 1",)] == pytest.approx({"compute": 1, "exchange": 0, "copies": 0, "idle": 1})


def test_phases_are_written_into_a_trace_by_the_clock():
    """The trace of a GPU has launches and kernels; the host's operators and annotations are not recorded.

    Its clock is another one (seen with torch 2.11, 45 days behind its own base): here at 24 s when the step ends.
    """
    second, base_ns = 10**9, 5 * 10**18
    phases_seen = Annotations()
    phases_seen._start_ns, phases_seen._stop_ns = base_ns, base_ns + 4 * second
    phases_seen._spans = [
        (base_ns + second, base_ns + 2 * second, ("layer 0", "forward")),
        (base_ns, base_ns + 3 * second, ("layer 0",)),
    ]
    launched = [span("cuda_runtime", "cudaLaunchKernel", at * 1e6, (at + 0.1) * 1e6, at * 10) for at in (20.5, 21.5)]
    launched.append(span("cuda_runtime", "cudaStreamSynchronize", 22e6, 24e6, 7))
    launched.append(span("cuda_runtime", "cudaDeviceSynchronize", 24.5e6, 25e6, 8))  # the profiler's own
    ran = [span("kernel", "gemm", at * 1e6, (at + 1) * 1e6, (at - 1.5) * 10) for at in (22, 23)]
    trace = {"baseTimeNanoseconds": 7 * second, "traceEvents": launched + ran}
    phases_seen.add_to(trace)
    times = times_of(trace)
    assert times.wall_s == phases_seen.wall_s == pytest.approx(4)
    assert times.phases[("layer 0",)]["compute"] == pytest.approx(1)
    assert times.phases[("layer 0", "forward")]["compute"] == pytest.approx(1)
