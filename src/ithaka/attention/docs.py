"""Packed documents and block masks, with the query blocks of attention, planned once and cached."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Unpack

import torch
from torch import Tensor

from ithaka.attention.score_blocks import (
    BlockOptions,
    DocumentSpan,
    KeyRange,
    MaskRange,
    QueryBlock,
    document_spans,
    forest_branches,
    plan_branch_blocks,
    plan_query_blocks,
    plan_range_blocks,
    split_by_part,
    split_short_documents,
    visible_keys,
)
from ithaka.config import ConfigError
from ithaka.facts.sizes import BLOCK_TOKENS
from ithaka.sharding.tokens import RingRound, TokenSharding, contiguous_sharding, ring_rounds

# Unequal documents of up to this length share calls of the varlen kernel. cuDNN is faster but plans
# each new shape (0.13 s for both directions), which only longer documents repay (measured at 128
# heads x layers).
SHORT_CALL_TOKENS = 32768


@dataclass(frozen=True)
class VarlenChunk:
    """The rows and keys of consecutive short documents, for one varlen call."""

    rows: slice
    keys: slice
    ends_d: Tensor
    longest: int

    @classmethod
    def from_spans(cls, spans: list[DocumentSpan], device: torch.device) -> "VarlenChunk":
        start = spans[0].start
        row = start + spans[0].shift
        ends = [0, *(span.start + span.length - start for span in spans)]
        return cls(
            rows=slice(row, row + ends[-1]),
            keys=slice(start, start + ends[-1]),
            ends_d=torch.tensor(ends, dtype=torch.int32, device=device),
            longest=max(span.length for span in spans),
        )


Plan = tuple[list[QueryBlock], list[VarlenChunk]]


class Docs:
    """The cumulative starts of packed documents, (0, ..., S), and the cached schedules over them.

    Create it once per batch: with thousands of documents, planning takes longer on the host than
    attention on the GPU, and each call would upload the varlen kernel's indices. With a
    `sharding`, the query rows are those of `member`, and the keys come in parts: its own, and those
    received in each of its `rounds`. `parents` makes them a forest (not in a ring): document i
    continues the earlier document parents[i] and attends to all of it and of its ancestors; -1: to
    itself only.
    """

    def __init__(
        self,
        starts: tuple[int, ...],
        sharding: TokenSharding | None = None,
        member: int = 0,
        parents: tuple[int, ...] = (),
    ) -> None:
        self.starts = starts
        self.sharding = sharding or contiguous_sharding(starts[-1], 1)
        self.parents = parents
        self.member = member
        self.runs = self.sharding.members[member]
        self.sent_bytes = 0  # by this member, so far
        self.local: dict[int, Any] = {}  # by halo: the LocalDocs of this rank (ops/state_graph.py)
        if starts[0] != 0 or any(b < a for a, b in pairwise(starts)):
            raise ConfigError(f"docs must ascend from 0, got {starts[:4]}...{starts[-2:]}")
        self.longest = max(b - a for a, b in pairwise(starts))
        self.branches = forest_branches(starts, parents)
        if self.branches:
            self.longest = max(each.depth + each.stop - each.start for each in self.branches)
        self._rounds: dict[tuple[bool, int | None], list[RingRound]] = {}
        self._chunked: dict[int, Docs] = {}
        self._plans: dict[tuple, list[Plan]] = {}

    def rounds(self, causal: bool = True, window: int | None = None) -> list[RingRound]:
        """The rounds in which this member receives others' keys: as many on all members, maybe
        none."""
        members = self.sharding.members
        if len(members) == 1:
            return []
        if (causal, window) not in self._rounds:
            spans = (document_spans(self.starts, runs) for runs in members)
            visible = [visible_keys(of_member, causal, window) for of_member in spans]
            self._rounds[causal, window] = ring_rounds(self.sharding, visible, self.member)
        return self._rounds[causal, window]

    def split(self, chunk: int) -> "Docs":
        """The same tokens, with each document cut into chunks of `chunk` tokens."""
        if chunk not in self._chunked:
            starts: list[int] = []
            parents: list[int] = []
            # per document: its last piece, and its length including ancestors
            ends: list[tuple[int, int]] = []
            for node, (a, b) in enumerate(pairwise(self.starts)):
                parent = self.parents[node] if self.parents else -1
                last, depth = ends[parent] if parent >= 0 else (-1, 0)
                for cut in (a, *range(a + chunk - depth % chunk, b, chunk)) if a < b else ():
                    starts.append(cut)
                    parents.append(last if cut == a and depth % chunk else -1)
                    last = len(starts) - 1
                ends.append((last, depth + b - a))
            tree = tuple(parents) if max(parents, default=-1) >= 0 else ()
            cuts = (*starts, self.starts[-1])
            self._chunked[chunk] = Docs(cuts, self.sharding, self.member, tree)
        return self._chunked[chunk]

    def num_keys(self, part: int, causal: bool, window: int | None) -> int:
        if part:
            return sum(self.rounds(causal, window)[part - 1].num_received)
        return sum(length for _, length in self.runs)

    def plan(
        self, part: int, device: torch.device, varlen: bool, **options: Unpack[BlockOptions]
    ) -> Plan:
        """Return the query blocks of a part of the keys and, with `varlen`, chunks of short
        documents (part 0 only)."""
        key = (device, varlen, *options.values())
        if key not in self._plans:
            self._plans[key] = self._plan_parts(device, varlen, options)
        return self._plans[key][part]

    def _plan_parts(self, device: torch.device, varlen: bool, options: BlockOptions) -> list[Plan]:
        block_q = options["block_q"]
        block_kv = options["block_kv"]
        spans = document_spans(self.starts, self.runs)
        if self.parents:
            roots = (branch for branch in self.branches if not branch.depth)
            spans = [DocumentSpan(a, b - a, 0, b - a, 0) for a, b, *_ in roots]
        # For documents that are complete on this rank, keys have the same offsets as rows.
        complete = [
            span._replace(start=span.start + span.shift, shift=0)
            for span in spans
            if span.is_complete
        ]
        chunks = []
        short = 0
        if varlen:
            short = min(SHORT_CALL_TOKENS, block_q, block_kv)
            block = max(block_q, options["call_tokens"])
            complete, unequal = split_short_documents(complete, short=short, block=block)
            chunks = [VarlenChunk.from_spans(chunk, device) for chunk in unequal]
        if self.parents:
            assert options["causal"]
            # Their sums are in buffers, for all heads of a call.
            max_rows = BLOCK_TOKENS["attend backward"] // max(1, block_q // self.starts[-1])
            cut_parts = [plan_branch_blocks(self.branches, max_rows, short, **options)]
        else:
            cut = [span for span in spans if not span.is_complete]
            blocks = plan_query_blocks(cut, **options | {"has_windows": False})
            rounds = self.rounds(options["causal"], options["window"])
            cut_parts = split_by_part(blocks, self._key_ranges(rounds), 1 + len(rounds), block_kv)
        own, *others = cut_parts
        plans: list[Plan] = [([*plan_query_blocks(complete, **options), *own], chunks)]
        return plans + [(blocks, []) for blocks in others]

    def _key_ranges(self, rounds: Sequence[RingRound]) -> list[KeyRange]:
        """Map the keys that this rank's rows attend to onto rows of k and v, part by part."""
        parts = [self.runs, *(list(chain.from_iterable(each.received)) for each in rounds)]
        keys = []
        for part, runs in enumerate(parts):
            row = 0
            for start, length in runs:
                keys.append(KeyRange(start, length, part, row - start))
                row += length
        return sorted(keys)


class BlockMask(Docs):
    """A block mask: for each (a, b, c, d), query rows [a, b) attend to keys [c, d)."""

    def __init__(self, ranges: Sequence[MaskRange], num_rows: int, num_keys: int) -> None:
        super().__init__((0, num_rows))
        self.ranges = tuple(ranges)
        self._num_keys = num_keys
        for mask_range in self.ranges:
            if len(mask_range) != 4:
                raise ConfigError(
                    f"ranges: {mask_range} has {len(mask_range)} numbers; use (a, b, c, d)"
                )
            a, b, c, d = mask_range
            if not (0 <= a < b <= num_rows and 0 <= c < d <= num_keys):
                raise ConfigError(
                    f"ranges: {(a, b, c, d)} is empty or out of range; use (a, b, c, d) with rows "
                    f"within [0, {num_rows}) and keys within [0, {num_keys})"
                )
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        """Go through the rows at which a range starts or ends: keys of ranges there must differ."""
        edges = [
            (row, row == r[0], number) for number, r in enumerate(self.ranges) for row in r[:2]
        ]
        active: list[tuple[int, int, int]] = []  # keys [c, d) and the range's number, ascending
        for _, is_start, number in sorted(edges):
            keys = (*self.ranges[number][2:], number)
            at = bisect_left(active, keys)
            if not is_start:
                del active[at]
                continue
            for c, d, other in active[max(0, at - 1) : at + 1]:
                if max(keys[0], c) < min(keys[1], d):
                    first, second = (self.ranges[i] for i in sorted((number, other)))
                    raise ConfigError(
                        f"ranges: {first} and {second} overlap and would count twice; shorten one"
                    )
            active.insert(at, keys)

    def num_keys(self, part: int, causal: bool, window: int | None) -> int:
        return self._num_keys

    def plan(
        self, part: int, device: torch.device, varlen: bool, **options: Unpack[BlockOptions]
    ) -> Plan:
        block_q = options["block_q"]
        block_kv = options["block_kv"]
        return plan_range_blocks(self.ranges, self.starts[-1], block_q, block_kv), []
