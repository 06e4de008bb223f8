"""What mixes the tokens of a layer, in plans: its bytes, seconds, exchanges and limits.

H heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from ithaka.facts.attention import AttentionKind
from ithaka.facts.sizes import CHUNK_TOKENS, SEGMENT_ROWS, SSD_SEGMENT
from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.layer_bytes import (
    LayerBytes,
    MemoryPoint,
    attention_backward_points,
    attention_points,
)
from ithaka.plan.seconds import LayerSeconds
from ithaka.plan.shape import MixerCost, ModelShape, StepShape

# Buffers of a segment of the gated delta rule in the sum dtype, forward and backward: vectors
# (K + V per row), states (K by K + V per chunk) and chunk matrices, counted by hand in the kernels,
# and on a CPU.
SEGMENT_BUFFERS = ((0.0, 0.0, 2.0), (1.75, 1.0, 2.0))
PLAIN_SEGMENT_BUFFERS = ((3.0, 0.0, 5.2), (1.0, 1.8, 14.7))
PLAIN_SSD_BUFFERS = ((2.2, 1.5, 2.5), (2.5, 3.0, 5.0))
# Its kernels, as passes over [s, H, K + V] in the sum dtype, forward and backward; then those for a
# rank's affine maps, where another rank continues the document. Within 8 % of 0.0087 and 0.0252 s
# per layer, and 0.0096 and 0.0139 s for the maps, at 64K tokens, 32 heads of 128, on one H200
# (LOG.md, "kernels of the gated delta rule").
RULE_PASSES = (18, 58)
RULE_MAP_PASSES = (22, 31)
# The same for Mamba2 (ops/ssd_kernels.py), over the states of all chunks: the sum within 4 % of a
# layer of Nemotron-3-Nano, Granite-4-H and Falcon-H1 at 64K tokens on one H200 (LOG.md, "Mamba2's
# kernels at 2.3 to 3.1 times"); maps within 16 % for the first two, twice as much for the third.
SSD_PASSES = (4, 9)
SSD_MAP_PASSES = (3, 3)


@dataclass(frozen=True)
class AttentionCost(MixerCost):
    """Softmax attention, with all tokens or in a window or chunk."""

    kind: AttentionKind
    causal: bool = True  # False: every token attends to all others

    sizes = LayerBytes

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"window of {self.kind.window}" if self.kind.window else "full attention"

    @property
    def attention(self) -> tuple[AttentionKind, ...]:  # type: ignore[override]
        return (self.kind,)

    def seconds(self, layer: LayerSeconds, work: StepShape) -> tuple[float, float]:
        return layer.attention(work, self.kind, self.causal)

    def exchange_seconds(self, layer: LayerSeconds) -> tuple[float, float]:
        return layer.exchange()


@dataclass(frozen=True)
class DeltaRuleCost(MixerCost):
    """The gated delta rule. A rank has all heads, and gets its first state from the rank before."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int

    name = "gated delta rule"
    why_no_ring = "passes states from rank to rank in order"
    passes: ClassVar[tuple[int, int]] = RULE_PASSES
    map_passes: ClassVar[tuple[int, int]] = RULE_MAP_PASSES
    segment_rows: ClassVar[int] = SEGMENT_ROWS

    @property
    def map_width(self) -> int:
        return self.key_dim + self.value_dim

    @property
    def pass_width(self) -> float:
        """Values per row that one of `passes` moves."""
        return self.key_dim + self.value_dim

    def sizes(self, *arguments: Any) -> DeltaBytes:
        return DeltaBytes(self, *arguments)

    def seconds(self, layer: LayerSeconds, work: StepShape) -> tuple[float, float]:
        one_pass = layer.move(layer.s * self.heads * self.pass_width * layer.layout.sum_bytes)
        maps = self.map_passes if layer.layout.cp > 1 else (0, 0)
        forward = self.passes[0] + maps[0]
        backward = self.passes[1] + maps[1]
        return forward * one_pass, backward * one_pass

    def exchange_seconds(self, layer: LayerSeconds) -> tuple[float, float]:
        """Every rank gathers the maps of all ranks."""
        size = self.heads * self.key_dim * self.map_width * layer.layout.sum_bytes
        is_in_node = layer.layout.cp <= layer.hardware.gpus_per_node
        rate = layer.gpu.link_bytes_s if is_in_node else layer.gpu.network_bytes_s
        seconds = (layer.layout.cp - 1) * size / rate
        return seconds, seconds

    def segment_values(self, backward: bool, element_bytes: int) -> float:
        """Values in the sum dtype per row of a segment, in addition to its inputs and outputs."""
        buffers = SEGMENT_BUFFERS if element_bytes == 2 else PLAIN_SEGMENT_BUFFERS
        vectors, states, matrices = buffers[backward]
        width = self.key_dim + self.value_dim
        state = states * self.key_dim * width / CHUNK_TOKENS
        return vectors * width + state + matrices * CHUNK_TOKENS


@dataclass(frozen=True)
class SsdCost(DeltaRuleCost):
    """Mamba2."""

    name = "Mamba2"
    passes = SSD_PASSES
    map_passes = SSD_MAP_PASSES
    segment_rows = SSD_SEGMENT * SEGMENT_ROWS

    @property
    def map_width(self) -> int:
        return 1 + self.value_dim

    @property
    def pass_width(self) -> float:
        return self.key_dim * self.value_dim / CHUNK_TOKENS

    def segment_values(self, backward: bool, element_bytes: int) -> float:
        state = self.key_dim * self.value_dim
        if element_bytes == 2:
            decays = 5 + backward
            # In 16 bits; in backward with their gradients and products.
            chunk_states = (1 + backward) * state / CHUNK_TOKENS / 2
            return decays + chunk_states + backward * self.key_dim / 2  # dq and dk
        vectors, states, matrices = PLAIN_SSD_BUFFERS[backward]
        width = vectors * (self.key_dim + self.value_dim)
        return width + states * state / CHUNK_TOKENS + matrices * CHUNK_TOKENS


@dataclass(frozen=True)
class ConvolutionCost(MixerCost):
    """A short convolution, computed with the projections. Without channels: no mixer."""

    channels: int = 0

    @property
    def name(self) -> str:  # type: ignore[override]
        return "short convolution" if self.channels else "no attention"

    @property
    def why_no_ring(self) -> str | None:  # type: ignore[override]
        return DeltaRuleCost.why_no_ring if self.channels else None

    def sizes(self, *arguments: Any) -> ConvolutionBytes:
        return ConvolutionBytes(self, *arguments)


@dataclass(frozen=True)
class SideBySideCost(MixerCost):
    """Softmax attention and a recurrence in one layer, one after the other."""

    first: AttentionCost
    second: DeltaRuleCost

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.first.name} and {self.second.name}"

    @property
    def attention(self) -> tuple[AttentionKind, ...]:  # type: ignore[override]
        return self.first.attention

    @property
    def why_no_ring(self) -> str | None:  # type: ignore[override]
        return self.second.why_no_ring

    def sizes(self, *arguments: Any) -> SideBySideBytes:
        return SideBySideBytes(self.second, *arguments)

    def seconds(self, layer: LayerSeconds, work: StepShape) -> tuple[float, float]:
        forward, backward = self.first.seconds(layer, work)
        more_forward, more_backward = self.second.seconds(layer, work)
        return forward + more_forward, backward + more_backward

    def exchange_seconds(self, layer: LayerSeconds) -> tuple[float, float]:
        forward, backward = self.first.exchange_seconds(layer)
        more_forward, more_backward = self.second.exchange_seconds(layer)
        return forward + more_forward, backward + more_backward


class DeltaBytes(LayerBytes):
    """Sizes of a layer with the gated delta rule or Mamba2."""

    has_stages = False

    def __init__(
        self,
        rule: DeltaRuleCost,
        shape: ModelShape,
        layout: Layout,
        s: int,
        policy: ActivationPolicy | None = None,
    ) -> None:
        super().__init__(shape, layout, s, policy)
        element_bytes = layout.element_bytes
        sum_bytes = layout.sum_bytes
        rows = s * rule.heads
        state = rule.heads * rule.key_dim * rule.value_dim * sum_bytes
        keys = 2 * s * rule.key_heads * rule.key_dim * element_bytes
        self.rule = rule
        # q, k, v, g and beta
        self.projected = keys + rows * (rule.value_dim * element_bytes + 2 * sum_bytes)
        self.douts = rows * rule.value_dim * element_bytes
        self.outputs = self.douts + -(-rows // rule.segment_rows) * state
        self.out_width = rule.heads * rule.value_dim
        stored_out = layout.stored_output_bytes(s, self.out_width)
        self.stored_outputs = self.outputs - self.douts + stored_out
        self.qkv = self.projected * self.policy.projections

    def mix_points(self, phase: str, stream: int) -> Iterator[MemoryPoint]:
        yield MemoryPoint(f"{phase} projections", stream, self.projected, "project")
        yield MemoryPoint(f"{phase} attention", stream, self.projected + self.outputs, "rule")

    def mix_backward_points(self, outputs: int) -> Iterator[MemoryPoint]:
        """q, k and v become their gradients, segment by segment."""
        stream = self.x + self.fetched_input
        projected = 0 if self.qkv else self.projected
        is_resident = self.keeps_attention and not self.fetches_attention
        # Kept outputs were used by the resume pass; without them, states are recomputed.
        states = -self.douts if is_resident else self.outputs - self.douts
        live = projected + self.douts + states + self.graphs - self.gate_up
        yield MemoryPoint("backward projections", stream, live, "project again")
        yield MemoryPoint("backward attention", stream, live, "rule backward")
        yield MemoryPoint("backward projections", stream, live - self.douts, "project backward")

    def tile_bytes(self, work: str) -> int:
        if work in ("project", "project again"):  # its results are among those of all tokens
            results = self.projected + self.graphs * (work == "project again")
            tile = min(self.layout.tile_tokens or self.s, self.s)
            return max(0, super().tile_bytes("project") - results * tile // self.s)
        if not work.startswith("rule"):
            return super().tile_bytes(work)
        per_row = self.rule.segment_values(work == "rule backward", self.layout.element_bytes)
        rows = min(self.rule.segment_rows, self.s * self.rule.heads)
        return int(per_row * rows * self.layout.sum_bytes)


class ConvolutionBytes(LayerBytes):
    """Sizes of a layer whose capture pass computes the output of its mixer, if it has one."""

    has_stages = False

    def __init__(
        self,
        convolution: ConvolutionCost,
        shape: ModelShape,
        layout: Layout,
        s: int,
        policy: ActivationPolicy,
    ) -> None:
        super().__init__(shape, layout, s, policy)
        self.outputs = s * convolution.channels * layout.element_bytes
        self.projected = self.outputs
        self.douts = self.outputs
        self.stored_outputs = layout.stored_output_bytes(s, convolution.channels)
        self.graphs = self.graphs * bool(convolution.channels)
        self.qkv = 0
        self.out_width = convolution.channels

    def mix_points(self, phase: str, stream: int) -> Iterator[MemoryPoint]:
        if self.projected:
            yield MemoryPoint(f"{phase} projections", stream, self.projected, "project")

    def mix_backward_points(self, outputs: int) -> Iterator[MemoryPoint]:
        if self.projected:
            stream = self.x + self.fetched_input
            live = outputs + self.douts
            yield MemoryPoint("backward projections", stream, live, "project backward")


class SideBySideBytes(LayerBytes):
    """Sizes of a layer with attention and a recurrence: one runs while the other's outputs live."""

    def __init__(
        self,
        rule: DeltaRuleCost,
        shape: ModelShape,
        layout: Layout,
        s: int,
        policy: ActivationPolicy,
    ) -> None:
        super().__init__(shape, layout, s, policy)
        self.second = DeltaBytes(rule, shape, layout, s, policy)
        self.attention_kept = self.outputs + self.qkv  # live while the recurrence runs
        self.outputs += self.second.outputs
        self.stored_outputs += self.second.stored_outputs
        self.qkv += self.second.qkv
        self.out_width += self.second.out_width

    def mix_points(self, phase: str, stream: int) -> Iterator[MemoryPoint]:
        yield from attention_points(self, phase, stream)
        for point in self.second.mix_points(phase, stream):
            yield point._replace(heads=point.heads + self.attention_kept)

    def mix_backward_points(self, outputs: int) -> Iterator[MemoryPoint]:
        for point in attention_backward_points(self, outputs):
            yield point._replace(heads=point.heads + self.second.douts)
        yield from self.second.mix_backward_points(0)

    def tile_bytes(self, work: str) -> int:
        if work.startswith("rule"):
            return self.second.tile_bytes(work)
        return super().tile_bytes(work.removesuffix(" again"))


_TYPES = (AttentionCost, AttentionKind, DeltaRuleCost, SsdCost, ConvolutionCost, SideBySideCost)
_TYPES_BY_NAME: dict[str, Any] = {kind.__name__: kind for kind in _TYPES}


def mixers_to_json(mixers: Sequence[MixerCost]) -> dict[str, Any]:
    """Each different mixer once, and the index of each layer's."""
    kinds = [*dict.fromkeys(mixers)]
    return {
        "kinds": [_to_json(mixer) for mixer in kinds],
        "layers": [kinds.index(mixer) for mixer in mixers],
    }


def mixers_from_json(values: Mapping[str, Any]) -> tuple[MixerCost, ...]:
    kinds: list[Any] = [_from_json(kind) for kind in values["kinds"]]
    return tuple(kinds[index] for index in values["layers"])


def _to_json(value: object) -> object:
    if not is_dataclass(value):
        return value
    values = {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    return {"type": type(value).__name__, **values}


def _from_json(value: object) -> object:
    if not isinstance(value, dict):
        return value
    arguments = {name: _from_json(part) for name, part in value.items() if name != "type"}
    return _TYPES_BY_NAME[value["type"]](**arguments)
