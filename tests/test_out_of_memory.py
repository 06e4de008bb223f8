"""Out of memory: where, what was planned and measured there, and which settings would fit; nothing saved is lost."""

import dataclasses
import errno
import functools
import re

import psutil
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from ithaka.cli import app
from ithaka.config import ConfigError, load
from ithaka.layer.stages import HeldHeads
from ithaka.layer.store import SlabPool, StoreError
from ithaka.layout import fixed_settings, make_layout
from ithaka.phases import current_phase
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.models import find_shape
from ithaka.plan.search import Plan
from ithaka.plan.shape import Work
from ithaka.train import launch, loop, watch
from ithaka.train.preflight import Machine, hardware_of, validated
from ithaka.train.watch import Shortage, Witness, is_shortage, planned_at
from runs import numbers, run, tiny_run, valid

GIB = 2**30
CPU = torch.device("cpu")
FULL = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1 GiB is free."


def fail_in(patch, owner, name, path, error, times=0):
    """`owner.name` raises `error` when it is called in the phase `path`, after `times` calls there."""
    plain, calls = getattr(owner, name), []

    @functools.wraps(plain)
    def failing(*args, **kwargs):
        if current_phase() == path:
            calls.append(path)
            if len(calls) > times:
                raise error
        return plain(*args, **kwargs)

    patch.setattr(owner, name, failing)


def settings_in(text):
    return re.findall(r"--set (\S+)", text)


def explained(config, name, path, steps_before=0):
    """A run on this rank that runs out of memory; what it says."""
    with pytest.MonkeyPatch.context() as patch:
        times = steps_before * config.train.accumulate
        fail_in(patch, HeldHeads, name, path, torch.OutOfMemoryError(FULL), times)
        with pytest.raises(loop.OutOfMemoryError) as caught:
            run(config)
        dist.barrier()  # a rank that left early would fail the others in its own way
    return str(caught.value)


@pytest.mark.parametrize(
    "name, path",
    [
        ("attend", ("layer 0", "forward", "attention", "stage 0")),
        ("attend", ("layer 1", "backward", "attention", "stage 0")),
        ("attend_backward", ("layer 1", "backward", "attention", "stage 1")),
    ],
)
def test_the_phase_is_named_on_every_rank(ranks, tmp_path, name, path):
    train = {"validate_every": 0, "validate_sequences": 0}
    config = tiny_run(tmp_path, parallel={"cp": 2, "heads_per_stage": 2}, train=train)
    for text in ranks.run(2, explained, config, name, path):
        assert f", in {' / '.join(path)}: " in text.splitlines()[0]
        assert "2.5 GiB more were asked for" in text and "There is no checkpoint yet." in text


def test_the_last_checkpoint_goes_on_with_the_setting_that_is_told(tmp_path, capfd):
    plan = {"steps": 4, "save_every": 2, "validate_every": 0, "validate_sequences": 0}
    config = tiny_run(tmp_path, train=plan, data={"context": 512})
    path = ("layer 1", "backward", "attention", "stage 0")
    text = explained(config, "attend_backward", path, steps_before=3)
    assert f"The last checkpoint is {config.train.run_dir / 'checkpoints' / 'step-00000002'}." in text
    assert f"ithaka train --resume {config.train.run_dir} --set parallel.heads_per_stage=" in text
    changed = load(config.train.run_dir / "config.yaml", settings_in(text))
    before, after = (planned_by(valid(c, config.train.run_dir), path) for c in (config, changed))
    assert after < before
    assert launch.run_ranks(run, (changed, config.train.run_dir), 1) == 0
    whole = dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=tmp_path / "whole"))
    run(whole)
    losses = [[record[1] for record in numbers(c.train.run_dir)] for c in (config, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 4


def planned_by(run, path):
    return sum(planned_at(run, path).values())


@pytest.mark.parametrize(
    "error, code",
    [
        (torch.OutOfMemoryError(FULL), 3),
        (MemoryError(), 3),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."), 3),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."), 3),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), 3),
        (RuntimeError("NCCL error, unhandled cuda error. Last error:\nCuda failure 2 'out of memory'"), 3),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 3),
        (RuntimeError("CUDA driver error: out of memory"), 3),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), 3),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 3),  # of mmap
        (RuntimeError("something else"), 1),
        (OSError(errno.EIO, "Input/output error"), 1),
    ],
)
def test_exit_code_3_for_memory_only(tmp_path, monkeypatch, capsys, error, code):
    config = tiny_run(tmp_path)
    monkeypatch.setattr(loop, "build_model", lambda *_, **__: (_ for _ in ()).throw(error))
    assert launch.run_ranks(run, (config,), 1) == code
    said = capsys.readouterr().err
    assert ("in building the model: " in said) == (code == 3) and ("Traceback" in said) == (code == 1)


def test_an_explanation_that_fails_hides_nothing(tmp_path, monkeypatch, capsys):
    config = tiny_run(tmp_path)
    monkeypatch.setattr(loop, "build_model", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError(FULL)))
    monkeypatch.setattr(watch, "planned_at", lambda *_: (_ for _ in ()).throw(ConfigError("field=1 is wrong")))
    assert launch.run_ranks(run, (config,), 1) == 3
    said = capsys.readouterr().err
    assert "in building the model: no host memory left: 2.5 GiB more were asked for" in said
    assert "field=1 is wrong" in said and "Traceback" not in said
    assert "There is no checkpoint yet." in said


@pytest.mark.parametrize("name", [None, "Some Other 9000"])
def test_nodes_with_other_numbers_of_ranks_are_explained(tmp_path, name):
    """8 ranks on this node, 4 on another: 12 that 3 divides, not 8."""
    machine = Machine(name, 30 * GIB, host_bytes=8 * 10**9, disk_bytes=0, local_ranks=8)
    hardware = hardware_of([machine], 12)
    assert (hardware.num_nodes, hardware.gpus_per_node, hardware.host_bytes) == (3, 4, 4 * 10**9)
    assert hardware.gpu.memory_bytes == (10**9 if name is None else 30 * GIB)
    run = dataclasses.replace(validated(tiny_run(tmp_path, parallel={"cp": 3}), 12), hardware=hardware)
    text = Shortage(torch.OutOfMemoryError(FULL), Witness(CPU), run).explain("model", "again")
    assert "planned peak: " in text
    assert ("ithaka plan model --gpus 3x4 --gpu-file" in text) == (name is not None)


def test_room_in_the_store_is_explained_like_memory(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, memory={"offload": "host", "keep_attention": "all"})
    monkeypatch.setattr(
        SlabPool, "take", lambda pool, num_bytes: (_ for _ in ()).throw(StoreError("host", pool._full(num_bytes)))
    )
    words = r"(?s)after embedding: host memory: .*planned per node: (\S+ \S+) of (\S+ \S+) \((.*?)\)\n"
    with pytest.raises(loop.OutOfMemoryError, match=words) as caught:
        run(config)
    text = str(caught.value)
    total, there, parts = re.search(words, text).groups()
    assert 0 < as_bytes(total) < as_bytes(there) <= psutil.virtual_memory().total  # what was free when the run began
    assert {part.rsplit(" ", 2)[0] for part in parts.split(", ")} == {"layer inputs", "kept attention"}
    assert max(as_bytes(figure) for figure in re.findall(r"[\d.]\S* (?:B|[KMGT]iB)", text)) == as_bytes(there)


def as_bytes(text):
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)


# ---- figures, for GPUs that are not here


def llama(context, gpus="8xH100-80GB", **settings):
    shape, hardware = find_shape("llama3-8b"), parse_gpus(gpus)
    fixed = fixed_settings(settings, shape.num_layers, hardware.num_gpus)
    return Plan(shape, make_layout(shape.num_layers, **fixed), hardware, Work(context))


def shortage(plan, path, used_bytes, error=None):
    witness = Witness(torch.device("cuda"))
    witness.path, witness.used_bytes = path, used_bytes
    return Shortage(error or torch.OutOfMemoryError(FULL), witness, plan)


ON_HOST = {"parallel.cp": 8, "memory.offload": "host", "parallel.heads_per_stage": 32, "memory.tile_tokens": 16384}
BACKWARD = ("layer 31", "backward", "attention", "stage 0")


def as_value(text):
    return {"true": True, "false": False, "null": None}.get(text, int(text) if text.isdigit() else text)


@pytest.mark.parametrize(
    "settings",
    [
        ON_HOST,
        {**ON_HOST, "parallel.heads_per_stage": 8},
        {**ON_HOST, "memory.offload": "none"},
        {"parallel.cp": 8, "memory.checkpoint": "none"},
    ],
)
def test_the_setting_that_is_told_needs_less_there(settings):
    """Beside planned and measured: once to go on with, and once for the planner, who says what fits with it."""
    plan = llama(2**20, **settings)
    here = sum(planned_at(plan, BACKWARD).values())
    used = here + 5 * GIB - int(2.5 * GIB)
    text = shortage(plan, BACKWARD, used).explain("llama3-8b", "ithaka train --resume run")
    assert f"{here / GIB:.4g} GiB" in text and f"{(here + 5 * GIB) / GIB:.4g} GiB" in text
    told = settings_in(text)
    assert len(told) == 2 and told[0] == told[1]
    assert f"  ithaka train --resume run --set {told[0]}\n" in text
    asked = r"  ithaka plan llama3-8b --gpus 8xH100-80GB --context 1048576 --host-memory \d+GB --set \S+$"
    assert re.search(asked, text)
    name, value = told[0].split("=")
    after = llama(2**20, **{**settings, name: as_value(value)})
    assert sum(planned_at(after, BACKWARD).values()) < here


def test_where_no_setting_needs_less_a_shorter_context_is_asked_for():
    leanest = {**ON_HOST, "parallel.heads_per_stage": 8, "memory.tile_tokens": 1, "memory.overlap": False}
    text = shortage(llama(2**22, **leanest), BACKWARD, 6 * GIB).explain("llama3-8b", "again with")
    assert "use more ranks or less context" in text and f"--context {2**21} " in text


def test_a_setting_that_does_not_help_in_the_phase_is_not_told():
    """Heads per stage and overlap are attention's: where the optimizer runs they change nothing."""
    text = shortage(llama(2**20, **ON_HOST), ("optimizer",), 6 * GIB).explain("llama3-8b", "again with")
    assert "heads_per_stage" not in text and "overlap" not in text


def test_host_memory_and_disk_get_a_setting_that_needs_less_of_them():
    plan = llama(2**21, **{**ON_HOST, "memory.keep_attention": "all", "memory.attention_offload": "host"})
    full = shortage(plan, ("layer 9", "forward"), 0, StoreError("host", "host memory: full"))
    text = full.explain("llama3-8b", "again with")
    assert "planned per node: " in text and "kept attention" in text
    assert settings_in(text)[0] == "memory.keep_attention=none"
    full = shortage(llama(2**21, **ON_HOST), ("layer 9", "forward"), 0, MemoryError())
    assert full.tier == "host" and is_shortage(full.error)
    assert settings_in(full.explain("llama3-8b", "again with"))[0] == "memory.offload=disk"


def test_what_is_planned_in_a_phase():
    plan = llama(2**18, **{**ON_HOST, "memory.offload": "none"})
    totals = [sum(planned_at(plan, (f"layer {i}", "forward")).values()) for i in range(32)]
    assert totals == sorted(totals) and len(set(totals)) == 32
    assert "loss tile" in planned_at(plan, ("loss backward",))
    ledger = plan.ledger
    peak = ledger.gpu_peak - ledger.gpu["reserve"]
    assert sum(planned_at(plan, ()).values()) == peak >= max(totals)


def test_a_rehearsal_explains_itself_the_same_way(tmp_path, monkeypatch):
    model = tiny_run(tmp_path).model.path
    path = ("step", "layer 1", "backward", "attention", "stage 0")
    fail_in(monkeypatch, HeldHeads, "attend_backward", path, torch.OutOfMemoryError(FULL), times=2)
    wasteful = ["--set", "memory.checkpoint=full", "--set", "memory.keep_attention=none"]
    arguments = ["rehearse", str(model), "--gpus", "2xH100-80GB", "--context", "4K", *wasteful]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3, result.output
    assert f"in {' / '.join(path)}: " in result.stderr
    assert "planned peak: " in result.stderr and "optimizer" in result.stderr
    assert "the same command with --set " in result.stderr
