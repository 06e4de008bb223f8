"""Memory and time of distillation on one GPU: Llama-3.2-3B's shape with an 8B teacher, few layers
each.

    python benchmarks/distillation.py                      # ithaka at 128K tokens
    python benchmarks/distillation.py trl 32K 64K 128K     # TRL, up to the first that fails

Prints JSON lines. The teacher's weights are loaded in every case. ithaka's gate: distillation takes
at most 2.5 GiB more than training with the cross-entropy, and its step at most 10 % longer than
that step plus the teacher's forward.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ithaka
from ithaka.comm.mesh import default_device, free_memory
from ithaka.config import parse_count

DEVICE = default_device()
ON_GPU = DEVICE.type == "cuda"
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SHAPES = (
    {"3b": (3072, 8192, 24, 8, 128), "8b": (4096, 14336, 32, 8, 128)}
    if ON_GPU
    else {"3b": (48, 96, 4, 2, 12), "8b": (64, 128, 4, 2, 16)}
)
VOCAB = 128256 if ON_GPU else 512
LAYERS = 4
STEPS = 3
BETA = 0.5
LAYOUT = ithaka.Layout(tile_tokens=8192, dtype="bfloat16" if ON_GPU else "float32")


def new_model(name: str, tokens: int, dtype: torch.dtype) -> Any:
    shape = dict(zip(NAMES, SHAPES[name], strict=True)) | {
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
    }
    config = LlamaConfig(
        **shape, max_position_embeddings=tokens, tie_word_embeddings=name == "3b", use_cache=False
    )
    torch.manual_seed(len(name))
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def measure(step: Callable[[], Any]) -> dict[str, float]:
    """Return the median seconds of a step and its peak in GiB, after a first one that allocates and
    compiles."""
    seconds = []
    for _ in range(1 + STEPS):
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
    return {"seconds": round(statistics.median(seconds[1:]), 3), "peak_gib": round(peak, 2)}


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def run_ithaka(tokens: int) -> None:
    compute = getattr(torch, LAYOUT.dtype)
    student = ithaka.parallelize(new_model("3b", tokens, torch.float32).train(), layout=LAYOUT)
    teacher = new_model("8b", tokens, compute).requires_grad_(False).eval()
    teacher = ithaka.parallelize(teacher, layout=LAYOUT)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def forward() -> None:
        teacher(input_ids=ids, labels=ids)
        teacher.reshard()

    found: dict[str, dict[str, float]] = {}

    def add(case: str, figures: dict[str, float]) -> None:
        found[case] = figures
        print(json.dumps({"side": "ithaka", "tokens": tokens, "case": case, **figures}), flush=True)

    add(
        "cross-entropy", measure(lambda: update(optimizer, student(input_ids=ids, labels=ids).loss))
    )
    add("forward of the teacher", measure(forward))
    planned = sum(figures["seconds"] for figures in found.values())
    for beta in (0.0, BETA, 1.0):
        figures = measure(
            lambda beta=beta: update(
                optimizer, ithaka.distill(student, teacher, ids, ids, beta=beta).loss
            )
        )
        more = figures["peak_gib"] - found["cross-entropy"]["peak_gib"]
        ratios = {"gib_above": round(more, 2), "time_ratio": round(figures["seconds"] / planned, 3)}
        add(f"distillation, beta {beta}", figures | ratios)


def run_trl(tokens: int) -> None:
    """TRL's tiled divergence on Hugging Face models in bfloat16, with gradient checkpointing and
    fp32 AdamW."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    student = new_model("3b", tokens, torch.float32).train()
    teacher = new_model("8b", tokens, torch.bfloat16).eval()
    student.gradient_checkpointing_enable({"use_reentrant": False})
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            mine = student.model(ids, use_cache=False).last_hidden_state[:, :-1]
            with torch.no_grad():
                theirs = teacher.model(ids, use_cache=False).last_hidden_state[:, :-1]
            heads = student.lm_head.weight, teacher.lm_head.weight
            loss, *_ = _chunked_divergence_loss(
                mine, theirs, *heads, torch.ones_like(ids[:, 1:]), BETA
            )
        update(optimizer, loss)

    print(
        json.dumps({"side": "trl", "tokens": tokens, "case": f"beta {BETA}", **measure(step)}),
        flush=True,
    )


def main() -> None:
    side, *lengths = sys.argv[1:] or ["ithaka"]
    for length in lengths or (["128K"] if ON_GPU else ["256"]):
        tokens = parse_count(length)
        assert tokens is not None, length
        try:
            (run_trl if side == "trl" else run_ithaka)(tokens)
        except torch.OutOfMemoryError as error:
            print(
                json.dumps({"side": side, "tokens": tokens, "error": str(error).split(". ")[0]}),
                flush=True,
            )
            break
        free_memory()


if __name__ == "__main__":
    main()
