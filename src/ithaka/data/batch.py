"""From segments to tensors: the tokens of a packed sequence, and batches for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ithaka.data.documents.images import Medium
from ithaka.data.pack import (
    IMAGE_BASE,
    NODE_DTYPE,
    Documents,
    PackedSequence,
    join_teachers,
)
from ithaka.data.stored_tokens import decode_ids, decode_labels
from ithaka.facts.attention import PairCounts
from ithaka.facts.sizes import IGNORE_INDEX

if TYPE_CHECKING:
    import torch


def concatenate(
    segments: np.ndarray,
    shards: Sequence[Documents],
    context: int,
    pad_id: int,
    image_ids: Mapping[str, int],
    documents_together: bool = False,
) -> PackedSequence:
    """Concatenate the tokens of `segments`, and pad. `image_ids`: by kind of medium."""
    lengths = segments["length"]
    ends = lengths.cumsum()
    length = int(lengths.sum())
    ids_S = np.full(context, pad_id, dtype=np.int32)
    targets_S = np.full(context, IGNORE_INDEX, dtype=np.int32)
    images: list[Medium] = []
    for (shard, _, low, num), end in zip(segments.tolist(), ends.tolist(), strict=True):
        documents = shards[shard]
        tokens = documents.tokens[low : low + num]
        ids_S[end - num : end] = decode_ids(tokens)
        targets_S[end - num : end] = decode_labels(tokens)
        if documents.images:
            own = ids_S[end - num : end]
            images += _insert_image_ids(own, documents.images, image_ids)
    teacher = None
    if len(segments) and shards[segments["shard"][0]].teacher is not None:  # then all have one
        columns = []
        for shard, _, low, num in segments.tolist():
            column = shards[shard].teacher
            assert column is not None
            columns.append(column[low : low + num])
        padding = np.empty((context - length, 2, 0), np.int32)
        teacher = join_teachers([*columns, padding])
    return PackedSequence(
        ids_S,
        targets_S,
        ends - lengths if len(segments) else np.zeros(1, np.int64),
        length,
        segments["source"],
        documents_together,
        images=tuple(images),
        teacher=teacher,
    )


def _insert_image_ids(
    ids: np.ndarray, images: Sequence[Medium], image_ids: Mapping[str, int]
) -> list[Medium]:
    """Replace the numbers of images (see `mark_images`) by ids, and return these images."""
    is_image = ids >= IMAGE_BASE
    numbers, inverse = np.unique(ids[is_image] - IMAGE_BASE, return_inverse=True)
    found = [images[i] for i in numbers]
    ids[is_image] = np.array([image_ids[image.kind] for image in found], np.int32)[inverse]
    return found


def split_forests(
    sequence: PackedSequence, segments: np.ndarray, shards: Sequence[Documents]
) -> PackedSequence:
    """Replace each forest, which is one segment, by its nodes."""
    if not len(segments):
        return sequence
    nodes: list[np.ndarray] = []
    sources: list[int] = []
    num_nodes = 0
    num_samples = 0
    for (shard, source, low, length), start in zip(
        segments.tolist(), sequence.starts.tolist(), strict=True
    ):
        known = shards[shard].nodes
        first, last = np.searchsorted(known["start"], [low, low + length])
        own = known[first:last].copy()
        if not len(own):  # a document is a forest of one node
            own = np.array([(low, -1, 0)], NODE_DTYPE)
        own["start"] += start - low
        own["parent"] += np.where(own["parent"] >= 0, num_nodes, 0)
        own["sample"] += num_samples
        num_nodes += len(own)
        num_samples = int(own["sample"].max()) + 1
        sources += [source] * len(own)
        nodes.append(own)
    joined = np.concatenate(nodes)
    return replace(
        sequence,
        starts=joined["start"],
        sources=np.array(sources),
        parents=joined["parent"],
        samples=joined["sample"],
    )


class Batch(NamedTuple):
    """Tensors int64 [B, S] on the CPU. labels are not shifted, and -100 where ignored."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor
    # indices into TrainData.source_names; None if there is one source
    source_ids: torch.Tensor | None = None
    # document_ids of parents, or -1; None: no document has a parent
    parents: torch.Tensor | None = None
    # at labels, if samples are pairs: 2 * pair, + 1 for rejected
    sample_ids: torch.Tensor | None = None
    # pixels and sizes of images and videos, as arguments of the model
    images: Mapping[str, Any] = {}
    # stored ids and log-probabilities, [B, S, k]
    teacher: tuple[torch.Tensor, torch.Tensor] | None = None
    # Computed once per batch by `pack_for_training` (train/objectives.py).
    packed: Any = None  # inputs.shard.PackedBatch
    pairs: PairCounts = PairCounts()

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the model."""
        inputs = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "document_ids": self.document_ids,
            **self.images,
        }
        optional = {"parents": self.parents, "packed": self.packed}
        return inputs | {name: value for name, value in optional.items() if value is not None}

    @property
    def num_preferences(self) -> int:
        """Pairs of a chosen and a rejected sample."""
        return 0 if self.sample_ids is None else (int(self.sample_ids.max()) + 1) // 2


def collate(sequences: Sequence[PackedSequence], with_sources: bool = False) -> Batch:
    """Stack B sequences of S tokens into tensors [B, S]."""
    import torch  # late: `ithaka data` needs none

    def stack(column: Callable[[PackedSequence], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack([column(sequence) for sequence in sequences])).long()

    batch = Batch(
        stack(lambda s: s.ids), stack(PackedSequence.labels), stack(PackedSequence.document_ids)
    )
    if with_sources:
        batch = batch._replace(source_ids=stack(PackedSequence.source_ids))
    if any(sequence.teacher is not None for sequence in sequences):
        blank = np.empty((len(sequences[0].ids), 2, 0), np.int32)
        columns = join_teachers(
            [blank if sequence.teacher is None else sequence.teacher for sequence in sequences]
        )
        ids, bits = torch.from_numpy(columns).unflatten(0, batch.labels.shape).unbind(2)
        batch = batch._replace(teacher=(ids.long(), bits.contiguous().view(torch.float32)))
    if all(sequence.parents is None for sequence in sequences):
        return batch
    parents_BN = stack(PackedSequence.parent_ids)
    samples_BN = stack(PackedSequence.sample_ids)
    counts_B = samples_BN.amax(1) + 1
    samples_BN += torch.where(samples_BN >= 0, (counts_B.cumsum(0) - counts_B)[:, None], 0)
    return batch._replace(
        parents=parents_BN if (parents_BN >= 0).any() else None, sample_ids=samples_BN
    )


def num_valid(labels: torch.Tensor) -> int:
    """Count the valid targets of labels [..., S] after the shift by one."""
    return int((labels[..., 1:] != IGNORE_INDEX).sum())
