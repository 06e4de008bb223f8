"""Which tokens of a sequence each member of a ring has: all have as many, and about as much attention.

The sequence is cut into equal chunks, which are dealt in rounds, those with most attention first; in each round the
largest goes to the member that has least so far. For one causal document that is zigzag: two chunks per member
balance. Packed documents take more.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

PIECES = (2, 4, 8, 16, 32, 64)  # chunks per member
BALANCED = 1.05
SHORTEST = 1024  # tokens of a chunk if there are more than two per member: kernels are slow on few rows


@dataclass(frozen=True)
class Deal:
    chunk: int  # tokens
    members: tuple[tuple[int, ...], ...]  # each one's chunks, ascending
    balance: float = 1.0  # attention of the member with most over the mean: query-key pairs, causal, without windows

    @property
    def num_tokens(self) -> int:
        return self.chunk * sum(map(len, self.members))

    @cached_property
    def dealt(self) -> list[int]:
        """The chunks, member by member."""
        return [number for chunks in self.members for number in chunks]

    @cached_property
    def places(self) -> list[int]:
        """Where each chunk of the sequence is in `dealt`."""
        return sorted(range(len(self.dealt)), key=self.dealt.__getitem__)

    def runs(self, member: int) -> list[tuple[int, int]]:
        """(first token, tokens) of a member's neighbouring chunks."""
        runs: list[tuple[int, int]] = []
        for number in self.members[member]:
            start, length = runs.pop() if runs and sum(runs[-1]) == number * self.chunk else (number * self.chunk, 0)
            runs.append((start, length + self.chunk))
        return runs


def contiguous(num_tokens: int, ring: int) -> Deal:
    return Deal(num_tokens // ring, tuple((member,) for member in range(ring)))


def deal(starts: Sequence[int], ring: int, ulysses: int) -> Deal:
    """The deal with fewest chunks that balances, or the best. `starts` of documents are cumulative, (0, ..., S).

    The tokens dealt are a multiple of ring * ulysses: those from S on are padding.
    """
    best: Deal | None = None
    for pieces in PIECES if ring > 1 else (1,):
        chunk = -(-starts[-1] // (ring * pieces * ulysses)) * ulysses
        if best is None or (best.balance > BALANCED and chunk >= SHORTEST):
            found = _in_rounds(_areas(starts, chunk, ring * pieces), chunk, ring)
            best = found if best is None or found.balance < best.balance else best
    assert best is not None
    return best


def _areas(starts: Sequence[int], chunk: int, count: int) -> list[int]:
    """Query-key pairs of each chunk's rows; padding has none."""
    before = [0]  # each document
    for a, b in pairwise(starts):
        before.append(before[-1] + (b - a) * (b - a + 1) // 2)

    def up_to(token: int) -> int:
        i = bisect_right(starts, token) - 1
        rows = token - starts[i]
        return before[i] + rows * (rows + 1) // 2

    return [b - a for a, b in pairwise(up_to(min(i * chunk, starts[-1])) for i in range(count + 1))]


def _in_rounds(areas: list[int], chunk: int, ring: int) -> Deal:
    largest_first = sorted(range(len(areas)), key=areas.__getitem__, reverse=True)
    members: list[list[int]] = [[] for _ in range(ring)]
    sums = [0] * ring
    for first in range(0, len(areas), ring):
        least_first = sorted(range(ring), key=sums.__getitem__)
        for member, number in zip(least_first, largest_first[first : first + ring], strict=True):
            members[member].append(number)
            sums[member] += areas[number]
    return Deal(chunk, tuple(tuple(sorted(chunks)) for chunks in members), max(sums) * ring / max(1, sum(areas)))
