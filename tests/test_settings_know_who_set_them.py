"""Every value has an origin, from the file to the run: the planner replaces what nobody gave."""

import dataclasses
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from peft import LoraConfig

from ithaka.cli.runs import run_entries
from ithaka.config import CPU_DEFAULT, ConfigError, Origin, RunEntry, load_config, parse_config
from ithaka.plan.hardware import Hardware, find_gpu
from ithaka.plan.search import make_search_space
from ithaka.run import launch, road, run_files
from ithaka.run.detect import detect_machine
from ithaka.run.draft import AUTO, Draft, Request, read_settings
from ithaka.run.road import Planned, check, model_shape, plan_entries, plan_settings
from ithaka.run.rules import RUN_RULES
from runs import MODEL, adopted, run, tiny_run

H100S = Hardware(find_gpu("H100"), 8, 1, host_bytes=2 * 10**12, disk_bytes=0)


def origins(config, *names):
    return [config.origin(name) for name in names]


@pytest.fixture
def without_gpus(monkeypatch):
    monkeypatch.setattr(launch, "num_gpus", lambda: 0)


def test_the_last_of_file_and_command_line_set_a_value(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 7, batch: 2}\nloss: dpo\nadapter: {rank: 4}\n")
    config = load_config(file, ["train.steps=9", "data.reasoning.turns=last"])
    names = ("train.batch", "loss.type", "adapter.rank", "train.steps", "data.reasoning")
    assert origins(config, *names) == [Origin.FILE] * 3 + [Origin.COMMAND] * 2
    # `loss: dpo` also sets data.train_on, which nobody gave
    assert config.data.train_on == "pairs"
    assert origins(config, "data.train_on", "adapter.alpha", "optim.lr") == [Origin.DEFAULT] * 3
    assert config.given == {*names}
    changed = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=5))
    assert changed.given == config.given
    assert parse_config({"train": {"steps": 9}}) == load_config(None, ["train.steps=9"])


def test_the_demonstration_sets_what_the_command_does_not(without_gpus):
    config = adopted(None, ["train.steps=9"]).config
    demo = {f"{section}.{key}" for section, keys in CPU_DEFAULT.items() for key in keys}
    assert config.given == demo | {"train.steps"}
    assert {config.origin(name) for name in demo - {"train.steps"}} == {Origin.DEMO}
    assert config.origin("train.steps") == Origin.COMMAND
    assert (config.optim.decay_steps, config.origin("optim.decay_steps")) == (9, Origin.DEFAULT)


def test_a_model_and_an_adapter_set_what_their_files_say(tmp_path):
    LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"]).save_pretrained(tmp_path)
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | quantized))
    changes = (f"model.path={tmp_path}", f"adapter.path={tmp_path}", "adapter.dropout=0.5")
    config = adopted(None, changes).config
    names = ("adapter.rank", "adapter.alpha", "adapter.targets", "adapter.base")
    assert origins(config, *names) == [Origin.MODEL] * 4
    assert (config.adapter.rank, config.adapter.base) == (3, "nf4")
    given = ("model.path", "adapter.path", "adapter.dropout")
    assert origins(config, *given, "optim.lr") == [Origin.COMMAND] * 3 + [Origin.DEFAULT]


def test_a_resumed_run_sets_what_it_was_started_with(tmp_path):
    settings = {"steps": 2, "validate_every": 0}
    config = tiny_run(tmp_path, train=settings, optim={"warmup_steps": 0})
    run(config)
    resumed = adopted(None, ["train.steps=5"], config.train.run_dir).config
    names = ("train.batch", "data.path", "optim.decay_steps", "memory.offload", "train.run_dir")
    assert origins(resumed, *names) == [Origin.RUN] * 5
    assert resumed.origin("train.steps") == Origin.COMMAND


def test_a_planned_run_keeps_what_was_given(tmp_path, monkeypatch):
    tree = {"model": {"embedded": "base"}, "memory": {"tile_tokens": 4096}}
    tree["train"] = {"run_dir": str(tmp_path / "run")}
    changes = ["parallel.cp=auto", "memory.overlap=false", "data.context=1M"]
    planned = plan_settings(parse_config(tree, changes), H100S)
    config = planned.config
    given = {"memory.tile_tokens": Origin.FILE, "memory.overlap": Origin.COMMAND}
    for name, value in planned.plan.settings.items():
        assert config.get(name) == value
        assert config.origin(name) == given.get(name, Origin.PLAN), name
    assert {"parallel.cp", "memory.offload"} <= planned.plan.settings.keys() - config.given
    assert config.origin("attention.kernel") == Origin.DEFAULT
    again = plan_settings(config, H100S).config
    assert (again, again.origins) == (config, config.origins)
    # What its run writes down, it takes back when it is resumed.
    monkeypatch.setattr(run_files, "check_inputs", lambda run: 0)
    settings = check(Draft(Request(), config), [planned], 8, H100S).saved_settings
    assert yaml.safe_load(settings)["origins"]["memory.offload"] == "the plan"
    (tmp_path / "config.yaml").write_text(settings)
    stored = load_config(tmp_path / "config.yaml")
    assert stored == config
    resumed = read_settings(Request(resume=tmp_path))
    assert resumed.saved == stored and {*resumed.saved.origins.values()} == {Origin.RUN}
    assert resumed.saved_origins["memory.offload"] == "the plan"


def test_a_resumed_run_is_not_planned_again(tmp_path):
    config = parse_config({"format": 2, "model": {"embedded": "base"}})
    draft = Draft(Request(resume=tmp_path), config)
    [planned] = plan_entries(draft, H100S)
    assert (planned.plan, planned.config.origins) == (None, config.origins)


def test_settings_that_follow_from_others_have_their_origin(tmp_path):
    """Steps of a curriculum, and micro-steps of a global batch."""
    file = tmp_path / "file.yaml"
    file.write_text("curriculum: [{context: 61, steps: 3}, {context: 122, steps: 2}]")
    config = adopted(file).config
    names = ("train.steps", "data.context", "optim.decay_steps")
    expected = [Origin.FILE, Origin.FILE, Origin.DEFAULT]  # the file's entries decide the first two
    assert origins(config.of_entry(1), *names) == expected
    config = tiny_run(tmp_path, train={"global_batch": 4})
    planned = Planned(config, model_shape(config))
    draft = Draft(Request(), config)
    config = check(draft, [planned], 1, detect_machine(config, 1, None)).config
    assert (config.train.accumulate, config.origin("train.accumulate")) == (4, Origin.DEFAULT)


def test_a_runs_file_given_as_a_file_is_the_users(tmp_path):
    """Values that a curriculum decides may stand in it, other values are refused."""
    file = tmp_path / "config.yaml"
    tree = {"format": 2, "curriculum": [{"context": 61, "steps": 3}]}
    for steps, is_refused in ((3, False), (4, True)):
        file.write_text(yaml.safe_dump({**tree, "train": {"steps": steps}}))
        if is_refused:
            with pytest.raises(ConfigError, match="train.steps=4 cannot be combined"):
                load_config(file)
        else:
            assert load_config(file).origin("train.steps") == Origin.FILE


def test_auto_leaves_a_setting_to_the_plan():
    changes = ["parallel.cp=auto", "memory.attention_offload=null", "memory.overlap=false"]
    config = load_config(None, ["model.embedded=base", "data.context=1M", *changes])
    space = make_search_space(config, model_shape(config), H100S)
    assert space.origins == {"memory.overlap": Origin.COMMAND}


def test_rules_render():
    """Names in brackets become settings; a package's extra stays."""
    config = load_config(None, ["adapter.rank=4", "optim.name=adamw8bit"])
    texts = [str(rule.error({}, config)) for rule in RUN_RULES if "needs an extra" in rule.text]
    assert any("'.[adapter]'" in text for text in texts)
    assert any("'.[adamw8bit]'" in text for text in texts)


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_restart_reads_the_settings_of_a_resumed_run_again(tmp_path, monkeypatch, is_resumed):
    """The first attempt has written them; a file of the user is read once."""
    settings = {"format": 2, "model": {"embedded": "small"}, "train": {"run_dir": str(tmp_path)}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    calls = []

    def prepare_run(request, draft):
        calls.append((request, draft))
        return SimpleNamespace(
            finished=False, plan=None, entry=RunEntry(), num_ranks=1, run_dir=tmp_path
        )

    monkeypatch.setattr(road, "prepare_run", prepare_run)
    codes = [1, 0]
    monkeypatch.setattr(launch, "run_ranks", lambda *_: codes.pop(0))
    request = Request(resume=tmp_path) if is_resumed else Request(tmp_path / "config.yaml")
    first = read_settings(request)
    assert run_entries(request, first, launch.Restarts(1), only_profile=False) == 0
    (_, earlier), (later_request, later) = calls
    assert earlier is first
    if is_resumed:
        assert later is None and later_request == request
    else:
        assert later.config is first.config
        assert later.request == later_request == replace(request, resume=AUTO, run_dir=tmp_path)
