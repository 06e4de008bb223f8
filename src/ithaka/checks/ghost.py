"""Rehearse a plan without a GPU: trace one rank's step of a few layers, and extrapolate its memory to full depth."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ithaka.attention.choose import kernel_for
from ithaka.checks.rehearse import read_config, run_step
from ithaka.comm.ghost import GHOST, ghost_rank
from ithaka.comm.mesh import make_mesh
from ithaka.config import ConfigError, OptimConfig, load_config
from ithaka.data.open import open_data
from ithaka.data.pack import PackedSequence
from ithaka.data.tokenizer import load_tokenizer
from ithaka.model.build import build_model
from ithaka.model.truncate import choose_neighbors, read_kinds, truncate_config
from ithaka.plan.hardware import GIB
from ithaka.plan.layer_bytes import CALL_TOKENS
from ithaka.plan.search import Plan
from ithaka.plan.trace import Amounts, LinearTrace, Segment, Trace, TraceRequest
from ithaka.profile.trace import ghost_store, trace_step
from ithaka.train.step import make_optimizer

MAX_TILES = 24  # per rank; a longer sequence is extrapolated from two shorter ones
UNSEEN = "does not see fragmentation, the CUDA context or buffers of NCCL, for which plans reserve {:.1f} GiB"


def trace_plan(plan: Plan, config: dict[str, Any], rank: int = 0, inputs: dict[str, Any] | None = None) -> Trace:
    """The trace of a planned step on this rank, at full depth. `config`: the model's config.json; `inputs`: arguments
    of a call, by default random tokens."""
    if not 0 <= rank < (num_ranks := plan.hardware.num_gpus):
        raise ConfigError(f"--rank {rank} is not one of the {num_ranks} ranks; use 0 to {num_ranks - 1}")
    request, representatives = request_trace(plan, config, rank)
    if inputs is not None:
        found = trace_model(request, inputs["input_ids"].numel(), inputs)
    else:
        found = _trace_lengths(request, plan.work.tokens)
    found = found.unroll(representatives)
    return _offload_states(found) if plan.layout.offload_optimizer else found


def request_trace(plan: Plan, config: dict[str, Any], rank: int = 0) -> tuple[TraceRequest, list[int]]:
    """What to trace for a plan, and the traced layer that is like each layer of the model."""
    layout, work, shape = plan.layout, plan.work, plan.shape
    policies = layout.layer_policies(shape.num_layers)
    truncated, layers, representatives = _truncate(plan, config, policies)
    layout = replace(
        layout,
        kept=tuple(policies[i] for i in layers),
        dtype="bfloat16",
        kernel=plan.hardware.gpu.kernel,
        offload_optimizer=False,  # `_offload_states` does it
    )
    options: dict[str, Any] = {"adapter": shape.adapter, "optimizer": shape.optimizer, "trains": work.trains}
    document = work.context if work.batch > 1 else work.document_tokens
    ranks = plan.hardware.num_gpus, rank
    request = TraceRequest(
        json.dumps(truncated), layout, *ranks, work.context, document, reference=work.reference, **options
    )
    return request, representatives


def _truncate(plan: Plan, config: dict[str, Any], policies: Any) -> tuple[dict[str, Any], tuple[int, ...], list[int]]:
    """A configuration with the layers to trace, these, and the traced layer that is like each layer of the model."""
    if "_class_name" in config:
        layers, representatives = choose_neighbors(list(zip(plan.shape.mixers, policies, strict=True)))
        return {**config, "num_layers": len(layers)}, layers, representatives
    full = read_config(config)
    kinds = read_kinds(full)
    layers, representatives = choose_neighbors(list(zip(kinds, policies, strict=True)))
    truncated = truncate_config(full, layers)
    if read_kinds(truncated) == [kinds[i] for i in layers]:
        return truncated.to_dict(), layers, representatives
    return full.to_dict(), tuple(range(len(kinds))), list(range(len(kinds)))  # a kind depends on the layer's index


def _trace_lengths(request: TraceRequest, tokens: int) -> Trace:
    """Trace a sequence of this length or, if it is long, two shorter ones."""
    layout = request.layout
    tile = layout.cp * (layout.tile_tokens or tokens)
    # Attention takes several heads per call in shorter sequences than CALL_TOKENS, whose buffers are not linear.
    short = -(-max(MAX_TILES // 4 * tile, CALL_TOKENS) // tile) * tile
    if tokens <= 2 * short:
        return cached_trace(request, tokens)
    return LinearTrace(cached_trace(request, short), cached_trace(request, 2 * short)).at(tokens)


def cached_trace(request: TraceRequest, tokens: int) -> Trace:
    trace = request.read(tokens)
    if trace is None:
        trace = trace_model(request, tokens)
        request.write(trace)
    return trace


def trace_model(request: TraceRequest, tokens: int, inputs: dict[str, Any] | None = None) -> Trace:
    """Trace a step of `tokens` tokens, or of the model's arguments `inputs`."""
    layout, trains, adapter = request.layout, request.trains, request.adapter
    with ghost_rank(request.num_ranks, request.rank), ghost_store() as store:
        mesh = make_mesh(layout.cp, GHOST, ring=layout.ring, replicas=layout.replicas)
        options: dict[str, Any] = {"store": store, "context": max(tokens, request.context)}
        build = partial(build_model, json.loads(request.config), mesh, layout, **options)
        model = build(adapter=adapter, trains=trains)
        other = build(trains=False) if request.reference and not adapter else None
        optim: Any = OptimConfig(name=request.optimizer, lr=0.0)  # type: ignore[arg-type]
        optimizer = make_optimizer(model, optim) if trains else None
        if inputs is None:
            inputs = model.ithaka_root.example_inputs(tokens, request.document_tokens)
        step = partial(run_step, model, optimizer, (other or model) if request.reference else None)
        return replace(trace_step(model, optimizer, step, inputs), tokens=tokens)


def _offload_states(trace: Trace) -> Trace:
    """Move parameters, gradients and optimizer states to the host: a trace keeps them on the device, because the ghost
    device has no host. Gradients in flight stay."""
    sharded = sum(state.get("gradients", 0.0) for state in trace.states)
    segments = []
    for segment in trace.segments:
        states = {name: segment.start.get(name, 0.0) for name in ("parameters", "optimizer")}
        host = sum(states.values()) + sharded

        def strip(sizes: Amounts) -> Amounts:
            return {name: size for name, size in sizes.items() if name not in ("parameters", "optimizer")}

        peaks = {phase: strip(sizes) for phase, sizes in segment.peaks.items()}
        start, peak, end = (size + host for size in segment.host)
        segments.append(
            replace(segment, start=strip(segment.start), end=strip(segment.end), peaks=peaks, host=(start, peak, end))
        )
    return replace(trace, segments=tuple(segments))


# ---- the user's data


def find_worst_batch(file: Path, plan: Plan, rank: int = 0) -> dict[str, Any]:
    """Pack the data of a run's configuration as the run would, and return the model's arguments for the batch that
    needs the most memory: of the first round, the sequences with the most image tokens, then with the most documents
    that continue others, then with the longest document."""
    work, cp = plan.work, plan.layout.cp
    config = load_config(file, [f"data.context={work.context}"])
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.chat_template)
    with tempfile.TemporaryDirectory(prefix="ithaka-") as folder:
        options: dict[str, Any] = {"seed": config.train.seed, "batch": work.batch, "cp": (rank % cp, cp)}
        data = open_data(config.data, tokenizer=tokenizer, cache_dir=Path(folder), **options)
        try:
            sequences = sorted(
                map(data.stream.get_sequence, range(len(data.stream.current_round()))), key=_memory_order, reverse=True
            )
            return data.collate(sequences[: work.batch]).inputs
        finally:
            data.close()


def _memory_order(sequence: PackedSequence) -> tuple[int, int, int]:
    images = sum(image.num_tokens for image in sequence.images)
    branches = 0 if sequence.parents is None else int((sequence.parents >= 0).sum())
    return images, branches, int(np.diff(sequence.borders, append=sequence.length).max())


# ---- what is printed


def describe_ghost(plan: Plan, trace: Trace, rank: int) -> dict[str, Any]:
    """Peaks by phase on the device and the host in GiB, and those of the plan without its reserve."""
    ledger, gpus = plan.ledger, plan.hardware.gpus_per_node
    planned = (ledger.gpu_peak - ledger.gpu["reserve"]) / GIB
    planned_host = (ledger.host_needed - ledger.host["reserve"]) / gpus / GIB
    capacity, reserve = ledger.gpu_bytes / GIB, ledger.gpu["reserve"] / GIB
    peak = trace.peak_bytes / GIB
    return {
        "rank": rank,
        "gpus": plan.hardware.name,
        "tokens": trace.tokens,
        "kernels": sorted({kernel_for(plan.hardware.gpu.kernel, kind) for kind in plan.shape.attention_kinds}),
        "phases": list(_list_phases(trace)),
        "peak_phase": _name_peak(trace.peak),
        "device_gib": {"traced": peak, "planned": planned, "capacity": capacity, "reserve": reserve},
        "host_gib": {"traced": trace.host_bytes / GIB, "planned": planned_host},
        "fits": peak + reserve <= capacity,
        "note": f"a ghost rehearsal {UNSEEN.format(reserve)}",
    }


def _list_phases(trace: Trace) -> Iterator[dict[str, Any]]:
    """The highest segment of each kind: embedding, forward and backward of layers, loss, update."""
    highest: dict[str, Segment] = {}
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


def _name_peak(segment: Segment) -> str:
    inner = segment.peak[0].rpartition("/")[2]
    return segment.name if not inner or inner in segment.name else f"{segment.name}, {inner}"
