"""Hold out documents for validation by their content: no copy of one is trained on, in any file,
source or entry of a curriculum, and files that are added or renamed do not move documents to the
other side, except the one that a small source must hold out."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


def hash_content(content: bytes) -> int:
    """Return the key of a document, an unsigned 64-bit integer."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def to_content(values: object) -> bytes:
    """Encode the values of a record; equal ones from JSON and Parquet give the same bytes."""
    return json.dumps(values, sort_keys=True, default=repr).encode()


class SourceContent(NamedTuple):
    """What a source contains, as far as the split depends on it."""

    sizes: dict[int, int]  # key of a document -> bytes of all its copies
    is_complete: bool  # False: these are only the first documents
    is_one_text: bool  # whose end is held out
    fraction: float  # to hold out; 0: none of this source
    num_bytes: int  # of all documents, also those that were not read


@dataclass(frozen=True)
class Split:
    """One side of the split of documents, or both."""

    fraction: float
    held_out: bool | None  # None: both sides
    extra: tuple[int, ...] = ()  # keys above the fraction that are held out, too
    never: tuple[int, ...] = ()  # keys of documents that are not held out
    cuts: tuple[int, ...] = ()  # keys of texts whose end is held out

    def holds_out(self, key: int) -> bool:
        return key not in self.never and (key < limit_of(self.fraction) or key in self.extra)

    def keeps(self, key: int) -> bool:
        """Whether a document is on this side."""
        return self.held_out is None or self.held_out == self.holds_out(key)

    def of_source(self, source: SourceContent) -> "Split":
        """Leave out keys of other sources, so that these do not change the identity of this one.

        In the part of a large source that was not read, a copy of a document that a small source
        must hold out is therefore trained on."""

        def select(keys: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(key for key in keys if key in source.sizes)

        extra = select(self.extra)
        return replace(self, extra=extra, never=select(self.never), cuts=select(self.cuts))

    def may_hold_out(self, source: SourceContent) -> bool:
        """Whether the split holds out any document of a source, as far as its content is known."""
        return not source.is_complete or self.share(source) > 0

    def share(self, source: SourceContent) -> float:
        """Fraction of the known bytes of a source that are held out."""
        if source.is_one_text:
            return self.fraction
        held_out = sum(size for key, size in source.sizes.items() if self.holds_out(key))
        return held_out / max(sum(source.sizes.values()), 1)


def make_split(sources: Sequence[SourceContent]) -> Split:
    """Return the training side of one split for all sources of a run.

    A document that is more than half of its source is trained on. Each other source of several
    documents has at least one on each side.
    """
    fraction = max(source.fraction for source in sources)
    limit = limit_of(fraction)
    cuts = {key for source in sources if source.is_one_text for key in source.sizes}
    divided = [source for source in sources if not source.is_one_text and source.sizes]
    never: set[int] = set()
    for source in divided:
        large = {key for key, size in source.sizes.items() if size > source.num_bytes / 2}
        is_all_held_out = max(source.sizes) < limit and not large
        never |= {max(source.sizes)} if is_all_held_out else large
    extra: set[int] = set()
    for source in divided:
        smallest = min((key for key in source.sizes if key not in never | cuts), default=0)
        if source.fraction and smallest >= limit_of(source.fraction):
            extra.add(smallest)
    return Split(fraction, False, tuple(sorted(extra)), tuple(sorted(never)), tuple(sorted(cuts)))


def limit_of(fraction: float) -> int:
    """Return the key below which documents are held out."""
    return int(fraction * 2**64)
