"""A curriculum trains several lengths in one run, each with its own plan, and resumes from any
step."""

import dataclasses
import json
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from ithaka.checkpoint.export import export
from ithaka.cli import app
from ithaka.config import Origin, load_config, parse_config, to_dict
from ithaka.plan.hardware import Hardware, find_gpu
from ithaka.run import run_files
from ithaka.run.draft import Draft, Request
from ithaka.run.road import check, plan_entries
from ithaka.run.rules import check_settings
from ithaka.train.step import learning_rate
from refusals import assert_command_refused, assert_refused
from runs import bitwise_metrics, copy_run_at_step, metrics, saves_in_time, tiny_run

ENTRIES = [
    {"context": 61, "steps": 3},
    {"context": 122, "steps": 3, "rope": {"theta": 5e4}, "data": {"documents": "together"}},
    {
        "context": 90,
        "steps": 2,
        "data": {"path": "OTHER"},
        "optim": {"lr": 5e-4, "warmup_steps": 1},
    },
    {"context": 61, "steps": 2, "data": {"path": "FIRST"}},
]


def train(*arguments):
    with saves_in_time():
        result = CliRunner().invoke(app, ["train", *map(str, arguments), "--ranks", "1"])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The run directory of ENTRIES, its YAML file and its output."""
    folder = tmp_path_factory.mktemp("curriculum")
    tree = to_dict(tiny_run(folder))
    shutil.copytree(folder / "texts", folder / "others")
    (folder / "others" / "00.txt").write_text("Quite another text. " * 20)
    paths = {"FIRST": str(folder / "texts"), "OTHER": str(folder / "others")}
    tree["curriculum"] = json.loads(json.dumps(ENTRIES))
    for entry in tree["curriculum"]:
        entry["data"] = {k: paths.get(v, v) for k, v in entry.get("data", {}).items()}
    del tree["train"]["steps"], tree["data"]["context"], tree["train"]["run_dir"]
    tree["train"] |= {"save_every": 1, "keep_last": 20}
    (folder / "file.yaml").write_text(yaml.safe_dump(tree))
    return (
        folder / "run",
        folder / "file.yaml",
        train(folder / "file.yaml", "--run-dir", folder / "run"),
    )


def test_one_command_trains_all_entries(finished):
    run_dir, file, output = finished
    records = metrics(run_dir)[1:]
    assert [record["step"] for record in records] == list(range(1, 11))
    per_step = [b["tokens"] - a["tokens"] for a, b in zip(metrics(run_dir), records, strict=False)]
    assert per_step == [61] * 3 + [122] * 3 + [90] * 2 + [61] * 2
    optim = dataclasses.replace(load_config(file).optim, decay_steps=10)
    third_optim = dataclasses.replace(optim, lr=5e-4, warmup_steps=1, decay_steps=2)
    rates = [learning_rate(step, optim, 10) for step in range(10)]
    rates[6:8] = learning_rate(0, third_optim, 2), learning_rate(1, third_optim, 2)
    assert [record["lr"] for record in records] == rates
    assert "4 of 4, steps 9 to 10" in output and "theta 50000.0" in output.partition("2 of 4")[2]
    assert "every 15 minutes and 1 step, in the background" in output
    assert "first tokens" not in output and "timeouts" not in output
    assert read_theta(run_dir / "model") == 5e4
    assert not (run_dir / "tokens").exists() or not any((run_dir / "tokens").iterdir())


def test_an_entry_continues_the_data_of_an_earlier_one(finished):
    """The last entry continues the data of the first two."""
    states = [
        json.loads((finished[0] / f"checkpoints/step-{step:08d}/state.json").read_text())
        for step in (6, 8, 9)
    ]
    before, other, after = (state["data"] for state in states)
    assert before["data"] == after["data"] != other["data"]
    assert after["sequences"] == before["sequences"] + 1 and other["sequences"] == 2


def test_a_step_is_exported_with_the_positions_of_its_entry(finished, tmp_path):
    thetas = [read_theta(export(finished[0], tmp_path / str(step), step=step)) for step in (3, 4)]
    assert thetas == [10000.0, 5e4]


def read_theta(folder):
    return json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 7])
def test_resume_from_any_entry_repeats_every_number(finished, tmp_path, step):
    again = copy_run_at_step(finished[0], tmp_path / "again", step)
    train("--resume", again)
    assert bitwise_metrics(again) == bitwise_metrics(finished[0])


def test_a_finished_curriculum_offers_resume_auto(finished):
    assert_command_refused(
        ["train", "--resume", str(finished[0])], "curriculum", fix="--resume auto"
    )


ENTRY = {"context": 8, "steps": 1}

# (configuration, what the message names, fix)
REFUSED = [
    ({"train": {"steps": 7}}, ["train.steps=7", "curriculum"], "per entry"),
    ({"data": {"context": 7}}, ["data.context=7", "curriculum"], "per entry"),
    ({"train": {"epochs": 2}}, ["train.epochs=2", "curriculum"], "leave it out"),
    (
        {"model": {"rope": {"theta": 9.0}}, "curriculum": [{**ENTRY, "rope": {"theta": 8.0}}]},
        ["model.rope", "curriculum"],
        "leave one out",
    ),
    ({"curriculum": {"context": 8}}, ["curriculum={context: 8}"], "a list"),
    ({"curriculum": [{"context": 8}]}, ["curriculum", "steps"], "add it"),
    ({"curriculum": [{**ENTRY, "steps": 0}]}, ["curriculum.steps=0"], "at least 1"),
    (
        {"curriculum": [{"context": 8, "step": 1}]},
        ["curriculum.step=1"],
        "did you mean curriculum.steps?",
    ),
    (
        {"curriculum": [{**ENTRY, "data": {"context": 9}}]},
        ["curriculum.data.context"],
        "context of the entry",
    ),
    (
        {"curriculum": [{**ENTRY, "data": {"pth": 9}}]},
        ["curriculum.data.pth=9"],
        "did you mean curriculum.data.path?",
    ),
    (
        {"curriculum": [{**ENTRY, "optim": {"lr": -1}}]},
        ["curriculum[0]", "optim.lr=-1"],
        "at least 0",
    ),
    (
        {"curriculum": [{**ENTRY, "steps": 4, "optim": {"warmup_steps": 4}}]},
        ["optim.warmup_steps=4"],
        "give more",
    ),
]


@pytest.mark.parametrize("tree, named, fix", REFUSED)
def test_bad_curriculum_is_refused(tree, named, fix):
    config = {"curriculum": [ENTRY], **tree}
    assert_refused(lambda: check_settings(parse_config(config)), *named, fix=fix)


def test_later_entries_are_checked_before_the_first_starts(finished, tmp_path):
    tree = yaml.safe_load(finished[1].read_text())
    tree["curriculum"][3]["data"] = {"path": "/nowhere"}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(tree))
    arguments = ["train", str(tmp_path / "file.yaml"), "--run-dir", str(tmp_path / "run")]
    assert_command_refused(arguments, "data.path=/nowhere", fix="data.path=hf://org/name")
    assert not (tmp_path / "run").exists()


def test_each_entry_has_its_own_plan(tmp_path, monkeypatch):
    curriculum = [{"context": 2**15, "steps": 1}, {"context": 2**24, "steps": 1}]
    tree = {
        "model": {"embedded": "base"},
        "memory": {"tile_tokens": 4096},
        "curriculum": curriculum,
    }
    config = parse_config(tree).with_values({"train.run_dir": tmp_path / "run"}, Origin.COMMAND)
    hardware = Hardware(find_gpu("H100"), 8, 1, host_bytes=2 * 10**12, disk_bytes=0)
    draft = Draft(Request(), config)
    entries = plan_entries(draft, hardware)
    layouts = [entry.plan.layout for entry in entries]
    assert layouts[0] != layouts[1] and {layout.tile_tokens for layout in layouts} == {4096}
    assert [entry.entry.start for entry in entries] == [0, 1]
    monkeypatch.setattr(run_files, "check_inputs", lambda run: 0)
    (tmp_path / "config.yaml").write_text(check(draft, entries, 8, hardware).saved_settings)
    stored = load_config(tmp_path / "config.yaml")
    assert stored == config
    names = {"model.embedded", "memory.tile_tokens"}
    assert "memory.tile_tokens" in stored.given
    assert not stored.given & (entries[0].plan.settings.keys() - names)
