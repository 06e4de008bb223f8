"""Late copies, exchanges or computations change no bit of a gradient.

On a GPU the delays are real: `torch.cuda._sleep` is queued on a stream before each copy or
exchange. The threaded process group runs collectives on the caller's stream, so `late_exchange`
gives exchanges their own, as NCCL does. On a CPU a late exchange moves nothing before `wait`, and
the disk sleeps.
"""

import functools
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ithaka.comm import exchange
from ithaka.layer.stages import StagedAttention
from ithaka.layer.store import DiskFile, Store
from precision import Size, bf16_layout, initial_model, parallel_copy, random_batch
from threads import run_on_threads

CYCLES = 20_000_000  # about 10 ms of a GPU
SIZE = Size(
    heads=4, kv_heads=2, head_dim=64, intermediate=256, vocab=128, window=50, tokens=512, layers=3
)
SIZE_ON_CPU = Size(
    heads=4, kv_heads=2, head_dim=8, intermediate=32, vocab=64, window=20, tokens=48, layers=3
)
gpu = pytest.mark.gpu


def gradients(device, cp: int, **layer) -> dict[str, torch.Tensor]:
    """Return the gradients of the second of two steps, which reuses memory that holds other values
    from the first.

    Each stage has one head per rank. The reference kernel always adds in the same order; PyTorch's
    GPU kernels do not.
    """
    size = SIZE if device.type == "cuda" else SIZE_ON_CPU
    model = initial_model("qwen3", size, 0, device)
    batch = random_batch(size, 0, device)
    num_tiles = 4 if device.type == "cuda" else 2
    layout = bf16_layout(
        cp, tile_tokens=size.tokens // cp // num_tiles, kernel="reference", **layer
    )

    def work():
        ours = parallel_copy(model, device, cp, layout)
        for ids in (batch.ids.roll(1, 1), batch.ids):
            ours.zero_grad()
            ours(input_ids=ids, labels=ids).loss.backward()
        return {name: param.grad.full_tensor() for name, param in ours.named_parameters()}

    grads_by_rank = run_on_threads(cp, work)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return grads_by_rank[0]


@functools.cache
def right_gradients(device, cp: int) -> dict[str, torch.Tensor]:
    return gradients(device, cp, keep_attention="device")


def differing_names(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name, grad in a.items() if not torch.equal(grad, b[name])]


def late_copies(monkeypatch, *streams: str) -> None:
    """Make these streams of the store sleep before each copy."""
    queue = Store.on_stream

    @contextmanager
    def late(self, stream, *after):
        with queue(self, stream, *after):
            if stream is not None and any(stream is getattr(self, name) for name in streams):
                torch.cuda._sleep(CYCLES)
            yield

    monkeypatch.setattr(Store, "on_stream", late)


def delay(sleep, method):
    """Return a method that sleeps first."""

    def late(self, *args, **more):
        sleep()
        return method(self, *args, **more)

    return late


def late_disk(monkeypatch) -> None:
    """Slow down writes, so that backward needs tensors that forward has not finished writing."""
    monkeypatch.setattr(DiskFile, "write", delay(lambda: time.sleep(0.1), DiskFile.write))


def late_compute(monkeypatch) -> None:
    """Start attention late, so that copies and exchanges that do not wait for it come too early."""
    for name in ("attend", "attend_backward"):
        monkeypatch.setattr(
            StagedAttention,
            name,
            delay(lambda: torch.cuda._sleep(CYCLES), getattr(StagedAttention, name)),
        )


class LateWork:
    """An all-to-all that moves nothing before `wait`: until then, the received tensor is NaN."""

    def __init__(self, received, send, group) -> None:
        self.received = received
        self.send = send
        self.group = group
        received.fill_(float("nan"))

    def wait(self) -> None:
        dist.all_to_all_single(self.received, self.send, group=self.group)


class LateStreamWork:
    """An all-to-all on a stream that all ranks share, after a sleep."""

    def __init__(self, stream, received, send, group) -> None:
        received.fill_(float("nan"))
        ready = torch.cuda.Event()
        ready.record()
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            torch.cuda._sleep(CYCLES)
            # runs when the last rank has queued its wait
            dist.all_to_all_single(received, send, group=group)
            self.done = torch.cuda.Event()
            self.done.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


def late_exchange(monkeypatch, device) -> None:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(send, shape, group):
        if group.size() == 1:
            return exchange.Exchange(send.view(shape), None, None)
        send = send.contiguous()
        received = torch.empty(shape, dtype=send.dtype, device=send.device)
        parts = (received.view(-1), send.view(-1), group)
        work = LateWork(*parts) if stream is None else LateStreamWork(stream, *parts)
        return exchange.Exchange(received, send, work)

    monkeypatch.setattr(exchange, "_start_all_to_all", start)


LAYERS = [
    {"keep_input": "host", "keep_attention": "host", "overlap": True},
    {"keep_input": "host", "keep_attention": "host", "overlap": False},
    {"keep_input": "host", "keep_attention": None, "overlap": True},
    {"keep_input": "disk", "keep_attention": "disk", "overlap": True},
    {"keep_input": "disk", "keep_attention": "disk", "overlap": False},
]
NAMES = ["host", "host, no overlap", "host, attention recomputed", "disk", "disk, no overlap"]
every_layer = pytest.mark.parametrize("layer", LAYERS, ids=NAMES)


@pytest.fixture(scope="module")
def on_time(device):
    """Gradients without delays, by cp; everything stays on the device, so no copy can corrupt
    it."""
    return {cp: right_gradients(device, cp) for cp in (1, 2)}


@gpu
@pytest.mark.parametrize(
    "streams", [("out_stream",), ("in_stream",), ("out_stream", "in_stream")], ids=str
)
@every_layer
def test_late_copies_change_no_gradient(device, on_time, monkeypatch, layer, streams):
    late_copies(monkeypatch, *streams)
    assert differing_names(gradients(device, 1, **layer), on_time[1]) == []


@gpu
@every_layer
def test_late_computation_changes_no_gradient(device, on_time, monkeypatch, layer):
    late_compute(monkeypatch)
    assert differing_names(gradients(device, 1, **layer), on_time[1]) == []


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS[3:], ids=NAMES[3:])
def test_a_slow_disk_changes_no_gradient(device, on_time, monkeypatch, layer):
    late_disk(monkeypatch)
    assert differing_names(gradients(device, 1, **layer), on_time[1]) == []


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow_on_cpu)])
def test_late_exchanges_change_no_gradient(device, on_time, monkeypatch, overlap):
    late_exchange(monkeypatch, device)
    assert (
        differing_names(gradients(device, 2, keep_attention="device", overlap=overlap), on_time[2])
        == []
    )


@gpu
def test_all_delays_together_change_no_gradient(device, on_time, monkeypatch):
    late_exchange(monkeypatch, device)
    late_copies(monkeypatch, "out_stream", "in_stream")
    late_disk(monkeypatch)
    assert differing_names(gradients(device, 2, **LAYERS[0]), on_time[2]) == []
    assert differing_names(gradients(device, 2, **LAYERS[3]), on_time[2]) == []


# These test the delays: each reveals a missing wait. On a GPU, each runs in its own process, since
# a copy that comes too early overwrites memory in use, and a wild index may stop the GPU.


def copies_do_not_wait(monkeypatch, device) -> None:
    late_copies(monkeypatch, "out_stream", "in_stream")
    monkeypatch.setattr(Store, "wait_event", lambda self, event: None)


def copies_do_not_wait_for_the_computation(monkeypatch, device) -> None:
    late_compute(monkeypatch)
    record = Store.record_event
    on_stream = lambda self, stream=None: None if stream is None else record(self, stream)  # noqa: E731
    monkeypatch.setattr(Store, "record_event", on_stream)


def exchanges_are_not_waited_for(monkeypatch, device) -> None:
    late_exchange(monkeypatch, device)
    monkeypatch.setattr(
        LateWork if device.type == "cpu" else LateStreamWork, "wait", lambda self: None
    )


def the_disk_is_not_written(monkeypatch, device) -> None:
    monkeypatch.setattr(DiskFile, "write", lambda self, data, offset: None)


def nothing(monkeypatch, device) -> None:
    """Plant no error, for comparison."""


PLANTED = {
    copies_do_not_wait: (1, LAYERS[0]),
    copies_do_not_wait_for_the_computation: (1, LAYERS[0]),
    exchanges_are_not_waited_for: (2, {"keep_attention": "device"}),
    the_disk_is_not_written: (1, LAYERS[3]),
    nothing: (1, LAYERS[0]),
}
ON_CPU = (exchanges_are_not_waited_for, the_disk_is_not_written)


def is_detected(plant, device) -> bool:
    cp, layer = PLANTED[plant]
    right = right_gradients(device, cp)
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, device)
        return bool(differing_names(gradients(device, cp, **layer), right))


@pytest.mark.parametrize("plant", ON_CPU)
def test_a_missing_wait_is_detected(plant):
    assert is_detected(plant, torch.device("cpu"))


@gpu
def test_missing_waits_are_detected_on_a_gpu():
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    started = {
        plant: subprocess.Popen(
            [sys.executable, __file__, plant.__name__], env={**os.environ, "PYTHONPATH": paths}
        )
        for plant in PLANTED
    }
    codes = {plant.__name__: process.wait(120) for plant, process in started.items()}
    assert codes.pop("nothing") == 0
    assert all(codes.values()), codes


if __name__ == "__main__":
    sys.exit(is_detected(globals()[sys.argv[1]], torch.device("cuda")))
