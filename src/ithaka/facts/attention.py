"""Softmax attention as kernels, plans and inputs see it: its kind, the head dims of kernels, and
the query-key pairs of tokens."""

from dataclasses import dataclass

HEAD_DIMS = (256, 8)  # (maximum, required multiple) of FlashAttention and cuDNN
EFFICIENT_HEAD_DIMS = (1024, 8)  # of the memory-efficient kernel


@dataclass(frozen=True)
class AttentionKind:
    """The attention of some layers, as far as it matters to kernels."""

    head_dim: int
    group: int = 1  # query heads per kv head
    # Tokens that a query attends to, with its own (or the size of a chunk); None: all.
    window: int | None = None
    softcap: float | None = None


def span_pairs(earlier: int, length: int, window: int | None = None) -> int:
    """Return the query-key pairs of `length` tokens that also attend to `earlier` earlier ones."""

    def count(tokens: int) -> int:
        reach = tokens if window is None else min(tokens, window)
        return reach * tokens - reach * (reach - 1) // 2

    return count(earlier + length) - count(earlier)


@dataclass(frozen=True)
class PairCounts:
    """Query-key pairs of causal attention, in documents and to ancestors."""

    all_layers: int = 0
    full_layer: int = 0  # one layer without a window
