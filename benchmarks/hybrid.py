"""Measure a model like Qwen3.5-9B, three layers with the gated delta rule and one with attention, on one GPU.

    python benchmarks/hybrid.py --out results.jsonl              # 16K, 64K and 128K; 512K as a middle rank of 8
    python benchmarks/hybrid.py --sides ithaka --tokens 64K      # some of it
    python benchmarks/hybrid.py --rule-only                      # the rule alone, plain and in kernels: times, errors
    python benchmarks/hybrid.py --tiny                           # smoke test, also on a CPU

All cases run in one process, on the same random weights: float32 weights and moments, bfloat16 computation, fused
AdamW, median of the timed steps. Hugging Face uses checkpointing, autocast and its plain PyTorch path ("hf"), or
flash-linear-attention where it is installed ("hf fla"). "512K/8" is rank 4 of 8: exchanges are local copies. The
vocabulary is 32K, so that Hugging Face's logits fit. Prints one JSON line per case.
"""

import argparse
import importlib.util
import json
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from steps import GIB, StepTimer
from transformers import AutoConfig, AutoModelForCausalLM

from ithaka.comm.loopback import start_loopback
from ithaka.comm.mesh import end_process_group, free_memory, make_mesh, start_process_group
from ithaka.config import parse_count
from ithaka.layer.mixers import DeltaMixer
from ithaka.layout import ActivationPolicy, Layout
from ithaka.model.build import parallelize_model
from ithaka.ops import delta_kernels, delta_rule
from ithaka.ops.delta_kernels import runs_in_kernels
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule, LocalDocs
from ithaka.phases import listening, phase
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.search import Plan
from ithaka.plan.shape import StepShape
from ithaka.profile.timeline import PhaseTimer
from ithaka.run.shapes import shape_from_config

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "vocab_size": 32768,
}
TINY = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2}
TINY |= {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 128}
TINY |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
SIDES = ("hf", "hf fla", "ithaka", "ithaka compiled")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model(case: dict[str, Any]) -> Any:
    shape = dict(TINY if case["tiny"] else SHAPE)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, max_position_embeddings=case["tokens"])
    torch.manual_seed(0)
    with torch.device(device()):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()


def run_hf(case: dict[str, Any]) -> Any:
    model = make_model(case)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mixers = [mixer for layer in model.model.layers if (mixer := DeltaMixer.find(layer))]

    def forward(ids: torch.Tensor) -> Any:
        with torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda"):
            return model(input_ids=ids.to(device()), labels=ids.to(device()), use_cache=False)

    @contextmanager
    def plain():  # also while checkpointing recomputes
        with ExitStack() as stack:
            for mixer in mixers:
                stack.enter_context(mixer.in_plain_torch())
            yield

    return model, forward, nullcontext if case["side"] == "hf fla" else plain


def run_ithaka(case: dict[str, Any]) -> Any:
    ranks = case["ranks"]
    if ranks > 1:
        start_loopback(ranks, rank=ranks // 2)
    else:
        start_process_group(device())
    model = make_model(case)
    kept = (ActivationPolicy(attention="device" if case["keep"] else None),) * len(model.model.layers)
    layout = Layout(
        ranks,
        tile_tokens=case["tile"],
        kept=kept,
        dtype="bfloat16" if device().type == "cuda" else "float32",
        compile=case["side"].endswith("compiled"),
    )
    parallelize_model(model, mesh=make_mesh(ranks, device()), layout=layout)
    case |= plan_case(case, layout)
    return model, lambda ids: model(input_ids=ids, labels=ids), nullcontext


def plan_case(case: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Plan this model on H200s, without the reserve."""
    shape = shape_from_config((TINY if case["tiny"] else SHAPE) | {"max_position_embeddings": case["tokens"]})
    plan = Plan(shape, layout, parse_gpus(f"{case['ranks']}xH200"), StepShape(case["tokens"]))
    peak = plan.ledger.gpu_peak - plan.ledger.gpu["reserve"]
    return {"planned_s": round(plan.step_s, 4), "planned_GiB": round(peak / GIB, 2)}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    model, forward, running = run_hf(case) if case["side"].startswith("hf") else run_ithaka(case)
    steps = StepTimer(model, forward, case["tokens"], running)
    steps.run_steps(case["steps"], untimed=1)
    result: dict[str, Any] = {
        "step_s": round(statistics.median(steps.seconds), 4),
        "peak_GiB": round(steps.peak_gib, 2),
        "losses": steps.losses[-2:],
    }
    result |= {"tokens_per_s": round(case["tokens"] / case["ranks"] / result["step_s"])}
    if case["side"].startswith("ithaka"):
        with listening(timer := PhaseTimer(device())), phase("step"):
            steps.run_step()
        result["phases_s"] = {
            "/".join(path[1:]): round(s, 4) for path, s in timer.seconds().items() if 1 < len(path) < 5 and s > 1e-4
        }
    return result


def make_rule(num_tokens: int, heads: tuple[int, int], dims: int, double: bool = False) -> DeltaRule:
    generator = torch.Generator(device()).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, device=device())

    q, k, v = draw(heads[0], dims), draw(heads[0], dims), draw(heads[1], dims)
    g, beta = -0.1 * draw(heads[1]).exp(), draw(heads[1]).sigmoid()
    inputs = [*(t.bfloat16() for t in (q, k, v)), g, beta]
    docs = LocalDocs((0, num_tokens * 3), num_tokens, num_tokens, 1, device())
    return DeltaRule(DeltaInputs(*(t.double() if double else t for t in inputs)), docs)


KERNEL_OPTIONS: list[dict[str, Any]] = [
    {},
    {"SEGMENT_ROWS": 2**17},
    {"SEGMENT_ROWS": 2**19},
    {"COLUMNS": 16},
    {"SCAN_OPTIONS": {"num_warps": 8, "num_stages": 2}},
    {"SCAN_OPTIONS": {"num_warps": 4, "num_stages": 1}, "COLUMNS": 16},
    {"SCAN_OPTIONS": {"num_warps": 4, "num_stages": 3}},
    {"CHUNK_OPTIONS": {"num_warps": 4, "num_stages": 1}},
    {"CHUNK_OPTIONS": {"num_warps": 8, "num_stages": 2}},
    {"WIDE": False},
    {"WIDE": False, "COLUMNS": 16},
    {"WIDE": False, "CHUNK_OPTIONS": {"num_warps": 4, "num_stages": 1}},
]


def time_rule(tiny: bool, tunes: bool) -> Iterator[dict[str, Any]]:
    """Measure seconds and errors of the rule alone, on a middle rank: in its kernels, with `tunes` also with other
    settings, and in plain PyTorch."""
    heads, dims, tokens = ((2, 4), 16, 256) if tiny else ((32, 32), 128, 65536)
    has_kernels = runs_in_kernels(*make_rule(64, heads, dims).inputs[1:3])
    for options in KERNEL_OPTIONS[: len(KERNEL_OPTIONS) if tunes else 1] * has_kernels:
        yield time_case(tokens, heads, dims, {"kernels": True} | options)
    yield time_case(tokens, heads, dims, {"kernels": False})


def time_case(tokens: int, heads: tuple[int, int], dims: int, case: dict[str, Any]) -> dict[str, Any]:
    found = dict(case)
    with ExitStack() as stack:
        for name, value in case.items():
            module: Any = delta_rule if name in ("kernels", "SEGMENT_ROWS") else delta_kernels
            if name == "kernels":
                name, value = "runs_in_kernels", lambda *_, value=value: value and torch.cuda.is_available()
            stack.enter_context(patch.object(module, name, value))
        try:
            found |= time_steps(make_rule(tokens, heads, dims))
            found["errors"] = rule_errors(min(tokens, 4096), heads, dims)
        except Exception as error:  # settings that do not fit this GPU
            found["failed"] = f"{type(error).__name__}: {error}"[:300]
    return found


def time_steps(rule: DeltaRule) -> dict[str, Any]:
    state, dout = rule.zero_state(), torch.randn_like(rule.inputs.v_sHV)
    _, states = rule.forward(state)
    steps: dict[str, Any] = {
        "summarize": rule.summarize,
        "forward": lambda: rule.forward(state),
        "summarize_grad": lambda: rule.summarize_grad(dout),
        "backward": lambda: rule.backward(states, dout, state),
    }
    found: dict[str, Any] = {}
    for name, step in steps.items():
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        begin = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            found[f"{name}_GiB"] = round((torch.cuda.max_memory_allocated() - before) / GIB, 2)
        found[f"{name}_s"] = round(time.perf_counter() - begin, 4)
    if torch.cuda.is_available():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for name in ("forward", "backward"):
                steps[name]()
        events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
        found["top_ms"] = {event.key[:40]: round(event.device_time_total / 1000, 2) for event in events[:6]}
    return found


def rule_errors(tokens: int, heads: tuple[int, int], dims: int) -> dict[str, float]:
    """Return the errors of bfloat16 against float64."""
    ours, exact = (make_rule(tokens, heads, dims, double) for double in (False, True))
    dout = torch.randn(exact.inputs.v_sHV.shape, device=device()).bfloat16()
    outs = []
    for rule in (ours, exact):
        with patch.object(delta_rule, "runs_in_kernels", lambda *_: False) if rule is exact else nullcontext():
            out, states = rule.forward(rule.zero_state())
            rule.backward(states, dout.to(out.dtype), rule.zero_state())
        outs.append([out, *rule.inputs])
    named = zip(("out", *DeltaInputs._fields), *outs, strict=True)
    return {name: float(f"{float((a.double() - b).norm() / b.norm()):.2e}") for name, a, b in named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", nargs="+", default=["16K", "64K", "128K", "512K/8"], help="of the sequence / ranks")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--tile", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", action="store_true", help="recompute the outputs of attention and rule")
    parser.add_argument("--rule-only", action="store_true")
    parser.add_argument("--tune", action="store_true", help="with --rule-only: other settings of the kernels, too")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.tokens, options.tile, options.steps, options.sides = ["128", "256/4"], 48, 1, ("hf", "ithaka")
    lines: list[str] = []

    def report(result: dict[str, Any]) -> None:
        lines.append(json.dumps(result))
        print(lines[-1], flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report({"device": where, "torch": torch.__version__})
    for result in time_rule(options.tiny, options.tune) if options.rule_only else ():
        report(result)
    for size in () if options.rule_only else options.tokens:
        tokens, _, ranks = size.partition("/")
        for side in options.sides:
            case: dict[str, Any] = {"side": side, "tokens": parse_count(tokens), "ranks": int(ranks or 1)}
            case |= {"tile": options.tile, "steps": options.steps, "tiny": options.tiny, "keep": not options.recompute}
            if side.startswith("hf") and case["ranks"] > 1:
                continue
            if side == "hf fla" and importlib.util.find_spec("fla") is None:
                continue
            try:
                case |= measure(case)
            except Exception as error:
                traceback.print_exc()
                case["failed"] = f"{type(error).__name__}: {error}"[:300]
            end_process_group()
            free_memory()
            torch.compiler.reset()
            report(case)


if __name__ == "__main__":
    main()
