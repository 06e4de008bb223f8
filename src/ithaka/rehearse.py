"""Rank 0 of N on one device: real shards, buffers, copies, kernels and optimizer; collectives are local copies.

X is the bytes of one residual-stream tensor on one rank: s * D * 2 in bf16.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ithaka.attention.kernels import resolve_kernel
from ithaka.config import AdapterConfig, ConfigError, OptimConfig
from ithaka.dist.loopback import start_loopback
from ithaka.dist.mesh import default_device, make_mesh
from ithaka.layout import Layout, default_dtype
from ithaka.measure import token_losses
from ithaka.model.build import build_model
from ithaka.phases import PhasePath, listening, phase
from ithaka.plan.hardware import GIB, this_host
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan
from ithaka.plan.seconds import Seconds, layer_seconds
from ithaka.plan.show import format_bytes
from ithaka.preflight.memory import STORE_HOLDERS
from ithaka.profile.live import LiveBytes
from ithaka.profile.timeline import PhaseTimer
from ithaka.train.loop import OutOfMemoryError
from ithaka.train.step import make_optimizer
from ithaka.train.watch import OutOfMemoryTracker, explain_out_of_memory, ran_out_of_memory

TINY_TOKENS = 1024  # per rank: a run whose activations are nothing beside the weights
SHORT_DOCUMENT = 128 * 1024  # with memory_only, attention does not look further back


@dataclass(frozen=True)
class Rehearsed:
    """What was measured on a model of few layers."""

    x_bytes: int
    layer_bytes: int  # the layers' peak above that at a tiny context: parameters, gradients, weights at work
    peak_bytes: int  # on the device, of the whole step
    peak_phase: str  # where that was
    host_bytes: int  # kept on the host by this rank
    disk_bytes: int
    forward_s: float  # per layer
    backward_s: float
    step_s: float  # of the step of these few layers, the optimizer included


def rehearse(
    config: dict[str, Any],
    layout: Layout,
    ranks: int,
    context: int,
    memory_only: bool,
    witness: OutOfMemoryTracker,
    adapter: AdapterConfig | None = None,
    trains: bool = True,
) -> Rehearsed:
    """Runs two training steps, or forwards of an evaluation, as rank 0 of `ranks`; the last one is measured. With
    `memory_only` one.

    `config`: the model's config.json; as many layers as the layout has are built, with random weights.
    `memory_only`: attention looks at most 128 Ki tokens back, which cuts its mathematics short; every allocation and
    copy stays. `witness` follows the phases.
    """
    layers = len(layout.kept)
    few = {**config, "num_hidden_layers": layers}
    if few.get("layer_types"):
        few["layer_types"] = few["layer_types"][:layers]
    start_loopback(ranks)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.enter_context(listening(witness))
        mesh = make_mesh(layout.cp, default_device(), ring=layout.ring, replicas=layout.replicas)
        with phase("building the model"):
            model = build_model(few, mesh, layout, adapter=adapter, trains=trains).train(trains)
        optimizer = make_optimizer(model, OptimConfig(lr=0.0)) if trains else None
        s = context // mesh.cp_size
        tiny_s = TINY_TOKENS if s >= 16 * TINY_TOKENS else max(2, s // 64)  # one token has no label
        *_, base = _measure(model, optimizer, mesh.device, mesh.cp_size * tiny_s, False)
        timer, step_s, peaks = _measure(model, optimizer, mesh.device, context, memory_only)
        highest = max(peaks, key=lambda path: (peaks[path], len(path)))
        seconds, store = timer.seconds(), model.model.layers[0].forward.store
        ways = ("forward", "backward")
        spent = {way: sum(seconds.get(("step", f"layer {i}", way), 0.0) for i in range(layers)) for way in ways}
        return Rehearsed(
            x_bytes=layout.x_bytes(model.config.hidden_size, s),
            layer_bytes=_layers_peak(peaks) - _layers_peak(base),
            peak_bytes=peaks[highest],
            peak_phase=" / ".join(highest[1:]) or "outside layers and loss",
            host_bytes=store.pool.peak_bytes,
            disk_bytes=store.disk.used_bytes,
            forward_s=spent["forward"] / layers,
            backward_s=spent["backward"] / layers,
            step_s=step_s,
        )


def _measure(
    model: PreTrainedModel, optimizer: Optimizer | None, device: torch.device, context: int, memory_only: bool
) -> tuple[PhaseTimer, float, dict[PhasePath, int]]:
    """(phases, seconds, peak bytes by phase) of the last step; on a CPU, live bytes of one more."""
    ids = torch.randint(model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(1))
    documents = torch.arange(context)[None] // SHORT_DOCUMENT if memory_only else None
    on_gpu = device.type == "cuda"
    done = partial(torch.cuda.synchronize, device) if on_gpu else lambda: None
    for _ in range(1 if memory_only else 2):
        timer = PhaseTimer(device)
        done()
        started = time.perf_counter()
        with listening(timer):
            _step(model, optimizer, ids, documents)
        done()
        step_s = time.perf_counter() - started
    if on_gpu:
        return timer, step_s, timer.peaks
    with LiveBytes() as live:
        live.tag_states(model, optimizer)
        _step(model, optimizer, ids, documents)
    return timer, step_s, live.phase_peaks()


def _step(model: PreTrainedModel, optimizer: Optimizer | None, ids: Tensor, documents: Tensor | None) -> None:
    """Without an optimizer, what an evaluation does."""
    with phase("step"):
        if optimizer is None:
            loss = token_losses(model, ids, document_ids=documents).mean()
        else:
            loss = model(input_ids=ids, labels=ids, document_ids=documents).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if not torch.isfinite(loss):
        raise RuntimeError(f"the rehearsal's loss is {loss.item()}; its timings would mean nothing")


def _in_layer(path: PhasePath) -> bool:
    return len(path) > 1 and path[1].startswith("layer ")


def _layers_peak(peaks: dict[PhasePath, int]) -> int:
    return max(peak for path, peak in peaks.items() if _in_layer(path))


def _on_gpu() -> bool:
    return default_device().type == "cuda"


def compute_dtype() -> str:
    return default_dtype(_on_gpu())


# ---- a plan: measured beside planned


def find_kernel(name: str, head_dim: int) -> str:
    """The attention kernel that runs on this device, in the precision of a rehearsal."""
    return resolve_kernel(name, default_device(), getattr(torch, compute_dtype()), head_dim).name


def truncate_plan(plan: Plan, layers: int, memory_only: bool, kernel: str = "auto") -> Plan:
    """What a plan's own layout costs on few layers, which keep what the plan's evenly spaced ones do, in the precision
    of this device. Each of them gets the adapters of the layer that has most."""
    shape = plan.shape
    kept = tuple(plan.layout.kept[(2 * i + 1) * shape.num_layers // (2 * layers)] for i in range(layers))
    few = replace(shape, num_layers=layers, windows=shape.windows[:layers])
    if shape.adapter:
        targets = (*shape.most_adapted, *(["lm_head"] if shape.has_adapter("lm_head") else []))
        few = few.with_adapter(replace(shape.adapter, targets=targets))
    layout = replace(plan.layout, kept=kept, dtype=compute_dtype(), kernel=kernel)
    work = replace(plan.work, document_tokens=SHORT_DOCUMENT) if memory_only else plan.work
    return Plan(few, layout, plan.hardware, work)


def check_cpu_memory(few: Plan) -> None:
    """Refuse what this machine's free memory does not hold: without a GPU the device's memory is the host's."""
    ledger = few.ledger
    on_host = (ledger.host_needed - ledger.host["reserve"]) // few.hardware.gpus_per_node
    need_bytes, free_bytes = ledger.gpu_peak - ledger.gpu["reserve"] + on_host, this_host().memory_bytes
    if need_bytes > free_bytes and not _on_gpu():
        raise ConfigError(
            f"--context {few.work.context} with --layers {few.shape.num_layers} needs {format_bytes(need_bytes)} "
            f"without a GPU, and {format_bytes(free_bytes)} are free; use a shorter --context or fewer --layers"
        )


def describe_rehearsal(plan: Plan, few: Plan) -> dict[str, Any]:
    """What is to be rehearsed. kernel: that runs here; planned_kernel: whose rates were planned with."""
    s, hidden = few.work.local_tokens(few.layout.cp), few.shape.hidden
    x = f"one {few.layout.dtype} activation [{s} tokens per rank, {hidden} hidden]"
    times = f"the CPU: measured times are this CPU's, planned ones are those of {plan.hardware.gpu.name}"
    return {
        "device": torch.cuda.get_device_name() if _on_gpu() else times,
        "gpus": plan.hardware.name,
        "kernel": find_kernel(few.layout.kernel, few.shape.head_dim),
        "planned_kernel": plan.hardware.gpu.kernel or None,
        "context": plan.work.context,
        "layers": few.shape.num_layers,
        "layers_of_model": plan.shape.num_layers,
        "attention_cut_short": few.work != plan.work and plan.work.tokens > SHORT_DOCUMENT,
        "x": f"{x} = {format_bytes(few.layout.x_bytes(hidden, s))}",
        "settings": plan.settings,
    }


def rehearse_plan(plan: Plan, few: Plan, model: str) -> tuple[list[dict[str, Any]], str]:
    """(measured beside planned, where the peak was) of the first layers of `model`, in the memory of the plan's GPU."""
    config, witness = find_config(model), OutOfMemoryTracker(default_device())
    if _on_gpu():
        total_bytes = torch.cuda.get_device_properties(default_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.hardware.gpu.memory_bytes / total_bytes))
    try:
        how = (few.work != plan.work, witness, few.shape.adapter, plan.work.trains)
        measured = rehearse(config, few.layout, plan.hardware.num_gpus, plan.work.tokens, *how)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemoryError(explain_out_of_memory(few, error, witness, model)) from error
    return compare(plan, few, measured), measured.peak_phase


def _layers_seconds(plan: Plan) -> tuple[Seconds, Seconds]:
    """Planned for all layers: forward, and backward if there is one."""
    total = Seconds(), Seconds()
    for (window, keeps), same in groupby(zip(plan.shape.windows, plan.layout.kept, strict=True)):
        of_layer = layer_seconds(plan.shape, plan.layout, plan.hardware, plan.work, window, keeps)
        total = total[0] + of_layer[0].times(n := len(list(same))), total[1] + of_layer[1].times(n * plan.work.trains)
    return total


def compare(plan: Plan, few: Plan, measured: Rehearsed) -> list[dict[str, Any]]:
    """Rows for the rehearsed layers, then, where it means something, for the whole model's step or forward."""
    forward, backward = (way.times(1 / few.shape.num_layers) for way in _layers_seconds(few))
    modelled_s, layer_s = (forward + backward).exchange, measured.forward_s + measured.backward_s
    trains = plan.work.trains
    # The whole model's layers take as much longer as planned: what they keep may differ.
    whole = sum(_layers_seconds(plan), Seconds())
    more = (whole.total - whole.exchange) / ((forward + backward).total - modelled_s)
    step_s = measured.step_s + (more - few.shape.num_layers) * layer_s + whole.exchange
    tokens_per_s = plan.work.tokens / plan.layout.cp / step_s
    peak, of_node = few.ledger.gpu_peak - few.ledger.gpu["reserve"], GIB * few.hardware.gpus_per_node
    host = sum(few.ledger.host[holder] for holder in STORE_HOLDERS)
    rows: list[tuple[str, float | None, float, str]] = [
        ("peak, reserve apart", peak / GIB, measured.peak_bytes / GIB, "GiB"),
        ("layer peak above parameters and gradients", None, measured.layer_bytes / measured.x_bytes, "X"),
        ("kept on the host, or on the way to disk", host / of_node, measured.host_bytes / GIB, "GiB"),
        ("kept on disk", few.ledger.disk_peak / of_node, measured.disk_bytes / GIB, "GiB"),
        ("layer forward", forward.total - forward.exchange, measured.forward_s, "s"),
    ]
    if trains:
        rows.append(("layer backward", backward.total - backward.exchange, measured.backward_s, "s"))
    if _on_gpu() and few.work == plan.work:  # a CPU's seconds, or attention cut short, make no step of these GPUs
        rows += [
            ("exchange per layer, modelled only", modelled_s, modelled_s, "s"),
            (f"{'step' if trains else 'forward'} of {plan.shape.num_layers} layers", plan.step_s, step_s, "s"),
            ("tokens/s per GPU", round(plan.tokens_per_s_per_gpu), round(tokens_per_s), ""),
        ]
    return [dict(zip(("what", "planned", "measured", "unit"), row, strict=True)) for row in rows]
