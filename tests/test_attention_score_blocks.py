"""The schedule covers every visible (row, key) exactly once, within the index range of a kernel."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaka.attention.docs import Docs
from ithaka.attention.score_blocks import (
    CAUSAL,
    EDGE,
    FULL,
    SQUARES,
    WINDOW,
    DocumentSpan,
    document_spans,
    forest_branches,
    plan_branch_blocks,
    plan_query_blocks,
    split_short_documents,
)
from ithaka.sharding.tokens import causal_pairs, shard_tokens


def visible(docs, causal, window):
    return {
        (i, j)
        for a, b in zip(docs, docs[1:], strict=False)
        for i in range(a, b)
        for j in range(a, i + 1 if causal else b)
        if window is None or j > i - window
    }


def split_squares(scores):
    for first, length in zip(accumulate((0, *scores.lengths)), scores.lengths, strict=False):
        yield replace(
            scores,
            q0=scores.q0 + first,
            k0=scores.k0 + first,
            rows=length,
            keys=length,
            mask=CAUSAL,
        )


def visits(blocks, window=None):
    for block in blocks:
        squares = [
            square for p in block.score_blocks if p.mask == SQUARES for square in split_squares(p)
        ]
        block = replace(
            block, score_blocks=(*(p for p in block.score_blocks if p.mask != SQUARES), *squares)
        )
        for c in range(block.count):
            for p, d in ((scores, d) for scores in block.score_blocks for d in range(scores.count)):
                assert block.count == 1 or p.count == 1
                shift = c * block.step + d * p.step
                for i in range(p.rows):
                    for j in range(p.keys):
                        if (p.mask == CAUSAL and j > i) or (p.mask == EDGE and j < i):
                            continue
                        if p.mask == WINDOW and not 0 <= p.keys - p.rows + i - j < window:
                            continue
                        yield p.q0 + i + shift, p.k0 + j + shift


def output_rows(blocks):
    return [
        block.start + c * block.step + t
        for block in blocks
        for c in range(block.count)
        for t in range(block.length)
    ]


@settings(max_examples=75, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    equal=st.integers(1, 4),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 14),
    block_q=st.integers(1, 16),
    block_kv=st.integers(1, 16),
    halve=st.booleans(),
    has_windows=st.booleans(),
    pieces=st.lists(st.integers(1, 20), max_size=6),
)
def test_every_visible_pair_is_scheduled_once(
    lengths, equal, causal, window, block_q, block_kv, halve, has_windows, pieces
):
    """The rows are all tokens, or every second range of `pieces`."""
    docs = [0]
    for length in lengths:
        for _ in range(equal):
            docs.append(docs[-1] + length)
    options = dict(
        causal=causal, window=window if causal else None, block_q=block_q, block_kv=block_kv
    )
    options |= dict(halve=halve, has_windows=has_windows)
    borders = [0, *(min(border, docs[-1]) for border in accumulate(pieces))]
    runs = [(a, b - a) for a, b in zip(borders[:-1:2], borders[1::2], strict=False) if b > a]
    rows = [
        token for start, length in runs or [(0, docs[-1])] for token in range(start, start + length)
    ]
    row_of = {token: row for row, token in enumerate(rows)}
    expected = sorted(
        (row_of[i], j) for i, j in visible(docs, causal, options["window"]) if i in row_of
    )
    blocks = list(plan_query_blocks(document_spans(tuple(docs), runs), **options))
    assert sorted(visits(blocks, window)) == expected
    assert sorted(output_rows(blocks)) == list(range(len(rows)))
    for block in blocks:
        for p in block.score_blocks:
            assert p.mask not in (CAUSAL, EDGE) or p.rows == p.keys


def path_of(docs, parents, node):
    """Return the tokens from the root to the end of a node."""
    prefix = path_of(docs, parents, parents[node]) if parents[node] >= 0 else []
    return prefix + list(range(docs[node], docs[node + 1]))


@settings(max_examples=75, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    links=st.lists(st.integers(-2, 8), min_size=9, max_size=9),
    window=st.none() | st.integers(1, 14),
    block_q=st.integers(1, 30),
    block_kv=st.integers(1, 30),
    max_rows=st.integers(1, 30),
    short=st.integers(0, 7),
)
def test_every_token_of_a_branch_attends_once_to_each_token_before_it(
    lengths, links, window, block_q, block_kv, max_rows, short
):
    """Nodes come in any order: children right after their parent, later, or after other trees."""
    docs = [0, *accumulate(lengths)]
    parents = [max(-1, min(link, node - 1)) for node, link in enumerate(links[: len(lengths)])]
    expected = []
    for node in range(len(lengths)):
        path = path_of(docs, parents, node)
        for i in range(len(path) - lengths[node], len(path)):
            expected += [
                (path[i], path[j]) for j in range(max(0, i + 1 - window) if window else 0, i + 1)
            ]
    branches = forest_branches(docs, parents)
    options = dict(causal=True, window=window, block_q=block_q, block_kv=block_kv)
    roots = [DocumentSpan(a, b - a, 0, b - a, 0) for a, b, depth, *_ in branches if not depth]
    blocks = [
        *plan_query_blocks(roots, **options),
        *plan_branch_blocks(branches, max_rows, short, **options),
    ]
    assert sorted(visits(blocks)) == sorted(expected)
    assert sorted(output_rows(blocks)) == list(range(docs[-1]))


def test_answers_share_calls():
    """A prompt and its first answer form a document; one more block pairs the prompt's keys with
    all other answers."""
    docs = (0, 32, *range(34, 49, 2))
    parents = (-1, *[0] * 8)
    branches = forest_branches(docs, parents)
    assert branches[0][:3] == (0, 34, 0) and {tuple(branch.path) for branch in branches[1:]} == {
        ((0, 32),)
    }
    (block,) = plan_branch_blocks(branches, 99, causal=True, window=None, block_q=99, block_kv=99)
    full, squares = block.score_blocks
    assert (full.rows, full.keys, squares.rows, squares.count) == (14, 32, 2, 7)
    branches[-2:] = [branches[-2]._replace(stop=49), branches[-1]._replace(start=49, stop=60)]
    (block,) = plan_branch_blocks(
        branches, 99, 99, causal=True, window=None, block_q=99, block_kv=99
    )
    assert block.score_blocks[1].lengths == (2, 2, 2, 2, 2, 5, 11) and len(block.score_blocks) == 2


@pytest.mark.parametrize("window", [5, 8, 9, 17, 100])
def test_batched_bands_never_overlap(window):
    """A batched call adds gradients of rows and of keys without atomics."""
    for block in plan_query_blocks(
        document_spans((0, 300)), causal=True, window=window, block_q=64, block_kv=64
    ):
        for p in block.score_blocks:
            assert block.count == 1 or block.step >= max(p.rows, p.keys)
            assert p.count == 1 or p.step >= max(p.rows, p.keys)


def test_a_short_window_needs_few_batched_calls():
    blocks = list(
        plan_query_blocks(
            document_spans((0, 1 << 20)),
            causal=True,
            window=4096,
            block_q=1 << 17,
            block_kv=1 << 16,
        )
    )
    assert sum(len(block.score_blocks) for block in blocks) < 40


def test_equal_documents_share_calls():
    docs = tuple(range(0, 1_024_001, 1024))
    blocks = list(
        plan_query_blocks(
            document_spans(docs), causal=True, window=None, block_q=1 << 17, block_kv=1 << 16
        )
    )
    assert len(blocks) == 8 and blocks[0].count == 128


MASKS = [
    dict(causal=True, window=None),
    dict(causal=True, window=4096),
    dict(causal=False, window=None),
]


def largest_call(blocks, row_elements):
    """Return the largest range of elements that one kernel call of this schedule addresses."""
    return max(
        ((b.count - 1) * b.step + (p.count - 1) * p.step + max(p.rows, p.keys)) * row_elements
        for b in blocks
        for p in b.score_blocks
    )


@pytest.mark.slow
@pytest.mark.parametrize("row_elements", [128, 4096, 64 * 256])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_no_call_exceeds_the_index_range_at_16m(row_elements, mask):
    """The blocks are those that `attention` chooses for 60 MB of L2."""
    most = (2**31 - 1) // row_elements
    tokens = 1 << 24
    for docs in ((0, tokens), tuple(range(0, tokens + 1, 1 << 10)), (0, 5, tokens)):
        for block_q in (1 << 17, 1 << 18):
            blocks = dict(block_q=min(block_q, most), block_kv=min(1 << 16, most))
            assert (
                largest_call(
                    plan_query_blocks(document_spans(docs), halve=True, **mask, **blocks),
                    row_elements,
                )
                <= 2**31 - 1
            )


def test_varlen_chunks_are_at_most_a_block():
    spans = document_spans(tuple(i * 1000 + i * (i - 1) // 2 for i in range(501)))
    blocked, chunks = split_short_documents(spans, short=8192, block=1 << 17)
    assert not blocked and all(sum(span.length for span in chunk) <= 1 << 17 for chunk in chunks)
    assert sorted(span for chunk in chunks for span in chunk) == spans


def test_only_short_unequal_consecutive_documents_are_chunked():
    spans = document_spans((0, 3, 7, 57, 59, 68, 77))
    assert split_short_documents(spans, short=10, block=16) == (spans[2:], [spans[:2]])


@pytest.mark.parametrize(
    "ring, context", [(2, 2**20), (4, 2**20), (2, 2**22), (4, 2**18), (3, 3 * 2**18)]
)
def test_rounds_of_a_ring_have_no_slivers(ring, context):
    """Blocks of fa4's backward on an H200 are multiples of its 132 SMs, and rounds are powers of
    2."""
    block_kv = 4 * 132 * 128
    docs = Docs((0, context), shard_tokens((0, context), ring, 8))
    options = dict(
        causal=True, window=None, block_q=4 * block_kv, block_kv=block_kv, call_tokens=4 * block_kv
    )
    rounds = docs.rounds()
    area = 0
    for part in range(len(rounds) + 1):
        blocks, _ = docs.plan(
            part, torch.device("cpu"), False, **options, halve=False, has_windows=True
        )
        score_blocks = [scores for block in blocks for scores in block.score_blocks]
        area += sum(scores.rows * scores.keys for scores in score_blocks if scores.mask == FULL)
        area += sum(
            scores.rows * (scores.rows + 1) // 2 for scores in score_blocks if scores.mask == CAUSAL
        )
        for block in blocks if part else ():
            received = sum(rounds[part - 1].num_received)
            fewest = max(1, round(received / block_kv))
            assert len(block.score_blocks) <= fewest + sum(map(len, rounds[part - 1].received)) - 1
            assert min(scores.keys for scores in block.score_blocks) >= min(block_kv, received) // 2
    rows = [token for start, length in docs.runs for token in (start, start + length)]
    assert area == sum(
        causal_pairs(b) - causal_pairs(a) for a, b in zip(rows[::2], rows[1::2], strict=True)
    )
