"""transformers.Trainer on sequences that ranks share. The three lines that ithaka adds are marked.

torchrun --nproc-per-node 2 examples/hf_trainer.py OUT_DIR    # two ranks share each sequence
python examples/hf_trainer.py OUT_DIR                         # one rank, the same losses
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from ithaka.hf import long_context  # <- one

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return rows of random tokens, of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 40, (count,), generator=generator).tolist()
    tokens = [torch.randint(64, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def padded(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)

    def pad(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (longest - len(values))

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in batch]),
        "labels": torch.tensor([pad(row["labels"], -100) for row in batch]),
        "attention_mask": torch.tensor([pad([1] * len(row["labels"]), 0) for row in batch]),
    }


def make_trainer(trainer_class: Callable[..., Any], output_dir: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, **SIZES))
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "logging_steps": 1,
        "save_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-2,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": [],
    }
    args = TrainingArguments(output_dir, **{**settings, **changes})
    data = {
        "train_dataset": rows(40, seed=1),
        "eval_dataset": rows(3, seed=2),
        "data_collator": padded,
    }
    return trainer_class(model=model, args=args, **data)


def main() -> None:
    cp = int(os.environ.get("WORLD_SIZE", "1"))

    def trainer_class(**arguments: Any) -> Any:
        # <- two, three
        return long_context(Trainer)(**arguments, ithaka={"cp": cp, "context": 128})

    trainer = make_trainer(trainer_class, sys.argv[1])
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
