"""What a trainer cannot have with long_context is refused by name; `parallelize` with a context plans as a run does."""

import copy
import dataclasses
import os
import pickle
import re
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOTrainer

import ithaka
from ithaka import hf
from ithaka.config import ConfigError, parse_config
from ithaka.dist.mesh import start_process_group
from ithaka.layout import Layout
from ithaka.preflight.machine import detect_machine, plan_run
from models import tiny_config, tiny_model

H200 = ("NVIDIA H200", 2**62)


@pytest.fixture(autouse=True)
def accelerate_forgets():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trainer(tmp_path, ithaka=None, arguments=None, **given):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for name, value in (arguments or {}).items():
        setattr(args, name, value)
    given.setdefault("model", tiny_model(tiny_config("llama"), torch.float32))
    return hf.long_context(Trainer)(args=args, ithaka=ithaka, **given)


# ---- trainers


@pytest.mark.parametrize(
    "name, value, way_out",
    [
        ("deepspeed", "ds.json", "ithaka shards the model itself"),
        ("fsdp", True, "ithaka applies FSDP2 itself"),
        ("parallelism_config", object(), "give ithaka={'cp': ...} instead"),
        ("gradient_checkpointing_kwargs", {"use_reentrant": True}, "recompute already"),
        ("fp16", True, "use bf16=True"),
        ("torch_compile", True, "Layout(compile=True)"),
        ("label_smoothing_factor", 0.1, "logits of whole sequences"),
        ("neftune_noise_alpha", 5, "which no rank has"),
        ("average_tokens_across_devices", False, "counts the same here"),
        ("train_sampling_strategy", "batch_rebalance", "use random or group_by_length"),
    ],
)
def test_arguments(tmp_path, name, value, way_out):
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, arguments={name: value})
    assert f"{name}=" in str(caught.value) and way_out in str(caught.value)


def test_objects(tmp_path):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1)
    for given in ({"optimizers": (optimizer, None)}, {"compute_metrics": print}, {"compute_loss_func": print}):
        with pytest.raises(ConfigError, match=next(iter(given))):
            trainer(tmp_path, **given)
    with pytest.raises(ConfigError, match="'cpus'.* is not a setting; use cp, ring, context, layout"):
        trainer(tmp_path, {"cpus": 2})
    with pytest.raises(ConfigError, match="of TRL only SFTTrainer is supported"):
        hf.long_context(DPOTrainer)
    with pytest.raises(ConfigError, match="give transformers.Trainer, trl.SFTTrainer or a class on one"):
        hf.long_context(dict)


def test_a_trainer_that_does_not_see_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("accelerate.state.PartialState._prepare_backend", lambda *args: (None, "NO"))
    with pytest.raises(ConfigError, match="the trainer sees 1 of 2 processes; .* use_cpu=True"):
        trainer(tmp_path)


def test_checkpoints_of_others(tmp_path):
    made = trainer(tmp_path, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}])
    with pytest.raises(ConfigError, match="has no folder ithaka; give one that long_context wrote"):
        made.train(resume_from_checkpoint=str(tmp_path))


class Planted:
    """Makes a folder where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_checkpoint_that_would_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = trainer(tmp_path, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}])
    dcp.save({"model": made._weights()}, checkpoint_id=tmp_path / hf.STATE)
    (tmp_path / hf.STATE / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(dcp.CheckpointException, match=r"\.metadata names posix\.mkdir"):
        made.train(resume_from_checkpoint=str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_gradient_checkpointing_is_what_the_layers_do(tmp_path):
    """TRL's default. The user's own arguments stay as they are."""
    made = trainer(tmp_path, arguments={"gradient_checkpointing": True})
    assert not made.args.gradient_checkpointing


class Loading(Trainer):
    """As SFTTrainer does."""

    def __init__(self, model, **given):
        super().__init__(model=AutoModelForCausalLM.from_pretrained(model), **given)


def test_a_trainer_that_loads_the_model_itself(tmp_path):
    tiny_model(tiny_config("llama"), torch.float32).save_pretrained(tmp_path)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert hf.long_context(Loading)(model=str(tmp_path), args=args).model.ithaka_mesh.cp_size == 1


# ---- plans


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr("ithaka.launch.detect_gpu", lambda: H200)
    monkeypatch.setattr("ithaka.plan.hardware.cgroup_rooms", list)


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
def test_a_context_is_planned_with_the_kernel_that_runs(on_h200, monkeypatch, kernel):
    """Which only its trial on the GPU shows."""
    model = tiny_model(tiny_config("llama", max_position_embeddings=65536), torch.bfloat16)
    start_process_group()
    with monkeypatch.context() as patch:
        patch.setattr(hf, "default_device", lambda: torch.device("cuda"))
        patch.setattr(hf, "agree_on_kernel", lambda *_: kernel)
        run = hf.plan_model_run(model, None, None, "bfloat16", None, context=65536, batch=1)
    assert run.plan.hardware.gpu.kernel == kernel


def test_a_context_is_planned_as_for_a_run(on_h200, capsys):
    """On a GPU that the planner knows, and of which a CPU takes the place here."""
    model = tiny_model(tiny_config("llama", max_position_embeddings=65536), torch.bfloat16)
    model = ithaka.parallelize(model, cp="auto", context="64K", batch=2)
    config = parse_config({"model": {"dtype": "bfloat16"}, "data": {"context": 65536}, "train": {"batch": 2}})
    shape = hf.shape_from_model(model)
    _, expected = plan_run(config, set(), detect_machine(config, 1, H200), shape)
    assert model.ithaka_plan.layout == expected.layout and model.ithaka_plan.work == expected.work
    planned_for = dataclasses.replace(expected.layout, dtype="bfloat16", heads_per_stage=None, kernel="cpu")  # all
    assert model.model.layers[0].forward.layout == planned_for
    printed = capsys.readouterr().out
    assert "64K tokens" in printed and printed.count("parallel.cp ") == 1


def big_model(**changes):
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        config = AutoConfig.for_model("llama", **sizes, vocab_size=128256, num_hidden_layers=32)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_what_does_not_fit_is_refused(on_h200):
    start_process_group()
    run = partial(hf.plan_model_run, big_model(), None, None, "bfloat16", None)
    with pytest.raises(ConfigError, match="data.context=67108864 needs .* of GPU memory"):
        run(64 * 2**20, 1)
    with pytest.raises(ConfigError, match="parallel.cp=3 does not divide the 1 rank"):
        hf.plan_model_run(big_model(), 3, None, "bfloat16", None, 4096, 1)


def test_adapters_are_planned(on_h200):
    """Freezing the base leaves room: what does not fit with every parameter trained does with PEFT's adapters."""
    start_process_group()
    plain = big_model()
    with pytest.raises(ConfigError, match="of GPU memory"):
        hf.plan_model_run(copy.copy(plain), None, None, "bfloat16", Layout(tile_tokens=4096), 131072, 1)
    adapted = get_peft_model(plain, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
    shape = hf.shape_from_model(adapted)
    assert shape.num_trained == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert hf.plan_model_run(adapted, None, None, "bfloat16", None, 131072, 1).plan.fits


def test_a_context_beyond_the_positions_of_the_model(tmp_path):
    """As `ithaka train` refuses it. What the message says to write gives a model that is taken."""
    tiny_model(tiny_config("llama", max_position_embeddings=32), torch.float32).save_pretrained(tmp_path / "model")
    load = partial(AutoModelForCausalLM.from_pretrained, tmp_path / "model")
    for refuse in (
        lambda: ithaka.parallelize(load(), context=100),
        lambda: trainer(tmp_path, {"context": 100}, model=load()),
    ):
        with pytest.raises(ConfigError, match="context=100 exceeds max_position_embeddings=32 of the model") as caught:
            refuse()
    written = re.search(r"from_pretrained\(\.\.\., (.*\})\)", str(caught.value))[1]
    moved = eval(f"load({written})", {"load": load})
    assert moved.config.max_position_embeddings == 128 and moved.config.rope_parameters["rope_type"] == "yarn"
    ithaka.parallelize(moved, context=100)


def test_settings_without_a_plan():
    with pytest.raises(ConfigError, match="context='long' is not a number of tokens"):
        ithaka.parallelize(big_model(), context="long")
    with pytest.raises(ConfigError, match="cp='all' is not a number of ranks"):
        ithaka.parallelize(big_model(), cp="all")
    with pytest.raises(ConfigError, match="dtype=bfloat16 is not layout.dtype=float32; give one of them"):
        ithaka.parallelize(big_model(), dtype="bfloat16", layout=Layout(dtype="float32"))
    for context in (None, 64):
        model = tiny_model(tiny_config("llama"))
        model = ithaka.parallelize(model, context=context, dtype="float32", layout=Layout(tile_tokens=7))
        assert model.model.layers[0].forward.layout == Layout(tile_tokens=7, dtype="float32", kernel="cpu")
    model = ithaka.parallelize(tiny_model(tiny_config("llama")), context=64)
    layout = model.model.layers[0].forward.layout
    assert model.ithaka_plan is None and layout.dtype == "float64" and layout.tile_tokens == 8192
