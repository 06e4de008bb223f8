"""Measure DPO and GRPO updates of TRL, plain and with long_context: seconds, peak memory and the
longest trace.

    python benchmarks/rewards.py grpo dpo --sides ithaka plain --lora --layers 4   # at 128K
    python benchmarks/rewards.py longest --lora            # plain TRL's traces on an 80 GB GPU
    python benchmarks/rewards.py plan                      # ithaka's, on one and eight; no GPU
    python benchmarks/rewards.py rehearse                  # rank 0 of these, with a few layers
    python benchmarks/rewards.py weights --size llama-8b   # gather all tensors, copy to the host

A smoke test on a CPU:

    python benchmarks/rewards.py grpo dpo plan rehearse longest --tokens 256 --size toy --lora

Everything runs in one process, ithaka first, one line of JSON each. Tokens are random. A DPO update
has one pair, two rows of --tokens; a GRPO update has two completions, one micro-step each. Both
have a reference: the model without its adapter or, without --lora, a frozen copy. The first update
is not counted. --gpu limits memory to another GPU's.

`longest` measures the peak of plain TRL at two lengths, extrapolates to the limit and tries that
length, then shorter ones until one fits. `longest`, and `rehearse` at the longest trace, cut
attention into blocks, which changes its time but not its allocations.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import ithaka
from ithaka.checks import rehearse as rehearsal
from ithaka.comm.mesh import default_device, end_process_group, free_memory
from ithaka.config import AdapterConfig
from ithaka.hf.trainers import long_context
from ithaka.plan.hardware import GIB, find_gpu, parse_gpus
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan, SearchSpace
from ithaka.plan.shape import StepShape
from ithaka.run import launch
from ithaka.trace.shapes import shape_from_config

LLAMA_3B = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
}
TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES = {
    "llama-3b": {
        **LLAMA_3B,
        "num_hidden_layers": 28,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **LLAMA_3B,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    },
    "toy": {**TOY, "num_hidden_layers": 2, "vocab_size": 512},
}
NUM_WORDS = 200  # vocabulary
PROMPT = 64
RANK = 16
ROWS = {"grpo": 1, "dpo": 2}  # per micro-step
MARGIN = 0.97  # each length tried is at most this fraction of the one before
ON_GPU = torch.cuda.is_available()
BLOCK = 16384 if ON_GPU else 64  # tokens per attention block in `longest`


class Clock(TrainerCallback):
    """Times each update after the first. `stops`: end after the first micro-step, which has the
    peak."""

    def __init__(self, stops: bool = False) -> None:
        self.seconds: list[float] = []
        self.stops = stops

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.start = time.perf_counter()

    def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.stops:
            raise StopIteration

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        if state.global_step > 1:
            self.seconds.append(time.perf_counter() - self.start)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(NUM_WORDS)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def model_config(size: str, tokens: int, layers: int | None = None) -> Any:
    sizes = SIZES[size] | ({"num_hidden_layers": layers} if layers else {})
    return AutoConfig.for_model("llama", **sizes, max_position_embeddings=max(tokens, 2048))


def make_model(arguments: argparse.Namespace, tokens: int, folder: str, **options: Any) -> Any:
    """A model with random weights. It is saved first if TRL loads a copy of it as the reference."""
    torch.manual_seed(0)
    config = model_config(arguments.size, tokens, arguments.layers)
    lora = arguments.lora
    with torch.device(default_device() if lora else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if ON_GPU else torch.float32, **options
        )
    if lora:
        return model
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(
        NUM_WORDS, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def make_trainer(
    arguments: argparse.Namespace, name: str, side: str, tokens: int, folder: str
) -> Any:
    length = tokens - PROMPT
    settings = {
        "per_device_train_batch_size": 1,
        "max_steps": arguments.steps + 1,
        "learning_rate": 1e-6,
        "bf16": ON_GPU,
        "use_cpu": not ON_GPU,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "beta": 0.1,
    }
    options = {"attn_implementation": arguments.attention} if side == "plain" else {}
    model = make_model(arguments, tokens, folder, **options)
    lora = LoraConfig(r=RANK, target_modules="all-linear") if arguments.lora else None
    named: dict[str, Any] = {
        "model": model,
        "processing_class": word_tokenizer(),
        "peft_config": lora,
    }
    trainer_class: Any
    if name == "dpo":
        trainer_class = DPOTrainer
        args = DPOConfig(folder, max_length=tokens, **settings)
        texts = [
            "".join(f" w{i}" for i in draw(count, n))
            for n, count in enumerate((PROMPT, length, length))
        ]
        row = dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
        named["train_dataset"] = Dataset.from_list([row] * 4)
    else:
        more = {
            "num_generations": 2,
            "gradient_accumulation_steps": 2,
            "max_completion_length": length,
        }
        trainer_class = GRPOTrainer
        args = GRPOConfig(folder, **settings, **more)
        named |= {
            "train_dataset": Dataset.from_list([{"prompt": "w1"}] * 4),
            "rollout_func": roll_out,
        }
        named["reward_funcs"] = lambda completion_ids, **columns: [
            float(ids[0]) for ids in completion_ids
        ]
    if side == "plain":
        return trainer_class(args=args, **named)
    return long_context(trainer_class)(args=args, **named, ithaka={"context": tokens})


def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    completions = [draw(trainer.max_completion_length, i) for i in range(len(prompts))]
    logprobs = [[-5.0] * len(ids) for ids in completions]
    return {
        "prompt_ids": [draw(PROMPT, 0)] * len(prompts),
        "completion_ids": completions,
        "logprobs": logprobs,
    }


def measure_update(
    arguments: argparse.Namespace, name: str, side: str, tokens: int, stops: bool = False
) -> dict[str, Any]:
    """Return the seconds of an update (not with `stops`) and the peak in GiB; neither if memory ran
    out."""
    clock = Clock(stops)
    seconds = None
    is_out = False
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = make_trainer(arguments, name, side, tokens, folder)
            trainer.add_callback(clock)
            with contextlib.suppress(StopIteration):
                trainer.train()
            seconds = statistics.median(clock.seconds) if clock.seconds else None
        except torch.OutOfMemoryError:
            is_out = True
        finally:
            trainer = None
            free_memory()
    peak = torch.cuda.max_memory_allocated() / GIB if ON_GPU and not is_out else None
    case = {
        "trainer": name,
        "side": side,
        "tokens": tokens,
        "lora": arguments.lora,
        "layers": arguments.layers,
    }
    return {
        **case,
        "seconds": seconds and round(seconds, 3),
        "peak_gib": peak and round(peak, 2),
        "fits": not is_out,
    }


@contextlib.contextmanager
def attention_in_blocks(implementation: str) -> Iterator[None]:
    """Cut the attention of plain models into blocks of BLOCK tokens: the same allocations, in
    linear time. Rows have no padding, so that masks are not needed."""
    attend = ALL_ATTENTION_FUNCTIONS[implementation]

    def attend_in_blocks(module: Any, q: Any, k: Any, v: Any, mask: Any, **named: Any) -> Any:
        tokens = q.shape[2]
        assert tokens % BLOCK == 0, tokens
        named.pop("position_ids", None)
        q, k, v = (
            x.transpose(1, 2).reshape(-1, BLOCK, *x.shape[1::2]).transpose(1, 2) for x in (q, k, v)
        )
        out, weights = attend(module, q, k, v, None, **named)
        return out.reshape(-1, tokens, *out.shape[2:]), weights

    ALL_ATTENTION_FUNCTIONS[implementation] = attend_in_blocks
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[implementation] = attend


def find_longest(
    arguments: argparse.Namespace, name: str, limit_gib: float
) -> Iterator[dict[str, Any]]:
    """Yield updates of plain TRL: two short ones, then from the extrapolated length down to one
    that fits."""
    arguments = argparse.Namespace(**{**vars(arguments), "steps": 0, "layers": None})
    lengths = (2 * BLOCK, 4 * BLOCK)
    peaks = []
    with attention_in_blocks(arguments.attention):
        for tokens in lengths:
            yield (result := measure_update(arguments, name, "plain", tokens, stops=name == "grpo"))
            peaks.append(result["peak_gib"] or tokens * limit_gib / 1000)
        slope = (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])
        tokens = int(lengths[0] + (limit_gib - peaks[0]) / slope)
        while (tokens := tokens // BLOCK * BLOCK) > lengths[1]:
            yield (result := measure_update(arguments, name, "plain", tokens, stops=name == "grpo"))
            if result["fits"]:
                return
            tokens = min(int(MARGIN * tokens), tokens - BLOCK)


def make_plan(
    arguments: argparse.Namespace, name: str, gpus: str, lora: bool, tokens: int | None = None
) -> Plan:
    """Plan a micro-step at `tokens` per row, by default the most that fit."""
    with tempfile.TemporaryDirectory() as folder:
        model_config(arguments.size, 2048).save_pretrained(folder)
        shape = shape_from_config(find_config(folder)).with_adapter(
            AdapterConfig(rank=RANK) if lora else None
        )
    hardware = parse_gpus(gpus)
    space = SearchSpace(replace(shape, reference=not lora), hardware, {"cp": hardware.num_gpus})
    return space.choose(
        StepShape(tokens or space.longest_context(ROWS[name]), ROWS[name], reference=True)
    )


def describe_plan(name: str, plan: Plan) -> dict[str, Any]:
    ledger = plan.ledger
    gib = {tier: round(need / GIB, 1) for tier, (need, _) in ledger.tiers.items() if need}
    lora = plan.shape.adapter is not None
    case = {"planned": name, "gpus": plan.hardware.name, "lora": lora, "tokens": plan.work.context}
    return {**case, "fits": plan.fits, "seconds": round(plan.step_s, 2), "gib": gib}


def rehearse(
    arguments: argparse.Namespace, name: str, gpus: str, longest: bool = False
) -> dict[str, Any]:
    """Rank 0 of `gpus` with a few layers: memory only at the longest trace (not on a CPU), time too
    at --tokens."""
    plan = make_plan(arguments, name, gpus, True, None if longest and ON_GPU else arguments.tokens)
    config = model_config(arguments.size, plan.work.tokens)
    truncated = rehearsal.truncate_plan(
        plan, config.to_dict(), arguments.rehearsed_layers, memory_only=longest
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        rows, phase = rehearsal.rehearse_plan(plan, truncated, folder)
    free_memory()
    figures = {
        row["what"]: [row["planned"] and round(row["planned"], 3), round(row["measured"], 3)]
        for row in rows
    }
    return {
        "rehearsed": name,
        "gpus": gpus,
        "tokens": plan.work.context,
        "phase": phase,
        "planned, measured": figures,
    }


def measure_weights(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time `iterate_weights` with a copy of each tensor to the host, after a warm-up."""
    torch.manual_seed(0)
    with default_device():
        model = AutoModelForCausalLM.from_config(
            model_config(arguments.size, 2048), dtype=torch.bfloat16
        )
    model = ithaka.parallelize(model)
    seconds = []
    for _ in range(arguments.steps + 1):
        start = time.perf_counter()
        for _, tensor in ithaka.iterate_weights(model):
            tensor.cpu()
        seconds.append(time.perf_counter() - start)
    return {"weights": arguments.size, "seconds": round(statistics.median(seconds[1:]), 3)}


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield results: plans, rehearsals, ithaka, then plain TRL."""
    gpu = find_gpu(arguments.gpu)
    tasks = arguments.tasks
    if ON_GPU:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpu.memory_bytes / total))
        launch.detect_gpu = lambda: (gpu.name, gpu.memory_bytes)
    machines = [f"{count}x{arguments.gpu}" for count in (1, 8)]
    if "plan" in tasks:
        for name, gpus, lora in product(ROWS, machines, (True, False)):
            yield describe_plan(name, make_plan(arguments, name, gpus, lora))
    if "rehearse" in tasks:
        # DPO at its longest has the same tokens and memory as GRPO.
        for name, gpus in product(ROWS, machines):
            yield rehearse(arguments, name, gpus)
        for gpus in machines:
            yield rehearse(arguments, "grpo", gpus, longest=True)
    if "weights" in tasks:
        yield measure_weights(arguments)
        end_process_group()
    for side, name in product(arguments.sides, ROWS):
        if name in tasks:
            yield measure_update(arguments, name, side, arguments.tokens)
    if "longest" in tasks:
        end_process_group()
        for name in ROWS:
            yield from find_longest(arguments, name, gpu.memory_bytes / GIB)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tasks", nargs="+", choices=["dpo", "grpo", "longest", "plan", "rehearse", "weights"]
    )
    parser.add_argument(
        "--sides", nargs="+", choices=["ithaka", "plain"], default=["ithaka"], help="in this order"
    )
    parser.add_argument("--tokens", type=int, default=131072, help="per row, with a short prompt")
    parser.add_argument("--size", choices=SIZES, default="llama-3b")
    parser.add_argument(
        "--layers", type=int, help="fewer layers than the shape has, for dpo and grpo"
    )
    parser.add_argument("--rehearsed-layers", type=int, default=2)
    parser.add_argument("--gpu", default="H100-80GB", help="plan for this GPU, within its memory")
    parser.add_argument("--lora", action="store_true", help="for updates and longest")
    parser.add_argument(
        "--attention", default="flash_attention_4" if ON_GPU else "sdpa", help="of plain TRL"
    )
    parser.add_argument("--steps", type=int, default=1)
    for result in run(parser.parse_args()):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
