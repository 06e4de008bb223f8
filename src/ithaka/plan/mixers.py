"""What mixes the tokens of a layer, in plans: its bytes, seconds, exchanges and limits.

H heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.layer_bytes import LayerBytes, MemoryPoint
from ithaka.plan.seconds import LayerSeconds
from ithaka.plan.shape import AttentionKind, Mixer, ModelShape, StepShape

# The gated delta rule (ops/delta_rule.py): tokens per chunk and rows (tokens x heads) per segment. Then a
# segment's buffers in the sum dtype, forward and backward: vectors (K + V per row), states (K by K + V per chunk) and
# chunk matrices. Counted by hand from the kernels for 16 bits, and on a CPU for the plain path.
CHUNK_TOKENS, SEGMENT_ROWS = 64, 2**18
SEGMENT_BUFFERS = ((0.0, 0.0, 2.0), (1.75, 1.0, 2.0))
PLAIN_SEGMENT_BUFFERS = ((3.0, 0.0, 5.2), (1.0, 1.8, 14.7))
# Its kernels, as passes over [s, H, K + V] in the sum dtype, forward and backward; then the extra passes for a rank's
# affine maps, needed where another rank continues the document. Within 8 % of the 0.0087 and 0.0252 s per layer, and
# 0.0096 and 0.0139 s for the maps, measured at 64K tokens, 32 heads of 128, on one H200 (LOG.md, "kernels of the gated
# delta rule").
RULE_PASSES, RULE_MAP_PASSES = (18, 58), (22, 31)


@dataclass(frozen=True)
class Attention(Mixer):
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

    def flop_seconds(self, layer: LayerSeconds, work: StepShape) -> float:
        return sum(self.seconds(layer, work))


@dataclass(frozen=True)
class DeltaRule(Mixer):
    """The gated delta rule. Each rank has all heads of its tokens, and gets its first state from the rank before."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int

    name = "gated delta rule"
    why_no_ring = "passes states from rank to rank in order"

    def sizes(self, *arguments: Any) -> DeltaBytes:
        return DeltaBytes(self, *arguments)

    def seconds(self, layer: LayerSeconds, work: StepShape) -> tuple[float, float]:
        one_pass = layer.move(layer.s * self.heads * (self.key_dim + self.value_dim) * layer.layout.sum_bytes)
        maps = RULE_MAP_PASSES if layer.layout.cp > 1 else (0, 0)
        forward, backward = (passes + extra for passes, extra in zip(RULE_PASSES, maps, strict=True))
        return forward * one_pass, backward * one_pass

    def exchange_seconds(self, layer: LayerSeconds) -> tuple[float, float]:
        """Every rank gathers the maps of all ranks."""
        size = self.heads * self.key_dim * (self.key_dim + self.value_dim) * layer.layout.sum_bytes
        is_in_node = layer.layout.cp <= layer.hardware.gpus_per_node
        rate = layer.gpu.link_bytes_s if is_in_node else layer.gpu.network_bytes_s
        return ((layer.layout.cp - 1) * size / rate,) * 2


class DeltaBytes(LayerBytes):
    """Sizes of a layer with the gated delta rule."""

    def __init__(
        self, rule: DeltaRule, shape: ModelShape, layout: Layout, s: int, policy: ActivationPolicy | None = None
    ) -> None:
        super().__init__(shape, layout, s, policy)
        element_bytes, sum_bytes = layout.element_bytes, layout.sum_bytes
        rows, state = s * rule.heads, rule.heads * rule.key_dim * rule.value_dim * sum_bytes
        keys = 2 * s * rule.key_heads * rule.key_dim * element_bytes
        self.rule = rule
        self.projected = keys + rows * (rule.value_dim * element_bytes + 2 * sum_bytes)  # q, k, v, g and beta
        self.douts = rows * rule.value_dim * element_bytes
        self.outputs = self.douts + -(-rows // SEGMENT_ROWS) * state
        self.qkv = self.projected * self.policy.projections

    def mix_points(self, phase: str, stream: int) -> Iterator[MemoryPoint]:
        yield MemoryPoint(f"{phase} projections", stream, self.projected, "project")
        yield MemoryPoint(f"{phase} attention", stream, self.projected + self.outputs, "rule")

    def mix_backward_points(self, outputs: int) -> Iterator[MemoryPoint]:
        """q, k and v become their gradients, segment by segment."""
        stream, projected = self.x + self.fetched_input, 0 if self.qkv else self.projected
        is_resident = self.keeps_attention and not self.fetches_attention
        # Kept outputs were used by the resume pass; without them, states are recomputed.
        states = -self.douts if is_resident else self.outputs - self.douts
        live = projected + self.douts + states + self.graphs - self.gate_up
        yield MemoryPoint("backward projections", stream, live, "project")
        yield MemoryPoint("backward attention", stream, live, "rule backward")
        yield MemoryPoint("backward projections", stream, live - self.douts, "project backward")

    def tile_bytes(self, work: str) -> int:
        if not work.startswith("rule"):
            return super().tile_bytes(work)
        rule, buffers = self.rule, SEGMENT_BUFFERS if self.layout.element_bytes == 2 else PLAIN_SEGMENT_BUFFERS
        vectors, states, matrices = buffers[work == "rule backward"]
        width = rule.key_dim + rule.value_dim
        per_row = vectors * width + states * rule.key_dim * width / CHUNK_TOKENS + matrices * CHUNK_TOKENS
        return int(per_row * min(SEGMENT_ROWS, self.s * rule.heads) * self.layout.sum_bytes)


def mixers_to_json(mixers: Sequence[Any]) -> dict[str, Any]:
    """Each different mixer once, and the index of each layer's."""
    kinds = [*dict.fromkeys(mixers)]
    return {"kinds": [asdict(mixer) for mixer in kinds], "layers": [kinds.index(mixer) for mixer in mixers]}


def mixers_from_json(values: Mapping[str, Any]) -> tuple[Mixer, ...]:
    kinds = [
        Attention(AttentionKind(**fields["kind"]), fields["causal"]) if "kind" in fields else DeltaRule(**fields)
        for fields in values["kinds"]
    ]
    return tuple(kinds[index] for index in values["layers"])
