"""Measure training steps of one side: `python benchmarks/one_case.py hf` or `ithaka`, started by
against_liger.py.

Reads cases from standard input, one JSON object per line, and prints a line of figures for each.
Both sides train the same model on the same tokens with the same loop: float32 weights and moments,
bfloat16 computation, fused AdamW.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import distributions
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from ithaka.comm.mesh import default_device, end_process_group, free_memory, start_process_group
from ithaka.config import parse_config
from ithaka.facts.machine import available_memory
from ithaka.facts.sizes import RESERVE_BYTES
from ithaka.parallel import parallelize, shape_from_model
from ithaka.plan.bytes import RESERVE_SHARE
from ithaka.plan.hardware import GIB, GPUS, Hardware, gpu_named
from ithaka.plan.search import make_search_space, work_from_config

# by context and layout: two cases of ithaka may have the same plan
MEASURED: dict[str, dict[str, Any]] = {}
DEVICE = default_device()
ON_GPU = DEVICE.type == "cuda"
COMPUTE = "bfloat16" if ON_GPU else "float32"  # a CPU is for smoke tests only
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
# 3b: Llama 3.2 3B
SHAPES = {"3b": (3072, 8192, 24, 8, 128, 128256), "tiny": (64, 128, 4, 2, 16, 512)}
# at least two steps, then until one of these is reached
TIMED_STEPS = 5
TIMED_S = 4.0
# Settings of ithaka that a case fixes; the planner decides the rest.
ON_DEVICE = {
    "offload": "none",
    "keep_attention": "all",
    "attention_offload": "none",
    "keep_projections": "none",
}
SETTINGS = {
    "none": {"checkpoint": "none"},
    "full": {"checkpoint": "full", **ON_DEVICE},
    "planned": {},
}


def new_model(case: dict, **options: Any) -> Any:
    """Build the model, with the same weights on both sides."""
    shape = dict(zip(NAMES, SHAPES[case["model"]], strict=True)) | {
        "num_hidden_layers": case["layers"]
    }
    shape |= {
        "max_position_embeddings": case["tokens"],
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    config = LlamaConfig(**shape, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    torch.manual_seed(0)
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).train()


def new_batch(case: dict) -> dict[str, Any]:
    """Make a batch on the host. The first token of a packed document is not a label."""
    random = torch.Generator().manual_seed(1)
    vocab = SHAPES[case["model"]][-1]
    ids = torch.randint(vocab, (1, case["tokens"]), generator=random)
    labels = ids.clone()
    labels[:, :: case["documents"] or case["tokens"]] = -100
    return {"input_ids": ids, "labels": labels}


def hf(case: dict) -> tuple[Any, Callable[[], Any]]:
    """Set up Hugging Face. precision=autocast: as in `Trainer(bf16=True)`; the residual stream is
    float32. precision=fsdp2: as in ithaka; the residual stream and the weights that Liger's loss
    reads are bfloat16."""
    model = new_model(case, attn_implementation=case["attention"])
    if case["checkpointing"] == "on":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case["precision"] == "fsdp2":
        start_process_group(DEVICE)
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, COMPUTE), reduce_dtype=torch.float32
        )
        for module in (*model.model.layers, model):
            fully_shard(module, mp_policy=policy)
    batch = new_batch(case)
    length = case["documents"]
    lengths = {}
    # rows of a batch: documents of one length need no packing
    if length and case["attention"] == "sdpa":
        batch = {name: value.view(-1, length) for name, value in batch.items()}
    elif length:  # as transformers' DataCollatorWithFlattening(return_flash_attn_kwargs=True) packs
        ends = torch.arange(0, case["tokens"] + 1, length, dtype=torch.int32)
        positions = torch.arange(case["tokens"])[None] % length
        batch |= {"position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        lengths = {"max_length_q": length, "max_length_k": length}

    def forward() -> Any:
        with torch.autocast(
            DEVICE.type, torch.bfloat16, enabled=ON_GPU and case["precision"] == "autocast"
        ):
            return model(**{name: value.to(DEVICE) for name, value in batch.items()}, **lengths)

    return model, forward


def ithaka(case: dict) -> tuple[Any, Callable[[], Any]]:
    """Set up ithaka, planned within `within_GiB` of allocated memory if the case has it, else
    within the GPU's; 1 % is left for the error of the plan."""
    model = new_model(case)
    batch = new_batch(case)
    gpu = (gpu_named(torch.cuda.get_device_name()) if ON_GPU else GPUS["CPU"]) or GPUS["H200-141GB"]
    limit = (0.99 * (case.get("within_GiB") or 1e6) * GIB + RESERVE_BYTES) / (1 - RESERVE_SHARE)
    total = torch.cuda.mem_get_info()[1] if ON_GPU else gpu.memory_bytes
    gpu = dataclasses.replace(gpu, memory_bytes=min(gpu.memory_bytes, total, int(limit)))
    memory = {"offload_optimizer": False, **SETTINGS[case["how"]]}
    config = parse_config(
        {"model": {"dtype": COMPUTE}, "data": {"context": case["tokens"]}, "memory": memory}
    )
    hardware = Hardware(gpu, host_bytes=available_memory())
    space = make_search_space(config, shape_from_model(model), hardware)
    plan = space.choose(
        dataclasses.replace(work_from_config(config), document_tokens=case["documents"] or None)
    )
    case |= {"fits": plan.fits, "plan": f"{case['tokens']} {case['documents']} {plan.layout}"}
    if case["documents"]:
        batch["document_ids"] = torch.arange(case["tokens"])[None] // case["documents"]
    if case["plan"] not in MEASURED:
        parallelize(
            model, context=case["tokens"], layout=dataclasses.replace(plan.layout, dtype=COMPUTE)
        )
    return model, lambda: model(**batch)


def measure(case: dict, model: Any, forward: Callable[[], Any]) -> dict[str, Any]:
    if case.get("plan") in MEASURED:
        return MEASURED[case["plan"]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses: list[float] = []

    def step_s() -> float:
        begin = time.perf_counter()
        loss = forward().loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ON_GPU:
            torch.cuda.synchronize()
        losses.append(round(loss.item(), 4))
        return time.perf_counter() - begin

    for _ in range(1 if case["tokens"] >= 64 * 1024 else 2):  # warm-up
        step_s()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    timed = [step_s(), step_s()]
    while len(timed) < TIMED_STEPS and sum(timed) < TIMED_S:
        timed.append(step_s())
    median = statistics.median(timed)
    peak = round(torch.cuda.max_memory_allocated() / GIB, 2) if ON_GPU else None
    figures = {
        "step_s": round(median, 4),
        "tokens_per_s": round(case["tokens"] / median),
        "peak_GiB": peak,
    }
    figures |= {"all_s": [round(s, 4) for s in timed], "losses": losses}
    return MEASURED.setdefault(case["plan"], figures) if "plan" in case else figures


def main() -> None:
    side = {"hf": hf, "ithaka": ithaka}[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect the output of libraries to the log
    if side is hf and ON_GPU:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True
        )
    about = [torch.cuda.get_device_name() if ON_GPU else "CPU"]
    names = ("torch", "transformers", "liger_kernel", "liger-kernel", "flash-attn-4")
    about += sorted(
        {f"{found.name} {found.version}" for found in distributions() if found.name in names}
    )
    for line in sys.stdin:
        case = json.loads(line)
        try:
            result = measure(case, *side(case)) | {"about": ", ".join(about)}
        except torch.OutOfMemoryError as error:
            result = {"out_of_memory": str(error)[:120]}
        except Exception as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"[:200]}
        end_process_group()
        free_memory()
        print(json.dumps(case | result), file=answers, flush=True)


if __name__ == "__main__":
    main()
