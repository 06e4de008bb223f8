"""Seconds and peak memory of an update of DPO or GRPO with TRL, plain or with long_context, or of sending weights.

    python benchmarks/rewards.py grpo --tokens 131072 --lora            # with long_context
    python benchmarks/rewards.py grpo --tokens 131072 --lora --plain    # TRL with its fused head and checkpointing
    python benchmarks/rewards.py dpo --tokens 256 --size toy            # a check on a CPU
    python benchmarks/rewards.py weights --size llama-8b                # gather all tensors, copy them to the host

Tokens are random. A DPO update has one pair, two rows of --tokens; a GRPO update has two completions, one micro-step
each. Both have a reference: the model without its adapter or, without --lora, a frozen copy. The first update is not
counted.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import ithaka
from ithaka.hf import long_context

LLAMA_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {
    "llama-3b": {**LLAMA_3B, "num_hidden_layers": 28, "vocab_size": 128256, "tie_word_embeddings": True},
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
NUM_WORDS = 200  # tokens that occur
PROMPT = 64


class Clock(TrainerCallback):
    """Seconds of each update after the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if state.global_step > 1:
            self.seconds.append(time.perf_counter() - self.start)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(NUM_WORDS)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def save_model(size: str, layers: int | None, tokens: int, folder: str) -> None:
    sizes = SIZES[size] | ({"num_hidden_layers": layers} if layers else {})
    config = AutoConfig.for_model("llama", **sizes, max_position_embeddings=max(tokens, 2048))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(NUM_WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_trainer(arguments: argparse.Namespace, folder: str) -> Any:
    on_gpu, length = torch.cuda.is_available(), arguments.tokens - PROMPT
    settings = {
        "per_device_train_batch_size": 1,
        "max_steps": arguments.steps + 1,
        "learning_rate": 1e-6,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "beta": 0.1,
    }
    dtype = torch.bfloat16 if on_gpu and arguments.lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    lora = LoraConfig(r=16, target_modules="all-linear") if arguments.lora else None
    named: dict[str, Any] = {"model": model, "processing_class": word_tokenizer(), "peft_config": lora}
    trainer_class: Any
    if arguments.trainer == "dpo":
        trainer_class, args = DPOTrainer, DPOConfig(folder, max_length=arguments.tokens, **settings)
        texts = ["".join(f" w{i}" for i in draw(count, n)) for n, count in enumerate((PROMPT, length, length))]
        row = dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
        named["train_dataset"] = Dataset.from_list([row] * 4)
    else:
        more = {"num_generations": 2, "gradient_accumulation_steps": 2, "max_completion_length": length}
        trainer_class, args = GRPOTrainer, GRPOConfig(folder, **settings, **more)
        named |= {"train_dataset": Dataset.from_list([{"prompt": "w1"}] * 4), "rollout_func": roll_out}
        named["reward_funcs"] = lambda completion_ids, **columns: [float(ids[0]) for ids in completion_ids]
    if arguments.plain:
        return trainer_class(args=args, **named)
    return long_context(trainer_class)(args=args, **named, ithaka={"context": arguments.tokens})


def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    completions = [draw(trainer.max_completion_length, i) for i in range(len(prompts))]
    logprobs = [[-5.0] * len(ids) for ids in completions]
    return {"prompt_ids": [draw(PROMPT, 0)] * len(prompts), "completion_ids": completions, "logprobs": logprobs}


def measure_weights(folder: str, steps: int) -> list[float]:
    """Seconds of `iterate_weights` with a copy of each tensor to the host, after a first one."""
    model = ithaka.parallelize(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        for _, tensor in ithaka.iterate_weights(model):
            tensor.cpu()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["dpo", "grpo", "weights"])
    parser.add_argument("--tokens", type=int, default=131072, help="per row, with a short prompt")
    parser.add_argument("--size", choices=SIZES, default="llama-3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--plain", action="store_true", help="TRL without long_context")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(arguments.size, arguments.layers, arguments.tokens, folder)
        if arguments.trainer == "weights":
            seconds = measure_weights(folder, arguments.steps)
        else:
            trainer, clock = make_trainer(arguments, folder), Clock()
            trainer.add_callback(clock)
            trainer.train()
            seconds = clock.seconds
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    result = {"seconds": round(statistics.median(seconds), 3), "peak_gib": peak and round(peak, 2)}
    print(json.dumps({**vars(arguments), **result}))


if __name__ == "__main__":
    main()
