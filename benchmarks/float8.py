"""Measure memory.stored_dtype=float8 and, separately, float8 matmuls.

    python benchmarks/float8.py layer
    python benchmarks/float8.py losses --out float8_losses.json
    python benchmarks/float8.py matmuls --out float8_matmuls.json
    python benchmarks/float8.py gains float8_matmuls.json

`layer` runs one of Llama-3-8B as rank 0 of 8, at 1M tokens. `losses` draws three curves:
SmolLM2-135M, 300 steps of 8K tokens. `gains` says what a step would gain and needs no GPU.

Each takes one or two minutes on an H200. On a CPU, --tiny runs the same code on small shapes.

Shapes: t tokens, M rows, K inputs and N outputs of a linear map, E experts.
"""

from __future__ import annotations

import gc
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor

from ithaka.checks import rehearse
from ithaka.cli.options import AsJson, print_rows
from ithaka.comm.mesh import default_device, end_process_group, make_mesh, start_process_group
from ithaka.config import OptimConfig
from ithaka.layer.store import HostHandle
from ithaka.layout import Layout
from ithaka.model.build import build_model
from ithaka.model.optimizers import make_optimizer
from ithaka.phases import Listener, PhasePath, listening
from ithaka.plan.hardware import GIB, parse_gpus
from ithaka.plan.models import find_config
from ithaka.plan.search import SearchSpace
from ithaka.plan.seconds import LOSS_SHARE, LayerSeconds
from ithaka.plan.shape import StepShape
from ithaka.trace.shapes import shape_from_config

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Tiny = Annotated[bool, typer.Option("--tiny", help="Small shapes, for a CPU.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="JSON to write.")]
DTYPES = (None, "float8")
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 512,
}
SMALL |= {"num_key_value_heads": 8, "head_dim": 16}


# ---- a layer


class CopiedBytes:
    """Bytes that the store copied to and from the host."""

    def __init__(self) -> None:
        self.to_host = self.from_host = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        copy_out = HostHandle._copy_out
        copy_in = HostHandle._copy_in

        def count_out(handle: Any, *args: Any) -> Any:
            self.to_host += handle.nbytes
            return copy_out(handle, *args)

        def count_in(handle: Any, *args: Any) -> Any:
            copied = copy_in(handle, *args)
            self.from_host += handle.nbytes * copied[0].numel() // max(1, handle.shape.numel())
            return copied

        with (
            patch.object(HostHandle, "_copy_out", count_out),
            patch.object(HostHandle, "_copy_in", count_in),
        ):
            yield


class Progress(Listener):
    """Prints when a rehearsal builds its model, and when each step starts and ends: two with few
    tokens, then two."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start_s = time.perf_counter()

    def _print(self, event: str, path: PhasePath) -> None:
        if len(path) == 1:
            seconds = time.perf_counter() - self.start_s
            print(f"{seconds:6.1f} s  {self.name}: {path[0]} {event}", file=sys.stderr, flush=True)

    def enter(self, path: PhasePath) -> None:
        self._print("starts", path)

    def leave(self, path: PhasePath) -> None:
        self._print("ends", path)


@app.command()
def layer(
    context: Annotated[int, typer.Option(min=16)] = 2**20,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of both dtypes, in turn.")] = 1,
    overlap: Annotated[
        bool, typer.Option(help="As memory.overlap. Without it, dq is stored too, in bf16.")
    ] = True,
    tiny: Tiny = False,
    as_json: AsJson = False,
) -> None:
    """Time a layer whose input and attention output are on the host, and count the bytes copied."""
    # The embeddings and the head, with 1B parameters, would take longer than the two layers.
    config = {**find_config("llama3-8b"), "vocab_size": 8192, **(SMALL if tiny else {})}
    rows: list[dict[str, Any]] = []
    for _ in range(rounds):
        for stored in DTYPES:
            tiers: Any = {
                "input_tier": "host",
                "keep_attention": 2,
                "attention_tier": "host",
                "stored_dtype": stored,
            }
            sizes: Any = {
                "heads_per_stage": 8,
                "overlap": overlap,
                "tile_tokens": 16 if tiny else 8192,
            }
            layout = Layout(cp=8, dtype=rehearse.rehearsal_dtype(), **tiers, **sizes)
            copied = CopiedBytes()
            with copied.counting(), listening(Progress(stored or layout.dtype)):
                measured = rehearse.rehearse(config, layout, 8, context, layers=range(2))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            row = {
                "stored": stored or layout.dtype,
                "forward s": measured.forward_s,
                "backward s": measured.backward_s,
            }
            row |= {
                "layer s": measured.forward_s + measured.backward_s,
                "peak GiB": measured.peak_bytes / GIB,
            }
            row |= {"host GiB": measured.host_bytes / GIB}
            rows.append(
                row | {"to host GiB": copied.to_host / GIB, "from host GiB": copied.from_host / GIB}
            )
    means = [
        {name: mean(row[name] for row in rows[i::2]) for name in rows[0] if name != "stored"}
        for i in (0, 1)
    ]
    ratios = {name: means[1][name] / (means[0][name] or 1) for name in means[0]}
    print_rows([*rows, {"stored": "float8 / 16 bits", **ratios}], as_json)


# ---- losses


# Compute dtype and stored dtype. Training amplifies rounding: compare float8's distance from bf16
# with bf16's from float32.
CURVES: dict[str, tuple[str, str | None]] = {
    "bfloat16": ("bfloat16", None),
    "float8": ("bfloat16", "float8"),
    "float32": ("float32", None),
}


def read_sources() -> bytes:
    """Return the text of Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(
        path.read_bytes()
        for path in sorted(folder.rglob("*.py"))
        if "site-packages" not in path.parts
    )


def read_tokens(model: Path | None, num_tokens: int) -> Tensor:
    """Return tokens of the standard library, in the model's tokenizer; without one, bytes."""
    from transformers import AutoTokenizer

    text = read_sources()
    ids = (
        AutoTokenizer.from_pretrained(model)(text.decode(errors="replace")).input_ids
        if model
        else list(text)
    )
    if len(ids) < num_tokens:
        raise SystemExit(
            f"the standard library has {len(ids)} tokens, fewer than {num_tokens}; use fewer "
            "--steps"
        )
    return torch.tensor(ids[:num_tokens])


def train(
    source: Any, name: str, ids: Tensor, context: int, steps: int, lr: float, log: bool
) -> list[float]:
    """Train all parameters with AdamW, warmup and clipping; return the loss of every step."""
    dtype, stored = CURVES[name]
    layout = Layout(
        tile_tokens=min(context, 8192),
        input_tier="host",
        keep_attention=find_layers(source),
        attention_tier="host",
        dtype=dtype,
        stored_dtype=stored,
    )
    model = build_model(source, make_mesh(1), layout, context=context)
    optimizer = make_optimizer(model, OptimConfig(lr=lr))
    losses = []
    for step in range(steps):
        batch = ids[step * context : (step + 1) * context][None].to(default_device())
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if log and step % 50 == 0:
            print(f"{name}, step {step}: {float(losses[-1]):.4f}", file=sys.stderr, flush=True)
    del model, optimizer
    gc.collect()
    return [float(loss) for loss in losses]


def find_layers(source: Any) -> int:
    config = (
        source if isinstance(source, dict) else json.loads((source / "config.json").read_text())
    )
    return config.get("text_config", config)["num_hidden_layers"]


@app.command()
def losses(
    out: Out,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint; default: SmolLM2-135M, random weights.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    context: Annotated[int, typer.Option(min=2)] = 8192,
    lr: Annotated[float, typer.Option()] = 6e-4,
    tiny: Tiny = False,
    as_json: AsJson = False,
) -> None:
    """Train in bf16, with layer inputs and attention outputs stored in float8, and in float32, on
    the same tokens."""
    start_process_group()
    config = find_config("smollm2-135m") | (SMALL | {"num_hidden_layers": 2} if tiny else {})
    ids = read_tokens(model, steps * context)
    source = model or config
    curves = {name: train(source, name, ids, context, steps, lr, not tiny) for name in CURVES}
    end_process_group()
    last = min(20, steps)
    final = {name: mean(curve[-last:]) for name, curve in curves.items()}
    about = {
        "model": str(model or "smollm2-135m, random weights"),
        "context": context,
        "lr": lr,
        "steps": steps,
    }
    differences = {name: final[name] / final["bfloat16"] - 1 for name in CURVES}
    out.write_text(
        json.dumps({**about, "final": final, "differences": differences, "losses": curves}) + "\n"
    )
    ends = [0, *range(49, steps, 50), steps - 1]
    rows = [
        {"step": step, **{name: curve[step] for name, curve in curves.items()}}
        for step in dict.fromkeys(ends)
    ]
    print_rows([*rows, {"step": f"mean of last {last}", **final}], as_json)
    for name, difference in differences.items():
        print(f"{name} ends {difference:+.3%} from bfloat16", file=sys.stderr)


# ---- matmuls

MATMUL_MODELS = ("llama3-8b", "gemma-3-27b", "qwen3-30b-a3b")
TILES = (8192, 16384)
LARGEST = 448.0


def linear_maps(config: dict[str, Any]) -> dict[str, tuple[int, int, int, int]]:
    """(K, N, experts, experts per token) of a layer's linear maps, with q, k and v and gate and up
    in one."""
    text = config.get("text_config", config)
    hidden = text["hidden_size"]
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or hidden // heads
    width = heads * head_dim
    kv_width = text["num_key_value_heads"] * head_dim
    maps = {"qkv": (hidden, width + 2 * kv_width, 1, 1), "o": (width, hidden, 1, 1)}
    experts = text.get("num_experts") or 1
    mlp = text["intermediate_size"]
    chosen = 1
    if experts > 1:
        mlp = text["moe_intermediate_size"]
        chosen = text["num_experts_per_tok"]
    return maps | {
        "gate_up": (hidden, 2 * mlp, experts, chosen),
        "down": (mlp, hidden, experts, chosen),
    }


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., K] in float8, and a scale per row, [..., 1]."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def cast_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the transpose of x [..., M, K] in float8, row-major, and a scale per column of x,
    [..., K, 1]."""
    scale = x.abs().amax(-2, keepdim=True).float().clamp(min=1e-12) / LARGEST
    codes = (x.float() / scale).to(torch.float8_e4m3fn)
    return codes.transpose(-1, -2).contiguous(), scale.transpose(-1, -2).contiguous()


def scaled_mm(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], ends: Tensor | None = None
) -> Tensor:
    """a [M, K] times the transpose of b [N, K], or of each expert's. Rows of both have scales."""
    (a8, a_scale) = a
    (b8, b_scale) = b
    if not a8.is_cuda:
        b_wide = (b8.float() * b_scale).transpose(-1, -2)
        return ((a8.float() * a_scale) @ (b_wide if b8.dim() == 2 else b_wide[0])).bfloat16()
    options: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    if ends is None:
        return torch._scaled_mm(a8, b8.t(), a_scale, b_scale.t(), **options)
    scales = a_scale.flatten(), b_scale.flatten() if b8.dim() == 2 else b_scale[..., 0]
    return torch._scaled_grouped_mm(a8, b8.transpose(-1, -2), *scales, offs=ends, **options)


def seconds_of(run: Callable[[], Any], repeats: int) -> float:
    """Mean seconds of a call, after two others."""
    for _ in range(2):
        run()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start_event, stop_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    for _ in range(repeats):
        run()
    stop_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(stop_event) / 1e3 / repeats


def measure_map(
    sizes: tuple[int, int, int, int], tile: int, compiles: bool
) -> dict[str, float | None]:
    """Seconds of a linear map on a tile: each matmul in bf16 and in float8 (None: PyTorch has no
    kernel), and the casts that float8 needs."""
    K, N, experts, chosen = sizes
    M = tile * chosen
    device = default_device()
    rows = cast_rows
    columns = cast_columns
    if compiles:  # fullgraph: fail instead of running eagerly, many times slower
        torch._dynamo.config.recompile_limit = 64
        rows, columns = (torch.compile(f, dynamic=True, fullgraph=True) for f in (rows, columns))
    x_MK, dy_MN = (torch.randn(M, width, device=device, dtype=torch.bfloat16) for width in (K, N))
    shape = (N, K)
    ends = None
    if experts > 1:
        shape = (experts, N, K)
        ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (M // experts)
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16) * K**-0.5
    casts = {"x": lambda: rows(x_MK), "dy": lambda: rows(dy_MN), "weight": lambda: rows(weight)}
    casts |= {"weight, transposed": lambda: columns(weight)}
    casts |= {"x, transposed": lambda: columns(x_MK), "dy, transposed": lambda: columns(dy_MN)}
    cast = {name: run() for name, run in casts.items()}

    def grouped(a: Tensor, b: Tensor) -> Tensor:
        return (
            torch._grouped_mm(a, b, offs=ends)
            if ends is not None and a.is_cuda
            else a @ (b[0] if b.dim() > 2 else b)
        )

    # In weight gradients of experts, every expert has its own scales; their values do not matter
    # here.
    dy_NM, x_KM = (
        (codes, scale.repeat(experts, 1) if codes.is_cuda else scale)
        for codes, scale in (cast["dy, transposed"], cast["x, transposed"])
    )
    runs: dict[str, Callable[[], Any]] = {
        "forward, bf16": lambda: grouped(x_MK, weight.transpose(-1, -2)),
        "input gradient, bf16": lambda: grouped(dy_MN, weight),
        "weight gradient, bf16": lambda: grouped(dy_MN.t(), x_MK),
        "forward, float8": lambda: scaled_mm(cast["x"], cast["weight"], ends),
        "input gradient, float8": lambda: scaled_mm(cast["dy"], cast["weight, transposed"], ends),
        "weight gradient, float8": lambda: scaled_mm(dy_NM, x_KM, ends),
    }
    runs |= {f"cast {name}": run for name, run in casts.items()}
    found: dict[str, float | None] = {}
    for name, run in runs.items():
        try:
            found[name] = seconds_of(run, 10)
        except RuntimeError as error:
            if not name.endswith("float8"):
                raise
            print(f"{sizes}, {tile} tokens, {name}: {error}".splitlines()[0], file=sys.stderr)
            found[name] = None
    return found


NEEDED_CASTS = {
    "forward": ("x", "weight"),
    "input gradient": ("dy", "weight, transposed"),
    "weight gradient": ("x, transposed", "dy, transposed"),
}


def sum_maps(
    maps: dict[str, dict[str, Any]], num_tiles: int, casts: bool = True
) -> dict[str, tuple[float, float]]:
    """(bf16, float8) seconds of each direction on a tile, over all maps. A weight is cast once for
    all tiles. A map without a float8 kernel stays in bf16."""
    sums = {}
    for direction, names in NEEDED_CASTS.items():
        bf16 = float8 = 0.0
        for found in maps.values():
            bf16 += found[f"{direction}, bf16"]
            if found[f"{direction}, float8"] is None:
                float8 += found[f"{direction}, bf16"]
                continue
            float8 += found[f"{direction}, float8"]
            for name in names if casts else ():
                float8 += found[f"cast {name}"] / (num_tiles if "weight" in name else 1)
        sums[direction] = bf16, float8
    return sums


@app.command()
def matmuls(out: Out, tiny: Tiny = False, as_json: AsJson = False) -> None:
    """Time the linear maps of three models in bf16 and, with a scale per row, in float8, including
    casts."""
    results: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    rows = []
    for model in MATMUL_MODELS:
        maps = linear_maps(find_config(model))
        if tiny:
            maps = {
                name: (64, 128, min(experts, 4), min(k, 2))
                for name, (_, _, experts, k) in maps.items()
            }
        for tile in (64, 128) if tiny else TILES:
            found = {name: measure_map(sizes, tile, not tiny) for name, sizes in maps.items()}
            results.setdefault(model, {})[str(tile)] = found
            for direction, (bf16, float8) in sum_maps(found, 1).items():
                alone = sum_maps(found, 1, casts=False)[direction][1]
                in_bf16 = [
                    name for name, each in found.items() if each[f"{direction}, float8"] is None
                ]
                row = {"model": model, "tile": tile, "direction": direction, "bf16 ms": bf16 * 1e3}
                row |= {"float8 ms": alone * 1e3, "with casts ms": float8 * 1e3}
                row |= {"speedup": bf16 / alone, "with casts": bf16 / float8}
                rows.append(row | {"no float8 kernel": ", ".join(in_bf16) or "-"})
            gc.collect()
    out.write_text(json.dumps(results) + "\n")
    print_rows(rows, as_json)


@app.command()
def gains(
    measured: Annotated[Path, typer.Argument(metavar="FILE", help="What `matmuls` wrote.")],
    gpus: Annotated[str, typer.Option(help="The machine of the plans.")] = "8xH200",
    as_json: AsJson = False,
) -> None:
    """Compute how much faster a planned step would be with float8 matmuls in its layers."""
    rows = []
    hardware = parse_gpus(gpus)
    endless = replace(hardware, gpu=replace(hardware.gpu, matmul_flops=1e30))
    for model, by_tile in json.loads(measured.read_text()).items():
        shape = shape_from_config(find_config(model), model)
        for context in (16384, 32768, 131072):
            plan = SearchSpace(shape, hardware).choose(StepShape(context))
            s = plan.work.local_tokens(plan.layout.cp)
            head = 3 * LayerSeconds(shape, plan.layout, hardware, s).matmul(
                shape.hidden, shape.vocab, LOSS_SHARE
            )
            share = (
                plan.seconds.linear - replace(plan, hardware=endless).seconds.linear - head
            ) / plan.step_s
            for tile, maps in by_tile.items():
                sums = sum_maps(maps, max(1, s // int(tile)))
                # Backward recomputes most of forward unless everything is kept.
                weights = {"forward": 2 if plan.layout.keep_everything < shape.num_layers else 1}
                bf16, float8 = (
                    sum(weights.get(name, 1) * pair[i] for name, pair in sums.items())
                    for i in (0, 1)
                )
                row = {"model": model, "context": context, "cp": plan.layout.cp, "tile": int(tile)}
                row |= {"matmuls of step": share, "matmuls faster": bf16 / float8}
                rows.append(row | {"step faster": 1 / (1 - share + share * float8 / bf16)})
    print_rows(rows, as_json)


if __name__ == "__main__":
    app()
