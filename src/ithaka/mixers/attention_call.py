"""The call of softmax attention in a layer's own forward, through transformers' attention
interface: capture q, k and v, or return the output.

transformers calls attention and makes masks through registered functions. Ours makes a
`PlaceholderMask`, which the layer passes on to its attention call; there, what replaces it decides.

Shapes: t tokens of a tile, H query heads, G kv heads, K head dim, V the head dim of v.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import EndPass, ProbedLayer

ATTENTION = "ithaka"  # the name of the functions below in transformers' registries
FAR_POSITION = 10_000_000


class AttentionCall(NamedTuple):
    """One call of transformers' attention interface: q [H, t, K], k [G, t, K], v [G, t, V]."""

    module: nn.Module
    q_HtK: Tensor
    k_GtK: Tensor
    v_GtV: Tensor
    options: dict[str, Any]


class PlaceholderMask:
    """Replaces an attention mask. The layer's attention call runs its `attend`, not a kernel."""

    def __init__(
        self, function: Callable[..., Tensor] | None = None, local_size: int | None = None
    ) -> None:
        self.function: Any = function  # by masking_utils: (batch, head, row, key) -> visible
        self.local_size = local_size  # window or chunk

    def __getitem__(self, index: object) -> Tensor:
        raise TypeError("it uses its attention mask as a tensor")

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the output of attention, [t, H, V]."""
        raise RuntimeError(
            f"{type(call.module).__name__} of a parallel model was called directly; call the model"
        )


class SkippingMask(PlaceholderMask):
    """Returns zeros, which nothing reads."""

    def attend(self, call: AttentionCall) -> Tensor:
        return call.v_GtV.new_zeros(call.q_HtK.shape[1], len(call.q_HtK), call.v_GtV.shape[-1])


class CapturingMask(SkippingMask):
    """Stores the attention call, with q, k and v in a given dtype, then ends the pass. If traced,
    continues with zeros."""

    def __init__(self, dtype: torch.dtype, traced: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.traced = traced
        self.call: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        q_HtK, k_GtK, v_GtV = [t.to(self.dtype) for t in (call.q_HtK, call.k_GtK, call.v_GtV)]
        self.call = AttentionCall(call.module, q_HtK, k_GtK, v_GtV, call.options)
        if not self.traced:
            raise EndPass
        return super().attend(call)


class ReplayingMask(PlaceholderMask):
    """Returns `out_tHV` as the output of attention."""

    def __init__(self, out_tHV: Tensor) -> None:
        super().__init__()
        self.out_tHV = out_tHV
        self.num_calls = 0

    def attend(self, call: AttentionCall) -> Tensor:
        self.num_calls += 1
        return self.out_tHV


def _attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: object = None,
    **options: object,
) -> tuple[Tensor, None]:
    if not isinstance(attention_mask, PlaceholderMask):
        raise RuntimeError(
            f"{type(module).__name__} gets a mask that transformers.masking_utils did not make: "
            f"{type(attention_mask)}"
        )
    call = AttentionCall(module, q.squeeze(0), k.squeeze(0), v.squeeze(0), options)
    return attention_mask.attend(call)[None], None


def _make_mask(
    mask_function: Callable[..., Tensor] | None = None,
    local_size: int | None = None,
    **others: object,
) -> PlaceholderMask:
    return PlaceholderMask(mask_function, local_size)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _make_mask)


def find_masks(inputs: LayerInputs) -> list[PlaceholderMask]:
    masks = [leaf for leaf in inputs.leaves if isinstance(leaf, PlaceholderMask)]
    return list(dict.fromkeys(masks))


def _replace_masks(inputs: LayerInputs, mask: PlaceholderMask) -> LayerInputs:
    leaves = [mask if isinstance(leaf, PlaceholderMask) else leaf for leaf in inputs.leaves]
    return replace(inputs, leaves=leaves)


class AttentionTap:
    """The tap of softmax attention: it replaces the layer's mask."""

    num_calls = 0
    _mask: CapturingMask | None = None

    @contextmanager
    def capture(
        self, inputs: LayerInputs, dtype: torch.dtype, traced: bool
    ) -> Iterator[LayerInputs]:
        self._mask = CapturingMask(dtype, traced)
        yield _replace_masks(inputs, self._mask)

    def take_call(self) -> AttentionCall | None:
        mask = self._mask
        self._mask = None
        return None if mask is None else mask.call

    @contextmanager
    def resume(self, inputs: LayerInputs, out_tHV: Tensor) -> Iterator[LayerInputs]:
        mask = ReplayingMask(out_tHV)
        yield _replace_masks(inputs, mask)
        self.num_calls = mask.num_calls

    def skip(self, inputs: LayerInputs) -> AbstractContextManager[LayerInputs]:
        return nullcontext(_replace_masks(inputs, SkippingMask()))

    def run_plainly(self) -> AbstractContextManager[None]:
        return nullcontext()


# ---- masks: causal, with a window or in chunks


def read_mask(call: AttentionCall, layer: ProbedLayer) -> tuple[int | None, int | None]:
    """Return (window, chunk): the candidate that equals the layer's mask around every length."""
    mask = next(iter(find_masks(layer.inputs)), PlaceholderMask())
    sliding_window = call.options.get("sliding_window")
    sizes = [size for size in (sliding_window, mask.local_size) if size is not None]
    rows, keys = _boundary_pairs(sorted({*sizes, *layer.lengths}))
    zeros = torch.zeros_like(rows)
    try:
        visible = mask.function(zeros, zeros, rows, keys)
    except Exception as error:
        raise layer.refuse(
            f"has a mask in {layer.name} that depends on more than positions "
            f"({type(error).__name__}: {error})"
        ) from error
    windows = [(size, None) for size in sizes]
    chunks = [(None, size) for size in sizes]
    for window, chunk in ((None, None), *windows, *chunks):
        if torch.equal(visible.expand(rows.shape), attends_to(rows, keys, window, chunk)):
            if sliding_window not in (None, window):
                break
            return window, chunk
    rule = f"neither causal nor a causal window or chunk of {sizes or 'any size'} tokens"
    raise layer.refuse(f"has a mask in {layer.name} that is {rule}")


def attends_to(rows: Tensor, keys: Tensor, window: int | None, chunk: int | None) -> Tensor:
    visible = keys <= rows
    if window is not None:
        visible = visible & (keys > rows - window)
    return visible if chunk is None else visible & (rows // chunk == keys // chunk)


def _boundary_pairs(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return rows and keys of pairs around 0, multiples of the lengths, and FAR_POSITION."""
    edges = {0, FAR_POSITION, *(m * length for length in lengths for m in (1, 2, 3))}
    rows = sorted({edge + d for edge in edges for d in (-1, 0, 1) if edge + d >= 0})
    pairs = set()
    for row in rows:
        keys = {0, 1, *(row + d for d in (-2, -1, 0, 1))}
        for length in lengths:
            for edge in (row - length, row // length * length):
                keys |= {edge - 1, edge, edge + 1}
        pairs |= {(row, key) for key in keys if key >= 0}
    rows_p, keys_p = zip(*sorted(pairs), strict=True)
    return torch.tensor(rows_p), torch.tensor(keys_p)
