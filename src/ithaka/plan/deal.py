"""Which tokens of a sequence each member of a ring has: all have as many, and about as much attention.

Documents go whole to one member: the longest first, each to the member with least so far. A long one is cut: every
member takes a piece of its front and one of its back, which together have as much attention per token as the document.
One causal document is therefore dealt in zigzag.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

LONG = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 0.0)  # of a member's attention: documents with more are cut
BALANCED = 1.05

TokenRange = tuple[int, int]  # first token, tokens


@dataclass(frozen=True)
class Deal:
    members: tuple[tuple[TokenRange, ...], ...]  # each one's tokens, ascending
    balance: float = 1.0  # attention of the member with most over the mean: query-key pairs, causal, without windows

    @cached_property
    def num_tokens(self) -> int:
        return sum(length for runs in self.members for _, length in runs)

    @cached_property
    def in_order(self) -> list[TokenRange]:
        """The runs of the sequence, in order: where each lies if all tokens lie member by member."""
        placed, row = [], 0
        for start, length in (run for runs in self.members for run in runs):
            placed.append((start, row, length))
            row += length
        return [(row, length) for _, row, length in sorted(placed)]


def contiguous_deal(num_tokens: int, ring: int) -> Deal:
    size = num_tokens // ring
    return Deal(tuple(((member * size, size),) for member in range(ring)))


def deal_tokens(starts: Sequence[int], ring: int, ulysses: int) -> Deal:
    """The deal that balances and cuts fewest documents, or the best. `starts` of documents are cumulative, (0, ..., S).

    The tokens dealt are a multiple of ring * ulysses: those from S on are padding.
    """
    size = -(-starts[-1] // (ring * ulysses)) * ulysses
    if ring == 1:
        return contiguous_deal(size, 1)
    best: Deal | None = None
    for long in LONG:
        found = _dealt(starts, ring, size, long)
        best = found if best is None or found.balance < best.balance else best
        if best.balance <= BALANCED:
            break
    assert best is not None
    return best


def area(rows: int) -> int:
    """Query-key pairs of a document's first rows."""
    return rows * (rows + 1) // 2


def _dealt(starts: Sequence[int], ring: int, size: int, long: float) -> Deal:
    documents = sorted((a - b, a) for a, b in pairwise(starts))  # longest first
    mean = max(1.0, sum(area(-length) for length, _ in documents) / ring)
    members: list[list[TokenRange]] = [[] for _ in range(ring)]
    rooms, areas, left = [size] * ring, [0] * ring, []

    def take(member: int, start: int, length: int, depth: int) -> None:
        """`depth`: tokens of the document before `start`."""
        if length:
            members[member].append((start, length))
            rooms[member] -= length
            areas[member] += area(depth + length) - area(depth)

    def cut(start: int, length: int) -> None:
        front, back = start, start + length
        for member, share in enumerate(_shares(length, rooms)):
            take(member, front, -(-share // 2), front - start)
            front += -(-share // 2)
            back -= share // 2
            take(member, back, share // 2, back - start)

    for negative, start in documents:
        length = -negative
        if area(length) > long * mean:
            cut(start, length)
            continue
        fitting = [member for member in range(ring) if rooms[member] >= length]
        if fitting:
            # Tokens and attention: where one is used up, the other is too.
            take(min(fitting, key=lambda m: areas[m] / mean - rooms[m] / size), start, length, 0)
        else:
            left.append((start, length))
    for start, length in left:
        cut(start, length)
    padding = starts[-1]
    for member, room in enumerate(tuple(rooms)):
        members[member] += [(padding, room)] if room else []
        padding += room
    runs = tuple(tuple(_joined(sorted(of_member))) for of_member in members)
    return Deal(runs, max(areas) * ring / max(1, sum(areas)))


def _shares(length: int, rooms: Sequence[int]) -> Iterator[int]:
    """`length` divided as the rooms are."""
    before, room = 0, sum(rooms)
    for own in rooms:
        yield (before + own) * length // room - before * length // room
        before += own


def _joined(runs: Sequence[TokenRange]) -> Iterator[TokenRange]:
    """Neighbours as one."""
    start, length = runs[0]
    for following, more in runs[1:]:
        if following == start + length:
            length += more
        else:
            yield start, length
            start, length = following, more
    yield start, length
