"""Record hashes of every Triton kernel and of one layer per built-in family on a GPU.

    export PYTHONPATH=src:tests
    python tests/record_gpu_hashes.py --out gpu.json                         # before a change
    python tests/record_gpu_hashes.py --out after.json --against gpu.json    # after it

Hashes on a CPU (record_hashes.py) never run Triton. Here, the kernels' own tests run, and every
tensor that a kernel was given is hashed after its launch; of a function that torch.compile
compiles, whose kernels are Inductor's, arguments and results. Then small models of all built-in
families run a step. Both run twice: what differs between the two runs is recorded as "varies". Each
file of tests and each family is a job of its own, several at a time, because most of the time goes
into compiling. Compare recordings from one kind of GPU and one version of Triton."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from decoders import tiny_decoder
from ithaka.comm.mesh import default_device, make_mesh
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model

KERNEL_TESTS = (
    "gpu/test_delta_kernels.py",
    "gpu/test_dropout.py",  # its kernel is compiled by torch.compile
    "gpu/test_expert_kernels.py",
    "gpu/test_float8_kernels.py",
    "gpu/test_fourbit_kernel.py",
    "gpu/test_fused_gpu.py",
    "gpu/test_ssd_kernels.py",
    "gpu/test_token_wise_gpu.py",
)
# The layers' sizes, large enough for every kernel; one entry per family that is built in.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "moe_intermediate_size": 64,
    "sliding_window": 70,
    "mamba_d_ssm": 512,
}
DELTA_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MAMBA_SIZES = {
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 64,
    "mamba_head_dim": 64,
    "mamba_d_state": 32,
    "ssm_state_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gpt_oss": {},
    "gemma3_text": {},
    "qwen3_moe": {},
    "qwen3_5_text": DELTA_SIZES,
    "glm4_moe": {},
    "olmo3": {},
    "smollm3": {},
    "ministral3": {},
    "phi3": {},
    "qwen3_next": DELTA_SIZES,
    "nemotron_h": MAMBA_SIZES,
    "granitemoehybrid": MAMBA_SIZES,
    "falcon_h1": MAMBA_SIZES,
    "lfm2_moe": {},
}
LENGTHS = (150, 1, 149)  # packed documents


class KernelHashes:
    """A pytest plugin that hashes the tensors of every kernel launch, by test, kernel and
    launch."""

    def __init__(self) -> None:
        self.by_launch: dict[str, str] = {}
        self.test = ""
        self.launches: Counter[str] = Counter()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.nodeid
        self.launches.clear()
        torch.manual_seed(0)

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        fill_uninitialized_memory()

    def hash_launch(self, name: str, values: list[Any]) -> None:
        number = self.launches[name]
        self.launches[name] += 1
        digest = hashlib.sha256()
        for value in values:
            if isinstance(value, Tensor):
                digest.update(bytes_of(value))
        self.by_launch[f"{self.test}, {name} {number}"] = digest.hexdigest()[:16]


# Of the tests that run. A compiled function may outlive the recording in which it was made.
recorder = KernelHashes()
launch = JITFunction.run
compile_function = torch.compile


def launch_and_hash(kernel: JITFunction, *args: Any, **options: Any) -> Any:
    compiled = launch(kernel, *args, **options)
    recorder.hash_launch(kernel.fn.__name__, [*args, *options.values()])
    return compiled


def compile_and_hash(function: Callable, **options: Any) -> Callable:
    compiled = compile_function(function, **options)

    def run_and_hash(*args: Any) -> Any:
        results = compiled(*args)
        more = results if isinstance(results, tuple) else (results,)
        recorder.hash_launch("compiled", [*args, *more])
        return results

    return run_and_hash


def fill_uninitialized_memory() -> None:
    """Make the unwritten parts of results equal in every run, and PyTorch's kernels
    deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def hash_kernels(file: str) -> dict[str, str]:
    """Return the hashes of every launch in a file of tests, also of those not marked `gpu`."""
    global recorder
    recorder = KernelHashes()
    path = str(Path(__file__).parent / file)
    with (
        patch.object(JITFunction, "run", launch_and_hash),
        patch.object(torch, "compile", compile_and_hash),
    ):
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", path], plugins=[recorder])
    if code != 0:
        raise RuntimeError(f"the tests of {file} failed with {code}")
    if not recorder.by_launch:
        raise RuntimeError(f"the tests of {file} launched no kernel")
    return recorder.by_launch


def hash_family(family: str) -> dict[str, str]:
    """Return the hashes of a step's loss and of every gradient."""
    fill_uninitialized_memory()
    model = tiny_decoder(family, torch.float32, **SIZES | FAMILIES[family]).to(default_device())
    layout = Layout(
        heads_per_stage=2,
        tile_tokens=128,
        input_tier="host",
        keep_attention=model.config.num_hidden_layers,
        dtype="bfloat16",
        kernel="reference",
    )
    model = parallelize_model(model, mesh=make_mesh(1), layout=layout)
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(128, (1, sum(LENGTHS)), generator=generator).to(default_device())
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    documents = documents[None].to(ids.device)
    loss = model(input_ids=ids, labels=ids, document_ids=documents).loss
    loss.backward()
    hashes = {f"{family}, loss": hash_tensor(loss)}
    for name, param in model.named_parameters():
        if param.grad is not None:
            hashes[f"{family}, {name}"] = hash_tensor(param.grad.full_tensor())
    return hashes


def hash_tensor(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()[:16]


def record_job(group: str, name: str) -> dict[str, str]:
    """Return {entry: hash, or "varies"} of a file of tests or a family."""
    record = hash_kernels if group == "kernels" else hash_family
    start = time.monotonic()
    try:
        first = record(name)
        second = record(name)
    except Exception as error:  # some cannot be sent to the parent process
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
    print(f"{name}: {len(first)} hashes, {time.monotonic() - start:.0f} s", flush=True)
    return {
        entry: value if second.get(entry) == value else "varies" for entry, value in first.items()
    }


def record_all(num_jobs: int) -> dict[str, dict[str, str]]:
    """Return {"kernels" or "layers": {entry: hash, or "varies"}}; a job that fails is an entry."""
    jobs = [("kernels", file) for file in KERNEL_TESTS]
    jobs += [("layers", family) for family in FAMILIES]
    recorded: dict[str, dict[str, str]] = {"kernels": {}, "layers": {}}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(record_job, *job): job for job in jobs}
        for future in as_completed(futures):
            group, name = futures[future]
            try:
                recorded[group] |= future.result()
            except Exception as error:
                print(f"{name} failed: {error}", flush=True)
                recorded[group][name] = f"failed: {type(error).__name__}"
    return recorded


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the entries that are not the same, without those that vary from run to run."""
    return [
        f"{name}: {before.get(name)} before, {after.get(name)} after"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and "varies" not in (before.get(name), after.get(name))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Record hashes of kernels and layers on a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="Write the JSON file here.")
    parser.add_argument("--against", type=Path, help="An earlier file to compare with.")
    parser.add_argument("--jobs", type=int, default=8, help="How many run at a time.")
    args = parser.parse_args()
    recorded = record_all(args.jobs)
    args.out.write_text(json.dumps(recorded, indent=0) + "\n")
    for group, hashes in recorded.items():
        varies = [name for name, value in hashes.items() if value == "varies"]
        print(f"{group}: {len(hashes)} hashes, {len(varies)} vary: {', '.join(varies[:8])}")
    if args.against:
        before = json.loads(args.against.read_text())
        lines = [line for group in recorded for line in differing(before[group], recorded[group])]
        print("\n".join([*lines, f"{len(lines)} entries differ from {args.against}"]))
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
