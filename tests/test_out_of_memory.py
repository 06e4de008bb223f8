"""An out-of-memory error names the phase, the planned and measured bytes and a planner command.
Checkpoints survive."""

import dataclasses
import errno
import functools
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from allocations import fake_gpu_memory
from ithaka.cli import app
from ithaka.config import load_config
from ithaka.device_memory import DeviceMemory
from ithaka.exits import ExitCode, ran_out_of_memory
from ithaka.layer.slabs import SlabPool, StoreError
from ithaka.layer.stages import StagedAttention
from ithaka.layout import Layout, layout_values
from ithaka.phases import PhaseState
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.search import Plan
from ithaka.plan.shape import StepShape
from ithaka.profile.position import HostPosition
from ithaka.run import launch
from ithaka.trace.shapes import find_shape
from ithaka.train import parts, prepare
from ithaka.train.agreement import measure_memory
from ithaka.train.out_of_memory import OutOfMemoryError, explain_out_of_memory
from ithaka.train.watch import Watch
from runs import bitwise_metrics, run, tiny_run

GIB = 2**30
OOM = ExitCode.OUT_OF_MEMORY
FULL = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1 GiB is free."
)


def fail_in(patch, owner, name, path, error, times=0):
    """Make `owner.name` raise `error` in the phase `path`, after `times` calls there."""
    plain = getattr(owner, name)
    calls = []

    @functools.wraps(plain)
    def failing(*args, **kwargs):
        if PhaseState.path == path:
            calls.append(path)
            if len(calls) > times:
                raise error
        return plain(*args, **kwargs)

    patch.setattr(owner, name, failing)


def message_of_failed_run(config, name, path, steps_before=0):
    """Run out of memory on this rank and return the message."""
    with pytest.MonkeyPatch.context() as patch:
        times = steps_before * config.train.accumulate
        fail_in(patch, StagedAttention, name, path, torch.OutOfMemoryError(FULL), times)
        with pytest.raises(OutOfMemoryError) as caught:
            run(config)
        dist.barrier()  # if a rank left early, the others would fail differently
    return str(caught.value)


@pytest.mark.parametrize(
    "name, path",
    [
        pytest.param(
            "attend", ("layer 0", "forward", "attention", "stage 0"), marks=pytest.mark.slow
        ),
        ("attend", ("layer 1", "backward", "attention", "stage 0")),
        ("attend_backward", ("layer 1", "backward", "attention", "stage 1")),
    ],
)
def test_the_phase_is_named_on_every_rank(ranks, tmp_path, name, path):
    train = {"validate_every": 0, "validate_sequences": 0}
    config = tiny_run(
        tmp_path,
        model={"num_hidden_layers": 2},
        parallel={"cp": 2, "heads_per_stage": 2},
        train=train,
    )
    for text in ranks.run(2, message_of_failed_run, config, name, path):
        assert f", in {' / '.join(path)}: " in text.splitlines()[0]
        assert "Tried to allocate 2.50 GiB" in text and "There is no checkpoint yet." in text
        assert re.search(
            r"\n  planned peak: \S+ [KM]iB in .*\n  measured: \S+ [MG]iB for the process", text
        )


def test_the_last_checkpoint_resumes_with_another_setting(tmp_path, capfd, monkeypatch):
    # saved before the next step
    monkeypatch.setattr(prepare, "can_save_in_background", lambda run: False)
    plan = {"steps": 4, "save_every": 2, "validate_every": 0, "validate_sequences": 0}
    config = tiny_run(tmp_path, model={"num_hidden_layers": 2}, train=plan, data={"context": 512})
    path = ("layer 1", "backward", "attention", "stage 0")
    text = message_of_failed_run(config, "attend_backward", path, steps_before=3)
    assert (
        f"The last checkpoint is {config.train.run_dir / 'checkpoints' / 'step-00000002'}." in text
    )
    changed = load_config(config.train.run_dir / "config.yaml", ["parallel.heads_per_stage=1"])
    assert launch.run_ranks(run, (changed, config.train.run_dir), 1) == 0
    train = dataclasses.replace(config.train, run_dir=tmp_path / "undisturbed")
    undisturbed = dataclasses.replace(config, train=train)
    run(undisturbed)
    losses = [
        [record[1] for record in bitwise_metrics(c.train.run_dir)] for c in (config, undisturbed)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 4


@pytest.mark.parametrize(
    "error, code",
    [
        (torch.OutOfMemoryError(FULL), OOM),
        (MemoryError(), OOM),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                "64 bytes."
            ),
            OOM,
        ),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 64 "
                "bytes."
            ),
            OOM,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"
            ),
            OOM,
        ),
        (
            RuntimeError(
                "NCCL error, unhandled cuda error. Last error:\nCuda failure 2 'out of memory'"
            ),
            OOM,
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OOM),
        (RuntimeError("CUDA driver error: out of memory"), OOM),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), OOM),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OOM),  # raised by mmap
        (RuntimeError("something else"), ExitCode.FAILED),
        (OSError(errno.EIO, "Input/output error"), ExitCode.TRANSIENT),
    ],
)
def test_only_memory_errors_get_the_out_of_memory_exit_code(
    tmp_path, monkeypatch, capsys, error, code
):
    config = tiny_run(tmp_path)
    monkeypatch.setattr(parts, "build_model", lambda *_, **__: (_ for _ in ()).throw(error))
    assert launch.run_ranks(run, (config,), 1) == code
    printed = capsys.readouterr().err
    assert ("in building the model: " in printed) == (code == OOM)
    assert ("Traceback" in printed) == (code == ExitCode.FAILED)


def test_a_full_store_is_explained_like_full_memory(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, memory={"offload": "host", "keep_attention": "all"})
    monkeypatch.setattr(SlabPool, "_has_room", lambda pool, num_bytes: False)
    words = (
        r"(?s)after embedding: host memory: .*planned per node: (\S+ \S+) of (\S+ \S+) \((.*?)\)\n"
    )
    with pytest.raises(OutOfMemoryError, match=words) as caught:
        run(config)
    text = str(caught.value)
    total, there, parts = re.search(words, text).groups()
    # free memory when the run began
    assert 0 < as_bytes(total) < as_bytes(there) <= psutil.virtual_memory().total
    holders = {part.rsplit(" ", 2)[0] for part in parts.split(", ")}
    # there may be room for a copy
    assert holders - {"copy to save"} == {"layer inputs", "kept attention"}
    assert max(
        as_bytes(figure) for figure in re.findall(r"[\d.]\S* (?:B|[KMGT]iB)", text)
    ) == as_bytes(there)


def as_bytes(text):
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)


# ---- plans for GPUs that this machine does not have


def llama(context, gpus="8xH100-80GB", **settings):
    shape = find_shape("llama3-8b")
    hardware = parse_gpus(gpus)
    layout = Layout(**layout_values(settings, shape.num_layers, hardware.num_gpus))
    return Plan(shape, layout, hardware, StepShape(context))


MEASURED = DeviceMemory(5 * GIB, 6 * GIB, 7 * GIB, 8 * GIB, 3)
ON_HOST = {
    "parallel.cp": 8,
    "memory.offload": "host",
    "parallel.heads_per_stage": 32,
    "memory.tile_tokens": 16384,
}


def explain(plan, path, error, memory=MEASURED):
    position = HostPosition(torch.device("cuda", 0))
    position.path = path
    position.memory = memory
    return explain_out_of_memory(plan, error, position, "llama3-8b")


def test_planned_and_measured_memory_are_compared_and_settings_suggested():
    plan = llama(2**20, **ON_HOST)
    path = ("layer 31", "backward", "attention", "stage 0")
    text = explain(plan, path, torch.OutOfMemoryError(FULL))
    peak = plan.ledger.gpu_peak - plan.ledger.gpu["reserve"]
    assert (
        f"planned peak: {peak / GIB:.4g} GiB in {plan.ledger.phase}, of 79.1 GiB\n  measured: "
        "5 GiB, 2 GiB more"
    ) in text
    command = r"  ithaka plan llama3-8b --gpus 8xH100-80GB --context 1048576 --host-memory \d+GB$"
    assert FULL in text and re.search(command, text)


def test_the_message_shows_memory_that_the_allocator_cannot_use(monkeypatch):
    fake_gpu_memory(monkeypatch, allocated=5 * GIB, reserved=7 * GIB, retries=3)
    text = explain(llama(2**20, **ON_HOST), ("embedding",), torch.OutOfMemoryError(FULL), None)
    assert "\n  measured: 5 GiB, 2 GiB more reserved but unused, 3 allocator retries\n" in text


def test_an_allocator_retry_is_a_warning_once(monkeypatch):
    events = []
    watch = Watch.__new__(Watch)
    watch._reported_retries = False
    watch.trainer = SimpleNamespace(step=4)
    watch.console = SimpleNamespace(event=lambda *args, **values: events.append((*args, values)))
    watch.report_retries(measure_memory(torch.device("cpu")))
    for retries in (0, 2, 3):
        fake_gpu_memory(monkeypatch, peak=5 * GIB, reserved_peak=7 * GIB, retries=retries)
        watch.report_retries(measure_memory(torch.device("cuda", 1)))
    ((step, message, values),) = events
    assert (step, values) == (4, {"retries": 2}) and "; 2 GiB are reserved but unused; " in message


def test_host_memory_has_its_own_plan():
    plan = llama(
        2**21, **{**ON_HOST, "memory.keep_attention": "all", "memory.attention_offload": "host"}
    )
    for error in (StoreError("host", "host memory: full"), MemoryError()):
        text = explain(plan, ("layer 9", "forward"), error)
        assert (
            "planned per node: " in text and "kept attention" in text and ran_out_of_memory(error)
        )
        assert (str(error) or "MemoryError()") in text.splitlines()[0]


def test_a_rehearsal_explains_out_of_memory_the_same_way(tmp_path, monkeypatch):
    model = tiny_run(tmp_path, model={"num_hidden_layers": 2}).model.path
    path = ("step", "layer 1", "backward", "attention", "stage 0")
    fail_in(
        monkeypatch, StagedAttention, "attend_backward", path, torch.OutOfMemoryError(FULL), times=2
    )
    wasteful = ["--set", "memory.checkpoint=full", "--set", "memory.keep_attention=none"]
    arguments = ["rehearse", str(model), "--gpus", "2xH100-80GB", "--context", "4K", *wasteful]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == OOM, result.output
    assert f"in {' / '.join(path)}: " in result.stderr
    assert (
        "planned peak: " in result.stderr
        and f"ithaka plan {model} --gpus 2xH100-80GB" in result.stderr
    )
