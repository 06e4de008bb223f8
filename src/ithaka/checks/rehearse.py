"""Run one rank of N on one device: real shards, buffers, copies, kernels and optimizer, with local
copies for collectives. Under torchrun, run all N ranks with real collectives instead.

X is the bytes of one residual-stream tensor on one rank: s * D * 2 in bf16.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from ithaka.attention.choose import agree_on_kernel, kernel_for
from ithaka.comm.agree import gather_objects
from ithaka.comm.loopback import start_loopback
from ithaka.comm.mesh import default_device, destroy_subgroups, make_mesh
from ithaka.config import AdapterConfig, ConfigError, OptimConfig
from ithaka.config.units import format_bytes
from ithaka.exits import ran_out_of_memory
from ithaka.facts.attention import AttentionKind
from ithaka.facts.dtypes import default_dtype
from ithaka.facts.machine import available_memory
from ithaka.facts.sizes import RESERVE_BYTES
from ithaka.layout import Layout
from ithaka.model.build import build_model, keep_layers, read_hf_config, read_layers
from ithaka.model.optimizers import make_optimizer
from ithaka.model.truncate import (
    LayerGroup,
    choose_layers,
    find_representative_layers,
    group_layers,
)
from ithaka.phases import PhasePath, listening, phase
from ithaka.plan.hardware import GIB, join_kernels
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan
from ithaka.plan.seconds import Seconds, seconds_by_layer
from ithaka.profile.live import LiveBytes
from ithaka.profile.position import HostPosition
from ithaka.profile.profiled_step import StepTimes
from ithaka.profile.timeline import PhaseTimer
from ithaka.roots.layer_kinds import LayerKind
from ithaka.run.validated import STORE_CATEGORIES
from ithaka.trace.trace_plan import run_step
from ithaka.train.out_of_memory import (
    OutOfMemoryError,
    explain_out_of_memory,
)

DIRECTIONS = ("forward", "backward")
TINY_TOKENS = 1024  # per rank; activations are negligible compared with weights
MEMORY_ONLY_DOCUMENT = 128 * 1024  # document length with memory_only, bounds attention's cost
Row = tuple[str, float | None, float, str]  # what, planned, measured, unit


@dataclass(frozen=True)
class RehearsalResult:
    """Measurements on the truncated model."""

    x_bytes: int
    # the layers' peak minus that at a tiny context (parameters, gradients, gathered weights)
    layer_bytes: int
    peak_bytes: int  # on the device, over the step
    peak_phase: str
    host_bytes: int  # offloaded by this rank
    disk_bytes: int
    layer_s: list[list[float]]  # [forward, backward] of each layer
    step_s: float  # truncated model, including the optimizer
    # on real ranks, per step: not hidden by compute, and hidden
    exchange_s: tuple[float, float] | None = None

    @property
    def forward_s(self) -> float:
        """Mean over the layers."""
        return mean(forward for forward, _ in self.layer_s)

    @property
    def backward_s(self) -> float:
        return mean(backward for _, backward in self.layer_s)

    def comparable(self, planned: Seconds) -> float:
        """The part of planned seconds that was measured."""
        return planned.total if self.exchange_s else planned.total - planned.exchange


def rehearse(
    config: dict[str, Any],
    layout: Layout,
    ranks: int,
    context: int,
    memory_only: bool = False,
    adapter: AdapterConfig | None = None,
    trains: bool = True,
    steps: int = 2,
    optimizer_name: Any = "adamw",
    reference: bool = False,
    document_tokens: int | None = None,
    layers: Sequence[int] | None = None,
    rank: int = 0,
) -> RehearsalResult:
    """Run training steps (trains=False: forward passes) as `rank` of `ranks`, and measure the last.
    `config` is the model's config.json, of which `layers` run (None: all). Weights are random.
    `memory_only`: run one step, and limit attention to documents of 128 Ki tokens; allocations do
    not change. `reference`: run the model without its adapter, or a frozen copy, first, as DPO and
    GRPO do."""
    if memory_only and "_class_name" in config:
        raise ConfigError(
            "--memory-only cuts attention into documents, which a clip does not have; leave it out"
        )
    truncated = config if layers is None else keep_layers(config, layers)
    with ExitStack() as stack:
        is_real = dist.is_initialized()
        if not is_real:
            start_loopback(ranks, rank)
        stack.callback(destroy_subgroups if is_real else dist.destroy_process_group)
        mesh = make_mesh(layout.cp, default_device(), ring=layout.ring, replicas=layout.replicas)
        with phase("building the model"):
            build = partial(build_model, truncated, mesh, layout, context=context)
            model = build(adapter=adapter, trains=trains)
            other = build(trains=False) if reference and not adapter else None
        optimizer = None
        if trains:
            optimizer = make_optimizer(model, OptimConfig(name=optimizer_name, lr=0.0))
        root = model.ithaka_root
        step = partial(run_step, model, optimizer, (other or model) if reference else None)
        s = context // mesh.cp_size
        # at least two: one token has no label
        tiny_s = TINY_TOKENS if s >= 16 * TINY_TOKENS else max(2, s // 64)
        if memory_only:
            steps = 1
            document_tokens = MEMORY_ONLY_DOCUMENT
        example = partial(root.example_inputs, context, document_tokens)
        _, tiny_peaks = _measure_step(
            step, root.example_inputs(mesh.cp_size * tiny_s), mesh.device, 2
        )
        seconds, peaks = _measure_step(step, example(), mesh.device, steps)
        peak_path = max(peaks, key=lambda path: (peaks[path], len(path)))
        store = root.layers[0].forward.store
        layer_s = []
        for i in range(len(root.layers)):
            paths = (("step", f"layer {i}", name) for name in DIRECTIONS)
            layer_s.append([seconds.get(path, 0.0) for path in paths])
        exchange_s = _measure_exchange(step, example()) if is_real else None
        result = RehearsalResult(
            x_bytes=layout.x_bytes(root.hidden_size, s),
            layer_bytes=_layers_peak(peaks) - _layers_peak(tiny_peaks),
            peak_bytes=peaks[peak_path],
            peak_phase=" / ".join(peak_path[1:]) or "outside layers and loss",
            host_bytes=store.pool.peak_bytes,
            disk_bytes=store.disk.used_bytes,
            layer_s=layer_s,
            step_s=seconds[("step",)],
            exchange_s=exchange_s,
        )
        return max(gather_objects(result), key=lambda each: each.step_s) if is_real else result


def _measure_exchange(
    step: Callable[[dict[str, Any]], object], inputs: dict[str, Any]
) -> tuple[float, float]:
    """Seconds in exchanges of one more step: (not hidden, hidden by compute)."""
    with StepTimes(default_device()) as times:
        step(inputs)
    with tempfile.TemporaryDirectory(prefix="ithaka-") as folder:
        found = times.write(Path(folder) / "trace.json.gz")
    return sum(row["exchange"] for row in found["phases"]), found["hidden"]["exchange"]


def _measure_step(
    step: partial, inputs: dict[str, Any], device: torch.device, steps: int
) -> tuple[dict[PhasePath, float], dict[PhasePath, int]]:
    """Return seconds and peak bytes by phase of the last step of `run_step`. On a CPU, one more
    step counts live bytes."""
    for _ in range(steps):
        timer = PhaseTimer(device)
        with listening(timer):
            step(inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return timer.seconds(), timer.peaks
    with LiveBytes() as live:
        model, optimizer, reference = step.args
        live.set_state_categories(model, optimizer)
        if reference not in (None, model):
            live.set_state_categories(reference, None)
        step(inputs)
    return timer.seconds(), live.phase_peaks()


def _layers_peak(peaks: dict[PhasePath, int]) -> int:
    in_layers = (path for path in peaks if len(path) > 1 and path[1].startswith("layer "))
    return max(peaks[path] for path in in_layers)


def _on_gpu() -> bool:
    return default_device().type == "cuda"


def rehearsal_dtype() -> str:
    return default_dtype(_on_gpu())


# ---- compare measurements with the plan


def find_kernel(name: str, kinds: Iterable[AttentionKind]) -> str:
    """Resolve the attention kernel for this device and the dtype of a rehearsal."""
    return agree_on_kernel(name, default_device(), getattr(torch, rehearsal_dtype()), kinds)


@dataclass(frozen=True)
class TruncatedPlan(Plan):
    """The plan of a model with a few of its layers."""

    layers: tuple[int, ...] = ()  # indices in the full model
    kinds: tuple[LayerKind, ...] = ()  # one per layer of the full model

    @cached_property
    def groups(self) -> list[LayerGroup]:
        return group_layers(self.kinds, self.layers, [mixer.name for mixer in self.shape.mixers])


def truncate_plan(
    plan: Plan,
    config: dict[str, Any],
    num_layers: int,
    memory_only: bool,
    kernel: str = "auto",
) -> TruncatedPlan:
    """Map a plan to one with `num_layers` layers, or one of each kind if more, in this device's
    dtype. As many layers keep more as of evenly spaced layers of each kind; every layer gets the
    adapters of the layer with the most. `config`: the model's config.json."""
    shape = plan.shape
    if "_class_name" in config:
        kinds = read_layers(config)
        layers = choose_layers(kinds, num_layers)
        dropped = None
    else:
        kinds, layers = find_representative_layers(read_hf_config(config), num_layers)
        dropped = sum(kind.num_parameters for i, kind in enumerate(kinds) if i not in layers)
    truncated = shape.keep_layers(layers, dropped)
    if shape.adapter:
        targets = (*shape.most_adapted, *(["lm_head"] if shape.has_adapter("lm_head") else []))
        truncated = truncated.with_adapter(replace(shape.adapter, targets=targets))
    work = replace(plan.work, document_tokens=MEMORY_ONLY_DOCUMENT) if memory_only else plan.work
    few = TruncatedPlan(
        truncated, plan.layout, plan.hardware, work, layers=layers, kinds=tuple(kinds)
    )
    like = [
        all_layers[(2 * i + 1) * len(all_layers) // (2 * len(rehearsed))]
        for _, rehearsed, all_layers in few.groups
        for i in range(len(rehearsed))
    ]
    layout = plan.layout.of_layers(like, shape.num_layers)
    layout = replace(layout, dtype=rehearsal_dtype(), kernel=kernel)
    return replace(few, layout=layout)


def check_cpu_memory(truncated: TruncatedPlan) -> None:
    """On a CPU, refuse a rehearsal that exceeds free host memory, which then also holds the
    device's tensors."""
    ledger = truncated.ledger
    host_bytes = (ledger.host_needed - ledger.host["reserve"]) // truncated.hardware.gpus_per_node
    need_bytes = ledger.gpu_peak - ledger.gpu["reserve"] + host_bytes
    free_bytes = available_memory()
    need_bytes *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # real ranks
    if need_bytes > free_bytes and not _on_gpu():
        fewer = " or fewer --layers" if len(truncated.layers) > len(truncated.groups) else ""
        raise ConfigError(
            f"--context {truncated.work.context} with {truncated.shape.num_layers} layers needs "
            f"{format_bytes(need_bytes)} without a GPU, {format_bytes(free_bytes)} available; "
            f"use a shorter --context{fewer}"
        )


def describe_rehearsal(plan: Plan, truncated: TruncatedPlan) -> dict[str, Any]:
    """Lines to print first. kernel: runs on this device; planned_kernel: its rates are in the
    plan."""
    s = truncated.work.local_tokens(truncated.layout.cp)
    hidden = truncated.shape.hidden
    kinds = truncated.shape.attention_kinds
    kernel = find_kernel(truncated.layout.kernel, kinds)
    x = f"one {truncated.layout.dtype} activation [{s} tokens per rank, {hidden} hidden]"
    times = f"the CPU: measured times are for this CPU, planned times for {plan.hardware.gpu.name}"
    groups = []
    for name, indices, layers in truncated.groups:
        rehearsed = [truncated.layers[i] for i in indices]
        groups.append({"kind": name, "rehearsed": rehearsed, "layers_of_model": len(layers)})
    is_cut = truncated.work != plan.work and plan.work.tokens > MEMORY_ONLY_DOCUMENT
    return {
        "device": torch.cuda.get_device_name() if _on_gpu() else times,
        "gpus": plan.hardware.name,
        "kernel": join_kernels(kernel_for(kernel, kind) for kind in kinds),
        "planned_kernel": join_kernels(plan.kernels.values()) or None,
        "context": plan.work.context,
        "layers": truncated.shape.num_layers,
        "layers_of_model": plan.shape.num_layers,
        "kinds": groups,
        "attention_cut_short": is_cut,
        "x": f"{x} = {format_bytes(truncated.layout.x_bytes(hidden, s))}",
        "settings": plan.settings,
    }


def rehearse_plan(
    plan: Plan, truncated: TruncatedPlan, model: str, rank: int = 0
) -> tuple[list[dict[str, Any]], str]:
    """Rehearse a few layers of `model` within the planned GPU's memory. Return table rows and the
    peak's phase."""
    config = find_config(model)
    position = HostPosition(default_device())
    if _on_gpu():
        total_bytes = torch.cuda.get_device_properties(default_device()).total_memory
        allowed_bytes = min(total_bytes, plan.hardware.gpu.memory_bytes) - RESERVE_BYTES
        torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes)
    try:
        with listening(position):
            measured = rehearse(
                config,
                truncated.layout,
                plan.hardware.num_gpus,
                plan.work.tokens,
                memory_only=truncated.work != plan.work,
                adapter=truncated.shape.adapter,
                trains=plan.work.trains,
                optimizer_name=truncated.shape.optimizer,
                reference=plan.work.reference,
                document_tokens=plan.work.context if plan.work.batch > 1 else None,
                layers=truncated.layers,
                rank=rank,
            )
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        explanation = explain_out_of_memory(truncated, error, position, model)
        raise OutOfMemoryError(explanation) from error
    return compare_with_plan(plan, truncated, measured), measured.peak_phase


def _layer_seconds(plan: Plan) -> list[tuple[Seconds, Seconds]]:
    """Planned seconds of each layer: forward, with that of a reference, and backward if the plan
    trains."""
    layers = seconds_by_layer(plan.shape, plan.layout, plan.hardware, plan.work)
    return [
        (forward.times(1 + plan.work.reference), backward.times(plan.work.trains))
        for forward, backward in layers
    ]


def _exchange_per_layer(plan: Plan) -> float:
    """Planned seconds, the mean over the layers of a plan."""
    return mean(forward.exchange + backward.exchange for forward, backward in _layer_seconds(plan))


def _compare_layers(truncated: TruncatedPlan, measured: RehearsalResult) -> Iterator[Row]:
    """Yield mean seconds per layer of each kind, without exchanges unless they were real."""
    planned = _layer_seconds(truncated)
    for name, rehearsed, layers in truncated.groups:
        suffix = ""
        if len(truncated.groups) > 1:
            suffix = f", {name} ({len(layers)} of {len(truncated.kinds)} layers)"
        for index, direction in enumerate(DIRECTIONS[: 1 + truncated.work.trains]):
            planned_s = mean(measured.comparable(planned[i][index]) for i in rehearsed)
            measured_s = mean(measured.layer_s[i][index] for i in rehearsed)
            yield f"layer {direction}{suffix}", planned_s, measured_s, "s"


def extrapolate_step(plan: Plan, truncated: TruncatedPlan, measured: RehearsalResult) -> float:
    """Seconds of the full model's step: as measured, with all layers, and planned exchanges unless
    they were real."""
    few = _layer_seconds(truncated)
    full = _layer_seconds(plan)
    step_s = measured.step_s + sum(
        part.total - measured.comparable(part) for layer in full for part in layer
    )
    for _, rehearsed, layers in truncated.groups:
        # Scale by planned seconds, not by layer count: activation policies may differ.
        planned_few = sum(measured.comparable(part) for i in rehearsed for part in few[i])
        planned_full = sum(measured.comparable(part) for i in layers for part in full[i])
        measured_s = sum(sum(measured.layer_s[i]) for i in rehearsed)
        step_s += (planned_full / planned_few - 1) * measured_s
    return step_s


def compare_with_plan(
    plan: Plan, truncated: TruncatedPlan, measured: RehearsalResult
) -> list[dict[str, Any]]:
    """Rows for the rehearsed layers and, on a GPU with full attention, the full model's step."""
    ledger = truncated.ledger
    node_gib = GIB * truncated.hardware.gpus_per_node
    peak_bytes = ledger.gpu_peak - ledger.gpu["reserve"]
    host_bytes = sum(ledger.host[name] for name in STORE_CATEGORIES)
    layer_x = measured.layer_bytes / measured.x_bytes
    rows: list[Row] = [
        ("peak without reserve", peak_bytes / GIB, measured.peak_bytes / GIB, "GiB"),
        ("layer peak above parameters and gradients", None, layer_x, "X"),
        ("host, including disk staging", host_bytes / node_gib, measured.host_bytes / GIB, "GiB"),
        ("disk", ledger.disk_peak / node_gib, measured.disk_bytes / GIB, "GiB"),
        *_compare_layers(truncated, measured),
    ]
    if measured.exchange_s:
        exposed_s, hidden_s = measured.exchange_s
        exchange_s = _exchange_per_layer(truncated)
        rows.append(("exchange per layer", exchange_s, exposed_s / len(measured.layer_s), "s"))
        hidden_percent = 100 * hidden_s / (exposed_s + hidden_s or 1.0)
        rows.append(("exchange hidden by compute", None, hidden_percent, "%"))
    # CPU times and truncated attention cannot be extrapolated.
    if _on_gpu() and truncated.work == plan.work:
        step_s = extrapolate_step(plan, truncated, measured)
        name = "step" if plan.work.trains else "forward"
        tokens_per_s = plan.work.tokens / plan.layout.cp / step_s
        if not measured.exchange_s:
            exchange_s = _exchange_per_layer(plan)
            rows.append(("exchange per layer (planned only)", exchange_s, exchange_s, "s"))
        rows += [
            (f"{name} of {plan.shape.num_layers} layers", plan.step_s, step_s, "s"),
            ("tokens/s per GPU", round(plan.tokens_per_s_per_gpu), round(tokens_per_s), ""),
        ]
    return [dict(zip(("what", "planned", "measured", "unit"), row, strict=True)) for row in rows]
