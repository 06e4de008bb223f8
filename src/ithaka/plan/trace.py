"""What one rank's training step allocates, computes and moves: recorded from the code that runs (profile/trace.py).

A trace is a list of segments: the embedding, the forward of each layer, the loss, the backward of each layer, and the
update. It has few layers, at least one of each kind; `unroll` repeats them to the depth of the model. Bytes and most
FLOPs grow linearly with the tokens, so `fit` makes a trace of any length from two.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ithaka.config import AdapterConfig
from ithaka.layout import Layout

Amounts = dict[str, float]  # by name; for bytes, by memory category


@dataclass(frozen=True)
class Segment:
    """Part of a step, from the start of its first phase to the start of the next segment's."""

    name: str  # "layer 3 backward", "loss forward", "update"
    start: Amounts  # device bytes by category
    end: Amounts
    peaks: dict[str, Amounts]  # by phase: device bytes by category when the phase has the most
    host: tuple[float, float, float] = (0, 0, 0)  # pinned bytes at the start, at the peak and at the end
    flops: Amounts = field(default_factory=dict)  # matmuls, grouped matmuls, attention by kernel and head dim
    moved: Amounts = field(default_factory=dict)  # bytes sent in collectives, and copied to and from the host

    @property
    def peak(self) -> tuple[str, Amounts]:
        """The phase with the most bytes, and these."""
        return max(self.peaks.items(), key=lambda item: sum(item[1].values()))

    @property
    def peak_bytes(self) -> float:
        return sum(self.peak[1].values())

    def raised(self, change: Amounts, host_change: float, name: str) -> Segment:
        """A copy that starts with more bytes."""
        start, end = _add(self.start, change), _add(self.end, change)
        peaks = {phase: _add(peak, change) for phase, peak in self.peaks.items()}
        host = (self.host[0] + host_change, self.host[1] + host_change, self.host[2] + host_change)
        return replace(self, name=name, start=start, end=end, peaks=peaks, host=host)


@dataclass(frozen=True)
class Trace:
    """A step of one rank with `tokens` tokens in its sequence."""

    tokens: int
    segments: tuple[Segment, ...]
    states: tuple[Amounts, ...] = ()  # per layer: bytes of parameters, gradients and optimizer on this rank

    @property
    def peak(self) -> Segment:
        return max(self.segments, key=lambda segment: segment.peak_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.peak.peak_bytes

    @property
    def host_bytes(self) -> float:
        return max(segment.host[1] for segment in self.segments)

    def find(self, name: str) -> Segment:
        return next(segment for segment in self.segments if segment.name == name)

    def total(self, what: str) -> Amounts:
        """The sum of `flops` or `moved` over all segments."""
        return _sum([getattr(segment, what) for segment in self.segments])

    def unroll(self, representatives: Sequence[int]) -> Trace:
        """The trace of a model whose layer i is like the traced layer `representatives[i]`. Layers add to what they
        keep, and to sharded gradients; weights are gathered as they were where the representative ran."""
        segments, states = list[Segment](), [self.states[i] for i in representatives]
        fixed = _subtract(_sum(states), _sum(self.states))
        fixed.pop("gradients", None)
        grads, traced_grads, host_change = 0.0, self._grads_before(), 0.0
        for segment, name, state in self._repeat(representatives):
            change = dict[str, float]()
            if segments:
                change = _subtract(segments[-1].end, segment.start)
                host_change = segments[-1].host[2] - segment.host[0]
            change |= {**fixed, "gradients": grads - traced_grads[segment.name], "unsharded weights": 0.0}
            segments.append(segment.raised(change, host_change, name))
            grads += state.get("gradients", 0.0)
        return replace(self, segments=tuple(segments), states=tuple(states))

    def _grads_before(self) -> Amounts:
        """Bytes of the sharded gradients of all layers that ran backward before each segment."""
        before, done = dict[str, float](), 0.0
        for segment in self.segments:
            before[segment.name] = done
            if segment.name.endswith(" backward") and segment.name.startswith("layer "):
                done += self.states[int(segment.name.split()[1])].get("gradients", 0.0)
        return before

    def _repeat(self, representatives: Sequence[int]) -> Iterator[tuple[Segment, str, Amounts]]:
        """Yield segments in the order of the full step, with their names there and the gradients that they add."""
        by_name, done = {segment.name: segment for segment in self.segments}, set[str]()
        for segment in self.segments:
            direction = segment.name.rpartition(" ")[2]
            if not segment.name.startswith("layer "):
                yield segment, segment.name, {}
            elif direction not in done:
                done.add(direction)
                order = list(enumerate(representatives))
                for layer, traced in order if direction == "forward" else reversed(order):
                    state = self.states[traced] if direction == "backward" else {}
                    yield by_name[f"layer {traced} {direction}"], f"layer {layer} {direction}", state

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Trace:
        segments = [Segment(**{**segment, "host": tuple(segment["host"])}) for segment in values["segments"]]
        return cls(values["tokens"], tuple(segments), tuple(values["states"]))


@dataclass(frozen=True)
class LinearTrace:
    """Traces of two lengths, and so of any."""

    short: Trace
    long: Trace

    def at(self, tokens: int) -> Trace:
        """The trace of a sequence of this length."""
        share = (tokens - self.short.tokens) / (self.long.tokens - self.short.tokens)

        def extend(a: float, b: float) -> float:
            return a + share * (b - a)

        segments = [
            _map_segments(lambda *amounts: _combine(extend, *amounts), a, b)
            for a, b in zip(self.short.segments, self.long.segments, strict=True)
        ]
        return Trace(tokens, tuple(segments), self.long.states)

    def to_json(self) -> dict[str, Any]:
        return {"short": self.short.to_json(), "long": self.long.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LinearTrace:
        return cls(Trace.from_json(values["short"]), Trace.from_json(values["long"]))


def _map_segments(combine: Callable[..., Amounts], a: Segment, b: Segment) -> Segment:
    assert a.name == b.name, f"{a.name} and {b.name} differ"
    values: dict[str, Any] = {"name": a.name}
    for entry in fields(Segment)[1:]:
        x, y = getattr(a, entry.name), getattr(b, entry.name)
        if entry.name == "peaks":
            values["peaks"] = {phase: combine(x.get(phase, {}), y[phase]) for phase in y}
        elif entry.name == "host":
            values["host"] = tuple(combine(dict(enumerate(x)), dict(enumerate(y))).values())
        else:
            values[entry.name] = combine(x, y)
    return Segment(**values)


def _combine(function: Callable[..., float], *amounts: Amounts) -> Amounts:
    names = dict.fromkeys(name for part in amounts for name in part)
    return {name: function(*(part.get(name, 0) for part in amounts)) for name in names}


def _sum(amounts: Sequence[Amounts]) -> Amounts:
    return _combine(lambda *values: sum(values), *amounts)


def _add(a: Amounts, b: Amounts) -> Amounts:
    return _combine(lambda x, y: x + y, a, b)


def _subtract(a: Amounts, b: Amounts) -> Amounts:
    return _combine(lambda x, y: x - y, a, b)


# ---- what to trace, and the cache


@dataclass(frozen=True)
class TraceRequest:
    """A model and one rank of a mesh."""

    config: str  # config.json of a model with the layers to trace
    layout: Layout  # with a policy for each of them, and a kernel by name
    num_ranks: int
    rank: int = 0
    context: int = 0  # positions that the model must have
    document_tokens: int | None = None  # length of packed documents; None: one
    adapter: AdapterConfig | None = None
    optimizer: str = "adamw"
    trains: bool = True
    reference: bool = False  # also run a reference model

    def file(self, tokens: int) -> Path:
        """Where the trace of a sequence of this length is cached: for this request, these packages and this code."""
        values = json.dumps([asdict(self), tokens, *_versions()], sort_keys=True, default=str)
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ithaka" / "traces"
        return folder / f"{hashlib.sha256(values.encode()).hexdigest()[:32]}.json"

    def read(self, tokens: int) -> Trace | None:
        """Return the cached trace, if there is one."""
        try:
            return Trace.from_json(json.loads(self.file(tokens).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, trace: Trace) -> None:
        """Cache a trace. A cache that cannot be written is left out."""
        file = self.file(trace.tokens)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
                json.dump(trace.to_json(), new)
            os.replace(new.name, file)


@cache
def _versions() -> tuple[str, ...]:
    """The versions of the packages that a step runs, and a digest of this one's code."""
    versions = []
    for package in ("torch", "transformers", "peft", "diffusers", "torchao"):
        try:
            versions.append(version(package))
        except PackageNotFoundError:
            versions.append("")
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.read_bytes())
    return (*versions, digest.hexdigest())
