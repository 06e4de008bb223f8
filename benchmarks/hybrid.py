"""A model like Qwen3.5-9B, three layers with the gated delta rule and one with attention, on one GPU.

    python benchmarks/hybrid.py --out results.jsonl              # 16K, 64K and 128K; 512K as a middle rank of 8
    python benchmarks/hybrid.py --sides ithaka --tokens 64K      # some of it
    python benchmarks/hybrid.py --rule-only                      # the rule alone: time by segment, error against fp64
    python benchmarks/hybrid.py --tiny                           # does it run? Also on a CPU

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
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ithaka.attention import delta_rule
from ithaka.attention.delta_rule import DeltaInputs, DeltaRule, LocalDocs
from ithaka.config import parse_count
from ithaka.dist.loopback import start_loopback
from ithaka.dist.mesh import end_process_group, free_memory, make_mesh, start_process_group
from ithaka.layer.mixers import DeltaMixer
from ithaka.layout import ActivationPolicy, Layout
from ithaka.model.build import parallelize_model
from ithaka.phases import listening, phase
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.search import Plan
from ithaka.plan.shape import Work, shape_from_config
from ithaka.profile.timeline import PhaseTimer

GIB = 2**30
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
    """What the planner says about this model on H200s, without the reserve."""
    shape = shape_from_config((TINY if case["tiny"] else SHAPE) | {"max_position_embeddings": case["tokens"]})
    plan = Plan(shape, layout, parse_gpus(f"{case['ranks']}xH200"), Work(case["tokens"]))
    peak = plan.ledger.gpu_peak - plan.ledger.gpu["reserve"]
    return {"planned_s": round(plan.step_s, 4), "planned_GiB": round(peak / GIB, 2)}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    model, forward, running = run_hf(case) if case["side"].startswith("hf") else run_ithaka(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(model.config.vocab_size, (1, case["tokens"]), generator=torch.Generator().manual_seed(1))
    seconds, losses = [], []

    def run_step() -> None:
        begin = time.perf_counter()
        with running(), phase("step"):
            loss = forward(ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(round(loss.item(), 4))
        seconds.append(time.perf_counter() - begin)

    for step in range(case["steps"] + 1):
        if step == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        run_step()
    peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    result: dict[str, Any] = {"step_s": round(statistics.median(seconds[1:]), 4), "peak_GiB": round(peak, 2)}
    result |= {"losses": losses[-2:], "tokens_per_s": round(case["tokens"] / case["ranks"] / result["step_s"])}
    if case["side"].startswith("ithaka"):
        with listening(timer := PhaseTimer(device())):
            run_step()
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


def time_rule(tiny: bool) -> list[dict[str, Any]]:
    """Seconds of the rule alone, as a middle rank's, and its error in bfloat16 against float64."""
    results: list[dict[str, Any]] = []
    heads, dims, tokens = ((2, 4), 16, 256) if tiny else ((32, 32), 128, 65536)
    own = delta_rule.SEGMENT_ROWS
    for rows in (own // 4, own // 2, own, own * 2):
        delta_rule.SEGMENT_ROWS = rows
        rule = make_rule(tokens, heads, dims)
        state, dout = rule.zero_state(), torch.randn_like(rule.inputs.v_sHV)
        steps: dict[str, Any] = {
            "summarize": rule.summarize,
            "forward": lambda rule=rule, state=state: rule.forward(state),
            "summarize_grad": lambda rule=rule, dout=dout: rule.summarize_grad(dout),
        }
        _, states = rule.forward(state)
        steps["backward"] = lambda rule=rule, states=states, dout=dout, state=state: rule.backward(states, dout, state)
        found: dict[str, Any] = {"rule": tokens, "segment_rows": rows}
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
        results.append(found)
    delta_rule.SEGMENT_ROWS = own
    few = 256 if tiny else 4096
    ours, exact = (make_rule(few, heads, dims, double) for double in (False, True))
    dout = torch.randn(exact.inputs.v_sHV.shape, device=device()).bfloat16()
    errors = {}
    outs = [rule.forward(rule.zero_state()) for rule in (ours, exact)]
    for rule, (_, states) in zip((ours, exact), outs, strict=True):
        rule.backward(states, dout.to(rule.inputs.v_sHV.dtype), rule.zero_state())
    pairs = {"out": (outs[0][0], outs[1][0])}
    pairs |= {name: (a, b) for name, a, b in zip("qkvgb", ours.inputs, exact.inputs, strict=True)}
    for name, (a, b) in pairs.items():
        errors[name] = float((a.double() - b).norm() / b.norm())
    return [*results, {"error of the rule in bfloat16": {name: float(f"{e:.2e}") for name, e in errors.items()}}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", nargs="+", default=["16K", "64K", "128K", "512K/8"], help="of the sequence / ranks")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--tile", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", action="store_true", help="recompute the outputs of attention and rule")
    parser.add_argument("--rule-only", action="store_true")
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
    for result in time_rule(options.tiny):
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
