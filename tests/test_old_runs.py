"""Run directories and configurations from before go on, or are refused by the number of their format.

tests/old_run is what the first version wrote after two steps of the run below, but for the tensors.
"""

import json
import shutil
from pathlib import Path

import pytest

from ithaka.config import FORMAT, ConfigError, load
from ithaka.report.page import write_report
from ithaka.train import checkpoint
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
        run(load(folder / "config.yaml", settings), folder)
    assert (checkpoint.export(folder, tmp_path / "out") / "model.safetensors").is_file()


def test_old_settings_and_tensors_go_on(old_run, tmp_path):
    folder, settings = old_run
    file = folder / "checkpoints" / "step-00000002" / "state.json"
    place = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())["data"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data": place}))
    before = metrics(folder)
    assert "format" not in (folder / "config.yaml").read_text()
    run(load(folder / "config.yaml", settings), folder)
    after = metrics(folder)
    assert after[:2] == before and [record["step"] for record in after] == [1, 2, 3, 4]
    assert (folder / "config.yaml").read_text().startswith(f"format: {FORMAT}\n")
    assert valid(load(folder / "config.yaml", [*settings, "train.steps=6"]), folder).config.memory.offload == "host"


def test_an_old_run_is_reported(old_run):
    folder, _ = old_run
    assert write_report([folder]).is_file()


@pytest.mark.parametrize("number", [0, FORMAT + 1, "new"])
def test_a_directory_of_another_format_is_refused_by_its_number(old_run, number):
    folder, settings = old_run
    file = folder / "config.yaml"
    file.write_text(f"format: {number}\n{file.read_text()}")
    words = f"config.yaml has format {number}, and this ithaka reads 1 to {FORMAT}; use the ithaka that wrote it"
    with pytest.raises(ConfigError, match=words):
        load(file, settings)


def test_a_checkpoint_of_another_format_is_refused_by_its_number(old_run):
    folder, settings = old_run
    file = folder / "checkpoints" / "step-00000002" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 7}))
    with pytest.raises(ConfigError, match=r"its format is 7, and this ithaka reads 1; use the ithaka that wrote it"):
        valid(load(folder / "config.yaml", settings), folder)
