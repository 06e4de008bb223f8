"""Rehearse a plan without a GPU: trace a step of random tokens or of the worst packed batch."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ithaka.attention.choose import kernel_for
from ithaka.config import load_config
from ithaka.data.open import open_data
from ithaka.data.pack import PackedSequence
from ithaka.data.tokenizer import load_tokenizer
from ithaka.hub import fetch_model
from ithaka.plan.hardware import GIB
from ithaka.plan.search import Plan
from ithaka.plan.trace import Trace, TracedPart

UNSEEN = (
    "does not see fragmentation, the CUDA context or buffers of NCCL, for which plans reserve "
    "{:.1f} GiB"
)


# ---- the user's data


def find_worst_batch(file: Path, plan: Plan, rank: int = 0) -> dict[str, Any]:
    """Pack the data of a run's configuration as the run would, and return the model's arguments for
    the batch that needs the most memory: of the first round, the sequences with the most image
    tokens, then with the most documents that continue others, then with the longest document."""
    work = plan.work
    cp = plan.layout.cp
    config = load_config(file, [f"data.context={work.context}"])
    model = fetch_model(config.model.path, weights=False)
    tokenizer = load_tokenizer(config.data.tokenizer, model, config.data.chat_template)
    with tempfile.TemporaryDirectory(prefix="ithaka-") as folder:
        data = open_data(
            config.data,
            tokenizer=tokenizer,
            cache_dir=Path(folder),
            seed=config.train.seed,
            batch=work.batch,
            cp=(rank % cp, cp),
        )
        try:
            sequences = map(data.stream.get_sequence, range(len(data.stream.current_round())))
            worst = sorted(sequences, key=_memory_order, reverse=True)[: work.batch]
            return data.collate(worst).inputs
        finally:
            data.close()


def _memory_order(sequence: PackedSequence) -> tuple[int, int, int]:
    images = sum(image.num_tokens for image in sequence.images)
    branches = 0 if sequence.parents is None else int((sequence.parents >= 0).sum())
    return images, branches, int(np.diff(sequence.borders, append=sequence.length).max())


# ---- what is printed


def describe_ghost(plan: Plan, trace: Trace, rank: int) -> dict[str, Any]:
    """Peaks by phase on the device and the host, and those of the plan without its reserve, in
    GiB."""
    ledger = plan.ledger
    gpus = plan.hardware.gpus_per_node
    planned = (ledger.gpu_peak - ledger.gpu["reserve"]) / GIB
    planned_host = (ledger.host_needed - ledger.host["reserve"]) / gpus / GIB
    capacity = ledger.gpu_bytes / GIB
    reserve = ledger.gpu["reserve"] / GIB
    peak = trace.peak_bytes / GIB
    kernel = plan.hardware.gpu.kernel
    return {
        "rank": rank,
        "gpus": plan.hardware.name,
        "tokens": trace.tokens,
        "kernels": sorted({kernel_for(kernel, kind) for kind in plan.shape.attention_kinds}),
        "phases": list(_list_phases(trace)),
        "peak_phase": _name_peak(trace.peak),
        "device_gib": {
            "traced": peak,
            "planned": planned,
            "capacity": capacity,
            "reserve": reserve,
        },
        "host_gib": {"traced": trace.host_bytes / GIB, "planned": planned_host},
        "fits": peak + reserve <= capacity,
        "note": f"a ghost rehearsal {UNSEEN.format(reserve)}",
    }


def _list_phases(trace: Trace) -> Iterator[dict[str, Any]]:
    """The highest segment of each kind: embedding, forward and backward of layers, loss, update."""
    highest: dict[str, TracedPart] = {}
    for segment in trace.segments:
        name = segment.name
        kind = name.rpartition(" ")[2] if name.startswith("layer ") else name
        if kind not in highest or segment.peak_bytes > highest[kind].peak_bytes:
            highest[kind] = segment
    for segment in highest.values():
        sizes = sorted(segment.peak[1].items(), key=lambda item: -item[1])
        yield {
            "phase": _name_peak(segment),
            "device_gib": segment.peak_bytes / GIB,
            "host_gib": segment.host[1] / GIB,
            "largest": {name: size / GIB for name, size in sizes[:4]},
        }


def _name_peak(segment: TracedPart) -> str:
    inner = segment.peak[0].rpartition("/")[2]
    return segment.name if not inner or inner in segment.name else f"{segment.name}, {inner}"
