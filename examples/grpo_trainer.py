"""trl.GRPOTrainer on sequences that ranks share, on a task whose reward is checked by a program.

A prompt names a letter, and a completion's reward is the fraction of its characters that are this
letter. By default a small random model learns it on two cores. The three lines that ithaka adds are
marked.

    python examples/grpo_trainer.py OUT_DIR                         # one rank
    torchrun --nproc-per-node 2 examples/grpo_trainer.py OUT_DIR    # two ranks share each sequence
    ... examples/grpo_trainer.py OUT_DIR --model models/SmolLM2-135M-Instruct
"""

import argparse
import os
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from ithaka.hf import long_context  # <- one

# tokens per completion
LETTERS = "abcdefgh"
LENGTH = 12
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter."""
    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate([*LETTERS, ":", "?"])}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def load(path: str | None) -> tuple[Any, Any, str]:
    """Return a model, its tokenizer and the form of a prompt."""
    if path is not None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(path), "Only the letter {}, again and again:"
    torch.manual_seed(0)
    tokenizer = letter_tokenizer()
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), **SIZES, eos_token_id=tokenizer.eos_token_id
    )
    return AutoModelForCausalLM.from_config(config), tokenizer, "{}:"


def reward_letters(completions: list[str], letter: list[str], **columns: Any) -> list[float]:
    """Return the fraction of each completion that is its letter; too short a completion has
    less."""
    return [
        text.count(wanted) / max(len(text), LENGTH)
        for text, wanted in zip(completions, letter, strict=True)
    ]


def make_trainer(output_dir: str, path: str | None = None, **changes: Any) -> Any:
    model, tokenizer, prompt = load(path)
    rows = [{"prompt": prompt.format(letter), "letter": letter} for letter in LETTERS] * 8
    settings = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": LENGTH,
        "max_steps": 100,
        "learning_rate": 1e-5 if path else 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 5,
        "save_strategy": "no",
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "report_to": [],
    }
    return long_context(GRPOTrainer)(  # <- two
        model=model,
        reward_funcs=reward_letters,
        args=GRPOConfig(output_dir, **{**settings, **changes}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        ithaka={"cp": int(os.environ.get("WORLD_SIZE", "1")), "context": 128},  # <- three
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir")
    parser.add_argument("--model", help="a Hugging Face directory; a small random model without it")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    trainer = make_trainer(arguments.output_dir, arguments.model, max_steps=arguments.steps)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
