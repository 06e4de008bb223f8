"""TRL's DPO, KTO, GRPO, RLOO and distillation trainers on 2 x 2 ranks match one process: logs and
weights, in fp64."""

import contextlib
import importlib.util
import io
import itertools
import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_callback import PrinterCallback
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import distillation_trainer, grpo_trainer, rloo_trainer

from decoders import tiny_decoder
from ithaka.hf.rewards import GRPOMixin
from ithaka.hf.trainers import long_context
from ithaka.model import prefixes
from ithaka.model.prefixes import PackedPrefixes, pack_prefixes
from models import tiny_config, tiny_model
from trainers import COMMON_ARGUMENTS, ShiftRouters, full_weights, trainer_environment

TOLERANCE = 1e-6  # relative above 1; TRL's fused head computes in fp32
TIMES = ("time", "runtime", "per_second", "epoch", "flos")  # logged values that differ between runs
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
EXPERTS = ("qwen3_moe", "gpt_oss", "minimax_m2")
TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
    "distillation": (DistillationTrainer, DistillationConfig),
}
SETTINGS = {
    "max_steps": 10,
    "save_steps": 4,
    "learning_rate": 0.01,
    "optim": "sgd",
    **COMMON_ARGUMENTS,
}
RESTARTED = ("num_tokens", "eval_num_tokens", "train_loss")  # restart at 0 after a resume
# TRL averages these over processes, whatever their numbers of tokens.
MEANS_OF_MEANS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/importance_sampling_ratio/mean",
)
SAMPLED = ("sampling/kl", "sampling/clipped_fraction")
datasets.disable_progress_bars()


def tokenizer():
    path = Path(__file__).parents[1] / "examples" / "sft.py"
    spec = importlib.util.spec_from_file_location("sft", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.byte_tokenizer()


def pairs(count):
    """Return prompts and answers of unequal lengths."""
    rows = [
        {
            "prompt": f"{n} + {n}?" + "?" * (n % 3),
            "chosen": f" It is {2 * n}" + "!" * (n % 4),
            "rejected": f" {n}.",
        }
        for n in range(count)
    ]
    return Dataset.from_list(rows)


def answers(prompts, trainer):
    """Return fixed completions of unequal lengths, all different, with a sampler's
    log-probabilities."""
    tokens = trainer.processing_class
    prompt_ids = [tokens(prompt)["input_ids"] for prompt in prompts]
    counts = {}
    completion_ids = []
    for prompt in prompts:
        number = counts[prompt] = counts.get(prompt, -1) + 1
        number += trainer.accelerator.process_index * len(prompts) % trainer.num_generations
        text = f"{prompt[::-1]}{'abcdefgh'[number]}" * (1 + number % 3)
        completion_ids.append(tokens(text)["input_ids"] + [tokens.eos_token_id] * (number % 2))
    logprobs = [[-4.0 - 0.1 * (token % 7) for token in ids] for ids in completion_ids]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


class Client:
    """Replaces TRL's client of a vLLM server: returns fixed completions and stores the weights sent
    to it."""

    def __init__(self):
        self.weights = {}

    def generate(self, prompts, n, **options):
        completions = [ids[::-1] * (1 + i % 3) + [7 + i] for ids in prompts for i in range(n)]
        logprobs = [[[-4.0 - 0.1 * (token % 7)] for token in ids] for ids in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}

    def update_named_params(self, metadata, tensors):
        self.weights = {name: tensor.clone() for name, tensor in tensors}
        assert [name for name, *_ in metadata] == [*self.weights]

    def reset_prefix_cache(self):
        pass

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}


class Server(VLLMGeneration):
    """TRL's side of a vLLM server, with the client above: vLLM is not installed."""

    def __init__(self, **settings):
        vars(self).update(settings, vllm_client=Client(), _weight_metadata=None, _dist=None)
        self._dist = DistributedBackend(self.accelerator)
        self.generation_kwargs = {}


def reward(completions, **columns):
    """Return a different reward for every completion."""
    return [0.1 * len(text) + 0.01 * (sum(map(ord, text)) % 97) for text in completions]


def in_order(groups, batch):
    """Replaces TRL's shuffle, so that micro-steps of one process have the rows of two groups."""
    count = len(batch["completion_ids"])
    order = (
        torch.arange(count)
        if groups == 2
        else torch.arange(count).view(2, 2, -1).transpose(0, 1).flatten()
    )
    return {name: rows[order] if rows.dim() else rows for name, rows in batch.items()}


def train(kind, cp, folder, resume=None, lora=False, changes=None, family="llama"):
    """Train on all ranks and return (logs, weights). cp=0 is the plain trainer."""
    trainer_class, config_class = TRAINERS[kind]
    world = dist.get_world_size()
    settings = {**SETTINGS, **(changes or {})}
    if cp:
        trainer_class = partial(long_context(trainer_class), ithaka={"cp": cp})
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            settings[name] = settings[name] * cp // world
    packed: list[PackedPrefixes] = []
    with trainer_environment(cp), pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "VLLMGeneration", Server)
        patch.setattr(prefixes, "MIN_TOKENS", 3)
        patch.setattr(
            prefixes,
            "pack_prefixes",
            lambda *rows: packed.append(pack_prefixes(*rows)) or packed[-1],
        )
        for module in (grpo_trainer, rloo_trainer, distillation_trainer):
            patch.setattr(
                module, "shuffle_sequence_dict", partial(in_order, world // cp if cp else 1)
            )
        path = folder.parent / family
        tokens = tokenizer()
        # grouped_mm has no fp64
        options = {} if family == "llama" else {"experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **options)
        settings["model_init_kwargs"] = options  # for the reference
        arguments = {
            "model": model,
            "processing_class": tokens,
            "peft_config": LORA if lora else None,
        }
        if kind in ("grpo", "rloo"):
            prompts = [{"prompt": row["prompt"]} for row in pairs(16)]
            arguments |= {"reward_funcs": reward, "train_dataset": Dataset.from_list(prompts)}
            if kind == "grpo" and not (settings.get("use_vllm") or "generation_kwargs" in settings):
                arguments["rollout_func"] = answers
        elif kind == "distillation":  # two prompts, which the rows of a batch share
            prompts = [{"prompt": row["prompt"]} for row in pairs(16)]
            teacher = AutoModelForCausalLM.from_pretrained(
                folder.parent / "teacher", dtype=torch.float64
            )
            arguments |= {
                "teacher_model": teacher,
                "train_dataset": Dataset.from_list(prompts[:2] * 8),
            }
        elif kind == "kto":
            rows = [
                {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
                for row in pairs(12)
                for side in ("chosen", "rejected")
            ]
            arguments |= {"train_dataset": Dataset.from_list(rows)}
        else:
            arguments |= {"train_dataset": pairs(16), "eval_dataset": pairs(4)}
        trainer = trainer_class(
            args=config_class(str(folder), **settings), callbacks=[ShiftRouters()], **arguments
        )
        trainer.remove_callback(PrinterCallback)
        random_seed = torch.initial_seed()
        if kind == "rloo":  # RLOOTrainer has no rollout_func
            texts = trainer.processing_class.batch_decode
            trainer._generate_single_turn = lambda ids, *_: answers(texts(ids), trainer)[
                "completion_ids"
            ]
        elif kind == "distillation":
            trainer._generate_single_turn = lambda ids, *_: [
                row[::-1] * (1 + len(row) % 3) + [7] for row in ids
            ]
        is_trained: list[bool] = []  # per pass through an embedding
        hook = register_module_forward_pre_hook(
            lambda module, _: (
                is_trained.append(torch.is_grad_enabled())
                if isinstance(module, nn.Embedding)
                else None
            )
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train(resume_from_checkpoint=resume)
        hook.remove()
        # with long_context, the reference runs before the model keeps activations
        if kind in ("dpo", "kto"):
            # passes of the model, and of the reference
            num_kl = int(getattr(trainer, "calculate_KL", False))
            assert is_trained.index(True) == (1 + 2 * num_kl if cp else num_kl)
        if family == "llama":  # a load-balancing loss counts tokens, so nothing is shared
            assert bool(packed) == bool(cp and kind in ("grpo", "rloo", "distillation"))
        assert all(both[1] < both[0] for both in (each.num_tokens for each in packed))
        trainer.save_model(str(folder / "final"))
        if settings.get("use_vllm") and dist.get_rank() == 0:  # the weights before the last update
            assert (
                trainer.vllm_generation.vllm_client.weights.keys()
                == dict(model.named_parameters()).keys()
            )
        weights = full_weights(trainer.model)
        if cp and kind in ("grpo", "rloo", "distillation"):  # the ranks of a cp group shuffle alike
            assert random_seed == settings["seed"] + dist.get_rank() // cp
        return trainer.state.log_history, weights


def check(runs, expected, only_here=(), ignored=()):
    logs, weights = expected
    for rank_logs, rank_weights in runs:
        assert [log["step"] for log in rank_logs] == [log["step"] for log in logs]
        for log, plain in zip(rank_logs, logs, strict=True):
            assert not plain.keys() - log.keys()
            for key in plain.keys() - {*ignored}:
                if not any(word in key for word in TIMES):
                    # a difference of sums in fp32
                    most = 10 * TOLERANCE if key == "kl" else TOLERANCE
                    assert log[key] == pytest.approx(plain[key], rel=TOLERANCE, abs=most), (
                        key,
                        log["step"],
                    )
            assert "train_runtime" in log or "eval_loss" in log or {*only_here} <= log.keys()
        for name, tensor in rank_weights.items():
            assert (tensor - weights[name]).abs().max() < TOLERANCE, name


def test_the_mismatch_of_a_sampler_is_an_estimate_of_its_kl_divergence():
    """It averages over the unmasked tokens whose log-probability the sampler knows, and is never
    negative."""
    sampled = torch.tensor(
        [[-1.0, -2.0, torch.nan, -1.0], [-3.0, -0.5, -1.0, -1.0]], dtype=torch.float64
    )
    model = torch.tensor([[-1.0, -2.5, -1.0, -9.0], [-2.5, -0.6, -1.0, -1.1]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    # as if three groups had equal sums
    accelerator = SimpleNamespace(reduce=lambda sums, reduction: 3 * sums)
    trainer = SimpleNamespace(
        _policy_logprobs=model,
        epsilon_low=0.2,
        epsilon_high=0.3,
        accelerator=accelerator,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    GRPOMixin._log_mismatch(trainer, sampled, mask)
    differences = [0.0, -0.5, 0.5, -0.1, 0.0, -0.1]
    kl = sum(math.exp(each) - 1 - each for each in differences) / 6
    logged = {name: values for name, (*values,) in trainer._metrics["train"].items()}
    assert logged == {
        "sampling/kl": [pytest.approx(kl)],
        "sampling/clipped_fraction": [pytest.approx(2 / 6)],
    }


def test_the_mismatch_of_a_sampler_excludes_padding_and_tool_tokens():
    """The sampler's log-probabilities of a tool's tokens are not those of a sample."""

    class Step:
        def compute_loss(self, model, inputs):
            return 0.0

    class OneGroup(GRPOMixin, Step):
        _log_mismatch = lambda self, sampled_BN, mask_BN: masks.append(mask_BN)  # noqa: E731

    masks: list[torch.Tensor] = []
    inputs = {
        "completion_mask": torch.tensor([[1, 1, 1, 0]]),
        "sampling_per_token_logps": torch.zeros(1, 4),
    }
    for tools, training in (
        ({}, True),
        ({"tool_mask": torch.tensor([[1, 0, 1, 1]])}, True),
        ({}, False),
    ):
        OneGroup().compute_loss(SimpleNamespace(training=training), inputs | tools)
    assert [mask.tolist() for mask in masks] == [
        [[True, True, True, False]],
        [[True, False, True, False]],
    ]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    return tmp_path_factory.mktemp("trl")


def save_model(family, folder):
    sizes = {"vocab_size": 258, "num_hidden_layers": 1}
    model = (
        tiny_model(tiny_config("llama", **sizes))
        if family == "llama"
        else tiny_decoder(family, **sizes)
    )
    model.save_pretrained(folder)
    if family == "llama":
        tiny_model(tiny_config("qwen3", 8, 4, vocab_size=258)).save_pretrained(
            folder.parent / "teacher"
        )


GRPO = {
    "per_device_train_batch_size": 4,
    "max_completion_length": 32,
    "temperature": 0.7,
    "num_generations": 4,
}
CASES = {
    # The reference is a frozen copy, loaded by TRL.
    "dpo copy": ("dpo", False, {"per_device_train_batch_size": 4}),
    # The reference is the model without its adapter. Evaluation, and accumulation over two
    # micro-steps.
    "dpo adapter": (
        "dpo",
        True,
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 5,
        },
    ),
    # Its KL term depends on which rows are in the batch of a process.
    "kto": ("kto", False, {"per_device_train_batch_size": 4, "loss_type": "apo_zero_unpaired"}),
    "rloo": ("rloo", False, {**GRPO, "gradient_accumulation_steps": 2}),
    # A group is split over both data-parallel groups. Two updates per generation.
    "grpo by group": (
        "grpo",
        False,
        {**GRPO, "scale_rewards": "group", "num_iterations": 2, "beta": 0.1},
    ),
    "grpo by batch": (
        "grpo",
        True,
        {
            **GRPO,
            "scale_rewards": "batch",
            "gradient_accumulation_steps": 2,
            "loss_type": "dapo",
            "beta": 0.1,
        },
    ),
}


# The previous case with fewer steps.
CASES["grpo, two steps"] = (
    "grpo",
    True,
    {**CASES["grpo by batch"][2], "max_steps": 2, "save_steps": 1},
)
CASES["kto, one group"] = ("kto", True, {"per_device_train_batch_size": 4, "max_steps": 6})
# Both sample the same tokens from the same seed.
CASES["grpo, sampled, one group"] = (
    "grpo",
    False,
    {**GRPO, "generation_kwargs": {"top_k": 20}, "max_steps": 3},
)
CASES["grpo, vllm"] = (
    "grpo",
    False,
    {**GRPO, "use_vllm": True, "vllm_mode": "server", "max_steps": 4},
)
DISTILLATION = {
    "per_device_train_batch_size": 8,
    "beta": 0.3,
    "temperature": 0.7,
    "max_completion_length": 32,
}
CASES["distillation"] = ("distillation", False, DISTILLATION | {"gradient_accumulation_steps": 2})
CASES["distillation, one group"] = (
    "distillation",
    True,
    DISTILLATION | {"max_steps": 2, "save_steps": 1},
)
# MoE models by default: TRL adds the load-balancing loss. minimax_m2 also has a persistent buffer.
SHORT = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "save_steps": 1,
}
for kind, family in itertools.product(("dpo", "kto", "grpo", "rloo"), EXPERTS):
    settings = (GRPO if kind in ("grpo", "rloo") else {}) | SHORT
    CASES[f"{kind} on {family}"] = (kind, (kind, family) == ("kto", "qwen3_moe"), settings)
# test_trainers_on_model_types.py has MoE models
FAST = ("grpo, two steps", "distillation, one group")


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_steps_equal_those_of_one_process(ranks, saved_model, case):
    """So do the steps after a resume from the first checkpoint, on two ranks."""
    kind, lora, changes = CASES[case]
    length = {} if kind in ("grpo", "rloo", "distillation") else {"max_length": 64}
    changes = {"per_device_eval_batch_size": 2, **length, **changes}
    family = case.rpartition(" on ")[2] if " on " in case else "llama"
    if not (saved_model / family).is_dir():
        save_model(family, saved_model / family)
    run = partial(train, lora=lora, changes=changes, family=family)
    logged = SAMPLED if kind == "grpo" and "sampled" not in case else ()
    (expected,) = ranks.run(1, run, kind, 0, saved_model / f"plain {case}")
    assert ("aux_loss" in expected[0][0]) == (family in EXPERTS)
    num_ranks = 2 if "one group" in case or family in EXPERTS else 4
    check(ranks.run(num_ranks, run, kind, 2, saved_model / case), expected, logged, MEANS_OF_MEANS)
    if lora or family in EXPERTS:
        resumed = partial(
            run, resume=str(saved_model / case / f"checkpoint-{(SETTINGS | changes)['save_steps']}")
        )
        runs = ranks.run(2, resumed, kind, 2, saved_model / f"resumed {case}")
        check(runs, expected, logged, ignored=RESTARTED)
    if family in EXPERTS and not lora:
        assert not AutoConfig.from_pretrained(saved_model / case / "final").output_router_logits
