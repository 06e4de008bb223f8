"""Record results that must not change: hashes of losses and gradients on a CPU, and plans.

    export PYTHONPATH=src:tests
    python tests/record_hashes.py --out hashes.json                         # before a change
    python tests/record_hashes.py --out after.json --against hashes.json    # after it
    python tests/record_hashes.py --plans --out plans.json

With --against, prints every entry that differs and exits with 1 if there is one. Hashes depend on
the CPU and on the version of torch, and on the cases before them in the process: compare only
complete recordings from one machine. Plans are compared without their prose.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import warnings
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import distribute_tensor
from typer.testing import CliRunner

from decoders import tiny_decoder
from ithaka.cli import app
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig, OptimConfig
from ithaka.layout import Layout
from ithaka.model.build import build_model, parallelize_model
from ithaka.model.optimizers import make_optimizer
from ithaka.parallel import parallelize
from models import FAMILIES, tiny_config, tiny_model
from parity import random_ids
from ranks import Ranks
from test_video import GRID, inputs_of, tiny
from vlms import media_inputs, tiny_vlm

GROUPS = {"cp1": (1, 1), "cp2": (2, 1), "cp4": (4, 1), "cp4 ring2": (4, 2)}
TIERS: dict[str, dict[str, Any]] = {
    "device": {"keep_everything": 99},  # of all layers
    "host": {"input_tier": "host", "keep_attention": 99, "attention_tier": "host"},
    "disk": {"input_tier": "disk"},
}
LENGTHS = (23, 1, 24)  # packed documents
PARENTS = (-1, 0, 0)  # of a forest: both other documents continue the first
OTHER_DECODERS = (
    "gemma3_text",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v3",
    "phi3",
    "qwen3_5_text",
    "qwen3_next",
)
RECURRENT = ("bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2", "lfm2_moe")
FORESTS = ("forest llama", "forest qwen3_5_text", "forest falcon_h1", "forest lfm2")
OTHERS = (
    *OTHER_DECODERS,
    *RECURRENT,
    *FORESTS,
    "qwen2_5_vl",
    "qwen3_vl",
    "wan",
    "ltx",
    "nf4 llama",
    "nf4 gemma3_text",
)
OPTIMIZERS = ("adamw", "muon", *(("adamw8bit",) if find_spec("torchao") else ()))
DROPPING = ("qwen3", "gemma3_text", "lfm2")
SIZES_WITH_NF4 = {
    "hidden_size": 256,
    "intermediate_size": 192,
    "head_dim": 32,
    "tie_word_embeddings": False,
}

MODELS = ("llama3-8b", "llama3.1-70b", "qwen3-8b", "qwen2.5-7b", "mistral-7b")
OTHER_MODELS = (
    "gemma-3-4b",
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "olmo-3-7b",
    "qwen3.5-9b",
    "qwen3-vl-8b",
    "wan2.1-14b",
    "lfm2-8b-a1b",
    "falcon-h1-7b",
    "granite-4-h-small",
)
GPUS = ("1xH100-80GB", "8xH100-80GB", "2x8xH200", "8xA100-80GB", "1xRTX4090")
PROSE = ("reasons", "assumed", "output")  # keys of a plan that may be reworded
OPTIONS = (
    ("--context", "128K"),
    ("--context", "1M"),
    ("--context", "1M", "--disk", "20TB"),
    ("--context", "512K", "--adapter", "16"),
    ("--context", "256K", "--host-memory", "512GB"),
    ("--context", "32K", "--batch", "2"),
    ("--context", "256K", "--set", "parallel.heads_per_stage=all"),
    ("--max-context",),
)


def hash_step(family: str, group: str, tier: str, adapter: bool, dtype: str) -> dict[str, str]:
    """Return {"loss" or parameter name: hash of the loss or gradient} of one step."""
    cp, ring = GROUPS[group]
    layout = Layout(cp, heads_per_stage=4, tile_tokens=5, ring=ring, dtype=dtype, **TIERS[tier])
    model = tiny_model(tiny_config(family, heads=8, kv_heads=2), torch.float32)
    if adapter:
        model = _with_adapter(model)
    model = parallelize_model(model, mesh=make_mesh(cp, ring=ring), layout=layout)
    ids = random_ids(1, sum(LENGTHS))
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    loss = model(input_ids=ids, labels=ids, document_ids=documents[None]).loss
    loss.backward()
    grads = {
        name: param.grad.full_tensor()
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    return {name: _hash(value) for name, value in {"loss": loss.detach(), **grads}.items()}


def hash_other(name: str, group: str, tier: str, adapter: bool, dtype: str) -> dict[str, str]:
    """The same for other decoders, experts, hybrids, forests, vision, video and a base in four
    bits."""
    cp, ring = GROUPS[group]
    mesh = make_mesh(cp, ring=ring)
    layout = Layout(cp, tile_tokens=5, ring=ring, dtype=dtype, **TIERS[tier])
    if name in ("wan", "ltx"):
        model = parallelize(tiny(name).float(), mesh=mesh, layout=layout)
        inputs = {key: value.float() for key, value in inputs_of(name).items()}
        if name == "ltx":
            inputs |= dict(zip(("num_frames", "height", "width"), GRID, strict=True))
        loss = (model(**inputs, return_dict=False)[0].double() ** 2).sum()
    else:
        if name.startswith("nf4"):
            model_type = name.removeprefix("nf4 ")
            build = (
                tiny_model(tiny_config("llama", heads=8, **SIZES_WITH_NF4))
                if model_type == "llama"
                else None
            )
            config = (build or tiny_decoder(model_type, **SIZES_WITH_NF4)).config.to_dict()
            four_bits = AdapterConfig(rank=3, base="nf4")
            model = build_model(config, mesh, layout, adapter=four_bits, seed=3)
            _randomize(param for param in model.parameters() if param.requires_grad)
            inputs = {"input_ids": random_ids(1, 37)}
        elif "_vl" in name:
            model = tiny_vlm(name, torch.float32)
            inputs = media_inputs(name, images=[(4, 6), (2, 4)])
            inputs = {
                key: value.float() if value.is_floating_point() else value
                for key, value in inputs.items()
            }
        else:
            model = tiny_decoder(name.removeprefix("forest "), torch.float32)
            lengths = torch.tensor(LENGTHS)
            documents = torch.arange(len(LENGTHS)).repeat_interleave(lengths)
            inputs = {"input_ids": random_ids(1, sum(LENGTHS)), "document_ids": documents[None]}
            if name in FORESTS:
                inputs["parents"] = torch.tensor(PARENTS).repeat_interleave(lengths)[None]
        if not name.startswith("nf4"):
            if adapter:
                model = _with_adapter(model)
            model = parallelize_model(model, mesh=mesh, layout=layout)
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    grads = {
        key: param.grad.full_tensor()
        for key, param in model.named_parameters()
        if param.grad is not None
    }
    return {key: _hash(value) for key, value in {"loss": loss.detach(), **grads}.items()}


def hash_optimizer(name: str, group: str, tier: str, adapter: bool, dtype: str) -> dict[str, str]:
    """Return the hash of each parameter after two steps: the second one depends on the moments."""
    cp, ring = GROUPS[group]
    layout = Layout(cp, tile_tokens=5, ring=ring, dtype=dtype, **TIERS[tier])
    model = tiny_model(tiny_config("llama", heads=8, **SIZES_WITH_NF4), torch.float32)
    model = parallelize_model(model, mesh=make_mesh(cp, ring=ring), layout=layout)
    optimizer = make_optimizer(model, OptimConfig(name=name.split()[1], lr=0.01))
    ids = random_ids(1, sum(LENGTHS))
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: _hash(param.detach().full_tensor()) for key, param in model.named_parameters()}


def hash_dropout(name: str, group: str, tier: str, adapter: bool, dtype: str) -> dict[str, str]:
    """Return the hashes of the loss and gradients of adapters with dropout."""
    cp, ring = GROUPS[group]
    family = name.split()[1]
    if family in FAMILIES:
        model = tiny_model(tiny_config(family, heads=8), torch.float32)
    else:
        model = tiny_decoder(family, torch.float32)
    model = _with_adapter(model, lora_dropout=0.3).train()
    layout = Layout(cp, tile_tokens=5, ring=ring, dtype=dtype, **TIERS[tier])
    model = parallelize_model(model, mesh=make_mesh(cp, ring=ring), layout=layout)
    model.ithaka_dropout.start_step(3, 5)
    ids = random_ids(1, sum(LENGTHS))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    hashes = {"loss": _hash(loss.detach())}
    for key, param in model.named_parameters():
        if param.grad is not None:
            hashes[key] = _hash(param.grad.full_tensor())
    return hashes


def _randomize(params: Any) -> None:
    for i, param in enumerate(params):
        with torch.no_grad():
            values = torch.linspace(-0.3, 0.4, param.numel()).roll(7 * i).view(param.shape)
            param.copy_(distribute_tensor(values, param.device_mesh, param.placements))


def _with_adapter(model: Any, **settings: Any) -> Any:
    """Add an adapter with random A and B; with PEFT's initial B, zero, A would get no gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", **settings)
        model = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for param in (param for param in model.parameters() if param.requires_grad):
            param.copy_(0.3 * torch.randn(param.shape, generator=generator))
    return model


def _hash(value: torch.Tensor) -> str:
    return hashlib.sha256(value.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def hash_group(group: str, cases: list[tuple]) -> list[dict[str, str]]:
    hashes = []
    for case in (case for case in cases if case[1] == group):
        try:
            hashes.append(hash_case(*case))
        except Exception as error:  # not supported, which must not change either
            hashes.append({"error": f"{type(error).__name__}: {str(error)[:60]}"})
    return hashes


def hash_case(name: str, *case: Any) -> dict[str, str]:
    if name in FAMILIES:
        return hash_step(name, *case)
    if name.startswith("optimizer "):
        return hash_optimizer(name, *case)
    if name.startswith("dropout "):
        return hash_dropout(name, *case)
    return hash_other(name, *case)


def record_hashes() -> dict[str, Any]:
    cases = list(product(FAMILIES, GROUPS, TIERS, (False, True), ("float32", "bfloat16")))
    cases += [
        (name, group, tier, adapter, dtype)
        for name, group, (tier, dtype), adapter in product(
            OTHERS,
            GROUPS,
            (("device", "float32"), ("host", "float32"), ("host", "bfloat16")),
            (False, True),
        )
        if not adapter or name in (*OTHER_DECODERS, *RECURRENT) or "_vl" in name
    ]
    ranks = Ranks(4)
    recorded = {}
    # one list after the other: a hash depends on the cases before it
    for chosen, (group, (cp, _)) in product((cases, later_cases()), GROUPS.items()):
        hashes = ranks.run(cp, hash_group, group, chosen, timeout_s=3600)
        assert all(of_rank == hashes[0] for of_rank in hashes), f"{group}: ranks differ"
        names = [_name(*case) for case in chosen if case[1] == group]
        recorded |= dict(zip(names, hashes[0], strict=True))
    ranks.close()
    return recorded


def later_cases() -> list[tuple]:
    optimizers = [f"optimizer {name}" for name in OPTIMIZERS]
    dropping = [f"dropout {family}" for family in DROPPING]
    cases = list(product(optimizers, GROUPS, ("device",), (False,), ("float32", "bfloat16")))
    return cases + list(product(dropping, GROUPS, ("device", "host"), (True,), ("bfloat16",)))


def _name(family: str, group: str, tier: str, adapter: bool, dtype: str) -> str:
    return f"{family}, {group}, {tier}, {dtype}{', adapter' if adapter else ''}"


def record_plan(arguments: tuple[str, ...]) -> Any:
    """Return a plan as JSON, with the hash of what it prints as text."""
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    text = CliRunner().invoke(app, ["plan", *arguments]).output
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        answer = json.loads(result.stdout)
    except json.JSONDecodeError:
        answer = {"output": result.output}
    return {"exit code": result.exit_code, "text": digest, **answer}


def record_plans() -> dict[str, Any]:
    commands = [
        (model, "--gpus", gpus, *rest) for model, gpus, rest in product(MODELS, GPUS, OPTIONS)
    ]
    commands += [
        (model, "--gpus", gpus, *rest)
        for model, gpus, rest in product(OTHER_MODELS, GPUS[:3], OPTIONS[:4])
    ]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        return {
            " ".join(words): plan
            for words, plan in zip(commands, pool.map(record_plan, commands, 1), strict=True)
        }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return one line per entry that differs, with the keys that differ."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old = before.get(name)
        new = after.get(name)
        if old is None or new is None:
            lines.append(f"{name}: only {'after' if old is None else 'before'}")
            continue
        names = [*old, *sorted(new.keys() - old.keys())]
        if keys := [key for key in names if key not in PROSE and old.get(key) != new.get(key)]:
            more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
            lines.append(f"{name}: {', '.join(keys[:4])}{more}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Record hashes of losses and gradients, or plans, and compare them."
    )
    parser.add_argument("--out", type=Path, required=True, help="Write the JSON file here.")
    parser.add_argument("--against", type=Path, help="An earlier file to compare with.")
    parser.add_argument("--plans", action="store_true", help="Record plans instead of hashes.")
    args = parser.parse_args()
    recorded = record_plans() if args.plans else record_hashes()
    entries = (
        f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}"
        for name, entry in recorded.items()
    )
    args.out.write_text("{\n" + ",\n".join(entries) + "\n}\n")
    print(f"{len(recorded)} entries in {args.out}")
    if args.against:
        lines = differences(json.loads(args.against.read_text()), recorded)
        print("\n".join([*lines, f"{len(lines)} of {len(recorded)} differ from {args.against}"]))
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
