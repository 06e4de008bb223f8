"""A run's host memory and disk are checked before any process starts."""

import dataclasses

import psutil
import pytest

from ithaka.config import ConfigError
from ithaka.facts import machine as this_machine
from ithaka.facts.machine import available_memory, cgroup_rooms, free_disk
from ithaka.layout import layout_from_config
from ithaka.run import detect as machine_module
from ithaka.run.detect import detect_machine
from ithaka.run.fits import check_fits
from ithaka.run.road import model_shape
from ithaka.run.validated import Run, certain_needs, store_host_bytes
from ithaka.train.prepare import prepare
from runs import tiny_run, validate

MIB = 2**20


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the machine's free memory and disk space."""

    def make(memory_bytes=2**40, disk_bytes=2**40):
        monkeypatch.setattr(machine_module, "available_memory", lambda: memory_bytes)
        monkeypatch.setattr(machine_module, "free_disk", lambda folder: disk_bytes)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    make()
    return make


def make_config(folder, context=4096, **memory):
    data = {"context": context, "path": str(folder / "texts"), "validation_fraction": 0}
    return tiny_run(folder, model={"num_hidden_layers": 2}, memory=memory, data=data)


def make_run(folder, num_ranks=2, on_gpu=False, cp="all", **changes) -> Run:
    """Return the run without validating it."""
    config = make_config(folder, **changes)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cp=cp))
    shape = model_shape(config)
    gpu = ("Some Other 9000", 2**40) if on_gpu else None
    hardware = detect_machine(config, num_ranks, gpu)
    return Run(
        config,
        num_ranks,
        shape,
        layout_from_config(config, shape.num_layers, num_ranks, on_gpu),
        hardware,
    )


def test_needs_cover_the_tensors_of_all_ranks(machine, tmp_path):
    """Two ranks share 2 layers of [4096, 32] in bf16; attention adds as much again, and the lse of
    4 heads in fp32."""
    inputs = 2 * 4096 * 32 * 2
    kept = 2 * 4096 * (32 * 2 + 4 * 4)
    for tier in ("host", "disk"):
        host, disk = certain_needs(
            make_run(tmp_path, on_gpu=True, offload=tier, keep_attention="all")
        )
        kept_bytes = {"layer inputs": inputs, "kept attention": kept}
        staging = {"on the way to disk": inputs + kept}  # up to three layers at once
        assert (host, disk) == ((kept_bytes, {}) if tier == "host" else (staging, kept_bytes))
    assert certain_needs(make_run(tmp_path, on_gpu=True, offload="none", keep_attention="all")) == (
        {},
        {},
    )


@pytest.mark.parametrize(
    "memory, room, fragments",
    [
        (
            {"offload": "host", "keep_attention": "all"},
            {"memory_bytes": MIB},
            [
                "data.context=4096",
                "host memory",
                "layer inputs 1 MiB",
                "kept attention 1.125 MiB",
                "memory.offload=disk",
                ".keep_attention=none",
                "a shorter data.context",
            ],
        ),
        (
            {"offload": "disk"},
            {"disk_bytes": MIB // 2},
            [
                "data.context=4096",
                "1 MiB",
                "disk",
                "512 KiB",
                "memory.disk_path",
                "a shorter data.context",
            ],
        ),
        (
            {"offload": "disk"},
            {"memory_bytes": MIB // 2},
            ["on the way to disk 1 MiB", "data.context"],
        ),
        (
            {"offload_optimizer": True},
            {"memory_bytes": 1000},
            ["parameters, gradients", "offload_optimizer=false"],
        ),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_figures(
    machine, tmp_path, memory, room, fragments
):
    config = make_config(tmp_path, **memory)
    validate(config, num_ranks=2)
    machine(**room)
    with pytest.raises(ConfigError) as error:
        validate(config, num_ranks=2)
    assert "\n" not in str(error.value)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_without_a_gpu_device_tensors_count_as_host_memory(machine, tmp_path):
    """Offloading to the host adds to that; with a GPU, device tensors are not counted."""
    assert certain_needs(make_run(tmp_path, offload="host"))[0]["layer inputs"] == 2 * 4096 * 32 * 4
    need = sum(certain_needs(make_run(tmp_path))[0].values())
    machine(memory_bytes=need)
    check_fits(make_run(tmp_path))
    machine(memory_bytes=need - 1)
    check_fits(make_run(tmp_path, on_gpu=True))
    with pytest.raises(ConfigError, match="host memory.*; use a shorter data.context$"):
        check_fits(make_run(tmp_path))
    with pytest.raises(ConfigError, match="use memory.checkpoint=full or a shorter data.context$"):
        check_fits(make_run(tmp_path, checkpoint="none"))


def test_a_long_evaluation_that_does_not_fit_is_refused(machine, tmp_path):
    run = make_run(tmp_path)
    longer = dataclasses.replace(run.config.evaluate, every=1, contexts=(2048, 8192))
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, evaluate=longer))
    trained, evaluated = (
        sum(certain_needs(run, ledger)[0].values())
        for ledger in (run.ledger, run.evaluation_ledger)
    )
    assert trained < evaluated
    fits, lacks = (
        dataclasses.replace(run.hardware, host_bytes=room) for room in (evaluated, evaluated - 1)
    )
    check_fits(dataclasses.replace(run, hardware=fits))
    with pytest.raises(
        ConfigError, match=r"^evaluate.contexts=8192 .*host memory.*; use shorter evaluate"
    ):
        check_fits(dataclasses.replace(run, hardware=lacks))


def test_ranks_on_other_nodes_need_no_local_memory(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert certain_needs(make_run(tmp_path, on_gpu=True, offload="host"))[0] == {
        "layer inputs": MIB // 4
    }


def test_this_machine_has_the_memory_that_psutil_reports(tmp_path):
    assert 0 < available_memory() <= psutil.virtual_memory().total and free_disk(tmp_path) > 0


def write_cgroup(folder, limit, used, cached):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 3\ninactive_file {cached}\n")


def test_the_tightest_control_group_counts(tmp_path, monkeypatch):
    write_cgroup(tmp_path / "a", 1000, 600, 100)
    write_cgroup(tmp_path / "a" / "b", "max", 600, 100)
    membership = tmp_path / "cgroup"
    membership.write_text("3:cpuset:/\n0::/a/b\n")
    assert min(cgroup_rooms(tmp_path, membership)) == 500
    monkeypatch.setattr(this_machine, "cgroup_rooms", lambda: [500])
    assert available_memory() == 500
    assert cgroup_rooms(tmp_path, tmp_path / "none") == []


def measure_pool(config):
    """Take a step; return the budget and the peak of this rank's host pool."""
    trainer = prepare(validate(config))
    store = trainer.model.model.layers[0].forward.store
    trainer.advance(trainer.next_batches())
    return store.pool.budget_bytes, store.pool.peak_bytes


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_the_store_stays_within_its_budget(ranks, tmp_path, tier):
    config = make_config(tmp_path, context=61, offload=tier, keep_attention="all")
    for budget, peak in ranks.run(2, measure_pool, config):
        if tier == "none":
            assert (budget, peak) == (None, 0)
        elif tier == "host":
            assert peak == 2 * 31 * (32 + 32 + 4) * 4 < budget
        else:
            run = make_run(tmp_path, context=61, offload=tier, keep_attention="all")
            assert peak <= budget == store_host_bytes(run) == 2 * 31 * 68 * 4
