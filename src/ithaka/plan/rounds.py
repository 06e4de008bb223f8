"""In which order the members of a ring send each other keys and values: in rounds, some tokens at a time.

In a round a member receives at most `round_tokens` and sends at most as many, so that what is under way is small beside
its own tokens, however many members there are. What none of a member's rows sees is not sent to it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ithaka.plan.deal import Deal, TokenRange

ROUNDS = 8  # in which a member's tokens are sent,
ROUND_TOKENS = 32768  # unless they are few: kernels are slow on few keys


@dataclass(frozen=True)
class RingRound:
    """One member's part of a round. Tokens lie as they come: member by member, run by run."""

    received: tuple[tuple[TokenRange, ...], ...]  # from each member, as tokens of the sequence
    sent: tuple[tuple[TokenRange, ...], ...]  # to each member, as rows of this one

    @property
    def num_received(self) -> list[int]:
        return [sum(length for _, length in runs) for runs in self.received]

    @property
    def num_sent(self) -> list[int]:
        return [sum(length for _, length in runs) for runs in self.sent]


def ring_round_tokens(member_tokens: int) -> int:
    return max(ROUND_TOKENS, -(-member_tokens // ROUNDS))


def ring_rounds(deal: Deal, seen: Sequence[Sequence[TokenRange]], member: int) -> list[RingRound]:
    """The rounds of `member`: as many as the others have. `seen`: keys that each member's rows see, ascending."""
    ring, own = len(deal.members), deal.members[member]
    firsts, row_of = [first for first, _ in own], [0, *accumulate(length for _, length in own)]
    received, sent = (defaultdict[tuple[int, int], list[TokenRange]](list) for _ in range(2))
    num_rounds = 0
    for number, owner, receiver, (start, length) in _transfers(deal, seen):
        num_rounds = max(num_rounds, number + 1)
        if receiver == member:
            received[number, owner].append((start, length))
        elif owner == member:
            run = bisect_right(firsts, start) - 1
            sent[number, receiver].append((row_of[run] + start - firsts[run], length))
    return [
        RingRound(*(tuple(tuple(runs[number, other]) for other in range(ring)) for runs in (received, sent)))
        for number in range(num_rounds)
    ]


def _transfers(deal: Deal, seen: Sequence[Sequence[TokenRange]]) -> Iterator[tuple[int, int, int, TokenRange]]:
    """(round, owner, receiver, tokens). Neighbours first: where all need all, all send and receive in every round."""
    ring = len(deal.members)
    most = ring_round_tokens(deal.num_tokens // ring)
    used: defaultdict[tuple[str, int, int], int] = defaultdict(int)  # tokens by way, member and round
    full: defaultdict[tuple[str, int], int] = defaultdict(int)  # rounds without room, from the first on
    for step in range(1, ring):
        for receiver in range(ring):
            ways = (("from", (receiver - step) % ring), ("to", receiver))
            for start, length in _both(deal.members[ways[0][1]], seen[receiver]):
                num_pieces = -(-length // most)
                for i in range(num_pieces):
                    low, high = i * length // num_pieces, (i + 1) * length // num_pieces
                    number = max(full[way] for way in ways)
                    while any(used[*way, number] + high - low > most for way in ways):
                        number += 1
                    for way in ways:
                        used[*way, number] += high - low
                        while used[*way, full[way]] >= most:
                            full[way] += 1
                    yield number, ways[0][1], receiver, (start + low, high - low)


def _both(a: Sequence[TokenRange], b: Sequence[TokenRange]) -> Iterator[TokenRange]:
    """What is in a run of each."""
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(sum(a[i]), sum(b[j]))
        if start < stop:
            yield start, stop - start
        i, j = (i + 1, j) if sum(a[i]) <= sum(b[j]) else (i, j + 1)
