"""Run directories and configurations from before go on, or are refused by the number of their format.

tests/old_run is what the first version wrote after two steps of the run below, but for the tensors.
"""

import json
import shutil
from pathlib import Path

import pytest

from ithaka.config import CONFIG_FORMAT, ConfigError, load_config
from ithaka.report.page import write_report
from ithaka.train import checkpoint
from ithaka.train.step import learning_rate
from runs import metrics, run, tiny_run, valid

MODEL = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


@pytest.fixture
def old_run(tmp_path):
    """The directory, with tensors for its checkpoint, and the settings that say where its files are now."""
    train = {"steps": 2, "save_every": 2, "validate_every": 0, "validate_sequences": 0}
    config = tiny_run(tmp_path, model={**MODEL, "num_hidden_layers": 1}, train=train, parallel={"cp": 1})
    run(config)
    folder = tmp_path / "old"
    shutil.copytree(Path(__file__).parent / "old_run", folder)
    saved, tensors = config.train.run_dir / "checkpoints" / "step-00000002", folder / "checkpoints" / "step-00000002"
    for file in (".metadata", "__0_0.distcp"):
        shutil.copy(saved / file, tensors / file)
    state = json.loads((tensors / "state.json").read_text())
    state["file_bytes"] = {file: (tensors / file).stat().st_size for file in state["file_bytes"]}
    (tensors / "state.json").write_text(json.dumps(state))
    where = [f"model.path={config.model.path}", f"data.path={config.data.path}", f"train.run_dir={folder}"]
    return folder, [*where, "train.steps=4"]


def test_an_old_place_in_the_data_is_refused_by_its_number_and_the_run_exported(old_run, tmp_path):
    folder, settings = old_run
    with pytest.raises(ConfigError, match="position in the data has format 1, .* reads 4 to 5: .* export the run"):
        run(load_config(folder / "config.yaml", settings), folder)
    assert (checkpoint.export(folder, tmp_path / "out") / "model.safetensors").is_file()


def test_old_settings_and_tensors_go_on(old_run, tmp_path):
    folder, settings = old_run
    file = folder / "checkpoints" / "step-00000002" / "state.json"
    place = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())["data"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data": place}))
    before = metrics(folder)
    assert "format" not in (folder / "config.yaml").read_text()
    run(load_config(folder / "config.yaml", settings), folder)
    after = metrics(folder)
    assert after[:2] == before and [record["step"] for record in after] == [1, 2, 3, 4]
    assert (folder / "config.yaml").read_text().startswith(f"format: {CONFIG_FORMAT}\n")
    assert (
        valid(load_config(folder / "config.yaml", [*settings, "train.steps=6"]), folder).config.memory.offload == "host"
    )


def test_steps_without_a_label_neither_update_nor_count(tmp_path):
    """They are in rounds that format 4 began: sequences without a label are left out of others."""
    rows = [{"input_ids": [i] * 20, "labels": [-100 if i % 3 else i] * 10 + [i] * 10} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "a.jsonl"), "context": 10, "validation_fraction": 0}
    train = {"steps": 2, "save_every": 2, "validate_every": 0, "validate_sequences": 0}
    config = tiny_run(tmp_path, model={**MODEL, "num_hidden_layers": 1}, data=data, train=train, parallel={"cp": 1})
    run(config)
    folder = config.train.run_dir
    assert "40 of 120 sequences have no token to train" in json.loads((folder / "data.json").read_text())["unlabelled"]
    file = folder / "checkpoints" / "step-00000002" / "state.json"
    state = json.loads(file.read_text())
    state["data"]["version"] = 4
    del state["checksums"]
    for packing in state["data"]["packings"]:
        assert packing.pop("labelled")
    file.write_text(json.dumps(state))
    run(load_config(folder / "config.yaml", ["train.steps=12", "train.save_every=12"]), folder)
    lines = metrics(folder)
    steps, events = ([line for line in lines if ("event" in line) == is_event] for is_event in (False, True))
    assert [step["step"] for step in steps] == [*range(1, 13)]
    assert all(step["label_tokens"] == 9 and step["loss"] > 0 and step["grad_norm"] > 0 for step in steps)
    assert [step["lr"] for step in steps[2:]] == [learning_rate(i, config.optim, 12) for i in range(2, 12)]
    assert [event["unlabelled"] for event in events] == [True], "reported once"
    done = json.loads((folder / "checkpoints" / "step-00000012" / "state.json").read_text())["data"]["packings"][0]
    assert done["done"] > 12, "the data has advanced"


def test_an_old_run_is_reported(old_run):
    folder, _ = old_run
    assert write_report([folder]).is_file()


@pytest.mark.parametrize("number", [0, CONFIG_FORMAT + 1, "new"])
def test_a_directory_of_another_format_is_refused_by_its_number(old_run, number):
    folder, settings = old_run
    file = folder / "config.yaml"
    file.write_text(f"format: {number}\n{file.read_text()}")
    words = f"config.yaml has format {number}, and this ithaka reads 1 to {CONFIG_FORMAT}; use the ithaka that wrote it"
    with pytest.raises(ConfigError, match=words):
        load_config(file, settings)


def test_a_checkpoint_of_another_format_is_refused_by_its_number(old_run):
    folder, settings = old_run
    file = folder / "checkpoints" / "step-00000002" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 7}))
    with pytest.raises(ConfigError, match=r"its format is 7, and this ithaka reads 1; use the ithaka that wrote it"):
        valid(load_config(folder / "config.yaml", settings), folder)
