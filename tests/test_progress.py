"""Long steps report their progress, on the console and in metrics.jsonl."""

import json
import time
from dataclasses import replace

import pytest
import torch

from ithaka.config import embedded_model
from ithaka.layout import Layout
from ithaka.log.console import Console, describe_progress
from ithaka.log.metrics import read_metrics
from ithaka.phases import listening, phase
from ithaka.plan.hardware import Hardware, find_gpu
from ithaka.plan.search import Plan
from ithaka.plan.seconds import planned_shares
from ithaka.plan.shape import StepShape
from ithaka.profile.position import PhaseTracker
from ithaka.profile.progress import Progress, StepProgress
from ithaka.trace.shapes import shape_from_config

SHAPE = shape_from_config(embedded_model("small"))
PLAN = Plan(SHAPE, Layout(heads_per_stage=2), Hardware(find_gpu("CPU")), StepShape(4096))
MICRO_STEPS = 2


@pytest.fixture
def progress():
    tracker = PhaseTracker(torch.device("cpu"))
    shares = planned_shares(SHAPE, PLAN.layout, PLAN.hardware, PLAN.work)

    def make(report=lambda _: None, every_s: float = 30.0) -> Progress:
        made = Progress(tracker, shares, MICRO_STEPS, report)
        made.every_s = every_s
        return made

    with listening(tracker):
        yield make


def run_layer(index: int, direction: str) -> None:
    with phase(f"layer {index}"), phase(direction), phase("attention"), phase("stage 0"):
        pass


def run_step() -> None:
    """Enter the phases of a step with two micro-steps."""
    for _ in range(MICRO_STEPS):
        for index in range(SHAPE.num_layers):
            run_layer(index, "forward")
        for name in ("loss forward", "loss backward"):
            with phase(name):
                pass
        for index in reversed(range(SHAPE.num_layers)):
            run_layer(index, "backward")


def test_shares_of_a_step_add_up_to_one(progress):
    steps = progress()
    with steps.step(1):
        run_step()
        _, share = steps.update()
    assert share == pytest.approx(1)


def test_layers_are_weighted_by_their_planned_seconds(progress):
    steps = progress()
    with steps.step(1):
        run_layer(0, "forward")
        forward = steps.update()[1]
        run_layer(0, "backward")
        backward = steps.update()[1] - forward
        with phase("layer 1"), phase("forward"), phase("attention"), phase("stage 3"):
            path, share = steps.update()
    assert 2 < backward / forward < 5, "backward recomputes attention, then differentiates it"
    assert path == ("layer 1", "forward", "attention", "stage 3") and share == forward + backward


def test_progress_is_reported_while_the_step_runs(progress):
    reports: list[StepProgress] = []
    with progress(reports.append, every_s=0.02).step(7):
        run_layer(0, "forward")
        with phase("layer 1"), phase("forward"):
            deadline = time.monotonic() + 60
            while len(reports) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
    count = len(reports)
    run_layer(2, "forward")  # not reported outside a step
    assert reports[0].step == 7 and reports[0].phase == "layer 1 / forward"
    assert 0 < reports[0].percent < 100 and reports[0].eta_s is not None
    assert reports[1].percent == reports[0].percent and reports[1].eta_s < reports[0].eta_s, (
        "the ETA counts down within a layer"
    )
    assert len(reports) == count


REPORT = StepProgress(3, "layer 7 / backward / attention / stage 2", 41.0, 600.0, 5025.0)


def test_console_and_metrics_show_progress(tmp_path, capsys):
    console = Console(tmp_path, num_steps=9)
    console.progress(REPORT)
    console.close()
    printed = capsys.readouterr().out
    assert "step 3/9 in progress: layer 7 / backward / attention / stage 2  41%" in printed
    assert "1:23:45 left" in printed
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["progress"]["percent"] == 41.0
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_resuming_drops_progress_of_lost_steps(tmp_path):
    console = Console(tmp_path, num_steps=9)
    for step in (2, 3):
        console.progress(replace(REPORT, step=step))
    console.close()
    Console(tmp_path, num_steps=9, step=2).close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2]


def test_a_step_that_just_started_has_no_eta():
    assert describe_progress(StepProgress(1, "", 0.0, 1.0, None)) == "starting  0%"
