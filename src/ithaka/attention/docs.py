"""Packed documents and block masks: the query blocks of attention over them, planned once and cached."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ithaka.attention.score_blocks import (
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
from ithaka.plan.layer_bytes import BLOCK_TOKENS
from ithaka.sharding.tokens import RingRound, TokenSharding, contiguous_sharding, ring_rounds

# Documents of unequal length up to this one share calls of the varlen kernel. cuDNN is faster at every length but plans
# each new shape (0.13 s for both directions), which only longer documents repay (measured at 128 heads x layers).
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
        start, shift = spans[0].start, spans[0].shift
        ends = [0, *(span.start + span.length - start for span in spans)]
        keys, rows = (slice(a, a + ends[-1]) for a in (start, start + shift))
        longest = max(span.length for span in spans)
        return cls(rows, keys, torch.tensor(ends, dtype=torch.int32, device=device), longest)


class Docs:
    """The cumulative starts of packed documents, (0, ..., S), and the cached schedules over them.

    Create it once per batch and pass it to every call of attention: with thousands of documents, planning the schedule
    takes longer on the host than attention takes on the GPU, and each call would upload the varlen kernel's indices.
    With a `sharding`, the query rows are those of `member`, and the keys come in parts: its own, and those received in
    each of its `rounds`. `parents` makes them a forest (not in a ring): document i continues the earlier document
    parents[i] and attends to all of it and of its ancestors; -1: to itself only.
    """

    def __init__(
        self,
        starts: tuple[int, ...],
        sharding: TokenSharding | None = None,
        member: int = 0,
        parents: tuple[int, ...] = (),
    ) -> None:
        self.starts, self.sharding, self.parents = starts, sharding or contiguous_sharding(starts[-1], 1), parents
        self.member, self.runs = member, self.sharding.members[member]
        self.sent_bytes = 0  # by this member, so far
        self.local: dict[int, Any] = {}  # by halo: the LocalDocs of this rank (ops/scan.py)
        if starts[0] != 0 or any(b < a for a, b in zip(starts, starts[1:], strict=False)):
            raise ConfigError(f"docs must ascend from 0, got {starts[:4]}...{starts[-2:]}")
        self.longest = max(b - a for a, b in zip(starts, starts[1:], strict=False))
        self.branches = forest_branches(starts, parents)
        if self.branches:
            self.longest = max(branch.depth + branch.stop - branch.start for branch in self.branches)
        self._rounds: dict[tuple[bool, int | None], list[RingRound]] = {}
        self._chunked: dict[int, Docs] = {}
        self._plans: dict[tuple, list[tuple[list[QueryBlock], list[VarlenChunk]]]] = {}

    def rounds(self, causal: bool = True, window: int | None = None) -> list[RingRound]:
        """The rounds in which this member receives other members' keys: as many on all members, maybe none."""
        if (causal, window) not in self._rounds:
            members = self.sharding.members if len(self.sharding.members) > 1 else ()
            visible = [visible_keys(document_spans(self.starts, runs), causal, window) for runs in members]
            self._rounds[causal, window] = ring_rounds(self.sharding, visible, self.member) if members else []
        return self._rounds[causal, window]

    def split(self, chunk: int) -> "Docs":
        """The same tokens, with each document cut into chunks of `chunk` tokens."""
        if chunk not in self._chunked:
            starts: list[int] = []
            parents: list[int] = []
            ends: list[tuple[int, int]] = []  # per document: its last piece, and its length including ancestors
            for node, (a, b) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
                parent = self.parents[node] if self.parents else -1
                last, depth = ends[parent] if parent >= 0 else (-1, 0)
                for cut in (a, *range(a + chunk - depth % chunk, b, chunk)) if a < b else ():
                    starts.append(cut)
                    parents.append(last if cut == a and depth % chunk else -1)
                    last = len(starts) - 1
                ends.append((last, depth + b - a))
            tree = tuple(parents) if max(parents, default=-1) >= 0 else ()
            self._chunked[chunk] = Docs((*starts, self.starts[-1]), self.sharding, self.member, tree)
        return self._chunked[chunk]

    def num_keys(self, part: int, causal: bool, window: int | None) -> int:
        if part:
            return sum(self.rounds(causal, window)[part - 1].num_received)
        return sum(length for _, length in self.runs)

    def plan(
        self, part: int, device: torch.device, varlen: bool, **options: Any
    ) -> tuple[list[QueryBlock], list[VarlenChunk]]:
        """Return the query blocks of a part of the keys and, with `varlen`, chunks of short documents (part 0 only).

        `options`: those of `plan_query_blocks`.
        """
        key = (device, varlen, *options.values())
        if key not in self._plans:
            spans, chunks = document_spans(self.starts, self.runs), []
            if self.parents:
                spans = [DocumentSpan(a, b - a, 0, b - a, 0) for a, b, depth, *_ in self.branches if not depth]
            # For documents that are complete on this rank, keys have the same offsets as rows.
            complete = [span._replace(start=span.start + span.shift, shift=0) for span in spans if span.is_complete]
            short = min(SHORT_CALL_TOKENS, options["block_q"], options["block_kv"]) if varlen else 0
            if varlen:
                complete, short_chunks = split_short_documents(
                    complete, short=short, block=max(options["block_q"], options["call_tokens"])
                )
                chunks = [VarlenChunk.from_spans(chunk, device) for chunk in short_chunks]
            mask = options["causal"], options["window"]
            cut = plan_query_blocks(
                [span for span in spans if not span.is_complete], **options | {"has_windows": False}
            )
            num_parts, block_kv = 1 + len(self.rounds(*mask)), options["block_kv"]
            own, *others = split_by_part(cut, self._key_ranges(*mask), num_parts, block_kv)
            if self.parents:
                assert options["causal"]
                # Their sums are in buffers, for all heads of a call.
                max_rows = BLOCK_TOKENS["attend backward"] // max(1, options["block_q"] // self.starts[-1])
                own = plan_branch_blocks(self.branches, max_rows, short, **options)
            self._plans[key] = [
                ([*plan_query_blocks(complete, **options), *own], chunks),
                *((blocks, []) for blocks in others),
            ]
        return self._plans[key][part]

    def _key_ranges(self, causal: bool, window: int | None) -> list[KeyRange]:
        """Map the keys that this rank's rows attend to onto rows of k and v, part by part."""
        parts = [self.runs, *([run for runs in r.received for run in runs] for r in self.rounds(causal, window))]
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
        self.ranges, self._num_keys = tuple(ranges), num_keys
        for mask_range in self.ranges:
            if len(mask_range) != 4:
                raise ConfigError(f"ranges: {mask_range} has {len(mask_range)} numbers; use (a, b, c, d)")
            a, b, c, d = mask_range
            if not (0 <= a < b <= num_rows and 0 <= c < d <= num_keys):
                limits = f"rows within [0, {num_rows}) and keys within [0, {num_keys})"
                raise ConfigError(f"ranges: {(a, b, c, d)} is empty or out of range; use (a, b, c, d) with {limits}")
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        """Go through the rows at which a range starts or ends. The keys of the ranges there must not overlap."""
        edges = [(row, row == r[0], number) for number, r in enumerate(self.ranges) for row in r[:2]]
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
                    raise ConfigError(f"ranges: {first} and {second} overlap and would count twice; shorten one")
            active.insert(at, keys)

    def num_keys(self, part: int, causal: bool, window: int | None) -> int:
        return self._num_keys

    def plan(
        self, part: int, device: torch.device, varlen: bool, **options: Any
    ) -> tuple[list[QueryBlock], list[VarlenChunk]]:
        return plan_range_blocks(self.ranges, self.starts[-1], options["block_q"], options["block_kv"]), []
