"""Profiles of a GPU, from made-up events: an allocator history and a trace with two streams."""

import time
from pathlib import Path

import pytest
import torch

from allocations import fake_gpu_memory
from ithaka import phases
from ithaka.device_memory import PeakMeter, device_memory
from ithaka.profile.live import AllocatorHistory
from ithaka.profile.memory import Allocation, MemoryMap, format_peak
from ithaka.profile.profiled_step import KINDS, StepTimes
from ithaka.train.watch import what_to_record

OURS = str(Path(phases.__file__).parent / "layer" / "schedule.py")
FSDP = str(
    Path(torch.__file__).parent / "distributed" / "fsdp" / "_fully_shard" / "_fsdp_collectives.py"
)
MIB = 2**20


def event(
    action: str,
    time_us: int,
    address: int,
    size: int,
    *frames: tuple[str, int, str],
    made_in: str = "",
) -> dict:
    named = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
    return {
        "action": action,
        "time_us": time_us,
        "addr": address,
        "size": size,
        "frames": named,
        "user_metadata": made_in,
    }


def history(events: list[dict], categories: list[tuple[int, Allocation]]) -> MemoryMap:
    """Build the map of `events`, with 4 and 1 MiB live before the step and one phase from 1 ms
    on."""
    made = AllocatorHistory(torch.device("cuda", 0))
    made._initial_bytes = {1: 4 * MIB, 2: MIB}
    made._start_ns = 1_000_000
    made.phase_changes = [(1_000_000, ("layer 0", "backward", "mlp"))]
    made.snapshot = {"device_traces": [events]}
    made._categories = categories
    made._build()
    return made


IN_MLP = "MLP tile: layer 0/backward/mlp"


def test_the_history_becomes_allocations_by_category():
    events = [
        event("alloc", 2_000, 3, 8 * MIB, (OURS, 77, "_mlp"), made_in=IN_MLP),
        event(
            "alloc", 3_000, 4, 2 * MIB, (FSDP, 9, "foreach_reduce"), (OURS, 5, "x"), made_in=IN_MLP
        ),
        event("free_requested", 4_000, 3, 8 * MIB),
        # reuses the address
        event("alloc", 5_000, 3, 3 * MIB - 100, (OURS, 88, "again"), made_in=IN_MLP),
        event("free_requested", 6_000, 1, 4 * MIB),
    ]
    categories = [
        (1, Allocation(0, 1_000_100, "parameters", dtype="float32", shape=(1024, 1024))),
        (3, Allocation(0, 5_100_000, "gradients", dtype="float32", shape=(3, MIB // 4))),
    ]
    memory = history(events, categories)
    peak_bytes, peak_ns = memory.peak()
    assert peak_bytes == 15 * MIB
    assert memory.phase_at(peak_ns) == ("layer 0", "backward", "mlp")
    at_peak = {h.category: h for h in memory.live_at(peak_ns)}
    assert {name: h.num_bytes // MIB for name, h in at_peak.items()} == {
        "MLP tile": 8,
        "parameters": 4,
        "gradients": 2,
        "other": 1,
    }
    assert at_peak["MLP tile"].line == "ithaka/layer/schedule.py:77 in _mlp"
    assert at_peak["MLP tile"].phase == ("layer 0", "backward", "mlp")
    assert at_peak["parameters"].shape == (1024, 1024)
    left = {h.line: h for h in memory.live_at(9_000_000)}
    assert left["ithaka/layer/schedule.py:88 in again"].num_bytes == 3 * MIB, (
        "rounded up like the allocator"
    )
    assert left["ithaka/layer/schedule.py:88 in again"].category == "gradients", (
        "tagged after the allocation"
    )
    assert left["ithaka/layer/schedule.py:88 in again"].shape == (3, MIB // 4)


class FakeAllocator:
    """Replaces torch.cuda and records the time and metadata of each allocation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[dict] = []
        self.metadata = ""
        self.recording = False
        memory = torch.cuda.memory
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        fake_gpu_memory(monkeypatch, peak=21 * MIB)
        monkeypatch.setattr(memory, "_snapshot", lambda device: self.snapshot())
        monkeypatch.setattr(
            memory,
            "_record_memory_history",
            lambda enabled, **_: setattr(self, "recording", enabled),
        )
        monkeypatch.setattr(
            memory, "_set_memory_metadata", lambda text: setattr(self, "metadata", text)
        )

    def snapshot(self) -> dict:
        blocks = [{"address": 1, "size": 4 * MIB, "state": "active_allocated"}]
        return {"segments": [{"device": 0, "blocks": blocks}], "device_traces": [self.events]}

    def allocate(self, address: int, num_mib: int, action: str = "alloc") -> None:
        assert self.recording
        frame = (OURS, 77, "_mlp")
        self.events.append(
            event(
                action, time.time_ns() // 1000, address, num_mib * MIB, frame, made_in=self.metadata
            )
        )
        time.sleep(0.001)


def test_allocations_have_the_phase_and_category_of_their_time(monkeypatch):
    gpu = FakeAllocator(monkeypatch)
    with AllocatorHistory(torch.device("cuda", 0)) as recorded:
        with phases.phase("layer 0"), phases.phase("backward"):
            gpu.allocate(2, 1)
            with phases.phase("attention"), phases.allocating_for("kept on device"):
                gpu.allocate(3, 2)
            with phases.phase("mlp"):
                gpu.allocate(4, 8)
                gpu.allocate(4, 8, "free_requested")
            gpu.allocate(5, 3)
        gpu.allocate(6, 10)
    assert not gpu.recording and gpu.metadata == "" and recorded.measured_peak_bytes == 21 * MIB
    made = {
        allocation.num_bytes // MIB: (allocation.category, "/".join(allocation.phase))
        for allocation in recorded.allocations
    }
    assert made == {
        4: ("other", ""),
        1: ("residual stream", "layer 0/backward"),
        2: ("kept on device", "layer 0/backward/attention"),
        8: ("MLP tile", "layer 0/backward/mlp"),
        3: ("residual stream", "layer 0/backward"),
        10: ("other", ""),
    }
    assert recorded.peak()[0] == 20 * MIB


def test_meters_do_not_reset_the_peaks_of_others(monkeypatch):
    """The allocator counts 7 bytes, then 2, then 5, and is reset in between."""
    gpu = torch.device("cuda", 3)
    step = PeakMeter(gpu)
    fake_gpu_memory(monkeypatch, peak=7, reserved_peak=8)
    other = PeakMeter(gpu)
    assert step.restart() == 7
    fake_gpu_memory(monkeypatch, peak=2, reserved_peak=8)
    assert other.restart() == 7 and step.read() == 2
    fake_gpu_memory(monkeypatch, peak=5, reserved_peak=8)
    assert (other.read(), step.read(), device_memory(gpu).peak) == (5, 5, 7)
    assert PeakMeter(torch.device("cpu")).restart() == 0


def test_allocations_without_a_shape_are_grouped_by_size():
    sizes = [8, 8, 3]
    events = [
        event("alloc", 2_000 + i, 3 + i, n * MIB, (OURS, 77, "_mlp"), made_in=IN_MLP)
        for i, n in enumerate(sizes)
    ]
    summary = format_peak(history(events, []).describe({})["peak"])
    assert "16 MiB (67%) MLP tile: 2 x 8 MiB, ithaka/layer/schedule.py:77 in _mlp" in summary
    assert "3 MiB (12%) MLP tile: 3 MiB, ithaka/layer/schedule.py:77 in _mlp" in summary


def test_times_are_recorded_in_the_step_before_a_profile():
    kinds = [what_to_record(number, 3, times_before=number > 1) for number in range(1, 7)]
    assert kinds == [None, "times", "profile", None, "times", "profile"]
    assert [what_to_record(n, 2, times_before=n > 1) for n in (1, 2)] == [None, "profile"], (
        "the first step is too slow to time"
    )
    assert [what_to_record(n, 1, times_before=True) for n in (1, 2)] == ["profile", "profile"]
    assert what_to_record(5, 0, times_before=True) is None


def span(cat: str, name: str, start: float, stop: float, correlation: int | None = None) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "tid": 1,
        "ts": start,
        "dur": stop - start,
        "args": args,
    }


def by_path(times: dict) -> dict[tuple, dict]:
    return {tuple(row["path"]): {kind: row[kind] for kind in KINDS} for row in times["phases"]}


def test_each_instant_of_two_streams_counts_once():
    """Layer 0 launches a kernel, a collective and a copy that run long after the host has left the
    layer."""
    second = 1e6
    step = StepTimes(torch.device("cpu"))
    step.start_ns = 0
    step.stop_ns = 2 * 10**9
    step.phase_changes = [
        (0, ("layer 0",)),
        (0, ("layer 0", "forward")),
        (10**9, ("layer 1",)),
        (2 * 10**9, ()),
    ]
    events = [
        span("cuda_runtime", "cudaLaunchKernel", 0.1 * second, 0.2 * second, 1),
        span("cuda_runtime", "cudaLaunchKernel", 0.2 * second, 0.3 * second, 2),
        span("cuda_runtime", "cudaMemcpyAsync", 0.3 * second, 0.4 * second, 3),
        span("cuda_runtime", "cudaLaunchKernel", 1.5 * second, 1.6 * second, 4),
        span("cuda_runtime", "cudaStreamSynchronize", 1.6 * second, 2 * second, 5),
        span("kernel", "gemm", 1 * second, 4 * second, 1),
        span("kernel", "ncclDevKernel_SendRecv", 3 * second, 6 * second, 2),
        span("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 2 * second, 7 * second, 3),
        span("kernel", "gemm", 8 * second, 9 * second, 4),
    ]
    times = step.times({"traceEvents": events})
    rows = by_path(times)
    assert times["wall_s"] == pytest.approx(9)
    totals = {kind: sum(row[kind] for row in rows.values()) for kind in KINDS}
    assert totals == pytest.approx({"compute": 4, "exchange": 2, "copies": 1, "idle": 2})
    assert times["hidden"] == pytest.approx({"exchange": 1, "copies": 2})
    assert rows["layer 0", "forward"]["compute"] == pytest.approx(3)
    assert rows["layer 1",] == pytest.approx({"compute": 1, "exchange": 0, "copies": 0, "idle": 1})


def test_phases_are_added_to_a_trace_on_its_own_clock():
    """A GPU trace has launches and kernels, but no host operators or annotations.

    Its clock differs from the host's (with torch 2.11, by 45 days): here it shows 24 s when the
    step ends.
    """
    second = 10**9
    base_ns = 5 * 10**18
    step = StepTimes(torch.device("cpu"))
    step.start_ns = base_ns
    step.stop_ns = base_ns + 4 * second
    paths = [("layer 0",), ("layer 0", "forward"), ("layer 0",), ()]
    step.phase_changes = [(base_ns + i * second, path) for i, path in enumerate(paths)]
    launched = [
        span("cuda_runtime", "cudaLaunchKernel", at * 1e6, (at + 0.1) * 1e6, at * 10)
        for at in (20.5, 21.5)
    ]
    launched.append(span("cuda_runtime", "cudaStreamSynchronize", 22e6, 24e6, 7))
    # by the profiler
    launched.append(span("cuda_runtime", "cudaDeviceSynchronize", 24.5e6, 25e6, 8))
    ran = [span("kernel", "gemm", at * 1e6, (at + 1) * 1e6, (at - 1.5) * 10) for at in (22, 23)]
    trace = {"baseTimeNanoseconds": 7 * second, "traceEvents": launched + ran}
    times = step.times(trace)
    assert times["wall_s"] == pytest.approx(4)
    assert by_path(times)["layer 0",]["compute"] == pytest.approx(1)
    assert by_path(times)["layer 0", "forward"]["compute"] == pytest.approx(1)
    step.annotate(trace)
    written = {
        e["name"]: (e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e.get("cat") == "user_annotation"
    }
    assert written == {
        "ithaka: step": (20e6, 4e6),
        "ithaka: layer 0": (20e6, 3e6),
        "ithaka: layer 0/forward": (21e6, 1e6),
    }
