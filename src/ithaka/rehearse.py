"""Run rank 0 of N on one device: real shards, buffers, copies, kernels and optimizer; collectives are local copies.

X is the bytes of one residual-stream tensor on one rank: s * D * 2 in bf16.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ithaka.attention.choose import agree_on_kernel, kernel_for
from ithaka.config import AdapterConfig, ConfigError, OptimConfig
from ithaka.dist.loopback import start_loopback
from ithaka.dist.mesh import default_device, make_mesh
from ithaka.layout import Layout, default_dtype
from ithaka.measure import token_losses
from ithaka.model.build import build_model
from ithaka.model.families import find_layers, has_encoder
from ithaka.model.video import build_transformer, make_clip
from ithaka.model.video_blocks import is_diffusers_model
from ithaka.model.vision import make_frames
from ithaka.phases import PhasePath, listening, phase
from ithaka.plan.hardware import GIB, available_memory, join_kernels
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan
from ithaka.plan.seconds import Seconds, layer_seconds
from ithaka.plan.shape import AttentionKind
from ithaka.plan.units import format_bytes
from ithaka.preflight.run import STORE_HOLDERS
from ithaka.profile.live import LiveBytes
from ithaka.profile.timeline import PhaseTimer
from ithaka.train.loop import OutOfMemoryError
from ithaka.train.preferences import use_reference
from ithaka.train.step import make_optimizer
from ithaka.train.watch import OutOfMemoryTracker, explain_out_of_memory, ran_out_of_memory

TINY_TOKENS = 1024  # per rank; activations are negligible compared with weights
MEMORY_ONLY_DOCUMENT = 128 * 1024  # document length with memory_only, which bounds the cost of attention


@dataclass(frozen=True)
class RehearsalResult:
    """Measurements on the truncated model."""

    x_bytes: int
    layer_bytes: int  # peak of the layers minus their peak at a tiny context (parameters, gradients, gathered weights)
    peak_bytes: int  # on the device, over the step
    peak_phase: str
    host_bytes: int  # offloaded by this rank
    disk_bytes: int
    forward_s: float  # per layer
    backward_s: float
    step_s: float  # truncated model, including the optimizer


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
) -> RehearsalResult:
    """Run training steps (trains=False: forward passes) as rank 0 of `ranks`, and measure the last. `config` is the
    model's config.json; the layout sets the number of layers. Weights are random. `memory_only`: run one step, and
    limit attention to documents of 128 Ki tokens; allocations do not change. `reference`: run the model without its
    adapter, or a frozen copy, first, as DPO and GRPO do."""
    layers, is_video = len(layout.kept), "_class_name" in config
    if is_video and memory_only:
        raise ConfigError("--memory-only cuts attention into documents, which a clip does not have; leave it out")
    text = config.get("text_config") or config
    cut = {"num_layers" if is_video else "num_hidden_layers": layers}
    if text.get("layer_types"):
        cut["layer_types"] = text["layer_types"][:layers]
    truncated = {**config, **(cut if text is config else {"text_config": {**text, **cut}})}
    start_loopback(ranks)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        mesh = make_mesh(layout.cp, default_device(), ring=layout.ring, replicas=layout.replicas)
        with phase("building the model"):
            build: Any = build_transformer if is_video else build_model
            model = build(truncated, mesh, layout, adapter=adapter, trains=trains).train(trains)
            other = build(truncated, mesh, layout, trains=False).eval() if reference and not adapter else None
        optimizer = make_optimizer(model, OptimConfig(name=optimizer_name, lr=0.0)) if trains else None
        step = partial(_run_step, model, optimizer, (other or model) if reference else None)
        s = context // mesh.cp_size
        tiny_s = TINY_TOKENS if s >= 16 * TINY_TOKENS else max(2, s // 64)  # at least two: one token has no label
        steps = 1 if memory_only else steps
        document = MEMORY_ONLY_DOCUMENT if memory_only else document_tokens
        _, tiny_peaks = _measure_step(step, _make_inputs(model, mesh.cp_size * tiny_s), mesh.device, 2)
        seconds, peaks = _measure_step(step, _make_inputs(model, context, document), mesh.device, steps)
        peak_path, store = max(peaks, key=lambda path: (peaks[path], len(path))), find_layers(model)[0].forward.store
        forward_s, backward_s = (
            sum(seconds.get(("step", f"layer {i}", name), 0.0) for i in range(layers))
            for name in ("forward", "backward")
        )
        return RehearsalResult(
            x_bytes=layout.x_bytes(config["num_attention_heads"] * config["attention_head_dim"], s)
            if is_video
            else layout.x_bytes(model.config.get_text_config().hidden_size, s),
            layer_bytes=_layers_peak(peaks) - _layers_peak(tiny_peaks),
            peak_bytes=peaks[peak_path],
            peak_phase=" / ".join(peak_path[1:]) or "outside layers and loss",
            host_bytes=store.pool.peak_bytes,
            disk_bytes=store.disk.used_bytes,
            forward_s=forward_s / layers,
            backward_s=backward_s / layers,
            step_s=seconds[("step",)],
        )


def _measure_step(
    step: Any, inputs: dict[str, Any], device: torch.device, steps: int
) -> tuple[dict[PhasePath, float], dict[PhasePath, int]]:
    """Return seconds and peak bytes by phase of the last step. On a CPU, one more step counts live bytes."""
    for _ in range(steps):
        timer = PhaseTimer(device)
        with listening(timer):
            step(inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return timer.seconds(), timer.peaks
    with LiveBytes() as live:
        model, optimizer, reference = step.args
        live.tag_states(model, optimizer)
        if reference not in (None, model):
            live.tag_states(reference, None)
        step(inputs)
    return timer.seconds(), live.phase_peaks()


def _make_inputs(model: Any, context: int, document: int | None = None) -> dict[str, Any]:
    if is_diffusers_model(model):
        return make_clip(model, context)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (1, context), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "document_ids": torch.arange(context)[None] // document if document else None}
    return inputs | make_frames(model, ids) if has_encoder(model) else inputs


def _run_step(model: Any, optimizer: Optimizer | None, reference: Any, inputs: dict[str, Any]) -> None:
    """Run a training step; without an optimizer, the forward pass of an evaluation. If the reference is the model, its
    adapter is disabled."""
    with phase("step"):
        if is_diffusers_model(model):
            with torch.set_grad_enabled(optimizer is not None):
                loss = model(**inputs).sample.square().mean()
        elif optimizer is None:
            others = {name: value for name, value in inputs.items() if name != "input_ids"}
            loss = token_losses(model, inputs["input_ids"], **others).mean()
        elif reference is not None:
            options = {**inputs, "labels": inputs["input_ids"], "per_token": True}
            with torch.no_grad(), use_reference(model, None if reference is model else reference) as other:
                before = other(**options).tokens.logprobs
            loss = -(model(**options).tokens.logprobs - before).exp().mean()
        else:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if not torch.isfinite(loss):
        raise RuntimeError(f"the rehearsal's loss is {loss.item()}; its timings are meaningless")


def _layers_peak(peaks: dict[PhasePath, int]) -> int:
    return max(peak for path, peak in peaks.items() if len(path) > 1 and path[1].startswith("layer "))


def _on_gpu() -> bool:
    return default_device().type == "cuda"


def compute_dtype() -> str:
    return default_dtype(_on_gpu())


# ---- compare measurements with the plan


def find_kernel(name: str, kinds: Iterable[AttentionKind]) -> str:
    """Resolve the attention kernel for this device and the dtype of a rehearsal."""
    return agree_on_kernel(name, default_device(), getattr(torch, compute_dtype()), kinds)


def truncate_plan(plan: Plan, layers: int, memory_only: bool, kernel: str = "auto") -> Plan:
    """Map a plan to one with fewer layers, in this device's dtype. Activation policies are taken from evenly spaced
    layers; every layer gets the adapters of the layer with the most."""
    shape = plan.shape
    policies = tuple(plan.layout.kept[(2 * i + 1) * shape.num_layers // (2 * layers)] for i in range(layers))
    truncated = shape.first_layers(layers)
    if shape.adapter:
        targets = (*shape.most_adapted, *(["lm_head"] if shape.has_adapter("lm_head") else []))
        truncated = truncated.with_adapter(replace(shape.adapter, targets=targets))
    layout = replace(plan.layout, kept=policies, dtype=compute_dtype(), kernel=kernel)
    work = replace(plan.work, document_tokens=MEMORY_ONLY_DOCUMENT) if memory_only else plan.work
    return Plan(truncated, layout, plan.hardware, work)


def check_cpu_memory(truncated: Plan) -> None:
    """On a CPU, refuse a rehearsal that exceeds free host memory, which then also holds the device's tensors."""
    ledger = truncated.ledger
    host_bytes = (ledger.host_needed - ledger.host["reserve"]) // truncated.hardware.gpus_per_node
    need_bytes, free_bytes = ledger.gpu_peak - ledger.gpu["reserve"] + host_bytes, available_memory()
    if need_bytes > free_bytes and not _on_gpu():
        raise ConfigError(
            f"--context {truncated.work.context} with --layers {truncated.shape.num_layers} needs "
            f"{format_bytes(need_bytes)} without a GPU, {format_bytes(free_bytes)} available; "
            "use a shorter --context or fewer --layers"
        )


def describe_rehearsal(plan: Plan, truncated: Plan) -> dict[str, Any]:
    """Lines to print first. kernel: runs on this device; planned_kernel: its rates are in the plan."""
    s, hidden = truncated.work.local_tokens(truncated.layout.cp), truncated.shape.hidden
    kinds = truncated.shape.attention_kinds
    kernel = find_kernel(truncated.layout.kernel, kinds)
    x = f"one {truncated.layout.dtype} activation [{s} tokens per rank, {hidden} hidden]"
    times = f"the CPU: measured times are for this CPU, planned times for {plan.hardware.gpu.name}"
    return {
        "device": torch.cuda.get_device_name() if _on_gpu() else times,
        "gpus": plan.hardware.name,
        "kernel": join_kernels(kernel_for(kernel, kind) for kind in kinds),
        "planned_kernel": join_kernels(plan.kernels.values()) or None,
        "context": plan.work.context,
        "layers": truncated.shape.num_layers,
        "layers_of_model": plan.shape.num_layers,
        "attention_cut_short": truncated.work != plan.work and plan.work.tokens > MEMORY_ONLY_DOCUMENT,
        "x": f"{x} = {format_bytes(truncated.layout.x_bytes(hidden, s))}",
        "settings": plan.settings,
    }


def rehearse_plan(plan: Plan, truncated: Plan, model: str) -> tuple[list[dict[str, Any]], str]:
    """Rehearse the first layers of `model` within the planned GPU's memory. Return table rows and the peak's phase."""
    config, memory_tracker = find_config(model), OutOfMemoryTracker(default_device())
    if _on_gpu():
        total_bytes = torch.cuda.get_device_properties(default_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.hardware.gpu.memory_bytes / total_bytes))
    try:
        options = (truncated.work != plan.work, truncated.shape.adapter, plan.work.trains)
        named: dict[str, Any] = {"optimizer_name": truncated.shape.optimizer, "reference": plan.work.reference}
        if plan.work.batch > 1:
            named["document_tokens"] = plan.work.context
        with listening(memory_tracker):
            measured = rehearse(config, truncated.layout, plan.hardware.num_gpus, plan.work.tokens, *options, **named)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemoryError(explain_out_of_memory(truncated, error, memory_tracker, model)) from error
    return compare_with_plan(plan, truncated, measured), measured.peak_phase


def _planned_seconds(plan: Plan) -> tuple[Seconds, Seconds]:
    """Planned seconds of all layers: forward, with that of a reference, and backward if the plan trains."""
    total = Seconds(), Seconds()
    for (window, policy), group in groupby(zip(plan.shape.windows, plan.layout.kept, strict=True)):
        per_layer = layer_seconds(plan.shape, plan.layout, plan.hardware, plan.work, window, policy)
        num_layers = len(list(group))
        num_forward = num_layers * (1 + plan.work.reference)
        total = total[0] + per_layer[0].times(num_forward), total[1] + per_layer[1].times(num_layers * plan.work.trains)
    return total


def compare_with_plan(plan: Plan, truncated: Plan, measured: RehearsalResult) -> list[dict[str, Any]]:
    """Rows for the rehearsed layers, then, on a GPU and with full attention, for the full model's step or forward."""
    forward, backward = (total.times(1 / truncated.shape.num_layers) for total in _planned_seconds(truncated))
    exchange_s, layer_s = (forward + backward).exchange, measured.forward_s + measured.backward_s
    trains = plan.work.trains
    # Scale by planned seconds, not by layer count: layers may have different activation policies.
    full_model = sum(_planned_seconds(plan), Seconds())
    layer_ratio = (full_model.total - full_model.exchange) / ((forward + backward).total - exchange_s)
    step_s = measured.step_s + (layer_ratio - truncated.shape.num_layers) * layer_s + full_model.exchange
    tokens_per_s = plan.work.tokens / plan.layout.cp / step_s
    ledger, node_gib = truncated.ledger, GIB * truncated.hardware.gpus_per_node
    peak_bytes = ledger.gpu_peak - ledger.gpu["reserve"]
    host_bytes = sum(ledger.host[holder] for holder in STORE_HOLDERS)
    rows: list[tuple[str, float | None, float, str]] = [
        ("peak without reserve", peak_bytes / GIB, measured.peak_bytes / GIB, "GiB"),
        ("layer peak above parameters and gradients", None, measured.layer_bytes / measured.x_bytes, "X"),
        ("host, including disk staging", host_bytes / node_gib, measured.host_bytes / GIB, "GiB"),
        ("disk", ledger.disk_peak / node_gib, measured.disk_bytes / GIB, "GiB"),
        ("layer forward", forward.total - forward.exchange, measured.forward_s, "s"),
    ]
    if trains:
        rows.append(("layer backward", backward.total - backward.exchange, measured.backward_s, "s"))
    if _on_gpu() and truncated.work == plan.work:  # CPU times and truncated attention cannot be extrapolated
        rows += [
            ("exchange per layer (planned only)", exchange_s, exchange_s, "s"),
            (f"{'step' if trains else 'forward'} of {plan.shape.num_layers} layers", plan.step_s, step_s, "s"),
            ("tokens/s per GPU", round(plan.tokens_per_s_per_gpu), round(tokens_per_s), ""),
        ]
    return [dict(zip(("what", "planned", "measured", "unit"), row, strict=True)) for row in rows]
