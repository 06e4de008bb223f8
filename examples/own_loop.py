"""Your own training loop: plan, train, sample, save; optionally with adapters.

torchrun --nproc-per-node 2 examples/own_loop.py OUT_DIR    # two ranks share each sequence
python examples/own_loop.py OUT_DIR                         # one rank, the same losses
... examples/own_loop.py OUT_DIR --lora                     # PEFT adapters on a frozen model
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import ithaka

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONTEXT = 256


def make_model(lora: bool) -> Any:
    """Master weights are float32; for a pretrained model: from_pretrained(path,
    dtype=torch.float32)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, **SIZES))
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")) if lora else model


def train(model: Any, steps: int) -> list[float]:
    """Return the losses. Every rank of a cp group passes the same batch and gets the same loss."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        start = torch.randint(256, (1, 1), generator=generator)
        ids = (start + 3 * torch.arange(CONTEXT)) % 256
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(output_dir: str, lora: bool) -> list[float]:
    # On a GPU, compute in bfloat16 and update the float32 master weights.
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    # cp="auto": the planner decides how many ranks share a sequence; on a CPU, all do.
    model = ithaka.parallelize(make_model(lora), cp="auto", context=CONTEXT, dtype=dtype)
    losses = train(model, steps=5)
    sample = model.generate(
        input_ids=torch.tensor([[7, 10, 13, 16]]), max_new_tokens=4, do_sample=False
    )
    model.save_pretrained(output_dir)  # call it on every rank
    if dist.get_rank() == 0:
        print(f"losses {[round(loss, 4) for loss in losses]}, sample {sample[0].tolist()}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], "--lora" in sys.argv)
