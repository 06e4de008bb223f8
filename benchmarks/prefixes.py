"""Compare shared prefixes with repeated ones on one GPU: `python benchmarks/prefixes.py --out DIR`.

Two cases, each of Llama-3.2-3B's shape, forward and backward, bfloat16 computation with float32 weights, attention
outputs kept: `answers`, a prompt with several answers, and `episode`, turns that each repeat the history before them.
`shared` runs `pack_prefixes` of all sequences in one call. `repeated` runs each sequence alone, one call after another.
Only answers have labels; in an episode, each turn's answer. Both sides must have the same summed loss. Prints and
writes one JSON line per case and side: seconds, peak memory, loss, tokens and attention pairs.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from ithaka.comm.mesh import default_device, end_process_group, free_memory, start_process_group
from ithaka.layout import ActivationPolicy, Layout
from ithaka.model.build import parallelize_model
from ithaka.model.prefixes import pack_prefixes

GIB = 2**30
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
SHAPES = {"3b": (3072, 8192, 24, 8, 128, 128256), "tiny": (64, 128, 4, 2, 16, 512)}
Sequences = list[tuple[Tensor, Tensor]]  # ids and labels


def make_answers(vocab: int, prompt: int, answer: int, num_answers: int, ragged: bool) -> Sequences:
    """`ragged`: answers of different lengths, with the same mean."""
    random = torch.Generator().manual_seed(1)
    shared = torch.randint(vocab, (prompt,), generator=random)
    sequences = []
    for number in range(num_answers):
        length = answer + (answer * (2 * number + 1 - num_answers) // (2 * num_answers) if ragged else 0)
        ids = torch.cat([shared, torch.randint(vocab, (length,), generator=random)])
        sequences.append((ids, ids.masked_fill(torch.arange(len(ids)) < prompt, -100)))
    return sequences


def make_episode(vocab: int, turns: int, tokens: int) -> Sequences:
    """Turn i has the first i / turns of `tokens`; the last quarter of what it adds is its answer, with labels."""
    ids = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(2))
    sequences, step = [], tokens // turns
    for end in range(step, turns * step + 1, step):
        labels = ids[:end].masked_fill(torch.arange(end) < end - step // 4, -100)
        sequences.append((ids[:end], labels))
    return sequences


def make_model(shape: str, layers: int, positions: int, tile: int) -> Any:
    values = dict(zip(NAMES, SHAPES[shape], strict=True)) | {"num_hidden_layers": layers, "use_cache": False}
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config = LlamaConfig(**values, max_position_embeddings=positions, tie_word_embeddings=True, rope_parameters=rope)
    torch.manual_seed(0)
    device = default_device()
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    kept = (ActivationPolicy(attention="device"),) * layers
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    start_process_group(device)
    return parallelize_model(model, layout=Layout(tile_tokens=tile, kept=kept, dtype=dtype))


def measure(model: Any, calls: list[dict[str, Tensor]], num_labels: int, steps: int) -> dict[str, Any]:
    """`steps` timed steps, each of all calls, after a step of the longest call."""
    on_gpu = default_device().type == "cuda"

    def step_s(inputs: list[dict[str, Tensor]]) -> tuple[float, float]:
        begin, loss = time.perf_counter(), 0.0
        for each in inputs:
            out = model(**each, num_items_in_batch=num_labels)
            out.loss.backward()
            loss += out.loss.detach()
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, float(loss)

    step_s([max(calls, key=lambda each: each["input_ids"].numel())])
    free_memory()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    timed = [step_s(calls) for _ in range(steps)]
    peak = round(torch.cuda.max_memory_allocated() / GIB, 2) if on_gpu else None
    seconds = [round(second, 4) for second, _ in timed]
    return {"step_s": statistics.median(seconds), "peak_GiB": peak, "loss": timed[-1][1], "all_s": seconds}


def run_case(name: str, sequences: Sequences, args: argparse.Namespace) -> list[dict[str, Any]]:
    ids, labels = zip(*sequences, strict=True)
    packed = pack_prefixes(ids, labels)
    num_labels = sum(int((each[1:] != -100).sum()) for each in labels)
    model = make_model(args.model, args.layers, max(map(len, ids)), args.tile)
    repeated = [{"input_ids": a[None], "labels": b[None]} for a, b in sequences]
    sides = {"shared": ([packed.inputs], args.steps), "repeated": (repeated, args.repeated_steps)}
    rows = []
    for side, (calls, steps) in sides.items():
        which = side == "shared"
        row = {"case": name, "side": side, "model": args.model, "layers": args.layers}
        row |= {"tokens": packed.num_tokens[which], "pairs": packed.num_pairs[which]}
        rows.append(row | measure(model, calls, num_labels, steps))
        print(json.dumps(rows[-1]), flush=True)
    shared, repeated_row = rows
    ratio = repeated_row["step_s"] / shared["step_s"]
    off = abs(shared["loss"] / repeated_row["loss"] - 1)
    print(f"{name}: {ratio:.2f}x faster; losses differ by {off:.1e}; {packed}", flush=True)
    del model
    end_process_group()
    free_memory()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for prefixes.jsonl")
    parser.add_argument("--cases", nargs="+", choices=["answers", "ragged", "episode"], default=["answers", "episode"])
    parser.add_argument("--model", choices=SHAPES, default="3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32 * 1024)
    parser.add_argument("--answer", type=int, default=2 * 1024)
    parser.add_argument("--num-answers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--episode", type=int, default=128 * 1024, help="tokens of the last turn")
    parser.add_argument("--tile", type=int, default=16 * 1024)
    parser.add_argument("--steps", type=int, default=5, help="timed steps with shared prefixes")
    parser.add_argument("--repeated-steps", type=int, default=1, help="timed steps with repeated prefixes")
    args = parser.parse_args()
    vocab, rows = SHAPES[args.model][-1], []
    for name in args.cases:
        if name == "episode":
            sequences = make_episode(vocab, args.turns, args.episode)
        else:
            sequences = make_answers(vocab, args.prompt, args.answer, args.num_answers, name == "ragged")
        rows += run_case(name, sequences, args)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "prefixes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
