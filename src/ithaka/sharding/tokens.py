"""How the members of a ring share a sequence: the tokens of each member, and the rounds in which they send k and v.

Members get equal tokens and about equal attention. A document goes to one member, longest document first, each to the
member with the least so far. A long document is cut: every member takes a piece of its front and a piece of its back,
which together have the document's average attention per token. A single causal document is thus split in a zigzag.

In a round a member sends and receives at most `ring_round_tokens`, so that the buffers stay small compared with its own
tokens however large the ring is. Tokens that none of a member's rows attend to are not sent to it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

# Documents with more than this fraction of a member's attention are cut. Tried in this order.
CUT_THRESHOLDS = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 0.0)
MAX_IMBALANCE = 1.05
ROUNDS = 8  # rounds to send a member's tokens
ROUND_TOKENS = 32768  # minimum tokens per round: kernels are slow on few keys

TokenRange = tuple[int, int]  # first token, number of tokens


@dataclass(frozen=True)
class TokenSharding:
    """The tokens of each ring member."""

    members: tuple[tuple[TokenRange, ...], ...]  # tokens of each member, ascending
    balance: float = 1.0  # causal query-key pairs of the busiest member over the mean, ignoring windows

    @cached_property
    def num_tokens(self) -> int:
        return sum(length for ranges in self.members for _, length in ranges)

    @cached_property
    def in_order(self) -> list[TokenRange]:
        """(row, length) of each range in sequence order, for rows concatenated member by member."""
        placed, row = [], 0
        for start, length in (token_range for ranges in self.members for token_range in ranges):
            placed.append((start, row, length))
            row += length
        return [(row, length) for _, row, length in sorted(placed)]


def contiguous_sharding(num_tokens: int, ring: int) -> TokenSharding:
    size = num_tokens // ring
    return TokenSharding(tuple(((member * size, size),) for member in range(ring)))


def shard_tokens(starts: Sequence[int], ring: int, ulysses: int) -> TokenSharding:
    """Return the balanced sharding that cuts fewest documents, or the best balanced one. `starts`: cumulative starts of
    documents, (0, ..., S). Tokens from S to a multiple of ring * ulysses are padding."""
    size = -(-starts[-1] // (ring * ulysses)) * ulysses
    if ring == 1:
        return contiguous_sharding(size, 1)
    best = TokenSharding((), balance=float("inf"))
    for threshold in CUT_THRESHOLDS:
        best = min(best, _shard_documents(starts, ring, size, threshold), key=lambda sharding: sharding.balance)
        if best.balance <= MAX_IMBALANCE:
            break
    return best


def causal_pairs(rows: int) -> int:
    """Query-key pairs of a document's first `rows` tokens."""
    return rows * (rows + 1) // 2


def _shard_documents(starts: Sequence[int], ring: int, size: int, threshold: float) -> TokenSharding:
    documents = sorted((a - b, a) for a, b in pairwise(starts))  # longest first
    mean = max(1.0, sum(causal_pairs(-length) for length, _ in documents) / ring)
    members: list[list[TokenRange]] = [[] for _ in range(ring)]
    rooms, pairs, unplaced = [size] * ring, [0] * ring, []

    def assign(member: int, start: int, length: int, depth: int) -> None:
        """`depth`: tokens of the document before `start`."""
        if length:
            members[member].append((start, length))
            rooms[member] -= length
            pairs[member] += causal_pairs(depth + length) - causal_pairs(depth)

    def cut(start: int, length: int) -> None:
        front, back = start, start + length
        for member, share in enumerate(_shares(length, rooms)):
            assign(member, front, -(-share // 2), front - start)
            front += -(-share // 2)
            back -= share // 2
            assign(member, back, share // 2, back - start)

    for negative, start in documents:
        length = -negative
        if causal_pairs(length) > threshold * mean:
            cut(start, length)
            continue
        with_room = [member for member in range(ring) if rooms[member] >= length]
        if with_room:
            # Use up tokens and attention at the same pace.
            assign(min(with_room, key=lambda m: pairs[m] / mean - rooms[m] / size), start, length, 0)
        else:
            unplaced.append((start, length))
    for start, length in unplaced:
        cut(start, length)
    padding = starts[-1]
    for member, room in enumerate(tuple(rooms)):
        members[member] += [(padding, room)] if room else []
        padding += room
    merged = tuple(tuple(_merge(sorted(ranges))) for ranges in members)
    return TokenSharding(merged, max(pairs) * ring / max(1, sum(pairs)))


def _shares(length: int, rooms: Sequence[int]) -> Iterator[int]:
    """Divide `length` in proportion to the rooms."""
    before, room = 0, sum(rooms)
    for own in rooms:
        yield (before + own) * length // room - before * length // room
        before += own


def _merge(ranges: Sequence[TokenRange]) -> Iterator[TokenRange]:
    """Merge adjacent ranges."""
    start, length = ranges[0]
    for following, more in ranges[1:]:
        if following == start + length:
            length += more
        else:
            yield start, length
            start, length = following, more
    yield start, length


# ---- rounds


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


def ring_rounds(sharding: TokenSharding, seen: Sequence[Sequence[TokenRange]], member: int) -> list[RingRound]:
    """The rounds of `member`; all members have the same number. `seen`: keys that each member's rows attend to,
    ascending."""
    ring, own = len(sharding.members), sharding.members[member]
    firsts, row_of = [first for first, _ in own], [0, *accumulate(length for _, length in own)]
    received, sent = (defaultdict[tuple[int, int], list[TokenRange]](list) for _ in range(2))
    num_rounds = 0
    for number, owner, receiver, (start, length) in _transfers(sharding, seen):
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


def _transfers(
    sharding: TokenSharding, seen: Sequence[Sequence[TokenRange]]
) -> Iterator[tuple[int, int, int, TokenRange]]:
    """Yield (round, owner, receiver, tokens), nearest members first. If every member needs all tokens, every member
    sends and receives in every round."""
    ring = len(sharding.members)
    max_tokens = ring_round_tokens(sharding.num_tokens // ring)
    used: defaultdict[tuple[str, int, int], int] = defaultdict(int)  # tokens by direction, member and round
    num_full: defaultdict[tuple[str, int], int] = defaultdict(int)  # leading rounds without room
    for step in range(1, ring):
        for receiver in range(ring):
            owner = (receiver - step) % ring
            ends = (("from", owner), ("to", receiver))
            for start, length in _intersect(sharding.members[owner], seen[receiver]):
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
