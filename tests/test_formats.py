"""Run directories and checkpoints of another format are refused, and the error names the format."""

import json

import pytest

from ithaka.config import CONFIG_FORMAT, ConfigError, load_config
from runs import run, tiny_run, validate

MODEL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


@pytest.fixture
def saved_run(tmp_path):
    """The directory of a run of two steps, and settings to resume it with."""
    train = {"steps": 2, "save_every": 2, "validate_every": 0, "validate_sequences": 0}
    config = tiny_run(
        tmp_path, model={**MODEL, "num_hidden_layers": 1}, train=train, parallel={"cp": 1}
    )
    run(config)
    return config.train.run_dir, ["train.steps=4"]


@pytest.mark.parametrize("number", [0, CONFIG_FORMAT + 1, "new"])
def test_a_directory_of_another_format_is_refused_by_its_number(saved_run, number):
    folder, settings = saved_run
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace(f"format: {CONFIG_FORMAT}", f"format: {number}"))
    with pytest.raises(
        ConfigError, match=rf"config.yaml .*format {number}\b.* reads .*{CONFIG_FORMAT}\b.*wrote it"
    ):
        load_config(file, settings)


def test_a_checkpoint_of_another_format_is_refused_by_its_number(saved_run):
    folder, settings = saved_run
    file = folder / "checkpoints" / "step-00000002" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 7}))
    with pytest.raises(ConfigError, match=r"format 7, .*reads 1; use the ithaka that wrote it"):
        validate(load_config(folder / "config.yaml", settings), folder)
