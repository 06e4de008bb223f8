"""Each tracker's own files have every metric, offline, under the usual names; callbacks and
failures."""

import json
import os
import signal
import struct
import subprocess
import sys
import time

import pytest

from ithaka.log import trackers as trackers_module
from ithaka.log.console import Console
from ithaka.log.trackers import Trackers
from ithaka.train import trainer as trainer_module
from refusals import assert_refused
from runs import run, tiny_run, wait_for

VALUES = {"loss": 2.5, "val_loss": 2.25, "lr": 1e-3, "tokens": 400, "loss/a*b": 3.5, "mfu": None}


def tensorboard_scalars(folder):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    for file in sorted(folder.glob("run/tensorboard/events*")):
        for event in loader.EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                yield value.tag, event.step, round(value.tensor.float_val[0], 6)


def wandb_records(folder):
    """Read a .wandb file, a LevelDB log: blocks of 32 KiB, records with headers of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data = file.read_bytes()
        place = 7
        while place + 7 < len(data):
            _, length, kind = struct.unpack_from("<IHB", data, place)
            if kind == 1:
                yield Record.FromString(data[place + 7 : place + 7 + length])
            place += 7 + length
            place += (-place % 32768) if -place % 32768 < 7 else 0


def wandb_scalars(folder):
    for record in wandb_records(folder):
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        step = row.get("train/global_step")
        yield from (
            (key, step, value) for key, value in row.items() if key.startswith(("train/", "eval/"))
        )


def wandb_ending(folder):
    codes = [record.exit.exit_code for record in wandb_records(folder) if record.HasField("exit")]
    # the latest run's
    return {0: "finished", 1: "failed", 255: "killed"}[codes[-1]] if codes else ""


def trackio_scalars(folder):
    from trackio.sqlite_storage import SQLiteStorage

    for name in SQLiteStorage.get_runs(trackers_module.PROJECT):
        for row in SQLiteStorage.get_logs(trackers_module.PROJECT, name):
            yield from (
                (key, row["step"], value)
                for key, value in row.items()
                if key.startswith(("train/", "eval/"))
            )


def mlflow_scalars(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    for experiment in client.search_experiments():
        for each in client.search_runs([experiment.experiment_id]):
            assert each.data.params["train.seed"] == "0"
            for key in each.data.metrics:
                yield from (
                    (key, entry.step, entry.value)
                    for entry in client.get_metric_history(each.info.run_id, key)
                )


def mlflow_ending(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return run.info.status.lower()


ENDINGS = {"wandb": wandb_ending, "mlflow": mlflow_ending}
READERS = {
    "tensorboard": tensorboard_scalars,
    "wandb": wandb_scalars,
    "trackio": trackio_scalars,
    "mlflow": mlflow_scalars,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("mlflow", "wandb") else n for n in READERS],
)
def test_tracker_files_have_every_step_and_the_exit_status(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    monkeypatch.chdir(tmp_path)
    if name == "trackio":
        for module in ("trackio.sqlite_storage", "trackio.utils", "trackio"):
            monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio")
    config = tiny_run(tmp_path, train={"track": [name]})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for step, ending in enumerate(("killed", "failed", "finished")):
        trackers = Trackers(run_dir, config, step)
        assert trackers.log({"step": step + 1, **VALUES}, step + 1) == []
        assert trackers.close(ending) == []
        wait_for(lambda: name not in ENDINGS or ENDINGS[name](tmp_path) == ending, timeout_s=20)  # noqa: B023
        time.sleep(1.1 if name == "wandb" and step < 2 else 0)  # wandb names folders by the second
    source = "train/a_b_loss" if name == "mlflow" else "train/a*b_loss"
    names = {"train/loss": 2.5, "eval/loss": 2.25, "train/learning_rate": 1e-3, source: 3.5}
    logged = {each for each in READERS[name](tmp_path) if each[0] in names}
    assert logged == {(key, step, value) for key, value in names.items() for step in (1, 2, 3)}
    assert (
        name == "tensorboard" or json.loads((run_dir / trackers_module.IDS_FILE).read_text())[name]
    )


def test_tensorboard_forgets_the_steps_that_a_resumed_run_lost(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = tiny_run(tmp_path, train={"track": ["tensorboard"]})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for checkpoint, losses in ((0, [1.0, 2.0, 3.0]), (1, [9.0])):
        trackers = Trackers(run_dir, config, checkpoint)
        for step, loss in enumerate(losses, checkpoint + 1):
            assert trackers.log({"loss": loss}, step) == []
        assert trackers.close("killed") == []
    shown = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    shown.Reload()
    assert [(each.step, each.value) for each in shown.Scalars("train/loss")] == [(1, 1.0), (2, 9.0)]


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def failing(*_):
        raise OSError("no network")

    config = tiny_run(tmp_path, train={"track": ["wandb"]})
    monkeypatch.setitem(trackers_module.TRACKERS, "wandb", failing)
    assert_refused(
        lambda: Trackers(tmp_path, config, 0),
        "train.track=wandb",
        "no network",
        fix="fix its settings",
    )
    monkeypatch.setitem(
        trackers_module.TRACKERS,
        "wandb",
        lambda *_: trackers_module.Tracker(None, failing, failing),
    )
    (tmp_path / trackers_module.IDS_FILE).write_text('{"wan')  # truncated by a crash
    trackers = Trackers(tmp_path, config, 2)
    console = Console(tmp_path, 3, trackers=trackers)
    for message in trackers.log(VALUES, 1):
        console.print(message)
    assert trackers.log(VALUES, 2) == []
    console.close("failed")
    output = capsys.readouterr().out
    assert "train.track=wandb failed (OSError: no network); the run continues without it" in output
    assert output.count("OSError: no network") == 1


def crash(patch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("the run's own error")

    patch.setattr(trainer_module, "train_step", fail)


def stop(patch):
    train_step = trainer_module.train_step
    patch.setattr(
        trainer_module,
        "train_step",
        lambda *a, **k: os.kill(os.getpid(), signal.SIGINT) or train_step(*a, **k),
    )


@pytest.mark.parametrize("fault, ending", [(None, "finished"), (crash, "failed"), (stop, "killed")])
def test_trackers_learn_how_a_run_ended_and_cannot_change_it(
    tmp_path, monkeypatch, capsys, fault, ending
):
    pytest.importorskip("wandb")
    endings = []

    def close(ending):
        endings.append(ending)
        raise OSError("no network")

    monkeypatch.setitem(
        trackers_module.TRACKERS,
        "wandb",
        lambda *_: trackers_module.Tracker(None, lambda *_: None, close),
    )
    config = tiny_run(
        tmp_path, train={"track": ["wandb"], "validate_every": 0, "validate_sequences": 0}
    )
    if fault is not None:
        fault(monkeypatch)
    if fault is crash:
        with pytest.raises(ZeroDivisionError, match="the run's own error"):
            run(config)
    else:
        run(config)
    assert endings == [ending]
    words = (
        "train.track=wandb could not be closed (OSError: no network); it may lack the last steps"
    )
    assert capsys.readouterr().out.count(words) == 1
    try_lock = (
        "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    )
    # the run released it
    subprocess.run([sys.executable, "-c", try_lock, config.train.run_dir / "lock"], check=True)


class Recorder:
    """Records its calls in a file; the last `on_evaluation` fails."""

    def __init__(self, run_dir, config):
        self.file = run_dir / "calls.txt"
        self.steps = config.train.steps

    def write(self, *words):
        with self.file.open("a") as file:
            print(*words, file=file)

    def on_step(self, step, metrics):
        assert "val_loss" not in metrics or metrics["val_loss"] > 0
        self.write("step", step, "loss" in metrics)

    def on_evaluation(self, step, figures):
        self.write("evaluation", step, *figures)
        if step == self.steps:
            raise ValueError("no room")

    def on_save(self, step, checkpoint):
        assert (checkpoint / "state.json").is_file()
        self.write("save", step)


class Ending:
    def __init__(self, run_dir, config):
        self.file = run_dir / "ending.txt"

    def on_end(self, status):
        self.file.write_text(status)


def test_callbacks_are_called_and_cannot_end_the_run(tmp_path, capsys):
    names = ["test_trackers:Recorder", "test_trackers:Ending"]
    config = tiny_run(
        tmp_path, train={"callbacks": names, "steps": 3, "save_every": 1, "validate_every": 3}
    )
    run(config)
    calls = (config.train.run_dir / "calls.txt").read_text().splitlines()
    assert calls[:5] == [
        "step 0 False",
        "evaluation 0 val_loss",
        "step 1 True",
        "step 2 True",
        "save 1",
    ]
    assert calls[5:] == ["step 3 True", "evaluation 3 val_loss"], (
        "a callback that failed is not called again"
    )
    assert (config.train.run_dir / "ending.txt").read_text() == "finished"
    words = (
        "train.callbacks=test_trackers:Recorder failed in on_evaluation (ValueError: no "
        "room); the run continues"
    )
    assert capsys.readouterr().out.count(words) == 1
    for name in ("test_trackers", "test_trackers:Nobody", "nowhere:Class"):
        wrong = tiny_run(tmp_path / "wrong", train={"callbacks": [name]})
        refused = lambda: Trackers(tmp_path, wrong, 0)  # noqa: B023, E731
        assert_refused(refused, f"train.callbacks={name}", fix="package.module:Class")
