"""Attention matches its plain reference in fp64: output, lse and every gradient; wrong indices show
at 1e-10."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

import fake_fa4
from ithaka.attention import blocks as op
from ithaka.attention.blocks import AttentionSpec, attention, attention_backward
from ithaka.attention.choose import resolve_kernel
from ithaka.attention.docs import BlockMask, Docs
from ithaka.attention.kernels import KERNELS
from ithaka.attention.score_blocks import document_spans, plan_query_blocks
from ithaka.comm.exchange import SINGLE_RANK
from ithaka.config import ConfigError
from ithaka.facts import sizes as facts_sizes
from ithaka.facts.heads import EMPTY_SLOT, head_table
from ithaka.layer.stages import StagedAttention
from ithaka.sharding import tokens as ring_plan
from reference import attention_mask, attention_reference

SCALE = 0.37


def inputs(num_tokens, n, m, head_dim=16, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [
        (num_tokens, n, head_dim),
        (num_tokens, m, head_dim),
        (num_tokens, m, head_dim),
        (num_tokens, n, head_dim),
    ]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def run_both(q, k, v, dout, *, kernel="auto", blocks=None, **mask):
    """Return (out, lse, dq, dk, dv) of the op, and of the reference in fp64."""
    out, lse = attention(q, k, v, scale=SCALE, kernel=kernel, blocks=blocks, **mask)
    grads = attention_backward(
        dout, q, k, v, out.clone(), lse, scale=SCALE, kernel=kernel, blocks=blocks, **mask
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    ref_out, ref_lse = attention_reference(*leaves, scale=SCALE, **mask)
    ref_grads = torch.autograd.grad(ref_out, leaves, dout.double())
    return (out, lse, *grads), (ref_out, ref_lse, *ref_grads)


def assert_equal(ours, theirs, tolerance=1e-10):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert torch.isfinite(a).all(), name
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1), name


# Nodes of 30, 1, 9, 5, 5, 6, 14 and 31 tokens; the last three continue the first and the third.
FOREST = Docs((0, 30, 31, 40, 45, 50, 56, 70, 101), parents=(-1, 0, -1, 1, 1, 0, 2, 6))
MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window 9": {"window": 9},
    "window 1": {"window": 1},
    "window 2": {"window": 2},
    "window 40": {"window": 40},
    "window beyond the sequence": {"window": 500},
    "docs": {"docs": (0, 1, 30, 31, 64, 101)},
    "equal docs": {"docs": (0, 20, 40, 60, 80, 101)},
    "equal docs, window": {"docs": (0, 20, 40, 60, 80, 101), "window": 6},
    "docs, bidirectional": {"docs": (0, 20, 40, 60, 60, 101), "causal": False},
    "docs, window": {"docs": (0, 3, 60, 101), "window": 12},
}
FORESTS = {
    "answers": {"docs": Docs((0, 40, 55, 70, 85, 101), parents=(-1, 0, 0, 0, 0))},
    "forest": {"docs": FOREST},
    "forest, window": {"docs": FOREST, "window": 9},
}
MASKS |= FORESTS


BLOCKS = {
    "cpu": [(13, 9), None, (16, 32), (32, 16), (200, 16)],
    "reference": [(32, 16)],
    "fa4": [(26, 18), None, (900, 90)],
}


@pytest.mark.parametrize("kernel", BLOCKS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_fp64_matches_the_reference(fa4, mask, kernel, pytestconfig):
    """Groups of three heads run with one block size, with --slow with all of them, other groupings
    with the first."""
    slow = pytestconfig.getoption("--slow")
    cases = [((6, 2), blocks) for blocks in BLOCKS[kernel][: None if slow else 1]]
    if kernel != "reference" and (slow or mask in list(MASKS)[::3]):
        cases += [((2, 2), BLOCKS[kernel][0]), ((4, 1), BLOCKS[kernel][0])]
    for heads, blocks in cases:
        ours, theirs = run_both(*inputs(101, *heads), kernel=kernel, blocks=blocks, **MASKS[mask])
        assert_equal(ours, theirs)


IN_RING = [{}, {"window": 3}, {"window": 20}, {"causal": False}]
MANY_DOCS = (0, 5, 9, 40, 41, 73, 77, 82, 96)


@pytest.mark.parametrize("kernel", ["fa4"])
@pytest.mark.parametrize(
    "starts, mask",
    [
        (MANY_DOCS, IN_RING[1]),
        ((0, 96), {}),
        *(
            pytest.param(MANY_DOCS, mask, marks=pytest.mark.slow)
            for mask in (*IN_RING[::2], *IN_RING[3::2])
        ),
        pytest.param((0, 96), IN_RING[2], marks=pytest.mark.slow),
        pytest.param(tuple(range(0, 97, 8)), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_members_of_a_ring_compute_full_attention_together(fa4, kernel, mask, starts, monkeypatch):
    """Each member's rows receive keys in parts, and dk and dv add up. Keys that no row attends to
    are not sent."""
    q, k, v, dout = inputs(96, 4, 2)
    _, (out, lse, dq, dk, dv) = run_both(q, k, v, dout, docs=starts, **mask)
    monkeypatch.setattr(facts_sizes, "ROUND_TOKENS", 20)
    uncut = ring_plan.shard_tokens(starts, 2, 4)
    monkeypatch.setattr(ring_plan, "CUT_THRESHOLDS", (0.0,))
    for sharding in (
        uncut,
        ring_plan.shard_tokens(starts, 3, 1),
        ring_plan.contiguous_sharding(96, 4),
    ):
        sums = (torch.zeros_like(k), torch.zeros_like(v))
        for member, runs in enumerate(sharding.members):
            docs = Docs(starts, sharding, member)
            mine = tokens_of(runs)
            parts = [
                mine,
                *([t for of in r.received for t in tokens_of(of)] for r in docs.rounds(**mask)),
            ]
            assert set(sum(parts[1:], [])) <= visible_keys(mine, starts, **mask) - set(mine)
            options = {"scale": SCALE, "docs": docs, "kernel": kernel, "blocks": (24, 20), **mask}
            result = (
                torch.zeros_like(q[mine]),
                torch.full((4, len(mine)), -torch.inf, dtype=q.dtype),
            )
            for part, keys in enumerate(parts):
                attention(q[mine], k[keys], v[keys], part=part, sums=result, **options)
            of_q = torch.zeros_like(q[mine])
            for part, keys in enumerate(parts):
                rows = (dout[mine], q[mine], k[keys], v[keys], *result)
                _, *of_keys = attention_backward(*rows, part=part, dq=of_q, **options)
                for total, d in zip(sums, of_keys, strict=True):
                    total[keys] += d
            assert_equal((*result, of_q, *sums), (out[mine], lse[:, mine], dq[mine], *sums))
        assert_equal((out, lse, dq, *sums), (out, lse, dq, dk, dv))


@pytest.fixture
def written(fa4, monkeypatch):
    """For each call of the kernel's backward, record whether it writes dk and dv to our buffers."""
    for dtype, group in product(KERNELS["fa4"].dtypes, (1, 2, 3)):
        # so that its trial is over
        resolve_kernel("fa4", torch.device("cpu"), dtype, 16, group=group)
    calls = []
    backward = fake_fa4._flash_attn_bwd

    def record_and_call(*inputs, dk, dv, **options):
        assert (dk is None) == (dv is None)
        calls.append(dk is not None)
        return backward(*inputs, dk=dk, dv=dv, **options)

    monkeypatch.setattr(fake_fa4, "_flash_attn_bwd", record_and_call)
    return calls


ONE_CALL = {
    **{mask: (6, 2, {}) for mask in MASKS if mask not in FORESTS},
    "one group at a time": (6, 2, {"CALL_TOKENS": 350}),
    "one head at a time": (2, 2, {"CALL_TOKENS": 101}),
    "one group with as many tokens as can be addressed": (
        6,
        2,
        {"CALL_TOKENS": 350, "MAX_ELEMENTS": 101 * 6 * 16},
    ),
}
SEVERAL_CALLS = {
    "causal": (2, 2, {"blocks": (200, 50)}),
    "bidirectional": (2, 2, {"blocks": (50, 200)}),  # each row's keys are one score block
    "window 9": (2, 2, {"blocks": (50, 200)}),
    "docs": (2, 2, {"blocks": (30, 30)}),
    "equal docs": (6, 2, {"CALL_TOKENS": 250}),  # two of a group's three heads
    **{mask: (6, 2, {}) for mask in FORESTS},  # several calls read a shared key
}


@pytest.mark.parametrize(
    "mask, case, once",
    [*((*item, True) for item in ONE_CALL.items()), *((*x, False) for x in SEVERAL_CALLS.items())],
)
def test_the_kernel_writes_gradients_of_keys_that_take_one_call(
    written, monkeypatch, mask, case, once
):
    n, m, options = case
    for limit in ("CALL_TOKENS", "MAX_ELEMENTS"):
        monkeypatch.setattr(op, limit, options.get(limit, getattr(op, limit)))
    options = MASKS.get(mask, {}) | {"kernel": "fa4", "blocks": options.get("blocks")}
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        q, k, v, dout = inputs(101, n, m, dtype=dtype)
        written.clear()
        ours, theirs = run_both(q, k, v, dout, **options)
        assert_equal(ours, theirs, tolerance)
        assert written and set(written) == {once}
    q, k, v, dout = (x.bfloat16() for x in (q, k, v, dout))
    out, lse = attention(q, k, v, scale=SCALE, **options)
    _, dk, dv = attention_backward(dout, q, k, v, out.clone(), lse, scale=SCALE, **options)
    assert dk.dtype == dv.dtype == (torch.bfloat16 if once else torch.float32)
    # Parts of a ring, or stages, add to these sums.
    for more in (
        {"dq": torch.zeros(q.shape)},
        {"sums": (torch.zeros(k.shape), torch.zeros(v.shape))},
    ):
        written.clear()
        _, *grads = attention_backward(
            dout, q, k, v, out.clone(), lse, scale=SCALE, **options, **more
        )
        assert not any(written) and {x.dtype for x in grads} == {torch.float32}


def test_keys_that_no_row_attends_to_get_zeros(written):
    """The calls have the right number of keys, but some keys twice and others never."""
    q, k, v, dout = inputs(20, 2, 1)
    options = {
        "scale": SCALE,
        "kernel": "fa4",
        "causal": False,
        "docs": BlockMask([(0, 10, 0, 5), (10, 20, 0, 5)], 20, 10),
    }
    out, lse = attention(q, k[:10], v[:10], **options)
    _, *grads = attention_backward(dout, q, k[:10], v[:10], out, lse, **options)
    assert not any(written) and all((d[5:] == 0).all() and (d[:5] != 0).all() for d in grads)


# Query heads, kv heads, Ulysses ranks, heads per stage; by rank, whether the kernel writes each
# load's dk and dv.
WRITTEN_LOADS = {
    (6, 2, 1, None): [[True]],
    (4, 2, 1, 2): [[True, True]],
    (4, 1, 1, 2): [[False]],  # two stages
    (6, 2, 1, 4): [[False]],  # groups of 3 and 1, then of 2
    (3, 3, 2, None): [[False], [True]],  # the first has an empty slot
    (3, 1, 2, None): [[True], [True]],
    (12, 4, 2, 4): [[False, False], [False, False]],
}


@pytest.mark.parametrize("heads", WRITTEN_LOADS, ids=str)
def test_the_kernel_writes_only_loads_that_one_read_covers(written, heads):
    table = head_table(*heads)
    options = AttentionSpec(scale=SCALE, docs=Docs((0, 7, 30, 41)), kernel="fa4")
    q, k, v, dout = inputs(41, *heads[:2])
    for rank, expected in enumerate(WRITTEN_LOADS[heads]):
        staged = StagedAttention(table, rank, SINGLE_RANK, options)
        dqs = torch.zeros_like(q)
        dkvs = {}
        ways = {}
        for i, stage in enumerate(table.stages):
            of_stage = list(stage.query_heads[rank])
            kv_transfer = (
                None
                if stage.kv_transfer is None
                else list(table.kv_transfers[stage.kv_transfer].kv_heads[rank])
            )
            kv = () if kv_transfer is None else (k[:, kv_transfer], v[:, kv_transfer])
            out, lse = staged.attend(stage, q[:, of_stage], *kv)
            written.clear()
            dq = staged.attend_backward(stage, q[:, of_stage], out, dout[:, of_stage], *kv, lse)
            for read in stage.reads[rank]:
                ways.setdefault(read.kv_transfer, set()).update(written)
            at = [slot for slot, head in enumerate(of_stage) if head != EMPTY_SLOT]
            dqs[:, [of_stage[slot] for slot in at]] = dq[:, at]
            for ending in table.kv_transfers_ending(i):
                dkvs[ending] = list(staged.take_grads(ending))
        assert [ways[kv_transfer] for kv_transfer in range(len(table.kv_transfers))] == [
            {once} for once in expected
        ]
        mine = sorted(
            {head for stage in table.stages for head in stage.query_heads[rank]} - {EMPTY_SLOT}
        )
        of_k = [head // (heads[0] // heads[1]) for head in mine]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        taken = [leaf[:, of] for leaf, of in zip(leaves, (mine, of_k, of_k), strict=True)]
        ref_out, _ = attention_reference(*taken, scale=SCALE, docs=options["docs"].starts)
        theirs = torch.autograd.grad(ref_out, leaves, dout[:, mine])
        assert (dqs - theirs[0]).abs().max() < 1e-10
        for number, kv_transfer in enumerate(table.kv_transfers):
            for ours, exact in zip(dkvs[number], theirs[1:], strict=True):
                for slot, head in enumerate(kv_transfer.kv_heads[rank]):
                    assert (
                        ours[:, slot] - (0 if head == EMPTY_SLOT else exact[:, head])
                    ).abs().max() < 1e-10


def tokens_of(runs):
    return [t for start, length in runs for t in range(start, start + length)]


def visible_keys(rows, starts, causal=True, window=None):
    """Return the keys that any of these rows attends to, found token by token."""
    keys = set()
    for row in rows:
        start = max(s for s in starts if s <= row)
        end = min(s for s in starts if s > row)
        keys |= set(
            range(max(start, row - window + 1) if window else start, row + 1 if causal else end)
        )
    return keys


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 15, 16, 17, 33])
@pytest.mark.parametrize("causal", [True, False])
def test_odd_lengths_match_the_reference(num_tokens, causal):
    assert_equal(*run_both(*inputs(num_tokens, 4, 2), causal=causal, blocks=(16, 8)))


@pytest.mark.parametrize("head_dim", [8, 20, 64, 96, 128, 192, 256])
def test_head_dims_match_the_reference(head_dim):
    assert_equal(*run_both(*inputs(40, 2, 1, head_dim), blocks=(16, 16)))


def test_strided_inputs_match_the_reference():
    fused = torch.randn(50, 8 + 2 + 2, 16, dtype=torch.float64)
    q, k, v = fused.split([8, 2, 2], 1)
    dout = torch.randn(8, 50, 16, dtype=torch.float64).transpose(0, 1)
    assert_equal(*run_both(q, k, v, dout, blocks=(16, 16)))


def test_no_tokens_give_empty_results():
    q, k, v, dout = inputs(0, 2, 1)
    out, lse = attention(q, k, v, scale=1.0)
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)
    assert attention_backward(dout, q, k, v, out, lse, scale=1.0)[1].shape == (0, 1, 16)


@pytest.mark.parametrize("heads", [(2, 1)], ids=str)
@pytest.mark.parametrize(
    "mask", ["causal", "bidirectional", "window 9", "equal docs", "docs, window"]
)
def test_sixteen_bits_lose_no_more_than_plain_pytorch(mask, heads):
    """With many small blocks, ratios reach 1.3; with any sum over blocks in bf16 instead of fp32,
    they are 2 to 4.5."""
    q, k, v, dout = inputs(201, *heads, dtype=torch.bfloat16)
    options = {"causal": True, "window": None, "docs": None, **MASKS[mask]}
    if options["docs"]:
        options["docs"] = (*(2 * end for end in options["docs"][:-1]), 201)
    ours, theirs = run_both(q, k, v, dout, blocks=(8, 8), **options)
    leaves = [x.transpose(0, 1)[None].clone().requires_grad_() for x in (q, k, v)]
    plain_out = F.scaled_dot_product_attention(
        *leaves, attn_mask=attention_mask(201, **options), scale=SCALE, enable_gqa=True
    )
    plain = (plain_out, *torch.autograd.grad(plain_out, leaves, dout.transpose(0, 1)[None]))
    for name, a, p, t in zip(
        ("out", "dq", "dk", "dv"),
        (ours[0], *ours[2:]),
        plain,
        (theirs[0], *theirs[2:]),
        strict=True,
    ):
        error = (a - t).norm() / t.norm()
        allowed = (p[0].transpose(0, 1) - t).norm() / t.norm()
        assert error <= 1.5 * allowed, f"{name}: {error:.1e} against {allowed:.1e}"


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_gradients_are_fp32_sums_rounded_once(heads):
    """Contributions of score blocks are added in fp32, in the schedule's order, and rounded at the
    end: bit for bit."""
    n, m = heads
    q, k, v, dout = inputs(96, n, m, dtype=torch.bfloat16)
    out, lse = attention(q, k, v, scale=SCALE, blocks=(32, 16))
    ours = attention_backward(dout, q, k, v, out.clone(), lse, scale=SCALE, blocks=(32, 16))
    totals = [torch.zeros(96, heads, 16) for heads in (n, m, m)]
    blocks = list(
        plan_query_blocks(
            document_spans((0, 96)), causal=True, window=None, block_q=32, block_kv=16
        )
    )
    assert len(blocks) == 3 and any(len(block.score_blocks) > 2 for block in blocks)
    for r in range(n // m):
        heads_r = slice(r, None, n // m)
        for p, at in (
            (scores, i * scores.step)
            for block in blocks
            for scores in block.score_blocks
            for i in range(scores.count)
        ):
            rows = slice(p.q0 + at, p.q0 + at + p.rows)
            cols = slice(p.k0 + at, p.k0 + at + p.keys)
            views = (
                [x[rows, heads_r] for x in (dout, q)]
                + [x[cols] for x in (k, v)]
                + [out[rows, heads_r]]
            )
            shares = KERNELS["cpu"].backward(
                *(x.transpose(0, 1)[None] for x in views),
                lse[None, heads_r, rows],
                SCALE,
                p.mask == "causal",
            )
            for total, share in zip(
                (totals[0][rows, heads_r], totals[1][cols], totals[2][cols]), shares, strict=True
            ):
                total += share[0].transpose(0, 1)
    for name, grad, total in zip(("dq", "dk", "dv"), ours, totals, strict=True):
        assert torch.equal(grad.bfloat16(), total.bfloat16()), name


def test_wrong_calls_are_refused():
    q, k, v, _ = inputs(10, 3, 2)
    with pytest.raises(ConfigError, match="3 query heads"):
        attention(q, k, v, scale=1.0)
    q, k, v, _ = inputs(10, 2, 2)
    with pytest.raises(ConfigError, match="window=3"):
        attention(q, k, v, scale=1.0, window=3, causal=False)
    with pytest.raises(ConfigError, match="docs"):
        attention(q, k, v, scale=1.0, docs=(0, 9))
    with pytest.raises(ConfigError, match="nonsense"):
        attention(q, k, v, scale=1.0, kernel="nonsense")


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (2, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("docs", [(0, 50), (0, 7, 8, 31, 50)])
@pytest.mark.parametrize("window", [None, 11])
def test_gradients_are_added_to_existing_sums(heads, kv_heads, docs, window):
    torch.manual_seed(2)
    q, dout = (torch.randn(50, heads, 16, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(50, kv_heads, 16, dtype=torch.float64) for _ in range(2))
    options = {"scale": 0.25, "docs": docs, "blocks": (16, 8), "window": window}
    out, lse = attention(q, k, v, **options)
    dq, dk, dv = attention_backward(dout, q, k, v, out.clone(), lse, **options)
    initial = [torch.randn_like(k), torch.randn_like(v)]
    sums = (initial[0].clone(), initial[1].clone())
    dq_again, *_ = attention_backward(dout, q, k, v, out, lse, **options, sums=sums)
    assert dq_again.data_ptr() == out.data_ptr()
    torch.testing.assert_close(dq_again, dq, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums[0], initial[0] + dk, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums[1], initial[1] + dv, rtol=1e-12, atol=1e-12)
