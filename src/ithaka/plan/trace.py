"""What one rank's training step allocates, computes and moves: recorded from the code that runs
(trace/record_trace.py).

A trace is a list of segments: the embedding, the forward of each layer, the loss, the backward of
each layer, and the update. It has few layers, at least one of each kind; `unroll` repeats them to
the depth of the model. Bytes and most FLOPs grow linearly with the tokens, so a `LinearTrace` of
two lengths gives that of any.

The search for a plan estimates bytes (plan/bytes.py), and traces decide: `choose_traced` traces the
chosen plan, corrects the estimate of plans of its kind, and chooses again until a traced plan fits.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ithaka.config import AdapterConfig
from ithaka.layout import Layout
from ithaka.plan.bytes import STATES, plan_kind
from ithaka.plan.search import Plan, SearchSpace
from ithaka.plan.seconds import sent_bytes
from ithaka.plan.shape import Correction, StepShape

Amounts = dict[str, float]  # by name; for bytes, by memory category
MAX_TRACES = 4  # per search
ROOM = 0.02  # if a traced plan leaves a larger share of the device free, a faster one is tried
MIN_GAIN = 1.01  # the least speedup that is worth another trace


@dataclass(frozen=True)
class TracedPart:
    """Part of a step, from the start of its first phase to the start of the next segment's."""

    name: str  # "layer 3 backward", "loss forward", "update"
    start: Amounts  # device bytes by category
    end: Amounts
    peaks: dict[str, Amounts]  # by phase: device bytes by category when the phase has the most
    host: tuple[float, float, float] = (0, 0, 0)  # pinned bytes at the start, peak and end
    # Matmuls, grouped matmuls, attention by kernel and head dim.
    flops: Amounts = field(default_factory=dict)
    # Bytes sent in collectives, and copied to and from the host.
    moved: Amounts = field(default_factory=dict)

    @property
    def peak(self) -> tuple[str, Amounts]:
        """The phase with the most bytes, and these."""
        return max(self.peaks.items(), key=lambda item: sum(item[1].values()))

    @property
    def peak_bytes(self) -> float:
        return sum(self.peak[1].values())

    def raised(self, change: Amounts, host_change: float, name: str) -> TracedPart:
        """A copy that starts with more bytes."""
        start = _add(self.start, change)
        end = _add(self.end, change)
        peaks = {phase: _add(peak, change) for phase, peak in self.peaks.items()}
        first, peak, last = self.host
        host = (first + host_change, peak + host_change, last + host_change)
        return replace(self, name=name, start=start, end=end, peaks=peaks, host=host)


@dataclass(frozen=True)
class Trace:
    """A step of one rank with `tokens` tokens in its sequence."""

    tokens: int
    segments: tuple[TracedPart, ...]
    # Per layer: bytes of parameters, gradients and optimizer on this rank.
    states: tuple[Amounts, ...] = ()

    @property
    def peak(self) -> TracedPart:
        return max(self.segments, key=lambda segment: segment.peak_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.peak.peak_bytes

    @property
    def host_bytes(self) -> float:
        return max(segment.host[1] for segment in self.segments)

    def find(self, name: str) -> TracedPart:
        return next(segment for segment in self.segments if segment.name == name)

    def total(self, what: str) -> Amounts:
        """The sum of `flops` or `moved` over all segments."""
        return _sum([getattr(segment, what) for segment in self.segments])

    def unroll(self, representatives: Sequence[int]) -> Trace:
        """The trace of a model whose layer i is like the traced layer `representatives[i]`. Layers
        add to what they keep, and to sharded gradients; weights are gathered as they were where the
        representative ran."""
        segments = list[TracedPart]()
        states = [self.states[i] for i in representatives]
        fixed = _subtract(_sum(states), _sum(self.states))
        fixed.pop("gradients", None)
        grads = 0.0
        traced_grads = self._grads_before()
        host_change = 0.0
        for segment, name, state in self._repeat(representatives):
            change = dict[str, float]()
            if segments:
                change = _subtract(segments[-1].end, segment.start)
                host_change = segments[-1].host[2] - segment.host[0]
            change |= {
                **fixed,
                "gradients": grads - traced_grads[segment.name],
                "unsharded weights": 0.0,
            }
            segments.append(segment.raised(change, host_change, name))
            grads += state.get("gradients", 0.0)
        return replace(self, segments=tuple(segments), states=tuple(states))

    def offload_states(self) -> Trace:
        """Move parameters, sharded gradients and optimizer states to the host. Gradients in flight,
        of the embedding and of the head stay."""
        sharded = self.segments[-1].start.get("gradients", 0.0)  # all of them, before the update
        before = 0.0
        segments = []
        for segment in self.segments:
            after = before + self._grads_of(segment)
            states = sum(segment.start.get(name, 0.0) for name in STATES) + sharded
            start, peak, end = (size + states for size in segment.host)
            peaks = segment.peaks.items()
            offloaded = replace(
                segment,
                start=_without_states(segment.start, before),
                peaks={phase: _without_states(sizes, before) for phase, sizes in peaks},
                end=_without_states(segment.end, after),
                host=(start, peak, end),
            )
            segments.append(offloaded)
            before = after
        return replace(self, segments=tuple(segments))

    def _grads_of(self, segment: TracedPart) -> float:
        """Bytes of the sharded gradients that a layer's backward adds; 0 for other segments."""
        if not (segment.name.startswith("layer ") and segment.name.endswith(" backward")):
            return 0.0
        return self.states[int(segment.name.split()[1])].get("gradients", 0.0)

    def _grads_before(self) -> Amounts:
        """Bytes of the sharded gradients of all layers that ran backward before each segment."""
        before = dict[str, float]()
        done = 0.0
        for segment in self.segments:
            before[segment.name] = done
            done += self._grads_of(segment)
        return before

    def _repeat(self, representatives: Sequence[int]) -> Iterator[tuple[TracedPart, str, Amounts]]:
        """Yield the segments of the full step, with their names and the gradients that they add. A
        reference runs the layers forward once more."""
        runs = groupby(self.segments, lambda segment: re.sub(r"layer \d+ ", "", segment.name))
        for direction, run in runs:
            segments = {segment.name: segment for segment in run}
            if not any(name.startswith("layer ") for name in segments):
                for name, segment in segments.items():
                    yield segment, name, {}
                continue
            layers = list(enumerate(representatives))
            if direction != "forward":
                layers.reverse()
            for layer, traced in layers:
                state = self.states[traced] if direction == "backward" else {}
                yield segments[f"layer {traced} {direction}"], f"layer {layer} {direction}", state

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Trace:
        segments = [
            TracedPart(**{**segment, "host": tuple(segment["host"])})
            for segment in values["segments"]
        ]
        return cls(values["tokens"], tuple(segments), tuple(values["states"]))


@dataclass(frozen=True)
class LinearTrace:
    """Traces of two lengths, and so of any."""

    short: Trace
    long: Trace

    def at(self, tokens: int) -> Trace:
        """The trace of a sequence of this length."""
        share = (tokens - self.short.tokens) / (self.long.tokens - self.short.tokens)
        trace = Trace.from_json(_extend(self.short.to_json(), self.long.to_json(), share))
        return replace(trace, tokens=tokens, states=self.long.states)


def _extend(a: Any, b: Any, share: float) -> Any:
    """Extend a line from each number in `a` to that in `b`; one that is missing is 0."""
    if isinstance(b, dict):
        only_short = [name for name, value in a.items() if not isinstance(value, dict)]
        names = dict.fromkeys((*b, *only_short))
        empty: Any = {} if any(isinstance(value, dict) for value in b.values()) else 0
        return {name: _extend(a.get(name, empty), b.get(name, 0), share) for name in names}
    if isinstance(b, list | tuple):
        return [_extend(x, y, share) for x, y in zip(a, b, strict=True)]
    if isinstance(b, str):
        assert a == b, f"{a} and {b} differ"
        return b
    return a + share * (b - a)


def _without_states(sizes: Amounts, grads: float) -> Amounts:
    """Sizes without parameters, optimizer states and at most this many bytes of gradients."""
    kept = {name: size for name, size in sizes.items() if name not in STATES}
    if "gradients" in kept:
        kept["gradients"] = max(0.0, kept["gradients"] - grads)
    return kept


def _sum(amounts: Sequence[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in amounts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def _add(a: Amounts, b: Amounts) -> Amounts:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}


def _subtract(a: Amounts, b: Amounts) -> Amounts:
    return {name: a.get(name, 0) - b.get(name, 0) for name in {**a, **b}}


# ---- what to trace, and the cache


@dataclass(frozen=True)
class TraceRequest:
    """A model and one rank of a mesh."""

    config: str  # config.json
    layout: Layout  # with a kernel by name
    num_ranks: int
    rank: int = 0
    context: int = 0  # positions that the model must have
    document_tokens: int | None = None  # length of packed documents; None: one
    adapter: AdapterConfig | None = None
    optimizer: str = "adamw"
    trains: bool = True
    reference: bool = False  # also run a reference model

    @classmethod
    def from_plan(cls, plan: Plan, config: Mapping[str, Any], rank: int = 0) -> TraceRequest:
        """`config`: the model's config.json."""
        work = plan.work
        shape = plan.shape
        values = json.loads(json.dumps(dict(config)))
        if "_class_name" not in values:  # model.resize_embeddings
            (values.get("text_config") or values)["vocab_size"] = shape.vocab
        layout = replace(plan.layout, dtype="bfloat16", kernel=plan.hardware.gpu.kernel)
        document = work.context if work.batch > 1 else work.document_tokens
        return cls(
            json.dumps(values),
            layout,
            plan.hardware.num_gpus,
            rank,
            work.context,
            document,
            adapter=shape.adapter,
            optimizer=shape.optimizer,
            trains=work.trains,
            reference=work.reference,
        )

    def read(self, tokens: int) -> Trace | None:
        """Return the cached trace of a sequence of this length, if there is one."""
        values = read_cache("trace", asdict(self), tokens)
        if not values:
            return None
        try:
            return Trace.from_json(values["trace"]).unroll(values["representatives"])
        except (KeyError, TypeError):
            return None

    def write(self, trace: Trace, representatives: Sequence[int]) -> None:
        """Cache a trace of few layers, and the one that is like each layer of the model."""
        values = {"trace": trace.to_json(), "representatives": list(representatives)}
        write_cache(values, "trace", asdict(self), trace.tokens)


def read_cache(*key: object) -> Any:
    """Return what was cached for this key, these packages and this code; None if nothing was."""
    try:
        return json.loads(_cache_file(key).read_text()) if _cache_folder().is_dir() else None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home directory
        return None


def write_cache(value: object, *key: object) -> None:
    """Cache a value. Does nothing if the folder cannot be written to."""
    with suppress(OSError, RuntimeError):
        file = _cache_file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(value, new)
        os.replace(new.name, file)


def _cache_file(key: tuple[object, ...]) -> Path:
    values = json.dumps([*key, *_versions()], sort_keys=True, default=str)
    return _cache_folder() / f"{hashlib.sha256(values.encode()).hexdigest()[:32]}.json"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ithaka" / "traces"


@cache
def _versions() -> tuple[str, ...]:
    """The versions of the packages that a step runs, and a digest of this one's code."""
    versions = []
    for package in ("torch", "transformers", "peft", "diffusers", "torchao"):
        try:
            versions.append(version(package))
        except PackageNotFoundError:
            versions.append("")
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.read_bytes())
    return (*versions, digest.hexdigest())


# ---- traces decide


class Peaks(NamedTuple):
    """Traced bytes of one rank."""

    device: float
    host: float
    sent: float  # in all-to-alls

    @classmethod
    def from_trace(cls, trace: Trace) -> Peaks:
        moved = trace.total("moved")
        sent = sum(size for name, size in moved.items() if name.startswith("all-to-all"))
        return cls(trace.peak_bytes, trace.host_bytes, sent)


Tracer = Callable[[Plan], Peaks | None]  # None: this plan cannot be traced


def can_trace(plan: Plan) -> bool:
    """Whether a trace has all of the step: no teacher, reference copy or shared prefixes."""
    return not (plan.shape.teacher or plan.shape.reference or plan.work.distills or plan.work.spans)


def read_traced(plan: Plan, config: Mapping[str, Any]) -> Peaks | None:
    """The peaks of a cached trace of rank 0, if there is one."""
    if not can_trace(plan):
        return None
    trace = TraceRequest.from_plan(plan, config).read(plan.work.tokens)
    if trace is None:
        return None
    return Peaks.from_trace(trace.offload_states() if plan.layout.offload_optimizer else trace)


def correct(plan: Plan, peaks: Peaks) -> Plan:
    """`plan` with its traced peaks, and a shape that corrects the estimates of its kind."""
    kind = plan_kind(plan.shape, plan.layout)
    ranks = plan.hardware.gpus_per_node
    others = {name: value for name, value in plan.shape.corrections.items() if name != kind}
    estimate = replace(plan, shape=replace(plan.shape, corrections={kind: Correction()})).ledger
    stored = sum(estimate.stored.values())
    # A disk that is slower than planned fills the host, which a trace does not see.
    host = ranks * peaks.host / stored if stored and not estimate.disk_peak else 1.0
    states = sum(estimate.gpu[name] for name in STATES)
    activations = estimate.gpu_peak - estimate.gpu["reserve"] - states
    sent = sent_bytes(plan.shape, plan.layout, plan.work, plan.hardware)
    correction = Correction(
        device=max(peaks.device - states, 0.0) / activations,
        host=host,
        sent=peaks.sent / sent if sent else 1.0,
    )
    shape = replace(plan.shape, corrections={**others, kind: correction})
    alternatives = (replace(other, shape=shape) for other in plan.alternatives)
    fitting = tuple(other for other in alternatives if other.fits) if plan.fits else ()
    return replace(plan, shape=shape, alternatives=fitting)


def choose_traced(space: SearchSpace, work: StepShape, trace: Tracer | None) -> Plan:
    """Choose a plan and trace it; choose again, corrected, if it does not fit or leaves room."""
    traced: list[Plan] = []
    for _ in range(MAX_TRACES):
        plan = space.choose(work)
        speed = max((other.tokens_per_s_per_gpu for other in traced if other.fits), default=0.0)
        if trace is None or plan.layout in [other.layout for other in traced]:
            break
        if plan.tokens_per_s_per_gpu < MIN_GAIN * speed:
            break
        peaks = trace(plan)
        if peaks is None:
            break
        traced.append(correct(plan, peaks))
        ledger = traced[-1].ledger
        is_better = sum(other.fits for other in traced) > 1
        # It fills the device, or needs about what was estimated: the search found nothing faster
        # for the rest.
        full_bytes = min((1 - ROOM) * ledger.gpu_bytes, (1 - ROOM / 2) * plan.ledger.gpu_peak)
        is_full = ledger.gpu_peak > full_bytes
        if traced[-1].fits and (is_better or is_full):
            break
        space = replace(space, shape=traced[-1].shape)
    if fitting := [other for other in traced if other.fits]:
        return max(fitting, key=lambda other: other.tokens_per_s_per_gpu)
    return next((other for other in traced if other.layout == plan.layout), plan)
