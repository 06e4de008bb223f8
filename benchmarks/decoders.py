"""Compare decoders with Hugging Face + Liger on one GPU: `python benchmarks/decoders.py --out DIR`.

MoE models: `--models qwen3-30b-a3b gpt-oss-20b`.

Each side runs in its own process on the same weights and tokens: float32 weights and moments,
bfloat16 computation, checkpointing, fused AdamW, median of five steps. Prints and writes one JSON
line per case.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from steps import StepTimer
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from ithaka.blocks import experts
from ithaka.comm.mesh import end_process_group, free_memory, start_process_group
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model

# Shapes of the released models, with fewer layers.
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3-4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
    },
    "olmo3-7b": {
        "model_type": "olmo3",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 100278,
        "sliding_window": 4096,
    },
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 32},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "llama3.2-3b": {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 6,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "phi4-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 6,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
        "vocab_size": 200064,
        "pad_token_id": 0,
    },
    "smollm3-3b": {
        "model_type": "smollm3",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 128256,
        "pad_token_id": 0,
    },
    "moonlight-16b-a3b": {
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    },
    # Hybrids: two layers of Mamba2, one of attention, and for Nemotron layers of experts.
    # transformers alone runs Mamba2 in plain PyTorch unless mamba-ssm is installed.
    "nemotron-3-nano": {
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"],
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "vocab_size": 32768,
    },
    "granite-4-h-small": {
        "model_type": "granitemoehybrid",
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "mamba", "attention"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "position_embedding_type": "nope",
        "vocab_size": 32768,
    },
    "tiny-experts": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
    "tiny": {
        "model_type": "olmo3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "sliding_window": 16,
    },
}
SIDES = ("hf autocast", "hf fsdp2", "ithaka", "ithaka liger")
# `blackbox`: transformers' own code for the experts
EXPERT_SIDES = ("hf fsdp2", "ithaka blackbox", "ithaka")


def make_model(case: dict[str, Any], **options: Any) -> Any:
    shape = dict(SHAPES[case["model"]])
    config = AutoConfig.for_model(
        shape.pop("model_type"), **shape, max_position_embeddings=case["tokens"]
    )
    if case["experts"]:
        options["experts_implementation"] = case["experts"]
    torch.manual_seed(0)
    with torch.device(device()):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).train()


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def apply_liger(case: dict[str, Any]) -> None:
    from liger_kernel.transformers import monkey_patch

    # Without its own experts, which would replace those of --experts and tune their kernels for
    # minutes.
    options = {"swiglu": False} if case["experts"] else {}
    patch = getattr(
        monkey_patch, f"apply_liger_kernel_to_{SHAPES[case['model']]['model_type']}", None
    )
    case["liger"] = patch is not None
    if patch is not None:
        patch(**options)


def run_hf(case: dict[str, Any], precision: str) -> Any:
    apply_liger(case)
    model = make_model(case, attn_implementation=case["attention"])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if precision == "fsdp2":
        start_process_group(torch.device(device()))
        # FSDP2 casts a layer's inputs in forward, but not when checkpointing runs it again: OLMo 3
        # passes cos in fp32.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for module in (*model.model.layers, model):
            fully_shard(module, mp_policy=policy)

    def forward(ids: torch.Tensor) -> Any:
        with torch.autocast(device(), torch.bfloat16, enabled=precision == "autocast"):
            return model(input_ids=ids.to(device()), labels=ids.to(device()), use_cache=False)

    return model, forward


def run_ithaka(case: dict[str, Any], how: str) -> Any:
    if how == "liger":
        apply_liger(case)
    if how == "blackbox":
        experts.is_expert_module = lambda module: False
    model = make_model(case)
    layout = Layout(
        tile_tokens=case["tile"],
        keep_attention=len(model.model.layers),
        dtype="bfloat16",
        compile=case.get("compile", False),
    )
    start_process_group(torch.device(device()))
    parallelize_model(model, layout=layout)
    return model, lambda ids: model(input_ids=ids, labels=ids)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    kind, how = case["side"].split() if " " in case["side"] else (case["side"], "")
    model, forward = run_hf(case, how) if kind == "hf" else run_ithaka(case, how)
    steps = StepTimer(model, forward, case["tokens"])
    steps.run_steps(case["steps"], untimed=2)
    step_s = statistics.median(steps.seconds)
    if case["kernels"]:
        with torch.profiler.profile() as profile:
            steps.run_step()
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=by, row_limit=case["kernels"]), file=sys.stderr)
    return {
        "step_s": round(step_s, 4),
        "peak_GiB": round(steps.peak_gib, 2),
        "losses": steps.losses[-2:],
    }


def serve() -> None:
    """Run the cases of one side from standard input, one JSON object per line."""
    for line in sys.stdin:
        case = json.loads(line)
        try:
            case |= measure(case)
        except Exception as error:
            import traceback

            traceback.print_exc()
            case["failed"] = f"{type(error).__name__}: {error}"[:300]
        end_process_group()
        free_memory()
        print("RESULT " + json.dumps(case), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="+", default=["gemma3-4b", "olmo3-7b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 65536, 131072])
    parser.add_argument(
        "--sides", nargs="+", help=f"default: {SIDES}; for mixtures of experts: {EXPERT_SIDES}"
    )
    parser.add_argument(
        "--experts", default="grouped_mm", help="transformers' implementation of experts"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, help="log the slowest kernels of one more step"
    )
    parser.add_argument("--tile", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--attention", default="flash_attention_4")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    results = []
    for model in options.models:
        has_experts = any("experts" in name for name in SHAPES[model])
        for side in options.sides or (EXPERT_SIDES if has_experts else SIDES):
            common = {"model": model, "side": side, "tile": options.tile, "steps": options.steps}
            common |= {
                "experts": options.experts if has_experts else "",
                "kernels": options.kernels,
            }
            common |= {"attention": options.attention, "compile": options.compile}
            cases = "".join(
                json.dumps(common | {"tokens": tokens}) + "\n" for tokens in options.tokens
            )
            command = [sys.executable, __file__, "--serve"]
            log = (
                options.out / f"{model}-{side.replace(' ', '-')}.log"
                if options.out
                else Path(os.devnull)
            )
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w") as err:
                run = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True
                )
                assert run.stdin is not None and run.stdout is not None
                run.stdin.write(cases)
                run.stdin.close()
                for line in run.stdout:
                    if line.startswith("RESULT "):
                        results.append(json.loads(line.removeprefix("RESULT ")))
                        print(json.dumps(results[-1]), flush=True)
                run.wait()
    if options.out:
        (options.out / "decoders.jsonl").write_text(
            "".join(json.dumps(result) + "\n" for result in results)
        )


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
