"""trl.SFTTrainer on packed conversations, with loss on the assistant's turns, on sequences that
ranks share.

The three lines that ithaka adds are marked.

    torchrun --nproc-per-node 2 examples/sft.py OUT_DIR    # two ranks share each sequence
    python examples/sft.py OUT_DIR                         # one rank, the same losses
    ... examples/sft.py OUT_DIR --lora                     # adapters on a frozen model
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ithaka.hf import long_context  # <- one

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}{% if message['role'] == "
    "'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; for a pretrained model, load its tokenizer instead."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"eos_token": "<end>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **special)


def conversations(count: int, first: int = 0) -> Dataset:
    turns = [
        [
            {"role": "user", "content": f"{n} + {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}." + "!" * (n % 9)},
        ]
        for n in range(first, first + count)
    ]
    return Dataset.from_list([{"messages": turn} for turn in turns])


def make_trainer(
    trainer_class: Callable[..., Any], output_dir: str, lora: bool = False, **changes: Any
) -> Any:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=len(tokenizer), **SIZES)
    )
    settings = {
        "max_length": 128,
        "packing": True,
        "assistant_only_loss": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "logging_steps": 1,
        "save_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-2,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "report_to": [],
    }
    args = SFTConfig(output_dir, **{**settings, **changes})
    adapter = (
        {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])}
        if lora
        else {}
    )
    data = {"train_dataset": conversations(60), "eval_dataset": conversations(6, first=200)}
    return trainer_class(model=model, args=args, processing_class=tokenizer, **data, **adapter)


def main() -> None:
    cp = int(os.environ.get("WORLD_SIZE", "1"))

    def trainer_class(**arguments: Any) -> Any:
        # <- two, three; plans for max_length
        return long_context(SFTTrainer)(**arguments, ithaka={"cp": cp})

    trainer = make_trainer(trainer_class, sys.argv[1], lora="--lora" in sys.argv)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
