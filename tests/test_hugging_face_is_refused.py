"""long_context refuses unsupported trainer arguments; `parallelize` with a context plans as
`ithaka train` does."""

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
from datasets import Dataset
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from transformers.training_args import OptimizerNames
from trl import (
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOTrainer,
    RewardTrainer,
    RLOOTrainer,
    SFTTrainer,
)

import ithaka
from ithaka import parallel
from ithaka.checkpoint.save import trained_weights
from ithaka.comm.mesh import make_mesh, start_process_group
from ithaka.config import ConfigError, parse_config
from ithaka.hf import trainers as hf
from ithaka.hf.rewards import check_rollout
from ithaka.layout import ActivationPolicy, Layout
from ithaka.model import build
from ithaka.run.detect import detect_machine
from ithaka.run.road import plan_settings
from models import tiny_config, tiny_model
from refusals import assert_refused

H200 = ("NVIDIA H200", 2**62)


@pytest.fixture(autouse=True)
def reset_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trainer(tmp_path, ithaka=None, arguments=None, **kwargs):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for name, value in (arguments or {}).items():
        setattr(args, name, value)
    kwargs.setdefault("model", tiny_model(tiny_config("llama"), torch.float32))
    return hf.long_context(Trainer)(args=args, ithaka=ithaka, **kwargs)


# ---- trainers


@pytest.mark.parametrize(
    "name, value, fix",
    [
        ("deepspeed", "ds.json", "leave it out"),
        ("fsdp", True, "leave it out"),
        ("parallelism_config", object(), "ithaka={'cp': ...}"),
        ("gradient_checkpointing_kwargs", {"use_reentrant": True}, "leave it out"),
        ("fp16", True, "use bf16=True"),
        ("torch_compile", True, "Layout(compile=True)"),
        ("label_smoothing_factor", 0.1, "leave it out"),
        ("neftune_noise_alpha", 5, "leave it out"),
        ("average_tokens_across_devices", False, "True"),
        ("precompute_ref_log_probs", True, "leave it out"),
        ("train_sampling_strategy", "batch_rebalance", "use random or group_by_length"),
        ("optim", "lion_32bit", "adamw_torch_8bit"),
        ("optim", "paged_lion_8bit", "adamw_torch_8bit"),
        ("optim", "paged_ademamix_8bit", "adamw_torch_8bit"),
        ("optim", "paged_adamw_32bit", "adamw_torch"),
        ("optim", "rmsprop_bnb_8bit", "rmsprop"),
        ("optim", "adafactor", "adamw_torch_8bit"),
        ("optim", "galore_adamw_layerwise", "adamw_torch_8bit"),
    ],
)
def test_training_arguments_are_refused(tmp_path, name, value, fix):
    assert_refused(lambda: trainer(tmp_path, arguments={name: value}), f"{name}=", fix=fix)


def test_8_bit_adamw_of_bitsandbytes_becomes_torchao(tmp_path, capsys):
    """Training resumes from its own checkpoint with the same moments, which are 8-bit for rows of
    64."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
    for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"):
        arguments = {
            "optim": OptimizerNames(name),
            "max_steps": 2,
            "save_steps": 1,
            "disable_tqdm": True,
        }
        model = tiny_model(tiny_config("llama", hidden_size=64, num_hidden_layers=1), torch.float32)
        made = trainer(tmp_path, arguments=arguments, model=model, train_dataset=rows)
        assert (
            f"optim={name}" in (printed := capsys.readouterr().out)
            and "adamw_torch_8bit" in printed
        )
    moments = []
    for resume in (None, str(tmp_path / "checkpoint-1")):
        made.train(resume_from_checkpoint=resume)
        moment = made.optimizer.optimizer.state[made.model.model.layers[0].mlp.up_proj.weight][
            "exp_avg"
        ]
        moments.append(moment.to_local().codes.clone())
    assert torch.equal(*moments) and moments[0].any()


def test_objects_and_classes_are_refused(tmp_path):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1)
    for kwargs, fix in (
        ({"optimizers": (optimizer, None)}, "optimizer_cls_and_kwargs"),
        ({"compute_metrics": print}, "`ithaka evaluate`"),
        ({"compute_loss_func": print}, "ithaka.token_logprobs"),
    ):
        assert_refused(partial(trainer, tmp_path, **kwargs), *kwargs, fix=fix)
    assert_refused(
        lambda: trainer(tmp_path, {"cpus": 2}), "'cpus'", fix="cp, ring, context, layout"
    )
    assert_refused(lambda: trainer(tmp_path, model="gpt2"), "model='gpt2'", fix="from_pretrained")
    make = partial(hf.long_context(DPOTrainer), "model", ref_model="gpt2")
    assert_refused(make, "ref_model='gpt2'", fix="from_pretrained")
    assert_refused(lambda: trainer(tmp_path, 8), "ithaka=8", "dictionary", fix="{'cp': 8}")
    assert_refused(
        lambda: trainer(tmp_path, {"layout": {}}), "layout={}", "dict", fix="ithaka.Layout("
    )
    assert_refused(
        lambda: hf.long_context(hf.long_context(Trainer)), "LongContextTrainer", fix="directly"
    )
    assert_refused(
        lambda: hf.long_context(RewardTrainer), "RewardTrainer", "head", fix="GRPOTrainer"
    )
    assert_refused(
        lambda: hf.long_context(dict), "dict", fix="transformers.Trainer, trl.SFTTrainer"
    )


def test_adapters_other_than_lora_and_heads_over_classes_are_refused(tmp_path):
    """The planner reads LoRA's ranks, and TRL's trainers a generation_config, which such models do
    not have."""
    adapter = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = get_peft_model(tiny_model(tiny_config("llama"), torch.float32), adapter)
    for make in (
        partial(trainer, tmp_path, {"context": 64}, model=model),
        partial(hf.long_context(SFTTrainer), model),
        partial(ithaka.parallelize, model, context=64),
    ):
        assert_refused(make, "PEFT's peft_type=IA3", fix="peft_type=LORA")
    classifier = AutoModelForSequenceClassification.from_config(tiny_config("llama"))
    for make in (
        partial(trainer, tmp_path, model=classifier),
        partial(hf.long_context(SFTTrainer), classifier),
    ):
        assert_refused(make, "model", "LlamaForSequenceClassification", fix="AutoModelForCausalLM")


def test_nothing_to_train_is_refused(tmp_path):
    frozen = tiny_model(tiny_config("llama"), torch.float32).requires_grad_(False)
    assert_refused(
        partial(trainer, tmp_path, model=frozen),
        "model",
        "no parameter",
        fix="requires_grad_(True)",
    )
    assert_refused(
        partial(trainer, tmp_path, train_dataset=[]), "train_dataset", "no rows", fix="filter"
    )
    assert_refused(
        partial(trainer, tmp_path, train_dataset="a.json"),
        "train_dataset='a.json'",
        fix="load_dataset",
    )


def test_nan_in_the_weights_is_refused(tmp_path):
    """The trainer would log a loss of 0."""
    model = tiny_model(tiny_config("llama"), torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    made = trainer(tmp_path, model=model, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}])
    assert_refused(
        made.train,
        "model=LlamaForCausalLM",
        "model.layers.1.mlp.up_proj.weight",
        "NaN",
        fix="other weights",
    )


@pytest.mark.parametrize(
    "trainer_class, columns, fix",
    [
        (
            SFTTrainer,
            "question, answer",
            "text or messages or conversations or prompt and completion or input_ids",
        ),
        (DPOTrainer, "prompt, chosen", "chosen and rejected"),
        (
            KTOTrainer,
            "prompt, completion",
            "prompt and completion and label or chosen and rejected",
        ),
        (GRPOTrainer, "question", "prompt"),
        (RLOOTrainer, "question", "prompt"),
    ],
)
def test_datasets_without_the_columns_of_a_trainer_are_refused(trainer_class, columns, fix):
    rows = Dataset.from_dict({name: ["a"] for name in columns.split(", ")})
    make = partial(hf.long_context(trainer_class), "model", train_dataset=rows)
    assert_refused(make, f"columns {columns}", trainer_class.__name__, fix=fix)


def test_generation_on_the_training_gpus_is_refused(tmp_path):
    make = partial(hf.long_context(GRPOTrainer), None, print, ithaka={"cp": 1})
    config = partial(GRPOConfig, str(tmp_path), use_cpu=True, bf16=False)
    colocated = config(use_vllm=True, vllm_mode="colocate")
    assert_refused(lambda: make(colocated), "vllm_mode=colocate", fix="rollout_func")
    uncached = config(max_completion_length=4096, generation_kwargs={"use_cache": False})
    assert_refused(
        lambda: make(uncached), "max_new_tokens=4096", "512", fix="leave use_cache=False out"
    )


def test_a_trainer_that_does_not_see_all_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        "accelerate.state.PartialState._prepare_backend", lambda *args: (None, "NO")
    )
    assert_refused(lambda: trainer(tmp_path), "1 of 2 processes", fix="use_cpu=True")


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path):
    made = trainer(tmp_path, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}])
    resume = partial(made.train, resume_from_checkpoint=str(tmp_path))
    assert_refused(resume, f"resume_from_checkpoint={tmp_path}", fix="from_pretrained")


class Planted:
    """Creates a folder when unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = trainer(tmp_path, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}])
    dcp.save({"model": trained_weights(made.model)}, checkpoint_id=tmp_path / hf.STATE_FOLDER)
    (tmp_path / hf.STATE_FOLDER / ".metadata").write_bytes(pickle.dumps(Planted()))
    reason = r"\.metadata .*posix\.mkdir|metadata is None"  # the latter in torch 2.11
    with pytest.raises(ConfigError, match=reason):
        made.train(resume_from_checkpoint=str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_that_is_truncated_or_of_another_model_is_refused(tmp_path):
    made = trainer(tmp_path, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}])
    resume = partial(made.train, resume_from_checkpoint=str(tmp_path))
    names = f"resume_from_checkpoint={tmp_path} cannot be loaded"
    dcp.save(
        {"model": {"lm_head.weight": torch.zeros(3, 3)}}, checkpoint_id=tmp_path / hf.STATE_FOLDER
    )
    assert_refused(resume, names, fix="use the model, adapter and optimizer that wrote it")
    dcp.save({"model": trained_weights(made.model)}, checkpoint_id=tmp_path / hf.STATE_FOLDER)
    for file in (tmp_path / hf.STATE_FOLDER).glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    assert_refused(resume, names, fix="an earlier checkpoint")


ROLLOUT = {
    "prompt_ids": [[1], [1]],
    "completion_ids": [[2, 3], [4]],
    "logprobs": [[-1.0, -1.0], [-1.0]],
}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"completion_ids": [[2, 3]]}, "completion_ids has 1 rows for 2 prompts"),
        ({"logprobs": [[-1.0], [-1.0]]}, "logprobs[0] has 1 values for 2 completion_ids"),
        ({"env_mask": [[1, 1], [1, 0]]}, "env_mask[1] has 2 values for 1 completion_ids"),
    ],
)
def test_rollouts_of_other_lengths_are_refused(changes, named):
    check_rollout(ROLLOUT, 2)
    with pytest.raises(ValueError, match=re.escape(named)):
        check_rollout(ROLLOUT | changes, 2)


def test_gradient_checkpointing_is_left_to_the_layers(tmp_path):
    """TRL enables it by default."""
    made = trainer(tmp_path, arguments={"gradient_checkpointing": True})
    assert not made.args.gradient_checkpointing


class LoadingTrainer(Trainer):
    """Loads the model itself, like SFTTrainer."""

    def __init__(self, model, **kwargs):
        super().__init__(model=AutoModelForCausalLM.from_pretrained(model), **kwargs)


def test_a_trainer_may_load_the_model(tmp_path):
    tiny_model(tiny_config("llama"), torch.float32).save_pretrained(tmp_path)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert (
        hf.long_context(LoadingTrainer)(model=str(tmp_path), args=args).model.ithaka_mesh.cp_size
        == 1
    )


# ---- plans


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr("ithaka.run.launch.detect_gpu", lambda: H200)
    monkeypatch.setattr("ithaka.run.detect.available_memory", lambda: 16 * 2**30)


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
def test_a_context_is_planned_with_the_kernel_that_runs(on_h200, monkeypatch, kernel):
    """The kernel is known only after a test on the GPU."""
    model = tiny_model(tiny_config("llama", max_position_embeddings=65536), torch.bfloat16)
    start_process_group()
    with monkeypatch.context() as patch:
        patch.setattr(parallel, "default_device", lambda: torch.device("cuda"))
        patch.setattr(parallel, "agree_on_kernel", lambda *_: kernel)
        run = parallel.plan_model_run(model, None, None, "bfloat16", None, context=65536, batch=1)
    assert run.plan.hardware.gpu.kernel == kernel


def test_a_context_is_planned_as_for_a_run(on_h200, capsys):
    """The plan is for an H200; the model runs on a CPU."""
    model = tiny_model(tiny_config("llama", max_position_embeddings=65536), torch.bfloat16)
    model = ithaka.parallelize(model, cp="auto", context="64K", batch=2)
    config = parse_config(
        {"model": {"dtype": "bfloat16"}, "data": {"context": 65536}, "train": {"batch": 2}}
    )
    shape = parallel.shape_from_model(model)
    expected = plan_settings(config, detect_machine(config, 1, H200), shape).plan
    assert model.ithaka_plan.layout == expected.layout and model.ithaka_plan.work == expected.work
    resolved = {"heads_per_stage": None, "kernel": "cpu", "compile": False}
    planned_for = dataclasses.replace(expected.layout, dtype="bfloat16", **resolved)
    assert model.model.layers[0].forward.layout == planned_for
    printed = capsys.readouterr().out
    assert "64K tokens" in printed and printed.count("parallel.cp ") == 1


def big_model(**changes):
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    with torch.device("meta"):
        config = AutoConfig.for_model("llama", **sizes, vocab_size=128256, num_hidden_layers=32)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_a_context_that_does_not_fit_is_refused(on_h200):
    start_process_group()
    run = partial(parallel.plan_model_run, big_model(), None, None, "bfloat16", None)
    assert_refused(
        lambda: run(64 * 2**20, 1), "data.context=67108864", "GPU", fix="memory.offload=host"
    )
    three_ranks = partial(parallel.plan_model_run, big_model(), 3, None, "bfloat16", None, 4096, 1)
    assert_refused(three_ranks, "parallel.cp=3", "1 rank", fix="use 1,")


def test_plans_count_adapters(on_h200):
    """Freezing the base saves memory: a context that does not fit with full training fits with
    adapters."""
    start_process_group()
    plain = big_model()
    layout = Layout(tile_tokens=4096)
    fully_trained = partial(
        parallel.plan_model_run, copy.copy(plain), None, None, "bfloat16", layout, 131072, 1
    )
    assert_refused(fully_trained, "data.context=131072", "GPU", fix="memory.offload=host")
    adapted = get_peft_model(
        plain, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    )
    shape = parallel.shape_from_model(adapted)
    assert shape.num_trained == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert parallel.plan_model_run(adapted, None, None, "bfloat16", None, 131072, 1).plan.fits


def test_plans_count_adapters_on_experts(monkeypatch):
    """PEFT wraps the parameters of experts, not their module."""
    shape = dataclasses.make_dataclass(
        "Shape", [("encoders", tuple)], namespace={"with_adapter": lambda shape, adapter: adapter}
    )(())
    # measuring one takes seconds
    monkeypatch.setattr(parallel, "shape_from_config", lambda *_: shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe", num_hidden_layers=1))
    names = ["self_attn.q_proj", "mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules=names[:1], target_parameters=names[1:])
    )
    assert sorted(parallel.shape_from_model(adapted).targets) == sorted(
        f"model.layers.0.{name}" for name in names
    )


def test_plans_count_a_reference_model(on_h200):
    """A context that fits does not fit with a frozen copy of the model."""
    start_process_group()
    run = partial(parallel.plan_model_run, big_model(), None, None, "bfloat16", None, 131072, 1)
    assert run().plan.fits
    assert_refused(
        lambda: run(reference=True),
        "data.context=131072",
        "parameters 44.87 GiB",
        fix="memory.offload=host",
    )


def test_a_context_beyond_the_positions_of_the_model_is_refused(tmp_path):
    """The code that the message suggests loads a model that is accepted."""
    tiny_model(tiny_config("llama", max_position_embeddings=32), torch.float32).save_pretrained(
        tmp_path / "model"
    )
    load = partial(AutoModelForCausalLM.from_pretrained, tmp_path / "model")
    for refuse in (
        lambda: ithaka.parallelize(load(), context=100),
        lambda: trainer(tmp_path, {"context": 100}, model=load()),
    ):
        message = assert_refused(
            refuse, "context=100", "max_position_embeddings=32", fix="from_pretrained"
        )
    suggested = re.search(r"from_pretrained\(\.\.\., (.*\})\)", message)[1]
    extended = eval(f"load({suggested})", {"load": load})
    assert (
        extended.config.max_position_embeddings == 128
        and extended.config.rope_parameters["rope_type"] == "yarn"
    )
    ithaka.parallelize(extended, context=100)


def test_a_context_below_the_length_of_rows_is_refused(tmp_path):
    """The plan would be for rows of 16 tokens."""
    for context in (16, "16"):
        make = partial(trainer, tmp_path, {"context": context}, arguments={"max_length": 64})
        assert_refused(make, f"'context': {context!r}", "max_length=64", fix="max_length=16")
    assert trainer(tmp_path, {"context": 64}, arguments={"max_length": 64})
    make = partial(trainer, tmp_path, {"context": 16}, arguments={"max_completion_length": 64})
    assert_refused(
        make, "'context': 16", "max_completion_length=64", fix="max_completion_length=16"
    )


def test_torch_dtypes_are_accepted():
    assert Layout(dtype=torch.bfloat16) == Layout(dtype="bfloat16")
    model = ithaka.parallelize(tiny_model(tiny_config("llama")), dtype=torch.float32)
    assert model.model.layers[0].forward.layout.dtype == "float32"


def test_float16_is_refused(tmp_path):
    """It is refused as the compute dtype, and for trained parameters, whose gradients would have it
    too. A frozen float16 model can train adapters in bfloat16."""
    plain = tiny_model(tiny_config("llama"), torch.float32)
    half = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float16)
    refuses = partial(assert_refused, fix="use bfloat16 or float32")
    refuses(lambda: Layout(dtype="float16"), "layout.dtype=float16", "underflows")
    for call in (ithaka.parallelize, partial(ithaka.parallelize, context=64)):
        refuses(partial(call, plain, dtype="float16"), "dtype=float16", "underflows")
        refuses(partial(call, half), "the model's dtype=float16", "underflows")
        refuses(
            partial(call, half, dtype="bfloat16"), "embed_tokens.weight.dtype=float16", "underflows"
        )
    refuses(lambda: build.parallelize_model(half), "the model's dtype=float16", "underflows")
    refuses(lambda: trainer(tmp_path, model=half), "the model's dtype=float16", "underflows")
    refuses(
        lambda: trainer(tmp_path, arguments={"bf16": True}, model=half),
        "weight.dtype=float16",
        "underflows",
    )
    assert_refused(
        lambda: parse_config({"model": {"dtype": "float16"}}), "model.dtype=float16", fix="bfloat16"
    )
    adapted = get_peft_model(half, LoraConfig(r=4, target_modules=["q_proj"]))
    assert ithaka.parallelize(adapted, dtype="bfloat16", context=64)


def test_wrong_settings_are_refused_and_a_layout_replaces_the_plan():
    plain = tiny_model(tiny_config("llama"))
    for settings, *named, fix in (
        ({"context": "long"}, "context='long'", "524288"),
        ({"cp": "all"}, "cp='all'", '"auto"'),
        ({"cp": True}, "cp=True", '"auto"'),
        ({"ring": "2"}, "ring='2'", "1 or more"),
        ({"batch": 0}, "batch=0", "1 or more"),
        ({"layout": {}}, "layout={}", "dict", "ithaka.Layout("),
        ({"layout": {"cp": 2}, "context": 64}, "layout={'cp': 2}", "dict", "ithaka.Layout("),
        ({"mesh": "x"}, "mesh='x'", "str", "make_mesh(cp)"),
        (
            {"mesh": make_mesh(1), "layout": Layout(replicas=7)},
            "mesh.replicas=1",
            "layout.replicas=7",
            "one of them",
        ),
        ({"layout": Layout(kernel="magic")}, "layout.kernel=magic", "use auto"),
        ({"store": "disk"}, "store='disk'", "str", "Store(device)"),
        ({"reference": plain, "context": 64}, "reference", "LlamaForCausalLM", "True to plan"),
        ({"reference": "yes", "context": 64}, "reference", "str", "True to plan"),
        ({"dtype": "fp8"}, "dtype=fp8", "bfloat16, float32 or float64"),
        ({"dtype": torch.int8}, "dtype=int8", "bfloat16, float32 or float64"),
        (
            {"dtype": "bfloat16", "layout": Layout(dtype="float32")},
            "dtype=bfloat16",
            "layout.dtype=float32",
            "one of",
        ),
    ):
        assert_refused(partial(ithaka.parallelize, plain, **settings), *named, fix=fix)
    for settings in ({"tile_tokens": -1}, {"cp": 0}, {"ring": True}, {"heads_per_stage": 1.5}):
        (name, value), *_ = settings.items()
        assert_refused(partial(Layout, **settings), f"layout.{name}={value}", fix="1 or more")
    for name, value, fix in (
        ("overlap", "no", "True or False"),
        ("offload_optimizer", "host", "True or False"),
        ("compile", 1, "True or False"),
        ("blocks", 128, "(1024, 1024)"),
        ("blocks", (1, 2, 3), "(1024, 1024)"),
        ("input_tier", "cloud", "device, host or disk"),
        ("attention_tier", None, "device, host or disk"),
        ("keep_inputs", -1, "0 or more"),
        ("keep_attention", "all", "0 or more"),
        ("keep_projections", 1.0, "0 or more"),
        ("keep_everything", True, "0 or more"),
    ):
        assert_refused(partial(Layout, **{name: value}), f"layout.{name}={value!r}", fix=fix)
    assert_refused(partial(Layout, blocks=(4, 0)), "layout.blocks=0", fix="1 or more")
    assert_refused(partial(ActivationPolicy, "cloud"), "input='cloud'", fix="device, host or disk")
    assert_refused(
        partial(ActivationPolicy, attention="cloud"),
        "attention='cloud'",
        fix="device, host or disk",
    )
    assert_refused(partial(make_mesh, 3), "cp=3 does", "1 rank", fix="use 1,")
    assert_refused(partial(make_mesh, 1, "banana"), "device='banana'", fix="leave it out")
    assert_refused(partial(ActivationPolicy, mlp="x"), "mlp='x'", fix="True or False")
    for name in ("projections", "mlp"):
        needs = f"{name}=True of an ActivationPolicy needs a kept attention output"
        assert_refused(
            partial(ActivationPolicy, **{name: True}),
            needs,
            fix=f"attention='device', or {name}=False",
        )
    assert_refused(
        partial(ithaka.parallelize, tiny_model(tiny_config("llama", num_hidden_layers=0))),
        "num_hidden_layers=0",
        fix="at least 1",
    )
    quantized = tiny_model(tiny_config("llama"))
    up = quantized.model.layers[1].mlp.up_proj
    for dtype in (torch.int8, torch.float8_e4m3fn):
        up.weight = torch.nn.Parameter(up.weight.data.to(dtype), requires_grad=False)
        assert_refused(
            partial(ithaka.parallelize, quantized),
            "1.mlp.up_proj.weight",
            str(dtype),
            fix="bfloat16",
        )
    assert_refused(
        partial(ithaka.parallelize, big_model()),
        "embed_tokens.weight",
        "meta",
        fix="from_pretrained",
    )
    for context in (None, 64):
        model = tiny_model(tiny_config("llama"))
        model = ithaka.parallelize(
            model, context=context, dtype="float32", layout=Layout(tile_tokens=7)
        )
        assert model.model.layers[0].forward.layout == Layout(
            tile_tokens=7, dtype="float32", kernel="cpu", compile=False
        )
    model = ithaka.parallelize(tiny_model(tiny_config("llama")), context=64)
    layout = model.model.layers[0].forward.layout
    assert model.ithaka_plan is None and layout.dtype == "float64" and layout.tile_tokens == 8192
