"""Compare training steps of video transformers in diffusers and ithaka, on the same latents, kernel and GPU.

    python benchmarks/video.py --out DIR                                  # Wan 2.1 1.3B and 14B at 33K, 76K and 300K
    python benchmarks/video.py --out DIR --models wan-14b --tokens 76K    # some of it
    python benchmarks/video.py --out DIR --ranks 8 --tokens 1M            # rank 0 of 8; exchanges are local copies
    python benchmarks/video.py --models tiny --tokens tiny --steps 1      # smoke test, also on a CPU

Each case runs in its own process; sides alternate. The models have a few layers of the released shapes and random
weights: float32 weights and moments, bfloat16 computation, fused AdamW, median of the timed steps. diffusers uses
gradient checkpointing and, for self-attention, the kernel that ithaka chose, through ithaka's own attention function.
Both sides use FSDP2 on one rank, except for "diffusers autocast". "above_GiB" is the peak above float32 weights,
gradients and moments. Prints and writes one JSON line per case.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from ithaka.attention.blocks import attention, attention_backward
from ithaka.attention.choose import resolve_kernel
from ithaka.comm.loopback import start_loopback
from ithaka.comm.mesh import make_mesh, start_process_group
from ithaka.config import parse_count
from ithaka.layout import ActivationPolicy, Layout
from ithaka.model.build import parallelize_model

GIB = 2**30
SHAPES: dict[str, dict[str, Any]] = {  # config.json of the released models
    "wan-1.3b": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 4},
    "wan-14b": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 2},
    "tiny": {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128, "num_layers": 2, "text_dim": 64},
}
# Patches in frames, height and width: 81 frames of 480 x 832 and 720 x 1280, 333 frames of 720 x 1280, and more.
GRIDS = {"33K": (21, 30, 52), "76K": (21, 45, 80), "300K": (84, 45, 80), "1M": (256, 64, 64), "tiny": (4, 4, 4)}
SIDES = ("diffusers fsdp2", "ithaka", "diffusers autocast", "ithaka compiled")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model(case: dict[str, Any]) -> Any:
    from diffusers import WanTransformer3DModel

    shape = SHAPES[case["model"]] | ({"num_layers": case["layers"]} if case["layers"] else {})
    torch.manual_seed(0)
    with torch.device(device()):
        return WanTransformer3DModel(**shape).train()


class _Attention(torch.autograd.Function):
    """ithaka's attention, on one rank, for diffusers."""

    @staticmethod
    def forward(ctx, q, k, v, kernel):
        ctx.spec = {"scale": q.shape[-1] ** -0.5, "causal": False, "kernel": kernel}
        out, lse = attention(q, k, v, **ctx.spec)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = attention_backward(dout.contiguous(), q, k, v, out, lse, **ctx.spec)
        return *(grad.to(q.dtype) for grad in grads), None


def use_kernel(kernel: str) -> None:
    from diffusers.models.transformers import transformer_wan

    plain = transformer_wan.dispatch_attention_fn

    def dispatch(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if query.shape != key.shape:  # cross-attention
            return plain(query, key, value, **options)
        dtype = torch.bfloat16 if device().type == "cuda" else query.dtype
        return _Attention.apply(*(t[0].to(dtype) for t in (query, key, value)), kernel)[None]

    transformer_wan.dispatch_attention_fn = dispatch


def run_diffusers(case: dict[str, Any], kernel: str) -> Any:
    use_kernel(kernel)
    model, dtype = make_model(case), torch.bfloat16
    model.enable_gradient_checkpointing()
    is_autocast = case["side"].endswith("autocast")
    if not is_autocast:
        start_process_group(device())
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy)

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        if is_autocast:
            with torch.autocast(device().type, dtype):
                return model(**inputs).sample
        cast = {name: value if name == "timestep" else value.to(dtype) for name, value in inputs.items()}
        return model(**cast).sample

    return model, forward


def run_ithaka(case: dict[str, Any], kernel: str) -> Any:
    ranks, model = case["ranks"], make_model(case)
    if ranks > 1:
        start_loopback(ranks)
    kept = (ActivationPolicy(attention="device"),) * len(model.blocks)
    layout = Layout(
        ranks,
        tile_tokens=case["tile"],
        heads_per_stage=case["heads"] or None,
        kept=kept,
        dtype="bfloat16",
        kernel=kernel,
        compile=case["side"].endswith("compiled"),
    )
    model = parallelize_model(model, mesh=make_mesh(ranks, device()), layout=layout)
    return model, lambda inputs: model(**inputs).sample


def measure(case: dict[str, Any]) -> dict[str, Any]:
    heads, grid = SHAPES[case["model"]], GRIDS[case["tokens"]]
    dtype = torch.bfloat16
    kernel = resolve_kernel(case["kernel"], device(), dtype, heads.get("attention_head_dim", 128)).name
    model, forward = (run_ithaka if case["side"].startswith("ithaka") else run_diffusers)(case, kernel)
    num_params = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(1)
    shape = (1, 16, grid[0], 2 * grid[1], 2 * grid[2])
    clean, noise = (torch.randn(shape, generator=generator).to(device()) for _ in range(2))
    text = torch.randn(1, 512, model.config.text_dim, generator=generator).to(device())
    inputs = {
        "hidden_states": (clean + noise) / 2,
        "timestep": torch.tensor([500.0], device=device()),
        "encoder_hidden_states": text,
    }
    seconds, losses = [], []
    for step in range(case["steps"] + 1):  # the first compiles and tries kernels
        if step == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = F.mse_loss(forward(inputs).float(), noise - clean)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(round(loss.item(), 5))
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    static = 16 * num_params / case["ranks"]
    return {
        "patches": math.prod(grid),
        "layers": len(model.blocks),
        "kernel": kernel,
        "step_s": round(statistics.median(seconds[1:]), 4),
        "peak_GiB": round(peak / GIB, 2),
        "above_GiB": round((peak - static) / GIB, 2),
        "losses": losses,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
    }


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    result = subprocess.run(command, capture_output=True, text=True)
    found = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    if found:
        return case | json.loads(found[-1].removeprefix("RESULT "))
    return case | {
        "failed": (result.stderr.strip().splitlines() or ["no output"])[-1][:300],
        "log": result.stderr[-2000:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["wan-1.3b", "wan-14b"])
    parser.add_argument("--tokens", nargs="+", choices=GRIDS, default=["33K", "76K", "300K"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--tile", default="8K", help="tokens of ithaka's tiles")
    parser.add_argument("--heads", type=int, default=0, help="heads per stage; 0: all, or one per rank with --ranks")
    parser.add_argument("--layers", type=int, default=0, help="0: 4 of 1.3B, 2 of 14B")
    parser.add_argument("--ranks", type=int, default=1, help="run ithaka as rank 0 of this many")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not; 1 from 300K on")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print("RESULT " + json.dumps(measure(json.loads(options.case))), flush=True)
        return
    for tokens in options.tokens:
        for model in options.models:
            for side in options.sides:
                if options.ranks > 1 and not side.startswith("ithaka"):
                    continue
                case = {"model": model, "tokens": tokens, "side": side, "kernel": options.kernel}
                case |= {"tile": parse_count(options.tile), "ranks": options.ranks, "layers": options.layers}
                case["heads"] = options.heads or (options.ranks if options.ranks > 1 else 0)
                case["steps"] = min(options.steps, 1) if math.prod(GRIDS[tokens]) > 2**18 else options.steps
                row = run_case(case)
                log = row.pop("log", "")
                print(json.dumps(row), flush=True)
                if log:
                    print(log, file=sys.stderr, flush=True)
                if options.out:
                    options.out.mkdir(parents=True, exist_ok=True)
                    with (options.out / "video.jsonl").open("a") as file:
                        print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
