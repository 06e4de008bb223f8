"""Compare training steps of Qwen3-VL-4B's shape on a long video in Hugging Face and ithaka, on one
GPU.

    python benchmarks/vlm.py --out DIR                               # 64K and 256K tokens of frames
    python benchmarks/vlm.py --out DIR --tokens 64K --sides ithaka   # some of it
    python benchmarks/vlm.py --models tiny --tokens 32 --steps 1     # smoke test, also on a CPU

All cases run in this process, one after another, on the same weights and frames of 512 x 512 pixels
(256 tokens each): float32 weights and moments, bfloat16 computation, fused AdamW, FSDP2 on one
rank, median of the timed steps. Every token has a label. Hugging Face uses gradient checkpointing,
and computes logits and loss in checkpointed chunks of 4096 tokens. --attention is Hugging Face's;
ithaka's encoder calls PyTorch's scaled_dot_product_attention. "planned_GiB" and "planned_s" are the
planner's, for all tokens of the sequence; "phases_s" are measured, with the encoder's forward in
"embedding". Prints and writes one JSON line per case.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForImageTextToText

from ithaka.comm.mesh import end_process_group, free_memory, start_process_group
from ithaka.config import parse_count
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from ithaka.parallel import shape_from_model
from ithaka.phases import listening, phase
from ithaka.plan.bytes import gpu_phases
from ithaka.plan.hardware import Hardware, find_gpu
from ithaka.plan.seconds import step_seconds
from ithaka.plan.shape import StepShape
from ithaka.profile.timeline import PhaseTimer

GIB = 2**30
LOSS_CHUNK = 4096
IDS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
ROPE = {"rope_type": "default", "rope_theta": 5e6}
SHAPES: dict[str, dict[str, Any]] = {  # config.json of the released model, with fewer layers
    "qwen3-vl-4b": {
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rope_parameters": {**ROPE, "mrope_section": [24, 20, 20]},
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "num_heads": 16,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
            "patch_size": 16,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "tiny": {
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 256,
            "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "patch_size": 4,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
}
FRAMES = {"qwen3-vl-4b": 32, "tiny": 8}  # height and width in patches
SIDES = ("hf fsdp2", "ithaka compiled", "ithaka")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def make_model(case: dict[str, Any]) -> Any:
    shape = SHAPES[case["model"]]
    text = shape["text_config"] | {"max_position_embeddings": 2**20}
    if case["layers"]:
        text["num_hidden_layers"] = case["layers"]
    config = AutoConfig.for_model(
        "qwen3_vl", **shape | {"text_config": text}, **IDS, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    with torch.device(device()):
        model = AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation=case["attention"]
        )
    model.model.visual.requires_grad_(not case["frozen"])
    return model.train()


def make_inputs(case: dict[str, Any]) -> dict[str, Tensor]:
    """Frames with timestamps, then text. Sets the case's tile."""
    generator = torch.Generator().manual_seed(1)
    side = FRAMES[case["model"]]
    vocab = SHAPES[case["model"]]["text_config"]["vocab_size"]
    config = SHAPES[case["model"]]["vision_config"]

    def text(count: int) -> Tensor:
        return torch.randint(10, vocab, (count,), generator=generator)

    per_frame = side * side // 4
    num_frames = max(1, case["frame_tokens"] // per_frame)
    frame = torch.tensor([IDS["video_token_id"]]).repeat(per_frame)
    start = torch.tensor([IDS["vision_start_token_id"]])
    end = torch.tensor([IDS["vision_end_token_id"]])
    parts = [part for _ in range(num_frames) for part in (text(2), start, frame, end)]
    num_tokens = sum(map(len, parts)) + per_frame
    num_tiles = -(-num_tokens // case["tile"])
    case["tile"] = -(-num_tokens // num_tiles)  # all tiles are alike
    ids = torch.cat([*parts, text(per_frame + num_tiles * case["tile"] - num_tokens)])[None]
    num_patches = num_frames * side * side
    values = 3 * 2 * config["patch_size"] ** 2
    with torch.device(device()):
        torch.manual_seed(2)
        pixels = torch.randn(num_patches, values, dtype=dtype()).cpu()
    return {
        "input_ids": ids,
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[num_frames, side, side]]),
        "mm_token_type_ids": 2 * (ids == IDS["video_token_id"]).long(),
    }


def run_hf(case: dict[str, Any], model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    start_process_group(device())
    policy = MixedPrecisionPolicy(dtype(), torch.float32, cast_forward_inputs=False)
    for module in (
        *model.model.language_model.layers,
        *model.model.visual.blocks,
        model.model.visual,
        model,
    ):
        fully_shard(module, mp_policy=policy)
    model.forward = lambda **inputs: chunked_loss(model, **inputs)

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        return model(**{name: value.to(device()) for name, value in inputs.items()})

    return forward


def chunked_loss(model: Any, input_ids: Tensor, **inputs: Tensor) -> Tensor:
    hidden = model.model(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state[0, :-1]

    def loss(h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(h).float(), labels, reduction="sum")

    chunks = zip(hidden.split(LOSS_CHUNK), input_ids[0, 1:].split(LOSS_CHUNK), strict=True)
    return sum(checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks) / len(hidden)


def make_layout(case: dict[str, Any], num_layers: int) -> Layout:
    return Layout(
        tile_tokens=case["tile"],
        keep_attention=num_layers,
        dtype=str(dtype()).removeprefix("torch."),
        compile=case["side"].endswith("compiled"),
    )


def run_ithaka(case: dict[str, Any], model: Any) -> Any:
    start_process_group(device())
    model = parallelize_model(
        model, layout=make_layout(case, len(model.model.language_model.layers))
    )
    return lambda inputs: model(**inputs, labels=inputs["input_ids"]).loss


def plan(case: dict[str, Any], model: Any, num_tokens: int) -> dict[str, float]:
    gpu = find_gpu("H200")
    shape = shape_from_model(model)
    hardware = Hardware(gpu, 1, 1, host_bytes=10**12)
    work = StepShape(num_tokens)
    layout = make_layout(case, shape.num_layers)
    name, holders = max(
        gpu_phases(shape, layout, hardware, work), key=lambda entry: sum(entry[1].values())
    )
    seconds, text_s = (
        step_seconds(each, layout, hardware, work).total
        for each in (shape, replace(shape, encoders=()))
    )
    planned_s = {"planned_s": round(seconds, 4), "planned_encoder_s": round(seconds - text_s, 4)}
    return {"planned_GiB": round(sum(holders.values()) / GIB, 2), **planned_s, "planned_peak": name}


def report(case: dict[str, Any], event: str) -> None:
    """Print progress to stderr: the first step compiles kernels and, for compiled sides, layers."""
    print(
        f"{time.strftime('%H:%M:%S')} {case['side']}, {case['frame_tokens']} tokens: {event}",
        file=sys.stderr,
    )
    sys.stderr.flush()


def measure(case: dict[str, Any], inputs: dict[str, Tensor]) -> dict[str, Any]:
    model = make_model(case)
    is_ours = case["side"].startswith("ithaka")
    report(case, "model made")
    planned = plan(case, model, inputs["input_ids"].numel()) if is_ours else {}
    report(
        case,
        f"planned; {'the first build compiles kernels to test them' if is_ours else 'building'}",
    )
    forward = (run_ithaka if is_ours else run_hf)(case, model)
    report(case, "built")
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True
    )
    seconds = []
    losses = []
    for step in range(case["steps"] + 1):  # the first compiles and tries kernels
        begin = time.perf_counter()
        timer = PhaseTimer(device())
        with listening(timer), phase("step"):
            loss = forward(inputs)
            losses.append(round(loss.item(), 5))
            report(case, f"forward {step}: {time.perf_counter() - begin:.2f} s")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        report(case, f"step {step}: {seconds[-1]:.2f} s")
    return {
        "total_tokens": inputs["input_ids"].numel(),
        "patches": len(inputs["pixel_values_videos"]),
        "layers": len(model.model.language_model.layers),
        "step_s": round(statistics.median(seconds[1:]), 4),
        "peak_GiB": round(timer.peaks[("step",)] / GIB, 2),
        **planned,
        "phases_s": {path[1]: round(s, 4) for path, s in timer.seconds().items() if len(path) == 2},
        "phases_GiB": {
            "/".join(path[1:]): round(p / GIB, 2)
            for path, p in timer.peaks.items()
            if len(path) in (2, 3)
        },
        "losses": losses,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
    }


def run_case(case: dict[str, Any], inputs: dict[str, Tensor]) -> dict[str, Any]:
    try:
        return case | measure(case, inputs)
    except Exception as error:
        traceback.print_exc()
        return case | {"failed": f"{type(error).__name__}: {error}"[:300]}
    finally:
        end_process_group()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["qwen3-vl-4b"])
    parser.add_argument("--tokens", nargs="+", default=["64K", "256K"], help="tokens of frames")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument(
        "--attention", default="sdpa", help="of Hugging Face, such as flash_attention_4"
    )
    parser.add_argument("--tile", default="8K", help="at most this many tokens in ithaka's tiles")
    parser.add_argument("--layers", type=int, default=0, help="of the language model; 0: 4")
    parser.add_argument("--frozen", action="store_true", help="do not train the encoder")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not")
    options = parser.parse_args(arguments)
    rows = []
    for model in options.models:
        for tokens in options.tokens:
            shared = {
                "model": model,
                "frame_tokens": parse_count(tokens),
                "attention": options.attention,
            }
            shared |= {
                "tile": parse_count(options.tile),
                "layers": options.layers,
                "frozen": options.frozen,
            }
            inputs = make_inputs(shared)
            for side in options.sides:
                row = run_case(shared | {"side": side, "steps": options.steps}, inputs)
                free_memory()
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.out:
                    options.out.mkdir(parents=True, exist_ok=True)
                    with (options.out / "vlm.jsonl").open("a") as file:
                        print(json.dumps(row), file=file)
    return rows


if __name__ == "__main__":
    sys.exit(any("failed" in row for row in main()))
