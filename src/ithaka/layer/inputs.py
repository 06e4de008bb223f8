"""What a layer gets: its arguments (`LayerInputs`), and what is the same for all layers of a call
(`CallState`).

Shapes: s tokens on this rank, t in a tile, L layers, k experts per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ithaka.attention.docs import Docs
from ithaka.blocks.routing import LoadBalancingLoss
from ithaka.foreign.torch_core import pytree


@dataclass
class CallState:
    """One call of a model: what layers need in addition to their arguments, also in backward."""

    docs: Docs
    num_positions: int = 0  # 1 + the largest position on any rank
    balancing: LoadBalancingLoss | None = None  # if the model has one: the sums of this call
    chosen_sLk: Tensor | None = None  # the experts of this rank's tokens, if the user chose them
    keys_s: Tensor | None = None  # for adapter dropout in training


class CurrentCall:
    """The call that a model is in. Layers and rotary embeddings, which transformers calls, share
    this object instead of an argument, and read it once, when they are called."""

    state: CallState | None = None

    @contextmanager
    def running(self, state: CallState) -> Iterator[None]:
        self.state = state
        try:
            yield
        finally:
            self.state = None


@dataclass(frozen=True)
class LayerInputs:
    """The arguments of a layer other than x, for all tokens of this rank or for a tile."""

    leaves: list[Any]
    tree_spec: Any
    token_dims: Sequence[int | None]
    num_tokens: int
    ids_t: Tensor | None = None  # a number per document, for convolutions; None: there is one

    @classmethod
    def pack(
        cls, args: tuple, kwargs: dict[str, Any], token_dims: Sequence[int | None], num_tokens: int
    ) -> "LayerInputs":
        leaves, tree_spec = pytree.tree_flatten((args, kwargs))
        if len(leaves) != len(token_dims):
            raise RuntimeError(
                f"a layer got {len(leaves)} arguments, but {len(token_dims)} when it was checked"
            )
        return cls(leaves, tree_spec, token_dims, num_tokens)

    def unpack(self) -> tuple[tuple, dict[str, Any]]:
        """Return positional and keyword arguments."""
        return pytree.tree_unflatten(self.leaves, self.tree_spec)

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def trained(self) -> list[tuple[int, Tensor]]:
        """The leaves that need gradients, with their indices."""
        leaves = enumerate(self.leaves)
        return [(i, t) for i, t in leaves if isinstance(t, Tensor) and t.requires_grad]

    def tile(self, rows: slice) -> "LayerInputs":
        num_tokens = rows.stop - rows.start
        leaves = [
            leaf if dim is None else leaf.narrow(dim, rows.start, num_tokens)
            for leaf, dim in zip(self.leaves, self.token_dims, strict=True)
        ]
        return replace(self, leaves=leaves, num_tokens=num_tokens)

    def detach(self) -> "LayerInputs":
        """Return the same values; those that need gradients become leaves of a new graph."""
        leaves = list(self.leaves)
        for i, leaf in self.trained:
            leaves[i] = leaf.detach().requires_grad_()
        return replace(self, leaves=leaves)
