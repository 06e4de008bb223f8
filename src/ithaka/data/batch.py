"""Batches: packed sequences as tensors for the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ithaka.data.pack import PackedSequence, join_teachers
from ithaka.layer.loss import IGNORE_INDEX


class Batch(NamedTuple):
    """Tensors int64 [B, S] on the CPU. labels are not shifted, and -100 where ignored, as in Hugging Face."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor
    source_ids: torch.Tensor | None = None  # indices into TrainData.source_names; None if there is one source
    parents: torch.Tensor | None = None  # document_ids of parents, or -1; None: no document has a parent
    sample_ids: torch.Tensor | None = None  # at labels, if samples are pairs: 2 * pair, + 1 for rejected
    images: Mapping[str, Any] = {}  # pixels and sizes of images and videos, as arguments of the model
    teacher: tuple[torch.Tensor, torch.Tensor] | None = None  # stored ids and log-probabilities, [B, S, k]

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the model."""
        inputs = {"input_ids": self.input_ids, "labels": self.labels, "document_ids": self.document_ids, **self.images}
        return inputs if self.parents is None else inputs | {"parents": self.parents}

    @property
    def num_preferences(self) -> int:
        """Pairs of a chosen and a rejected sample."""
        return 0 if self.sample_ids is None else (int(self.sample_ids.max()) + 1) // 2


def collate(sequences: Sequence[PackedSequence], with_sources: bool = False) -> Batch:
    """Stack B sequences of S tokens into tensors [B, S]."""

    def stack(column: Callable[[PackedSequence], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack([column(sequence) for sequence in sequences]))

    batch = Batch(stack(lambda s: s.ids), stack(PackedSequence.labels), stack(PackedSequence.document_ids))
    if with_sources:
        batch = batch._replace(source_ids=stack(PackedSequence.source_ids))
    if any(sequence.teacher is not None for sequence in sequences):
        blank = np.empty((len(sequences[0].tokens), 2, 0), np.int32)
        columns = join_teachers([blank if sequence.teacher is None else sequence.teacher for sequence in sequences])
        ids, bits = torch.from_numpy(columns).unflatten(0, batch.labels.shape).unbind(2)
        batch = batch._replace(teacher=(ids.long(), bits.contiguous().view(torch.float32)))
    if all(sequence.parents is None for sequence in sequences):
        return batch
    parents_BN, samples_BN = stack(PackedSequence.parent_ids), stack(PackedSequence.sample_ids)
    counts_B = samples_BN.amax(1) + 1
    samples_BN += torch.where(samples_BN >= 0, (counts_B.cumsum(0) - counts_B)[:, None], 0)
    return batch._replace(parents=parents_BN if (parents_BN >= 0).any() else None, sample_ids=samples_BN)


def num_valid(labels: torch.Tensor) -> int:
    """Count the valid targets of labels [..., S] after the shift by one."""
    return int((labels[..., 1:] != IGNORE_INDEX).sum())
