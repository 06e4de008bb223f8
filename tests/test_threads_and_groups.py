"""A rank creates no context on another rank's GPU, and a finished curriculum entry leaves no
process group."""

import contextlib
import io
import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ithaka import cli
from ithaka.checkpoint import save
from ithaka.comm import mesh
from ithaka.config import parse_config, to_dict
from ithaka.layer import store
from ithaka.profile import progress
from ithaka.run import launch
from ithaka.run.draft import AUTO
from ithaka.train import heartbeat
from runs import metrics, run, tiny_run, validate

# Threads that use no CUDA: they read, tokenize, write a page, or handle signals.
ON_HOST = ("prefetch batch", "tokenize", "report", "signals")


def threads_of(config):
    """Run on this rank and return the threads started, and those that chose their device."""
    started = set()
    chosen = set()
    start_thread = threading.Thread.start

    def start(thread):
        if type(thread) is threading.Thread:  # ignores the console's spinners
            started.add(thread.name)
        start_thread(thread)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(threading.Thread, "start", start)
        for module in (store, progress, save, heartbeat):
            patch.setattr(
                module,
                "use_device",
                lambda device: chosen.add((threading.current_thread().name, device)),
            )
        run(config)
    return started, chosen


def test_every_thread_that_uses_cuda_chooses_its_device(ranks, tmp_path):
    config = tiny_run(
        tmp_path, memory={"offload": "disk", "disk_path": str(tmp_path)}, train={"steps": 2}
    )
    (started, chosen), _ = ranks.run(2, threads_of, config)
    names = {name for name in started if not name.startswith(ON_HOST)}
    assert {"heartbeat", "store", "saving", "progress", "ithaka-store_0"} <= names
    assert chosen == {(name, torch.device("cpu")) for name in names}


def test_a_device_is_chosen_by_its_number(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda:3", "cuda", "cpu"):
        mesh.use_device(torch.device(name))
    assert chosen == [torch.device("cuda:3")]


@pytest.fixture
def fake_gpu(monkeypatch):
    """Fake a GPU that does nothing; clear the caches of mesh.py before and after."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name in mesh.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    mesh._use_expandable_segments.cache_clear()
    yield
    mesh._use_expandable_segments.cache_clear()


@pytest.mark.parametrize("is_new", [True, False])
def test_gpu_memory_uses_expandable_segments(monkeypatch, fake_gpu, is_new):
    """The setting is made once, in every version of torch, and not for child processes."""
    settings = []
    if is_new:
        monkeypatch.setattr(
            torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False
        )
    else:
        monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    assert mesh.default_device() == mesh.default_device() == torch.device("cuda", 0)
    assert settings == ["expandable_segments:True"]
    assert not os.environ.keys() & {*mesh.ALLOCATOR_VARIABLES}


@pytest.mark.parametrize(("reserved_gib", "warns"), [(0.5, False), (3, True)])
def test_memory_allocated_before_the_setting_is_reported_once(
    monkeypatch, fake_gpu, recwarn, reserved_gib, warns
):
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", lambda _: None, raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: int(reserved_gib * 2**30))
    mesh.default_device()
    mesh.default_device()
    found = [
        str(warning.message) for warning in recwarn if "PYTORCH_ALLOC_CONF" in str(warning.message)
    ]
    assert len(found) == warns and all("3.0 GiB" in message for message in found)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_users_allocator_settings_are_kept(monkeypatch, fake_gpu, name):
    settings = []
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False
    )
    monkeypatch.setenv(name, "max_split_size_mb:512")
    mesh.default_device()
    assert not settings


@pytest.mark.parametrize(("limit", "allowed"), [(1.0, 0.875), (0.5, 0.5)])
def test_the_allocator_leaves_memory_to_nccl(monkeypatch, limit, allowed):
    """It may not fill the GPU, and NCCL takes its memory first; a user's own limit is kept."""
    limits = [limit]
    reduced = []
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: limits[-1])
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: limits.append(share)
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16 * 2**30)
    )
    monkeypatch.setattr(mesh.dist, "all_reduce", reduced.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, **options: options)
    device = torch.device("cuda", 0)
    mesh._reserve_nccl_memory(device)
    assert limits[-1] == allowed and reduced == [{"device": device}]


def test_a_mesh_on_a_gpu_reserves_memory_for_nccl(monkeypatch, fake_gpu):
    class ReservedError(Exception):
        pass

    def reserve(device):
        raise ReservedError(device)

    monkeypatch.setattr(mesh, "start_process_group", lambda _: None)
    monkeypatch.setattr(mesh, "_reserve_nccl_memory", reserve)
    with pytest.raises(ReservedError, match="cuda:0"):
        mesh.make_mesh(device="cuda:0")


def groups_after_entries(config):
    """Run a curriculum in one process, like torchrun, and count the process groups after each
    entry."""
    counts = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(launch, "ranks_persist", lambda: True)
        patch.setenv("RANK", str(dist.get_rank()))
        for _ in config.curriculum:
            cli.runs.train_rank(validate(config, AUTO))
            counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


@pytest.mark.slow
def test_an_entry_of_a_curriculum_leaves_no_process_groups(ranks, tmp_path):
    tree = to_dict(tiny_run(tmp_path, train={"validate_every": 0, "validate_sequences": 0}))
    del tree["train"]["steps"], tree["data"]["context"]
    config = parse_config(
        {**tree, "curriculum": [{"context": 61, "steps": 1}, {"context": 90, "steps": 1}]}
    )
    assert ranks.run(2, groups_after_entries, config) == [[1, 0]] * 2
    assert [line["step"] for line in metrics(config.train.run_dir)] == [1, 2]
