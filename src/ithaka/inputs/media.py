"""Which frames of images and videos each rank encodes, and a call's pixels of these frames only."""

import torch
from torch import Tensor


def divide_frames(patches_f: Tensor, num_ranks: int) -> Tensor:
    """Return the first frame of each rank, [num_ranks + 1]; ranks get about as many patches."""
    ends_f = patches_f.cumsum(0)
    ranks = torch.arange(num_ranks + 1)
    total = int(patches_f.sum())
    cuts = torch.searchsorted(2 * ends_f - patches_f, ranks * 2 * total // num_ranks)
    cuts[-1] = len(patches_f)
    return cuts


class OwnPixels:
    """A call's pixels, of which this rank has those it encodes. `name` identifies all of them."""

    def __init__(self, part_PM: Tensor, num_patches: int, name: str) -> None:
        self.part_PM = part_PM
        self.shape = (num_patches, part_PM.shape[1])
        self.name = name

    def __getitem__(self, rows: slice) -> Tensor:
        assert len(range(self.shape[0])[rows]) == len(self.part_PM), "read for another rank"
        return self.part_PM
