"""The masks of softmax attention: causal, with a window or in chunks. Find out which one a layer's mask is."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ithaka.config import ConfigError
from ithaka.layer.inputs import LayerInputs
from ithaka.mixers.attention_call import AttentionCall, PlaceholderMask, find_masks

FAR_POSITION = 10_000_000


def read_mask(
    call: AttentionCall, inputs: LayerInputs, name: str, lengths: set[int], refuse: Callable[[str], ConfigError]
) -> tuple[int | None, int | None]:
    """Return (window, chunk): the candidate that equals the layer's mask around every length."""
    (mask, *_), window = find_masks(inputs) or [PlaceholderMask()], call.options.get("sliding_window")
    sizes = [size for size in (window, mask.local_size) if size is not None]
    rows, keys = _boundary_pairs(sorted({*sizes, *lengths}))
    zeros = torch.zeros_like(rows)
    try:
        visible = mask.function(zeros, zeros, rows, keys)
    except Exception as error:
        problem = f"has a mask in {name} that depends on more than positions ({type(error).__name__}: {error})"
        raise refuse(problem) from error
    for window, chunk in ((None, None), *((size, None) for size in sizes), *((None, size) for size in sizes)):
        if torch.equal(visible.expand(rows.shape), attends_to(rows, keys, window, chunk)):
            if call.options.get("sliding_window") not in (None, window):
                break
            return window, chunk
    raise refuse(
        f"has a mask in {name} that is neither causal nor a causal window or chunk of {sizes or 'any size'} tokens"
    )


def attends_to(rows: Tensor, keys: Tensor, window: int | None, chunk: int | None) -> Tensor:
    visible = keys <= rows
    if window is not None:
        visible = visible & (keys > rows - window)
    return visible if chunk is None else visible & (rows // chunk == keys // chunk)


def _boundary_pairs(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return rows and keys of query-key pairs around 0, every length and its multiples, and FAR_POSITION."""
    edges = {0, FAR_POSITION, *(m * length for length in lengths for m in (1, 2, 3))}
    rows = sorted({edge + d for edge in edges for d in (-1, 0, 1) if edge + d >= 0})
    pairs = set()
    for row in rows:
        near = {row + d for d in (-2, -1, 0, 1)} | {row - length + d for length in lengths for d in (-1, 0, 1)}
        chunks = {row // length * length + d for length in lengths for d in (-1, 0, 1)}
        pairs |= {(row, key) for key in near | chunks | {0, 1} if key >= 0}
    rows_p, keys_p = zip(*sorted(pairs), strict=True)
    return torch.tensor(rows_p), torch.tensor(keys_p)
