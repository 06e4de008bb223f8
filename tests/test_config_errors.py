"""The configuration refuses unknown names, wrong types and values out of range, with field, value
and fix."""

import dataclasses
import pathlib

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaka.config import (
    BUILTIN_TEMPLATES,
    CONFIG_FORMAT,
    CPU_DEFAULT,
    GPU_DEFAULT,
    SECTIONS,
    AdapterConfig,
    Config,
    MemoryConfig,
    ParallelConfig,
    TrainConfig,
    format_value,
    load_config,
    parse_config,
    to_dict,
    to_yaml,
    with_absolute_paths,
)
from ithaka.config.fields import USUAL_NAMES
from ithaka.run.rules import check_settings
from refusals import assert_refused

# (override, what the message names, fix)
BAD_OVERRIDES = [
    ("data.contxt=5", "data.contxt=5", "did you mean data.context?"),
    ("dta.context=5", "dta", "did you mean data?"),
    ("train.save_steps=5", "train.save_steps=5", "did you mean train.save_every?"),
    ("train.eval_steps=5", "train.eval_steps=5", "did you mean train.validate_every?"),
    ("train.learning_rate=5", "train.learning_rate=5", "did you mean optim.lr?"),
    ("learning_rate.x=5", "learning_rate", "did you mean optim.lr?"),
    ("banana.x=5", "banana", "use one of model, adapter, data"),
    ("optim.zzz=5", "optim.zzz=5", "use one of optim.name, optim.lr"),
    ("data.context=0", "data.context=0", "at least 2"),
    ("data.context=long", "data.context=long", "integer"),
    ("data.context=1.5", "data.context=1.5", "integer"),
    ("data.context=true", "data.context=true", "integer"),
    ("data.context=null", "data.context=null", "integer"),
    ("data.context=1G", "data.context=1G", "integer"),
    ("data.path=", "data.path=", "null"),
    ("data.path=''", "data.path=", "path or null"),
    ("data.validation_fraction=1", "data.validation_fraction=1", "less than 1"),
    (
        "data.sources=[{path: a, wieght: 2}]",
        "data.sources.wieght=2",
        "did you mean data.sources.weight?",
    ),
    ("data.sources=[{path: a, weight: 0}]", "data.sources.weight=0", "more than 0"),
    ("data.sources=[{path: a}, {weight: 2}]", "data.sources={weight: 2}", "add one"),
    ("data.path=~nosuchuser/x", "data.path=~nosuchuser/x", "path or null"),
    ("data..path=x", "--set data..path=x", "train.steps=100"),
    ("data.sources=[a, b]", "data.sources=", "[{path: a.jsonl"),
    ("data.sources={path: a}", "data.sources=", "[{path: a.jsonl"),
    ("parallel.cp=0", "parallel.cp=0", "at least 1"),
    ("parallel.cp=most", "parallel.cp=most", "integer or auto or all"),
    ("memory.checkpoint=some", "memory.checkpoint=some", "none or full"),
    ("memory.keep_attention=-1", "memory.keep_attention=-1", "at least 0"),
    ("memory.offload_optimizer=1", "memory.offload_optimizer=1", "true or false"),
    ("model.dtype=fp8", "model.dtype=fp8", "bfloat16"),
    ("model.rope=yarn", "model.rope=yarn", "{theta: 8.0e6} or null"),
    ("model.rope={rope_theta: 5}", "model.rope.rope_theta=5", "did you mean model.rope.theta?"),
    (
        "model.rope={type: dynamic}",
        "model.rope.type=dynamic",
        "default or linear or llama3 or yarn or longrope",
    ),
    ("model.rope={factor: 0.5}", "model.rope.factor=0.5", "at least 1"),
    ("model.rope={type:yarn}", "model.rope={type:yarn}", "write {type: yarn}"),
    ("optim.betas=0.9", "optim.betas=0.9", "2 numbers"),
    ("optim.betas=[0.9, 1.0]", "optim.betas=1.0", "less than 1"),
    ("optim.lr=nan", "optim.lr=nan", "number"),
    ("optim.lr=-1e-3", "optim.lr=-0.001", "at least 0"),
    ("optim.clip_norm=0", "optim.clip_norm=0", "more than 0"),
    ("optim.min_lr_ratio=2", "optim.min_lr_ratio=2", "at most 1"),
    ("adapter.rank=0", "adapter.rank=0", "at least 1"),
    ("adapter.alpha=0", "adapter.alpha=0", "more than 0"),
    ("adapter.targets=all", "adapter.targets=all", "all-linear or a list of names"),
    ("adapter.targets=[]", "adapter.targets=[]", "all-linear"),
    (
        "adapter.modules_to_save=[norm]",
        "adapter.modules_to_save=['norm']",
        "[embed_tokens], of embed_tokens or lm_head",
    ),
    ("adapter.zzz=0.1", "adapter.zzz=0.1", "use one of adapter.rank"),
    ("adapter.dora=true", "adapter.dora=true: DoRA is not supported", "LoRA"),
    ("adapter.use_dora=true", "adapter.use_dora=true: DoRA is not supported", "LoRA"),
    ("adapter.dropout=1", "adapter.dropout=1", "less than 1"),
    ("train.steps=0", "train.steps=0", "at least 1"),
    ("train.steps=99999999999999999999", "train.steps=99999999999999999999", "at most 1000000000"),
    ("train.seed=1e26", "train.seed=1e26", "integer"),
    (f"train.seed={2**63}", f"train.seed={2**63}", f"at most {2**63 - 1}"),
    ("train.steps=1:30", "train.steps=1:30", "integer"),
    ("optim.lr=1:30.5", "optim.lr=1:30.5", "number"),
    ("train.steps", "--set train.steps", "--set train.steps=100"),
    ("steps=5", "--set steps=5", "--set train.steps=100"),
    ("train.steps=[", "train.steps=[", "quote"),
    ("train.track=wandb", "train.track=wandb", "[tensorboard]"),
    ("data.sources=[{path: a, path: b}]", "data.sources=", "once"),
]


def test_a_loss_may_be_set_by_its_type():
    assert load_config(overrides=["loss=dpo"]).loss.type == "dpo"
    assert load_config(overrides=["loss.beta=0.3", "loss=dpo"]).loss.beta == 0.3


@pytest.mark.parametrize("override, named, fix", BAD_OVERRIDES)
def test_bad_override_is_refused(override, named, fix):
    assert_refused(lambda: check_settings(load_config(overrides=[override])), named, fix=fix)


# (file, what the message names, fix)
BAD_FILES = [
    (None, ["run.yaml", "No such file"], "YAML"),
    ("train: {steps: 5", ["run.yaml", "expected ',' or '}'", "line 1"], "YAML"),
    ("- a\n- b\n", ["run.yaml", "mapping"], "`train:`"),
    ("train: 5\n", ["train=5", "run.yaml", "mapping"], "keys below `train:`"),
    ("trian:\n  steps: 5\n", ["trian", "run.yaml"], "did you mean train?"),
    ("train:\n  step: 5\n", ["train.step=5"], "did you mean train.steps?"),
    ("train:\n  steps: 1:30\n", ["train.steps=1:30"], "integer"),
    ("train:\n  steps: many\n", ["train.steps=many"], "integer"),
    ("5: {}\n", ["5 in"], "use one of model"),
    ("validation: {path: a}\n", ["validation", "run.yaml"], "did you mean data.validation_path or"),
    ("rope: {type: yarn}\n", ["rope", "run.yaml"], "did you mean model.rope?"),
    (
        "model:\n  path: a\ndata:\n  path: b\nmodel: {}\n",
        ["run.yaml", "model", "line 1", "line 5"],
        "once",
    ),
    ("train:\n  steps: 5\n  batch: 1\n  'steps': 6\n", ["steps", "line 2", "line 4"], "once"),
    (
        "data:\n  sources:\n  - {path: a}\n  - {path: b,\n     path: c}\n",
        ["path", "line 4", "line 5"],
        "once",
    ),
    (
        "curriculum:\n- context: 64K\n  steps: 1\n  context: 8K\n",
        ["context", "line 2", "line 4"],
        "once",
    ),
]


@pytest.mark.parametrize("content, named, fix", BAD_FILES)
def test_bad_file_is_refused(content, named, fix, tmp_path):
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    assert_refused(lambda: load_config(file), *named, fix=fix)


def test_a_key_may_override_a_merged_one(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {sources: [&a {path: a, weight: 2}, &b {<<: *a, path: b}, {<<: *b, weight: 3}]}\n"
    )
    assert [(str(source.path), source.weight) for source in load_config(file).data.sources] == [
        ("a", 2),
        ("b", 2),
        ("b", 3),
    ]


def test_binary_file_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00\x01")
    assert_refused(lambda: load_config(tmp_path / "run.yaml"), "run.yaml", "decode", fix="YAML")


def test_later_settings_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  steps: 7\n  batch: 3\ndata:\n")
    config = load_config(
        file, ["train.steps=9"], base={"train": {"steps": 5, "batch": 2, "seed": 1}}
    )
    assert (config.train.steps, config.train.batch, config.train.seed) == (9, 3, 1)
    assert config.data == Config().data


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("4096", 4096),
        ("128K", 131072),
        ("1M", 1 << 20),
        ("1.5M", 3 << 19),
        ("10m", 10 << 20),
        ("0.5k", 512),
        ("6.734M", 7061110),
        ("1.23M", 1289748),
        ("1_000_000", 1000000),
        ("1_024.5K", 1049088),
        ("0100", 100),
    ],
)
def test_token_counts_accept_units(text, tokens):
    assert load_config(overrides=[f"data.context={text}"]).data.context == tokens


def test_scientific_notation_and_integers_are_numbers():
    assert load_config(overrides=["optim.lr=3e-4"]).optim.lr == 3e-4
    assert load_config(overrides=["optim.lr=1"]).optim.lr == 1.0


def test_off_is_a_string_despite_yaml():
    assert load_config(overrides=["memory.plan=off"]).memory.plan == "off"


def test_a_field_may_accept_strings_numbers_and_null():
    assert load_config(overrides=["memory.keep_attention=3"]).memory.keep_attention == 3
    assert load_config(overrides=["memory.keep_attention=all"]).memory.keep_attention == "all"
    assert load_config(overrides=["optim.clip_norm=null"]).optim.clip_norm is None


@pytest.mark.parametrize("base", [{}, CPU_DEFAULT, GPU_DEFAULT], ids=["plain", "cpu", "gpu"])
def test_defaults_are_valid_and_survive_yaml(base, tmp_path):
    config = load_config(
        overrides=["data.path=some/text.jsonl", "optim.betas=[0.8, 0.9]"], base=base
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_every_setting_is_in_the_saved_file():
    saved = yaml.safe_load(to_yaml(Config(adapter=AdapterConfig())))
    for name, cls in SECTIONS.items():
        assert list(saved[name]) == [field.name for field in dataclasses.fields(cls)]


def test_only_existing_paths_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.txt").write_text("")
    (tmp_path / "bytes").mkdir()
    monkeypatch.chdir(tmp_path)
    sources = [{"path": path} for path in ("hf://org/name", "org/name", "m/*.txt", "/else/where")]
    config = parse_config(
        {
            "model": {"path": "m"},
            "adapter": {"path": "m"},
            "data": {
                "sources": sources,
                "tokenizer": "bytes",
                "text_field": "m",
                "chat_template": "m/a.txt",
            },
            "memory": {"disk_path": "m"},
            "evaluate": {"data": "m/a.txt"},
            "curriculum": [
                {"context": 64, "steps": 3, "data": {"path": "m/a.txt", "tokenizer": "m"}}
            ],
        }
    )
    tree = with_absolute_paths(to_dict(config))
    m = str(tmp_path / "m")
    assert [tree["model"]["path"], tree["adapter"]["path"], tree["memory"]["disk_path"]] == [
        m,
        m,
        m,
    ]
    data = tree["data"]
    assert (data["tokenizer"], data["text_field"], data["chat_template"]) == (
        "bytes",
        "m",
        f"{m}/a.txt",
    )
    assert [source["path"] for source in data["sources"]] == [
        "hf:/org/name",
        "org/name",
        f"{m}/*.txt",
        "/else/where",
    ]
    assert tree["curriculum"][0]["data"] == {"path": f"{m}/a.txt", "tokenizer": m}
    assert tree["evaluate"]["data"] == f"{m}/a.txt" and with_absolute_paths(tree) == tree
    assert to_dict(parse_config({"format": CONFIG_FORMAT, **tree})) == tree


def test_names_stay_names_where_a_folder_has_them(tmp_path, monkeypatch):
    """A run saves them; on resume, a path would be read in place of what the run started with."""
    monkeypatch.chdir(tmp_path)
    for name in (*BUILTIN_TEMPLATES, "bytes", "data"):
        (tmp_path / name).mkdir()
    for template in BUILTIN_TEMPLATES:
        entry = {"context": 64, "steps": 3, "data": {"chat_template": template}}
        data = {"chat_template": template, "tokenizer": "bytes"}
        config = parse_config(
            {"data": data, "loss": {"type": "distill", "teacher": "data"}, "curriculum": [entry]}
        )
        assert with_absolute_paths(to_dict(config)) == to_dict(config)
    moved = with_absolute_paths({"data": {"chat_template": "data", "tokenizer": "qwen3"}})
    assert moved["data"] == {
        "chat_template": str(tmp_path / "data"),
        "tokenizer": str(tmp_path / "qwen3"),
    }


def test_any_adapter_setting_enables_the_adapter(tmp_path):
    (tmp_path / "null.yaml").write_text("adapter:\n")
    assert load_config(tmp_path / "null.yaml").adapter is load_config().adapter is None
    config = load_config(
        overrides=["adapter.targets=[q_proj, 1.mlp.up_proj]", "adapter.modules_to_save=[lm_head]"]
    )
    assert config.adapter == AdapterConfig(
        16, 32.0, False, ("q_proj", "1.mlp.up_proj"), ("lm_head",)
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_configs_built_in_python_are_checked_too():
    assert_refused(
        lambda: dataclasses.replace(TrainConfig(), steps=0), "train.steps=0", fix="at least 1"
    )
    assert_refused(lambda: ParallelConfig(cp=1.5), "parallel.cp=1.5", fix="integer")


@settings(max_examples=25, deadline=None)
@given(
    tile=st.one_of(st.just("all"), st.integers(1, 1 << 40)),
    keep=st.one_of(st.sampled_from(["none", "all"]), st.integers(0, 200)),
    eps=st.floats(1e-300, 1e300),
    field=st.text("aZ0é中 :#-'\"\n\t\\[]{}&*!|>%@`,?", min_size=1),
)
def test_any_valid_value_survives_yaml(tile, keep, eps, field):
    tree = {
        "memory": {"tile_tokens": tile, "keep_attention": keep},
        "optim": {"eps": eps},
        "data": {"text_field": field},
    }
    config = parse_config(tree)
    assert config.memory == MemoryConfig(tile_tokens=tile, keep_attention=keep)
    assert parse_config(yaml.safe_load(to_yaml(config))) == config


def test_a_source_inherits_reading_options_from_data():
    config = load_config(
        overrides=[
            "data.text_field=body",
            "data.sources=[{path: a, weight: 2}, {path: b, text_field: t}]",
        ]
    )
    assert [(s.text_field, s.weight) for s in config.data.all_sources] == [("body", 2), ("t", 1)]
    assert parse_config(yaml.safe_load(to_yaml(config))) == config
    (alone,) = load_config(overrides=["data.path=a", "data.text_field=body"]).data.all_sources
    assert (alone.path, alone.text_field) == (pathlib.Path("a"), "body")
    overrides = ["data.path=c", "data.sources=[{path: a}]"]
    assert_refused(
        lambda: check_settings(load_config(overrides=overrides)),
        "data.path=c",
        "data.sources",
        fix="make the path a source",
    )


def test_formatted_mappings_omit_null():
    assert (
        format_value({"type": None, "theta": 4e5, "deep": {"on": True}})
        == "{theta: 400000.0, deep: {on: true}}"
    )


def test_one_key_of_a_nested_setting_may_be_set(tmp_path):
    """--set data.reasoning.loss=false keeps the other keys of data.reasoning."""
    file = tmp_path / "long.yaml"
    file.write_text("data: {reasoning: {turns: last}}")
    reasoning = load_config(file, ["data.reasoning.loss=false"]).data.reasoning
    assert (reasoning.turns, reasoning.loss) == ("last", False)
    for name, fix in (
        ("data.reasoning.lose=false", "did you mean"),
        ("data.context.x=1", "integer"),
    ):
        with pytest.raises(ValueError, match=fix):
            load_config(file, [name])


def test_names_of_other_trainers_lead_to_settings():
    """Each in its own section, and in a part of a configuration that has the same settings."""
    for name, usual in USUAL_NAMES.items():
        section, _, key = usual.partition(".")
        assert key in SECTIONS[section].__dataclass_fields__, usual
        assert not [other for other in SECTIONS.values() if name in other.__dataclass_fields__], (
            name
        )
    entry = {"context": 64, "steps": 3, "optim": {"learning_rate": 1e-4}}
    error = assert_refused(
        lambda: parse_config({"curriculum": [entry]}), "curriculum.optim.learning_rate", fix=""
    )
    assert error.endswith("did you mean curriculum.optim.lr?")
