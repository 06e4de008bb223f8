"""Count the calls and bytes of one Llama-3-8B layer's exchanges, with several ranks on one GPU,
next to the plan.

    LD_PRELOAD=DIR/libnccl.so.2 python benchmarks/ring_traffic.py    # needs NCCL 2.30 or later
    python benchmarks/ring_traffic.py --tiny                         # smoke test on a CPU

PyTorch's profiler records every collective of one forward and backward. Prints a JSON line per
case: the largest count over the ranks, by direction and group, and the planned bytes of the ring.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.profiler import profile, record_function, supported_activities

from ithaka.comm.mesh import default_device, end_process_group, make_mesh, start_process_group
from ithaka.layout import Layout
from ithaka.model.build import build_model
from ithaka.plan.layer_bytes import LayerBytes
from ithaka.plan.models import find_config
from ithaka.trace.shapes import shape_from_config

SEVERAL_ON_ONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "LOCAL_RANK": "0"}
ITEMSIZES = {"float": 4, "c10::BFloat16": 2}
CASES = ((1, 1), (2, 1), (2, 2), (4, 1))  # ring, stages


def case_layout(ranks: int, ring: int, stages: int, tokens: int) -> Layout:
    """`stages` divide the 32 query heads of the layer."""
    return Layout(
        cp=ranks,
        ring=ring,
        heads_per_stage=None if stages == 1 else 32 // stages,
        overlap=True,
        tile_tokens=min(8192, tokens // ranks),
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        keep_attention=1,
    )


def count_collectives(trace: dict[str, Any], ulysses: int) -> dict[str, int]:
    """Calls and bytes of all-to-alls by direction and group; on a GPU also NCCL's kernels. A call
    counts what is sent to or received from other ranks, whichever is more. The Ulysses group
    exchanges flat tensors, of which a rank keeps its own part; a ring exchanges
    [rows, heads, K]."""
    events = trace["traceEvents"]
    # on the host, where calls start
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    spans = {
        e["name"]: (e["ts"], e["ts"] + e["dur"])
        for e in marks
        if e["name"] in ("forward", "backward")
    }
    counts = Counter[str]()
    for event in events:
        if event.get("cat") == "kernel" and "nccl" in event["name"] and "SendRecv" in event["name"]:
            counts["NCCL kernels that send and receive"] += 1
        if event.get("name") == "c10d::alltoall_base_":
            direction = next(
                name for name, (begin, end) in spans.items() if begin <= event["ts"] <= end
            )
            received, sent = event["args"]["Input Dims"][:2]
            itemsize = ITEMSIZES[event["args"]["Input type"][1]]
            group = "Ulysses" if len(sent) == 1 else "ring"
            shared = ulysses - 1 if group == "Ulysses" else ulysses
            counts[f"{direction} {group} calls"] += 1
            num_bytes = max(math.prod(sent), math.prod(received)) * itemsize
            counts[f"{direction} {group} bytes"] += num_bytes * shared // ulysses
    return dict(counts)


def run_rank(tokens: int, tiny: bool, folder: Path) -> None:
    start_process_group()
    device = default_device()
    config = find_config("llama3-8b") | {"num_hidden_layers": 1, "vocab_size": 512}
    if tiny:
        config |= {"hidden_size": 256, "intermediate_size": 256, "head_dim": 8}
    for ring, stages in CASES:
        layout = case_layout(dist.get_world_size(), ring, stages, tokens)
        mesh = make_mesh(layout.cp, device, ring=ring)
        model = build_model(config, mesh, layout, context=tokens).train()
        ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(1))
        model(input_ids=ids, labels=ids).loss.backward()  # warm-up
        with profile(activities=list(supported_activities()), record_shapes=True) as profiler:
            with record_function("forward"):
                loss = model(input_ids=ids, labels=ids).loss
            with record_function("backward"):
                loss.backward()
        file = folder / f"{dist.get_rank()}.json"
        profiler.export_chrome_trace(str(file))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            gathered, count_collectives(json.loads(file.read_text()), layout.ulysses)
        )
        if dist.get_rank() == 0:
            about = {"tokens": tokens, "ring": ring, "ulysses": layout.ulysses, "stages": stages}
            most = {
                name: max(counts.get(name, 0) for counts in gathered)
                for name in sorted(gathered[0])
            }
            print(json.dumps(about | most | planned_bytes(config, layout, tokens)), flush=True)
        del model, loss
    end_process_group()


def planned_bytes(config: dict[str, Any], layout: Layout, tokens: int) -> dict[str, int]:
    """The ring's bytes, as in plan/seconds.py."""
    sizes = LayerBytes(shape_from_config(config, "llama3-8b"), layout, tokens // layout.cp)
    kv = sizes.ring_kv * (layout.ring - 1)
    return {
        "planned forward ring bytes": kv,
        "planned backward ring bytes": kv + sizes.in_sum_dtype(kv),
    }


def main(
    ranks: Annotated[int, typer.Option(min=2)] = 4,
    tokens: Annotated[int, typer.Option(help="Context length.")] = 128 * 1024,
    tiny: Annotated[bool, typer.Option("--tiny", help="A small model and context.")] = False,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Count what rings and Ulysses groups of several ranks on one GPU send."""
    if folder is not None:
        run_rank(tokens, tiny, folder)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as name:
        words = [
            "--tokens",
            str(1024 if tiny else tokens),
            "--folder",
            name,
            *(["--tiny"] if tiny else []),
        ]
        shared = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **SEVERAL_ON_ONE,
        }
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *words], env=os.environ | shared | {"RANK": str(rank)}
            )
            for rank in range(ranks)
        ]
        if any([process.wait() for process in processes]):
            sys.exit("a rank failed")


if __name__ == "__main__":
    typer.run(main)
