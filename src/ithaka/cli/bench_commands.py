"""`ithaka bench`: measure this machine."""

import json
import os
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from ithaka.cli.options import AsJson, Force, format_table, loading, parse_tokens, print_rows
from ithaka.config import (
    ConfigError,
    check_output,
    parse_count,
    renaming,
    shell_command,
    writing_to,
)

Seconds = Annotated[float, typer.Option(min=0, max=3600, help="Seconds per measurement.")]


def attention_command(
    tokens: Annotated[
        str | None, typer.Option(help="Sequence lengths; by default 16K,64K, or 1K,4K on a CPU.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1)] = 1,
    kv_heads: Annotated[int, typer.Option(min=1)] = 1,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    kernels: Annotated[str, typer.Option(help="Kernel names, auto or all.")] = "auto",
    blocks: Annotated[
        str, typer.Option(help="Block sizes in q x kv tokens, such as auto,128Kx64K.")
    ] = "auto",
    documents: Annotated[
        int, typer.Option(min=1, help="Number of packed documents of equal length.")
    ] = 1,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sliding window; by default none.")
    ] = None,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
) -> None:
    """Measure sustained TFLOP/s of causal attention, forward and backward, on random data."""
    lengths = [parse_tokens(text, "--tokens") for text in tokens.split(",")] if tokens else []
    sizes = [None if text == "auto" else _parse_blocks(text) for text in blocks.split(",")]
    with loading() as status:
        from ithaka.attention.choose import available_kernels
        from ithaka.checks.bench import AttentionCase, device_and_dtype, measure_attention

    if heads % kv_heads:
        raise ConfigError(
            f"--heads={heads} is not a multiple of --kv-heads={kv_heads}; use {kv_heads}, for "
            "example"
        )
    device, dtype = device_and_dtype()
    lengths = lengths or ([2**14, 2**16] if device.type == "cuda" else [2**10, 2**12])
    names = available_kernels(device, dtype, head_dim) if kernels == "all" else kernels.split(",")
    if documents > min(lengths):
        raise ConfigError(
            f"--documents={documents} exceeds --tokens={min(lengths)}; use at most one per token"
        )
    rows = []
    for name, length, block in product(names, lengths, sizes):
        case = AttentionCase(name, length, block, heads, kv_heads, head_dim, documents, window)
        with (
            status(f"measuring kernel {name} at {length} tokens"),
            renaming({"attention.kernel": "--kernels"}),
        ):
            rows.append(measure_attention(case, device, dtype, seconds))
    print_rows(rows, as_json)


def device_command(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path(
        "gpu.json"
    ),
    seconds: Seconds = 3.0,
    force: Force = False,
) -> None:
    """Measure matmul, attention and copies on this device, and write a file for
    `ithaka plan --gpu-file`."""
    check_output("--out", out, force)
    with loading() as status:
        from ithaka.checks.bench import device_and_dtype, measure_device

    with status("measuring this device"):
        gpu = measure_device(*device_and_dtype(), seconds)
    with writing_to("--out", out):
        out.write_text(json.dumps(gpu, indent=1) + "\n", encoding="utf-8")
    print(
        format_table(
            [
                {"figure": name, "value": float(gpu[name])}
                for name in gpu
                if not isinstance(gpu[name], str)
            ]
        )
    )
    print(gpu["source"])
    print(
        f"wrote {out}; use it with: "
        f"{shell_command('plan', 'MODEL', '--gpus', 8, '--gpu-file', out)}"
    )


def network_command(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path(
        "network.json"
    ),
    size: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="MiB that each rank sends per call.")
    ] = 256,
    force: Force = False,
) -> None:
    """Measure bandwidth between ranks, and write a file for `ithaka plan --gpu-file`. Needs
    torchrun."""
    from ithaka.run.launch import run_ranks, under_torchrun

    if not under_torchrun():
        raise ConfigError(
            "bench network needs several ranks; use torchrun --nproc-per-node 8 -m ithaka bench "
            "network"
        )
    check_output("--out", out, force)
    raise typer.Exit(run_ranks(_network_rank, (out, size), 1))


def _network_rank(out: Path, size: int) -> None:
    with loading():
        import torch.distributed as dist

        from ithaka.checks.bench import device_and_dtype, measure_network, network_figures

    device, _ = device_and_dtype()
    rows = measure_network(device, size)
    if dist.get_rank() == 0:
        print(format_table(rows) if rows else "one rank: nothing to measure")
        with writing_to("--out", out):
            out.write_text(
                json.dumps(network_figures(rows, device), indent=1) + "\n", encoding="utf-8"
            )
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        gpus = f"{dist.get_world_size() // per_node}x{per_node}"
        print(
            f"wrote {out}; use it with: "
            f"{shell_command('plan', 'MODEL', '--gpus', gpus, '--gpu-file', out)}"
        )
    dist.barrier()
    dist.destroy_process_group()


def _parse_blocks(text: str) -> tuple[int, int]:
    block_q, _, block_kv = map(parse_count, text.partition("x"))
    if not block_q or not block_kv:
        raise ConfigError(
            f"--blocks={text} is not a block size; write q x kv tokens as 128Kx64K, or auto"
        )
    return block_q, block_kv
