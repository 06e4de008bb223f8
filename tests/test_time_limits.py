"""Measurements alone decide how long a run may make no progress and which ranks are slow."""

import contextlib
import dataclasses
import io
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ithaka.config import DataConfig
from ithaka.data.documents import files
from ithaka.data.open import check_data
from ithaka.layer import stages
from ithaka.mixers.softmax import SoftmaxMixer
from ithaka.phases import listening, phase
from ithaka.plan.hardware import GPUS, find_gpu
from ithaka.profile.position import PhaseTracker
from ithaka.train import heartbeat, watch
from ithaka.train import trainer as trainer_module
from ithaka.train.heartbeat import Limits
from ithaka.train.watch import SLOW_STEPS, SlowRanks
from ranks import Ranks
from runs import metrics, run, run_and_record_exit, tiny_run, validate, wait_for


@pytest.fixture
def spend(monkeypatch):
    """`spend(3, "layer 0", "mlp")` spends three seconds of a fake clock in nested phases."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(heartbeat.time, "perf_counter", lambda: now.s)

    def spend(seconds, *path):
        with contextlib.ExitStack() as opened:
            for name in path:
                opened.enter_context(phase(name))
            now.s += seconds

    return spend


def test_attention_seconds_exclude_evaluation_and_waiting(spend):
    tracker = PhaseTracker(torch.device("cpu"))
    with listening(tracker):
        for way in ("forward", "backward"):
            spend(100, "layer 0", way, "projections", "copies")
            spend(100, "layer 0", way, "exchange")
            with phase("layer 0"), phase(way), phase("attention"), phase("stage 0"):
                spend(1)
                spend(100, "exchange")  # a ring's k and v, from a slow rank
                spend(2)
            spend(100, "layer 0", way, "mlp", "copies")
        for part in ("attention", "exchange", "mlp", "projections"):
            spend(100, "validation", "layer 0", "forward", part)
        spend(100, "validation", "layer 0", "forward", "attention", "stage 0")
    assert tracker.end_step()[0] == 6
    assert tracker.end_step()[0] == 0


def test_pauses_are_measured_by_kind_after_the_first_step(spend):
    tracker = PhaseTracker(torch.device("cpu"))

    def step(times):
        spend(1 * times, "data")
        spend(1 * times, "embedding")
        spend(2 * times, "layer 0", "forward")
        spend(4 * times, "layer 0", "forward", "attention", "stage 0")
        spend(3 * times, "layer 0", "forward", "exchange")
        spend(6 * times, "optimizer")
        spend(50)  # outside the optimizer
        spend(5 * times, "validation")
        spend(7 * times, "validation", "layer 0", "forward")
        spend(50)
        spend(99, "saving")

    with listening(tracker):
        step(1000)
        assert tracker.end_step()[1] == [0, 0, 0, 0], "the first one compiles"
        step(1)
        assert tracker.end_step()[1] == [4, 3, 6, 7]
        assert tracker.now()[2] == ("saving",)
        spend(1, "data")
        assert tracker.end_step()[1] == [4, 3, 6, 7]
    assert tracker.step == 0 and tracker.now()[2] == ("data",)


def test_a_pause_in_attention_is_measured_for_documents_as_long_as_the_context(spend):
    tracker = PhaseTracker(torch.device("cpu"))
    with listening(tracker):
        tracker.end_step()
        pauses = []
        for seconds, full in ((2.0, 100.0), (3.0, 10.0), (4.0, 10.0), (50.0, 1.0), (1.0, 1.0)):
            spend(seconds, "layer 0", "forward", "attention", "stage 0")
            spend(1.0, "layer 0", "forward", "exchange")
            pauses.append(tracker.end_step(full)[1][0])
    assert pauses == [200, 30, 30, 50, 50]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return validate(tiny_run(tmp_path_factory.mktemp("tiny"), model={"num_hidden_layers": 2}))


LAYER = ("layer 0", "backward")
UPDATE = ("optimizer",)
VALIDATION = ("validation", "layer 1", "forward")
PHASES = (
    LAYER,
    ("layer 0", "forward", "attention", "stage 0"),
    ("loss forward",),
    UPDATE,
    VALIDATION,
    ("data",),
    (),
)


def test_until_something_is_measured_the_start_limit_applies(tiny):
    limits = Limits.for_run(tiny)
    assert 600 < limits.start < 620 and {limits.for_phase(path) for path in PHASES} == {
        limits.start
    }
    assert limits.for_phase(("saving",)) == limits.save
    assert (
        not Limits(3600, 700, 600).describe()
        and "save 3601 s" in Limits(700, 700, 3601).describe()["timeouts"]
    )
    step = limits.with_pauses(0.0, 2.0, 0.0, 0.0)
    assert [step.for_phase(path) for path in PHASES] == [45.0] * 3 + [limits.start] * 4
    long = step.with_pauses(30.0, 2.0, 200.0, 12.0)
    assert [long.for_phase(path) for path in PHASES] == [150.0] * 3 + [1000.0, 60.0] + [
        limits.start
    ] * 2
    assert long.longest == 1000.0 and long.with_pauses(0.0, 0.0, 0.0, 0.0) == long


def on_gpu(run, name, context):
    """Return the run with another context, on a GPU named `name`."""
    known = heartbeat.gpu_named(name)
    gpu = known or dataclasses.replace(find_gpu("H100"), name=name)  # as in detect_machine
    config = dataclasses.replace(
        run.config, data=dataclasses.replace(run.config.data, context=context)
    )
    return dataclasses.replace(
        run, config=config, hardware=dataclasses.replace(run.hardware, gpu=gpu)
    )


def test_an_unknown_gpu_starts_with_the_slowest_gpus_limit_until_measured(tiny):
    context = 10**8  # makes attention's seconds matter
    known, unknown = (
        Limits.for_run(on_gpu(tiny, name, context))
        for name in ("NVIDIA H100 80GB HBM3", "Some 9000")
    )
    slowest = min(
        (gpu for gpu in GPUS.values() if gpu.name != "CPU"), key=lambda gpu: gpu.matmul_flops
    )
    assert known.planned > 2000 and unknown.start - known.start > known.planned
    assert unknown.start == pytest.approx(Limits.for_run(on_gpu(tiny, slowest.name, context)).start)
    assert unknown.with_pauses(100.0, 1.0, 0, 0).for_phase(LAYER) == 500, (
        "by no plan for another GPU"
    )
    assert known.with_pauses(100.0, 1.0, 0, 0).for_phase(LAYER) == known.planned, (
        "documents may become longer"
    )
    assert known.with_pauses(10_000.0, 1.0, 0, 0).for_phase(LAYER) == 50_000


def test_data_size_counts_for_every_kind_of_path(tmp_path, monkeypatch, tiny):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text("word " * 1000)
    for path in (folder, folder / "*.txt", f"{folder}/**/*.txt"):
        assert check_data(DataConfig(path=path, context=64), 300) == 20_000
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": ["word " * 1000] * 4})
    monkeypatch.setattr(files, "open_dataset", lambda path: {"train": dataset})
    monkeypatch.setattr("ithaka.data.documents.read.open_dataset", lambda path: {"train": dataset})
    assert check_data(DataConfig(path=Path("hf://someone/four-texts"), context=64), 300) >= 20_000
    assert tiny.data_bytes == sum(file.stat().st_size for file in tiny.config.data.path.iterdir())
    limits = [
        Limits.for_run(dataclasses.replace(tiny, data_bytes=size)).start
        for size in (0, 10**8, 10**12, 10**13)
    ]
    assert limits[1] - limits[0] == pytest.approx(100)
    assert limits[2] == limits[3] < limits[0] + 3600, "what a round needs, not all of the data"


def test_only_ranks_that_are_slow_for_their_work_are_reported():
    """Each case has the seconds and the work of four ranks."""
    cases = [
        ([1.0, 1.1, 1.0, 1.5], [1, 1, 1, 1], {3: 1.5}),
        ([3.0, 3.0, 4.0, 4.0], [3, 3, 4, 4], {}),  # 14 heads on four ranks
        ([1.0, 1.0, 1.0, 4.0], [1, 1, 1, 4], {}),  # longer documents
        ([1.0, 1.0, 1.0, 0.5], [9, 9, 9, 1], {}),  # short documents take longer for their work
        ([3.0, 3.0, 6.0, 4.0], [3, 3, 4, 4], {2: 1.5}),
    ]
    for seconds, work, named in cases:
        slow = SlowRanks()
        reports = [slow.add(seconds, work) for _ in range(20)]
        assert reports == [{}] * 9 + [pytest.approx(named)] + [{}] * 10, (seconds, work)


def test_a_rank_that_is_slow_again_is_reported_again():
    slow = SlowRanks()
    reports = [
        slow.add([1.0, 1.0, rank_s], [1, 1, 1])
        for rank_s in (2.0, 1.0, 2.0)
        for _ in range(2 * SLOW_STEPS)
    ]
    assert [set(report) for report in reports if report] == [{2}, {2}]


def slow_down(patch, where):
    """Make attention take 20 ms on both ranks and, on rank 1, attention or the projections before
    it 250 ms more.

    The ratio is large because the machine may be busy."""
    patch.setattr(watch, "SLOW_STEPS", 2)
    patch.setattr(watch, "SLOW_RATIO", 2.5)

    def delay(function, seconds):
        return lambda *args: time.sleep(seconds) or function(*args)

    late = {where: 0.25} if dist.get_rank() == 1 else {}
    for name in ("attend", "attend_backward"):
        attend = delay(getattr(stages.StagedAttention, name), 0.02 + late.get("attention", 0.0))
        patch.setattr(stages.StagedAttention, name, attend)
    patch.setattr(
        SoftmaxMixer, "project", delay(SoftmaxMixer.project, late.get("projections", 0.0))
    )


def run_slowly(where, config):
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        slow_down(patch, where)
        run(config)
    return output.getvalue()


@pytest.mark.parametrize(
    "where, named",
    [("attention", {"1"}), pytest.param("projections", set(), marks=pytest.mark.slow)],
)
def test_the_slow_rank_is_named_but_not_those_that_wait_for_it(ranks, tmp_path, where, named):
    """In a ring, both wait for k and v inside attention, also in validation."""
    train = {"steps": 2, "validate_every": 1, "validate_sequences": 1, "save_every": 0}
    config = tiny_run(tmp_path, parallel={"cp": 2, "ring": 2}, train=train)
    output, _ = ranks.run(2, run_slowly, where, config)
    events = [line["slow_ranks"] for line in metrics(config.train.run_dir) if "slow_ranks" in line]
    assert {rank for event in events for rank in event} == named and output.count(
        "Slow: rank"
    ) == len(named)


def slow_at_first_then_hanging(patch):
    """On rank 1, make unmeasured phases exceed the later limit and a layer hang in step 4."""
    patch.setattr(heartbeat, "BEAT_S", 0.1)
    patch.setattr(heartbeat, "OWN_ERROR_WAIT_S", 0.0)
    patch.setattr(heartbeat, "MIN_STEP_LIMIT_S", 3.0)
    steps = []
    train_step = trainer_module.train_step
    attend = stages.StagedAttention.attend
    update = torch.optim.AdamW.step
    seconds = {1: 4.0, 4: 60.0}

    def step(*args, **kwargs):
        steps.append(len(steps) + 1)
        return train_step(*args, **kwargs)

    def slow_attend(*args):
        time.sleep(seconds.pop(len(steps), 0.0))
        return attend(*args)

    def slow_update(*args):
        time.sleep(4.0 if len(steps) == 2 else 0.0)
        return update(*args)

    patch.setattr(trainer_module, "train_step", step)
    if dist.get_rank() == 1:
        patch.setattr(stages.StagedAttention, "attend", slow_attend)
        patch.setattr(torch.optim.AdamW, "step", slow_update)


@pytest.mark.slow
def test_unmeasured_phases_may_be_slow_but_measured_steps_may_not(tmp_path):
    train = {"steps": 9, "validate_every": 0, "save_every": 0}
    config = tiny_run(tmp_path, train=train, memory={"offload_optimizer": True})
    victims = Ranks(2)
    victims.start(2, tmp_path, run_and_record_exit, slow_at_first_then_hanging, config, tmp_path)
    wait_for(lambda: any(path.read_text() for path in tmp_path.glob("words-*")))
    message = next(path.read_text() for path in tmp_path.glob("words-*") if path.read_text())
    victims.close()
    assert message.startswith("4 rank 1 on ") and "no rank made progress for 3 s" in message
    assert "rank 1 last reported step 4, layer 0 / forward / attention" in message
    assert [line["step"] for line in metrics(config.train.run_dir)] == [1, 2, 3]
