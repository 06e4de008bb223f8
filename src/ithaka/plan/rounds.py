"""The rounds in which the members of a ring send each other keys and values.

In a round a member sends and receives at most `ring_round_tokens`, so that the buffers stay small compared with its own
tokens however large the ring is. Tokens that none of a member's rows attend to are not sent to it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ithaka.plan.deal import Deal, TokenRange

ROUNDS = 8  # rounds to send a member's tokens
ROUND_TOKENS = 32768  # minimum tokens per round: kernels are slow on few keys


@dataclass(frozen=True)
class RingRound:
    """One member's part of a round. Received tokens are ordered by member, then by range."""

    received: tuple[tuple[TokenRange, ...], ...]  # from each member, in tokens of the sequence
    sent: tuple[tuple[TokenRange, ...], ...]  # to each member, in rows of this one

    @property
    def num_received(self) -> list[int]:
        return [sum(length for _, length in runs) for runs in self.received]

    @property
    def num_sent(self) -> list[int]:
        return [sum(length for _, length in runs) for runs in self.sent]


def ring_round_tokens(member_tokens: int) -> int:
    return max(ROUND_TOKENS, -(-member_tokens // ROUNDS))


def ring_rounds(deal: Deal, seen: Sequence[Sequence[TokenRange]], member: int) -> list[RingRound]:
    """The rounds of `member`; all members have the same number.

    `seen`: keys that each member's rows attend to, ascending.
    """
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
    """Yield (round, owner, receiver, tokens), nearest members first.

    If every member needs all tokens, every member sends and receives in every round.
    """
    ring = len(deal.members)
    max_tokens = ring_round_tokens(deal.num_tokens // ring)
    used: defaultdict[tuple[str, int, int], int] = defaultdict(int)  # tokens by direction, member and round
    num_full: defaultdict[tuple[str, int], int] = defaultdict(int)  # leading rounds without room
    for step in range(1, ring):
        for receiver in range(ring):
            owner = (receiver - step) % ring
            ends = (("from", owner), ("to", receiver))
            for start, length in _intersect(deal.members[owner], seen[receiver]):
                num_pieces = -(-length // max_tokens)
                for i in range(num_pieces):
                    low, high = i * length // num_pieces, (i + 1) * length // num_pieces
                    number = max(num_full[end] for end in ends)
                    while any(used[*end, number] + high - low > max_tokens for end in ends):
                        number += 1
                    for end in ends:
                        used[*end, number] += high - low
                        while used[*end, num_full[end]] >= max_tokens:
                            num_full[end] += 1
                    yield number, owner, receiver, (start + low, high - low)


def _intersect(a: Sequence[TokenRange], b: Sequence[TokenRange]) -> Iterator[TokenRange]:
    """Ranges of tokens that are in both."""
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(sum(a[i]), sum(b[j]))
        if start < stop:
            yield start, stop - start
        i, j = (i + 1, j) if sum(a[i]) <= sum(b[j]) else (i, j + 1)
