"""A long step says where it is: on the console and in metrics.jsonl."""

import json
import time
from dataclasses import replace

import pytest
import torch

from ithaka.config import embedded_model
from ithaka.data.stream import Batch
from ithaka.layout import Layout
from ithaka.phases import listening, phase
from ithaka.plan.hardware import find_gpu
from ithaka.plan.shape import Work, shape_from_config
from ithaka.profile.progress import Job, Progress, Report
from ithaka.train.console import Console, Metrics, describe_progress, read_metrics
from ithaka.train.watch import with_documents

SHAPE = shape_from_config(embedded_model("small"))
JOB = Job(SHAPE, Layout(heads_per_stage=2), Work(4096), micro_steps=2, num_ranks=1, gpu=find_gpu("CPU"))


def run_layer(index: int, direction: str, again: bool = False) -> None:
    with phase(f"layer {index}"), phase(direction):
        for stage in [0, 1, 2, 3] * (2 if again else 1):
            with phase("attention"), phase(f"stage {stage}"):
                pass


def run_step() -> None:
    """The marks of a step of two micro-steps, attention recomputed."""
    for _ in range(JOB.micro_steps):
        for index in range(SHAPE.num_layers):
            run_layer(index, "forward")
        for name in ("loss forward", "loss backward"):
            with phase(name):
                pass
        for index in reversed(range(SHAPE.num_layers)):
            run_layer(index, "backward", again=True)


def test_all_work_is_counted_once():
    progress = Progress(torch.device("cpu"), lambda report: None)
    with listening(progress):
        progress.start(1, JOB)
        run_step()
        _, (done, flops) = progress._device_at()
        progress.stop()
    assert done == pytest.approx(progress._done.total_s)
    assert flops == pytest.approx(sum(JOB.flops().values()))


def test_a_stage_in_the_middle_of_a_layer_counts():
    progress = Progress(torch.device("cpu"), lambda report: None)
    with listening(progress):
        progress.start(1, JOB)
        with phase("layer 0"), phase("forward"):
            with phase("attention"), phase("stage 0"):
                pass
            path, (done, _) = progress._device_at()
        progress.stop()
    assert path == ("layer 0", "forward", "attention", "stage 0")
    assert 0 < done < 0.05 * progress._done.total_s


def test_reports_come_while_the_step_runs():
    said: list[Report] = []
    progress = Progress(torch.device("cpu"), said.append, every_s=0.02)
    with listening(progress):
        progress.start(7, JOB)
        run_layer(0, "forward")
        with phase("layer 1"), phase("forward"):
            deadline = time.monotonic() + 10
            while not said and time.monotonic() < deadline:
                time.sleep(0.01)
        progress.stop()
        count = len(said)
        run_layer(2, "forward")  # outside of a step nobody is told
    assert said[0].step == 7 and said[0].phase == "layer 1 / forward"
    assert 0 < said[0].percent < 100 and said[0].eta_s is not None and said[0].flops_s is not None
    assert len(said) == count


REPORT = Report(3, "layer 7 / backward / attention / stage 2", 41.0, 600.0, 5025.0, 512e12)


def test_console_and_metrics_show_it(tmp_path, capsys):
    console = Console(tmp_path, num_steps=9)
    console.progress(REPORT)
    console.close()
    shown = capsys.readouterr().out
    assert "step 3/9 under way: layer 7 / backward / attention / stage 2  41%" in shown
    assert "1:23:45 left  512 TFLOP/s per rank" in shown
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["progress"]["percent"] == 41.0
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_resuming_drops_progress_of_lost_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 0)
    for step in (2, 3):
        metrics.write(replace(REPORT, step=step))
    metrics.close()
    Metrics(path, 2).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2]


def test_nothing_known_is_left_out():
    assert describe_progress(Report(1, "", 0.0, 1.0, None, None)) == "starting  0%"


def test_a_step_counts_the_pairs_of_its_documents():
    """Two documents of 300 and 700 tokens are less work than one of 1000."""
    ids = torch.tensor([0] * 300 + [1] * 700)[None]
    job = with_documents(JOB, [Batch(ids, ids, ids)])
    assert job.work.pairs(None) / job.work.tokens == pytest.approx((300 * 301 / 2 + 700 * 701 / 2) / 1000)
