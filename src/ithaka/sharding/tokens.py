"""How the members of a ring share a sequence: the tokens of each member, and the rounds in which
they send k and v.

Members get equal tokens and about equal attention. A document goes to one member, longest document
first, each to the member with the least so far. A long document is cut: every member takes a piece
of its front and a piece of its back, which together have the document's average attention per
token. A single causal document is thus split in a zigzag.

In a round a member sends and receives at most `ring_round_tokens`, so that the buffers stay small
compared with its own tokens however large the ring is. Tokens that none of a member's rows attend
to are not sent to it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from ithaka.facts.sizes import ring_round_tokens

# Documents with more than this fraction of a member's attention are cut. Tried in this order.
CUT_THRESHOLDS = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 0.0)
MAX_IMBALANCE = 1.05

TokenRange = tuple[int, int]  # first token, number of tokens


@dataclass(frozen=True)
class TokenSharding:
    """The tokens of each ring member."""

    members: tuple[tuple[TokenRange, ...], ...]  # tokens of each member, ascending
    balance: float = 1.0  # causal pairs of the busiest member over the mean, ignoring windows

    @cached_property
    def num_tokens(self) -> int:
        return sum(map(_count_tokens, self.members))

    @cached_property
    def in_order(self) -> list[TokenRange]:
        """(row, length) of each range in sequence order, for rows concatenated member by member."""
        placed = []
        row = 0
        for start, length in chain.from_iterable(self.members):
            placed.append((start, row, length))
            row += length
        return [(row, length) for _, row, length in sorted(placed)]


def _count_tokens(ranges: Sequence[TokenRange]) -> int:
    return sum(length for _, length in ranges)


def contiguous_sharding(num_tokens: int, ring: int) -> TokenSharding:
    size = num_tokens // ring
    return TokenSharding(tuple(((member * size, size),) for member in range(ring)))


def shard_tokens(starts: Sequence[int], ring: int, ulysses: int) -> TokenSharding:
    """Return the balanced sharding that cuts fewest documents, or the best balanced one. `starts`:
    of documents, (0, ..., S). Tokens from S to a multiple of ring * ulysses are padding."""
    size = -(-starts[-1] // (ring * ulysses)) * ulysses
    if ring == 1:
        return contiguous_sharding(size, 1)
    best = TokenSharding((), balance=float("inf"))
    for threshold in CUT_THRESHOLDS:
        sharding = _shard_documents(starts, ring, size, threshold)
        if sharding.balance < best.balance:
            best = sharding
        if best.balance <= MAX_IMBALANCE:
            break
    return best


def causal_pairs(rows: int) -> int:
    """Query-key pairs of a document's first `rows` tokens."""
    return rows * (rows + 1) // 2


def _shard_documents(
    starts: Sequence[int], ring: int, size: int, threshold: float
) -> TokenSharding:
    documents = sorted((a - b, a) for a, b in pairwise(starts))  # longest first
    mean = max(1.0, sum(causal_pairs(-length) for length, _ in documents) / ring)
    members: list[list[TokenRange]] = [[] for _ in range(ring)]
    rooms = [size] * ring
    pairs = [0] * ring
    unplaced = []

    def assign(member: int, start: int, length: int, depth: int) -> None:
        """`depth`: tokens of the document before `start`."""
        if length:
            members[member].append((start, length))
            rooms[member] -= length
            pairs[member] += causal_pairs(depth + length) - causal_pairs(depth)

    def cut(start: int, length: int) -> None:
        front = start
        back = start + length
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
            member = min(with_room, key=lambda m: pairs[m] / mean - rooms[m] / size)
            assign(member, start, length, 0)
        else:
            unplaced.append((start, length))
    for start, length in unplaced:
        cut(start, length)
    padding = starts[-1]
    for member, room in enumerate(rooms):
        if room:
            members[member].append((padding, room))
        padding += room
    merged = tuple(tuple(_merge(sorted(ranges))) for ranges in members)
    return TokenSharding(merged, max(pairs) * ring / max(1, sum(pairs)))


def _shares(length: int, rooms: Sequence[int]) -> Iterator[int]:
    """Divide `length` in proportion to the rooms."""
    before = 0
    room = sum(rooms)
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
            start = following
            length = more
    yield start, length


# ---- rounds


@dataclass(frozen=True)
class RingRound:
    """One member's part of a round. Received tokens are ordered by member, then by range."""

    received: tuple[tuple[TokenRange, ...], ...]  # from each member, in tokens of the sequence
    sent: tuple[tuple[TokenRange, ...], ...]  # to each member, in rows of this one

    @property
    def num_received(self) -> list[int]:
        return list(map(_count_tokens, self.received))

    @property
    def num_sent(self) -> list[int]:
        return list(map(_count_tokens, self.sent))


def ring_rounds(
    sharding: TokenSharding, seen: Sequence[Sequence[TokenRange]], member: int
) -> list[RingRound]:
    """The rounds of `member`; all members have the same number. `seen`: keys that each member's
    rows attend to, ascending."""
    ring = len(sharding.members)
    own = sharding.members[member]
    firsts = [first for first, _ in own]
    row_of = [0, *accumulate(length for _, length in own)]
    # by round and member
    received: defaultdict[tuple[int, int], list[TokenRange]] = defaultdict(list)
    sent: defaultdict[tuple[int, int], list[TokenRange]] = defaultdict(list)
    num_rounds = 0
    for transfer in _transfers(sharding, seen):
        num_rounds = max(num_rounds, transfer.round + 1)
        start = transfer.start
        if transfer.receiver == member:
            received[transfer.round, transfer.owner].append((start, transfer.length))
        elif transfer.owner == member:
            run = bisect_right(firsts, start) - 1
            row = row_of[run] + start - firsts[run]
            sent[transfer.round, transfer.receiver].append((row, transfer.length))
    rounds = []
    for number in range(num_rounds):
        from_each = tuple(tuple(received[number, other]) for other in range(ring))
        to_each = tuple(tuple(sent[number, other]) for other in range(ring))
        rounds.append(RingRound(from_each, to_each))
    return rounds


class _Transfer(NamedTuple):
    """Tokens [start, start + length) of the sequence."""

    round: int
    owner: int
    receiver: int
    start: int
    length: int


def _transfers(
    sharding: TokenSharding, seen: Sequence[Sequence[TokenRange]]
) -> Iterator[_Transfer]:
    """Nearest members first. If all members need all tokens, all send and receive every round."""
    ring = len(sharding.members)
    max_tokens = ring_round_tokens(sharding.num_tokens // ring)
    # tokens by direction, member and round
    used: defaultdict[tuple[str, int, int], int] = defaultdict(int)
    num_full: defaultdict[tuple[str, int], int] = defaultdict(int)  # leading rounds without room
    for step in range(1, ring):
        for receiver in range(ring):
            owner = (receiver - step) % ring
            ends = (("from", owner), ("to", receiver))
            for start, length in _intersect(sharding.members[owner], seen[receiver]):
                num_pieces = -(-length // max_tokens)
                for i in range(num_pieces):
                    low = i * length // num_pieces
                    high = (i + 1) * length // num_pieces
                    number = max(num_full[end] for end in ends)
                    while any(used[*end, number] + high - low > max_tokens for end in ends):
                        number += 1
                    for end in ends:
                        used[*end, number] += high - low
                        while used[*end, num_full[end]] >= max_tokens:
                            num_full[end] += 1
                    yield _Transfer(number, owner, receiver, start + low, high - low)


def _intersect(a: Sequence[TokenRange], b: Sequence[TokenRange]) -> Iterator[TokenRange]:
    """Ranges of tokens that are in both."""
    i = j = 0
    while i < len(a) and j < len(b):
        start = max(a[i][0], b[j][0])
        stop = min(sum(a[i]), sum(b[j]))
        if start < stop:
            yield start, stop - start
        if sum(a[i]) <= sum(b[j]):
            i += 1
        else:
            j += 1
