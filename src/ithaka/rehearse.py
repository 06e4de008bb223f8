"""Rank 0 of N on one device: real shards, buffers, copies, kernels and optimizer; collectives are local copies.

X is the bytes of one residual-stream tensor on one rank: s * D * 2 in bf16.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.config import ConfigError, OptimConfig
from ithaka.dist.loopback import start_loopback
from ithaka.dist.mesh import default_device, make_mesh
from ithaka.layout import Layout
from ithaka.model.build import build_model
from ithaka.phases import OPTIMIZER, PARAMETERS, PhasePath, listening, phase
from ithaka.plan.hardware import GIB, this_host
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan, choose, evaluate
from ithaka.plan.seconds import layer_seconds
from ithaka.plan.show import size
from ithaka.profile.live import LiveBytes
from ithaka.profile.times import Timeline
from ithaka.train.console import status
from ithaka.train.launch import EXIT_MEMORY
from ithaka.train.optim import make_optimizer
from ithaka.train.preflight import STORED
from ithaka.train.watch import Shortage, Witness, is_shortage

TINY_TOKENS = 1024  # per rank: a run whose activations are nothing beside the weights
SHORT_DOCUMENT = 128 * 1024  # with memory_only, attention does not look further back

Saying = Callable[[str], AbstractContextManager]  # tells what is done inside it


def silently(what: str) -> AbstractContextManager:
    return nullcontext()


@dataclass(frozen=True)
class Rehearsed:
    """What was measured on a model of `num_layers` layers."""

    num_layers: int
    context: int
    x_bytes: int
    base_bytes: int  # the layers' peak at a tiny context: parameters, gradients, weights at work
    layer_peak_bytes: int  # the layers' peak
    gpu_peak_bytes: int  # of the whole step
    peak_phase: str  # where that was
    host_bytes: int  # kept on the host by this rank
    disk_bytes: int
    forward_s: float  # per layer
    backward_s: float
    parts_s: dict[str, float]  # per layer, by direction and part
    step_s: float  # of the step of these few layers, the optimizer included

    @property
    def layer_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def peak_x(self) -> float:
        """The layers' peak above parameters and their gradients, in X."""
        return (self.layer_peak_bytes - self.base_bytes) / self.x_bytes


def rehearse(
    config: dict[str, Any],
    *,
    ranks: int,
    context: int,
    layers: int,
    layout: Layout,
    memory_only: bool = False,
    cap_bytes: int | None = None,
    steps: int = 2,
    witness: Witness | None = None,
    saying: Saying = silently,
) -> Rehearsed:
    """Runs `steps` training steps as rank 0 of `ranks`; the last one is measured.

    `config`: the model's config.json; its first layers are built, with weights that are drawn. `cap_bytes`: what the
    device may hold. `memory_only`: attention looks at most 128 Ki tokens back, which cuts its mathematics short; every
    allocation and copy stays. `witness`: is told where the rehearsal is; `saying`: the user.
    """
    few = {**config, "num_hidden_layers": layers}
    if few.get("layer_types"):
        few["layer_types"] = few["layer_types"][:layers]
    with _loopback(ranks, cap_bytes) as device, listening(witness) if witness else nullcontext():
        mesh = make_mesh(layout.cp, device)
        with phase("building the model"), saying("building the model"):
            model = build_model(few, mesh, layout)
        stage = _Stage(model, make_optimizer(model, OptimConfig(lr=0.0)), mesh.device)
        if witness is not None:
            witness.know(stage.model, stage.optimizer)
        s = context // mesh.cp_size
        tiny_tokens = mesh.cp_size * (TINY_TOKENS if s >= 16 * TINY_TOKENS else max(1, s // 64))
        with saying(f"rehearsing at {tiny_tokens} tokens, to know the weights' part"):
            base_bytes = stage.measure(tiny_tokens, False, 2).layer_peak_bytes
        with saying(f"rehearsing at {context} tokens"):
            measured = stage.measure(context, memory_only, steps)
        seconds, store = measured.layers.seconds_by(2), model.model.layers[0].forward.store
        return Rehearsed(
            num_layers=layers,
            context=context,
            x_bytes=layout.x_bytes(model.config.hidden_size, s),
            base_bytes=base_bytes,
            layer_peak_bytes=measured.layer_peak_bytes,
            gpu_peak_bytes=measured.peak_bytes,
            peak_phase=measured.peak_phase,
            host_bytes=store.pool.peak_bytes,
            disk_bytes=store.disk.used_bytes,
            forward_s=seconds[("forward",)] / layers,
            backward_s=seconds[("backward",)] / layers,
            parts_s={" ".join(k): v / layers for k, v in measured.layers.seconds_by(2, 3).items()},
            step_s=measured.step_s,
        )


@contextmanager
def _loopback(ranks: int, cap_bytes: int | None) -> Iterator[torch.device]:
    device = default_device()
    start_loopback(ranks)
    if device.type == "cuda" and cap_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), device)
    try:
        yield device
    finally:
        dist.destroy_process_group()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _Measured(NamedTuple):
    layers: Timeline  # the layers' phases only
    step_s: float
    layer_peak_bytes: int
    peak_bytes: int
    peak_phase: str


@dataclass
class _Stage:
    """What steps are run with."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    device: torch.device

    def measure(self, context: int, memory_only: bool, steps: int) -> _Measured:
        """The last of `steps` steps."""
        ids = torch.randint(self.model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(1))
        documents = torch.arange(context)[None] // SHORT_DOCUMENT if memory_only else None
        on_gpu = self.device.type == "cuda"
        done = partial(torch.cuda.synchronize, self.device) if on_gpu else lambda: None
        for _ in range(steps):
            timeline = Timeline(self.device)
            done()
            started = time.perf_counter()
            with listening(timeline):
                self.step(ids, documents)
            done()
            step_s = time.perf_counter() - started
        peaks: dict[PhasePath, int] = {} if on_gpu else self.live_peaks(ids, documents)
        for p in timeline.phases if on_gpu else ():
            peaks[p.path] = max(peaks.get(p.path, 0), p.peak_bytes)
        in_layers = max(peak for path, peak in peaks.items() if _in_layer(path))
        highest = max(peaks, key=lambda path: (peaks[path], len(path)))
        layers = Timeline(self.device, [p for p in timeline.phases if _in_layer(p.path)])
        return _Measured(
            layers, step_s, in_layers, peaks[highest], " / ".join(highest[1:]) or "outside layers and loss"
        )

    def step(self, ids: Tensor, documents: Tensor | None) -> None:
        with phase("step"):
            loss = self.model(input_ids=ids, labels=ids, document_ids=documents).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if not torch.isfinite(loss):
            raise RuntimeError(f"the rehearsal's loss is {loss.item()}; its timings would mean nothing")

    def live_peaks(self, ids: Tensor, documents: Tensor | None) -> dict[PhasePath, int]:
        """On a CPU: live bytes at their highest, by phase; parameters and states included."""
        with LiveBytes() as live:
            live.register(self.model.parameters(), PARAMETERS)
            states = (value for state in self.optimizer.state.values() for value in state.values())
            live.register((value for value in states if isinstance(value, Tensor)), OPTIMIZER)
            self.step(ids, documents)
        return live.map.phase_peaks()


def _in_layer(path: PhasePath) -> bool:
    return len(path) > 1 and path[1].startswith("layer ")


# ---- a plan


def of_few_layers(plan: Plan, layers: int, memory_only: bool) -> Plan:
    """What a plan's own layout costs on its first layers, in the precision of this device."""
    few = replace(plan.shape, num_layers=layers, windows=plan.shape.windows[:layers])
    layout = replace(plan.layout, kept=plan.layout.kept[:layers], dtype=_dtype())
    work = replace(plan.work, document_tokens=SHORT_DOCUMENT) if memory_only else plan.work
    return evaluate(few, layout, plan.hardware, work)


def rehearse_plan(few: Plan, config: dict[str, Any], memory_only: bool, witness: Witness, saying: Saying) -> Rehearsed:
    """A plan of few layers, measured."""
    cap_bytes = few.hardware.gpu.memory_bytes if _on_gpu() else None
    sizes: dict[str, Any] = {"ranks": few.hardware.num_gpus, "context": few.work.tokens, "layers": few.shape.num_layers}
    how: dict[str, Any] = {"memory_only": memory_only, "steps": 1 if memory_only else 2, "cap_bytes": cap_bytes}
    return rehearse(config, layout=few.layout, witness=witness, saying=saying, **sizes, **how)


def _on_gpu() -> bool:
    return default_device().type == "cuda"


def _dtype() -> str:
    return "bfloat16" if _on_gpu() else "float32"


# ---- without a GPU: the device's memory is the host's


def check_cpu_memory(few_of: Callable[[Plan, int], Plan], plan: Plan, layers: int, fixed: Mapping[str, Any]) -> None:
    """Refuses what this machine's free memory does not hold. `few_of`: a plan's first so many layers."""
    free_bytes, need_bytes = this_host().memory_bytes, cpu_bytes(few_of(plan, layers))
    if need_bytes <= free_bytes:
        return
    ways: list[str] = []
    context = plan.work.context // 2
    while context >= 2 * plan.hardware.num_gpus and not ways:  # with the settings chosen anew
        shorter = choose(plan.shape, plan.hardware, replace(plan.work, context=context), fixed)
        ways += [f"--context {context}"] * (cpu_bytes(few_of(shorter, layers)) <= free_bytes)
        context //= 2
    fewer = (n for n in range(layers - 1, 0, -1) if cpu_bytes(few_of(plan, n)) <= free_bytes)
    ways += [f"--layers {n}" for n in islice(fewer, 1)]
    way_out = " or ".join(ways) or "a smaller model, or a machine with more memory"
    raise ConfigError(
        f"--context {plan.work.context} with --layers {layers} needs {size(need_bytes)} of memory without a GPU, "
        f"and {size(free_bytes)} are free; use {way_out}"
    )


def cpu_bytes(few: Plan) -> int:
    """What rank 0 of a plan needs, on its device and on its host, reserves apart."""
    ledger = few.ledger
    on_host = (ledger.host_peak - ledger.host["reserve"]) // few.hardware.gpus_per_node
    return ledger.gpu_peak - ledger.gpu["reserve"] + on_host


# ---- measured beside planned


Row = tuple[str, float | None, float, str]  # what, planned, measured, unit


def compare(plan: Plan, measured: Rehearsed, few: Plan) -> list[Row]:
    """Rows of (what, planned, measured, unit) for the rehearsed layers, then, where it means something, their step."""
    layer = layer_seconds(few.shape, few.layout, few.hardware, few.work, few.shape.windows[0], few.layout.kept[0])
    modelled_s = (layer.forward + layer.backward).exchange
    outside_s = measured.step_s - measured.num_layers * measured.layer_s
    step_s = outside_s + plan.shape.num_layers * (measured.layer_s + modelled_s)
    gpu, of_node = few.ledger.gpu_peak - few.ledger.gpu["reserve"], GIB * few.hardware.gpus_per_node
    host = sum(few.ledger.host[holder] for holder in STORED)
    rows: list[Row] = [
        (f"{_peak()}, reserve apart", gpu / GIB, measured.gpu_peak_bytes / GIB, "GiB"),
        ("layer peak above parameters and gradients", None, measured.peak_x, "X"),
        ("kept on the host, or on the way to disk", host / of_node, measured.host_bytes / GIB, "GiB"),
        ("kept on disk", few.ledger.disk_peak / of_node, measured.disk_bytes / GIB, "GiB"),
        ("layer forward", layer.forward.total - layer.forward.exchange, measured.forward_s, "s"),
        ("layer backward", layer.backward.total - layer.backward.exchange, measured.backward_s, "s"),
    ]
    if not _on_gpu() or few.work != plan.work:  # a CPU's seconds, or attention cut short, make no step of these GPUs
        return rows
    return [
        *rows,
        ("exchange per layer, modelled only", modelled_s, modelled_s, "s"),
        (f"step of {plan.shape.num_layers} layers", plan.step_s, step_s, "s"),
        ("tokens/s per GPU", plan.tokens_per_s_per_gpu, plan.work.tokens / plan.layout.cp / step_s, ""),
    ]


def run(plan: Plan, fixed: Mapping[str, Any], model: str, layers: int, memory_only: bool, as_json: bool) -> int:
    """Rehearses and prints; the exit code, 3 when memory does not suffice. `fixed`: what the user decided."""
    config = find_config(model)
    layers = min(layers, plan.shape.num_layers)
    as_run = partial(of_few_layers, layers=layers, memory_only=memory_only)
    few, witness = as_run(plan), Witness(default_device())
    if not _on_gpu():
        check_cpu_memory(partial(of_few_layers, memory_only=memory_only), plan, layers, fixed)
    if not as_json:
        print(heading(plan, layers), flush=True)
    try:
        measured = rehearse_plan(few, config, memory_only, witness, silently if as_json else status)
    except Exception as error:
        if not is_shortage(error):
            raise
        shortage = Shortage(error, witness, few)
        print(shortage.explain(model, "the same command with"), file=sys.stderr)
        return EXIT_MEMORY
    rows = compare(plan, measured, few)
    if as_json:
        print(json.dumps(as_data(plan, measured, rows, memory_only), indent=2))
    else:
        print(table(measured, rows, memory_only))
    return 0


def as_data(plan: Plan, measured: Rehearsed, rows: list[Row], memory_only: bool) -> dict[str, Any]:
    return {
        "device": _device_name(),
        "gpus": plan.hardware.name,
        "context": plan.work.context,
        "layers": measured.num_layers,
        "layers_of_model": plan.shape.num_layers,
        "attention_cut_short": memory_only and measured.context > SHORT_DOCUMENT,
        "settings": plan.settings,
        "rows": [{"what": w, "planned": p, "measured": m, "unit": u} for w, p, m, u in rows],
        "peak_phase": measured.peak_phase,
        "parts_s": measured.parts_s,
    }


def heading(plan: Plan, layers: int) -> str:
    """What is about to run."""
    settings = ", ".join(f"{name}={value}" for name, value in plan.settings.items() if value is not None)
    lines = [
        f"rank 0 of {plan.hardware.name}, {plan.work.tokens} tokens, {layers} of {plan.shape.num_layers} layers, "
        f"on {_device_name()}",
        f"settings: {settings}",
    ]
    if not _on_gpu():
        lines.append(f"no GPU here: measured times are this CPU's, planned ones are those of {plan.hardware.gpu.name}")
    return "\n".join(lines)


def table(measured: Rehearsed, rows: list[Row], memory_only: bool) -> str:
    width = max(len(row[0]) for row in rows)
    lines = ["", f"{'':{width}}  {'planned':>10}  {'measured':>10}"]
    for what, planned, value, unit in rows:
        shown = "" if planned is None else f"{planned:.3f}"
        lines.append(f"{what:{width}}  {shown:>10}  {value:10.3f} {unit}")
    parts = ", ".join(f"{name} {seconds:.4f}" for name, seconds in measured.parts_s.items() if seconds >= 1e-4)
    lines += ["", f"{_peak()} in: {measured.peak_phase}", *[f"seconds per layer: {parts}"] * bool(parts)]
    if memory_only:
        lines.append("memory only: attention was cut short, so its times say nothing about training")
    return "\n".join(lines)


def _device_name() -> str:
    return torch.cuda.get_device_name(default_device()) if _on_gpu() else "the CPU"


def _peak() -> str:
    return "GPU peak" if _on_gpu() else "peak"
