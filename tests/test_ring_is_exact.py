"""Ulysses x ring: loss and every gradient equal plain Hugging Face's, however tokens are
sharded."""

import functools
from bisect import bisect_right
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import ithaka
from grids import diagonal
from ithaka.attention.docs import Docs
from ithaka.comm import exchange
from ithaka.comm.mesh import make_mesh
from ithaka.config import ConfigError, parse_config
from ithaka.facts import sizes as facts_sizes
from ithaka.facts.heads import head_table
from ithaka.inputs.shard import pack_batch
from ithaka.layer.sharded import sharded_attention
from ithaka.layout import Layout, check_parallelism, layout_from_config
from ithaka.model.build import parallelize_model
from ithaka.sharding import tokens as ring_plan
from ithaka.sharding.tokens import contiguous_sharding, shard_tokens
from models import EXPERTS, tiny_config, tiny_model
from parity import check, gradient_errors, plain_sum, random_ids, relative
from reference import attention_reference
from refusals import assert_refused
from runs import copy_run_at_step, metrics, run, tiny_run
from threads import run_on_threads

GRID = [(1, 2), (2, 2), (4, 2), (2, 4), (1, 8), (3, 2)]  # ulysses, ring
SLOW_PAIRS = [(1, 2), (2, 2), (4, 2), (1, 8), (3, 2)]
KEPT = {"input_tier": "host", "keep_inputs": 1, "keep_attention": 1, "attention_tier": "host"}
# Family, query and kv heads (more than, as many as and fewer than Ulysses ranks), tokens, changes
# to the layout. Some lengths need padding.
CASES = [
    ("llama", 4, 4, 37, {}),
    ("mistral", 4, 2, 48, {"heads_per_stage": 1, "tile_tokens": 5, **KEPT}),
    ("qwen2", 7, 1, 41, {"heads_per_stage": 1, "overlap": False, **KEPT}),
    ("qwen3", 6, 3, 64, {"keep_everything": 1, "heads_per_stage": 1}),
]


def documents(num_tokens: int, chunks: int) -> list[int]:
    """Return starts of documents before, at and after the borders of `chunks` chunks."""
    borders = [i * num_tokens // chunks for i in range(1, chunks)]
    around = {border + i % 3 - 1 for i, border in enumerate(borders)} | {1, num_tokens // 2 + 2}
    return [0, *sorted(around - {0, num_tokens}), num_tokens]


def positions_of(starts: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(b - a) for a, b in zip(starts, starts[1:], strict=False)])[None]


@functools.cache
def plain_results(family, heads, kv_heads, tokens, starts):
    """Return the plain model after its backward, and its loss. `starts` are those of documents."""
    plain = tiny_model(tiny_config(family, heads, kv_heads))
    ids = random_ids(1, tokens)
    loss = plain_sum(plain, ids, ids, position_ids=positions_of(list(starts))) / (tokens - 1)
    loss.backward()
    return plain, loss.detach()


def compare(mesh, family, heads, kv_heads, tokens, all_starts, changes):
    """Compare one model on batches with different documents."""
    ring = mesh.ring_group.size()
    ulysses = mesh.ulysses_group.size()
    layout = replace(Layout(mesh.cp_size, ring=ring), **changes)
    if layout.heads_per_stage:
        layout = replace(layout, heads_per_stage=layout.heads_per_stage * ulysses)
    model = parallelize_model(
        tiny_model(tiny_config(family, heads, kv_heads)), mesh=mesh, layout=layout
    )
    ids = random_ids(1, tokens)
    results = []
    for starts in all_starts:
        plain, expected = plain_results(family, heads, kv_heads, tokens, tuple(starts))
        model.zero_grad()
        out = model(input_ids=ids, labels=ids, position_ids=positions_of(starts))
        out.loss.backward()
        results.append(
            {"loss": relative(out.loss.detach(), expected), **gradient_errors(model, plain)}
        )
    return results


@pytest.mark.parametrize(
    "ulysses,ring",
    [pytest.param(*pair, marks=[pytest.mark.slow] * (pair in SLOW_PAIRS)) for pair in GRID],
)
def test_any_ulysses_and_ring(ulysses, ring, monkeypatch):
    """Runs two of CASES per pair, with documents intact where possible or all cut, and with large
    and small rounds.

    Batches have one document, or several that end around every border.
    """
    for finest in (False, True) if ulysses * ring < 6 else (True,):  # many threads are slow
        monkeypatch.setattr(ring_plan, "CUT_THRESHOLDS", (0.0,) if finest else (1.0,))
        monkeypatch.setattr(facts_sizes, "ROUND_TOKENS", 12 if finest else 1 << 30)
        family, heads, kv_heads, tokens, changes = CASES[
            (GRID.index((ulysses, ring)) + finest) % len(CASES)
        ]
        all_starts = ([0, tokens], documents(tokens, 2 * ring))
        for starts in all_starts:  # computed once, not on every thread
            plain_results(family, heads, kv_heads, tokens, tuple(starts))

        def work(case=(family, heads, kv_heads, tokens, all_starts, changes)):
            return compare(make_mesh(ulysses * ring, ring=ring), *case)

        for errors in run_on_threads(ulysses * ring, work):
            check(errors)


def on_processes(cases):
    mesh = make_mesh(4, ring=2)
    return [errors for case in cases for errors in compare(mesh, *case)]


def test_rings_of_processes_are_exact(ranks):
    """Covers documents with windows, and experts."""
    cases = [
        ("qwen2", 4, 2, 50, [documents(50, 4)], {"heads_per_stage": 1}),
        (EXPERTS[0], 4, 1, 30, [[0, 30]], {}),
    ]
    for errors in ranks.run(4, on_processes, cases):
        check(errors)


def tokens_and_logits():
    """Compare the logits of all tokens, and the values and log-probabilities of a share, in
    order."""
    mesh = make_mesh(4, ring=2)
    config = tiny_config("llama")
    starts = [0, 1, 26, 41]
    plain = tiny_model(config)
    ids = random_ids(1, 41)
    positions = positions_of(starts)
    model = parallelize_model(tiny_model(config), mesh=mesh)
    logits = plain(input_ids=ids, position_ids=positions, use_cache=False).logits
    ours = model(input_ids=ids, position_ids=positions).logits
    weights = torch.linspace(-1, 2, ids.numel(), dtype=torch.float64)[None]
    losses = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    expected = -(losses * weights[0, 1:]).sum()
    share = ithaka.token_logprobs(model, ids, ids, share=True, position_ids=positions).logprobs
    mine = (share * ithaka.label_share(model, weights, position_ids=positions)).sum()
    gathered = ithaka.token_logprobs(model, ids, ids, position_ids=positions).logprobs
    torch.autograd.backward([ours, mine], [torch.ones_like(logits), torch.ones_like(mine)])
    (logits.sum() + expected).backward()
    torch.distributed.all_reduce(mine.detach(), group=mesh.cp_group)
    errors = {
        "logits": relative(ours.detach(), logits.detach()),
        "shares": relative(mine.detach(), expected.detach()),
    }
    errors["log-probabilities"] = relative(-gathered[0, 1:].detach(), losses.detach())
    return errors | gradient_errors(model, plain)


def test_logits_and_shares_are_in_order():
    check(run_on_threads(4, tokens_and_logits))


# ---- attention alone


def sharded(ring, causal, kernel):
    mesh = make_mesh(4, ring=ring)
    generator = torch.Generator().manual_seed(0)
    qkv_and_dout = [
        torch.randn(64, n, 8, generator=generator, dtype=torch.float64) for n in (3, 1, 1, 3)
    ]
    leaves = [x.requires_grad_() for x in qkv_and_dout[:3]]
    out, _ = attention_reference(*leaves, scale=8**-0.5, causal=causal)
    expected = (out, *torch.autograd.grad(out, leaves, qkv_and_dout[3]))
    mine = slice(mesh.cp_rank * 16, (mesh.cp_rank + 1) * 16)
    own = [x[mine].detach().requires_grad_() for x in leaves]
    docs = Docs((0, 64), contiguous_sharding(64, ring), mesh.ring_group.rank())
    ours = sharded_attention(
        *own, mesh.ulysses_group, ring=mesh.ring_group, causal=causal, docs=docs, kernel=kernel
    )
    results = (ours.detach(), *torch.autograd.grad(ours, own, qkv_and_dout[3][mine]))
    pairs = zip(("out", "dq", "dk", "dv"), results, expected, strict=True)
    errors = {name: relative(a, b[mine].detach()) for name, a, b in pairs}
    # Later members get k and v in forward and backward, earlier ones dk and dv; if not causal, all
    # get both. One head.
    later, earlier = (ring - 1 - docs.member, docs.member) if causal else (ring - 1, ring - 1)
    reads = len(table_of(3, mesh).reads[mesh.ulysses_group.rank()])
    return errors | {
        "bytes": docs.sent_bytes - reads * 2 * (64 // ring) * 8 * 8 * (2 * later + earlier)
    }


def table_of(num_heads, mesh):
    return head_table(num_heads, 1, mesh.ulysses_group.size()).stages[0]


@pytest.mark.parametrize("kernel", ["cpu", "fa4"])
@pytest.mark.parametrize("ring,causal", [(2, False), (4, True)])
def test_sharded_attention_is_exact_and_sends_no_more_than_needed(
    fa4, ring, causal, kernel, monkeypatch
):
    """So few tokens take one round, in which a rank sends k and v in both directions, and dk and
    dv."""
    calls = []
    start = exchange.start_uneven_all_to_all
    monkeypatch.setattr(
        exchange, "start_uneven_all_to_all", lambda *args: calls.append(args) or start(*args)
    )
    check(run_on_threads(4, lambda: sharded(ring, causal, kernel)))
    assert len(calls) == 4 * 6


# ---- the sharding


def test_one_causal_document_is_sharded_in_zigzag():
    sharding = shard_tokens((0, 800), 4, 1)
    zigzag = (
        ((0, 100), (700, 100)),
        ((100, 100), (600, 100)),
        ((200, 100), (500, 100)),
        ((300, 200),),
    )
    assert sharding.members == zigzag and sharding.balance == 1.0


@pytest.mark.parametrize(
    "ring, sigma",
    [
        *diagonal([2, 4], [0.5, 1.0]),
        *(pytest.param(ring, 1.5, marks=pytest.mark.slow) for ring in (2, 4)),
        *(pytest.param(8, sigma, marks=pytest.mark.slow) for sigma in (0.5, 1.0, 1.5)),
    ],
)
def test_packed_documents_are_balanced(ring, sigma):
    """Shards 1000 documents, log-normal around 8K. They are balanced by causal area, with and
    without a window of 4096, and few are cut."""
    lengths = (
        torch.randn(1000, generator=torch.Generator().manual_seed(ring))
        .mul(sigma)
        .exp()
        .mul(8192)
        .long()
        + 1
    )
    starts = (0, *lengths.cumsum(0).tolist())
    sharding = shard_tokens(starts, ring, 8)
    assert sharding.balance < 1.05
    for runs in sharding.members:
        assert sum(n for _, n in runs) == sharding.num_tokens // ring
    last_start, _ = max(run for runs in sharding.members for run in runs)
    assert last_start < sharding.num_tokens < starts[-1] + 8 * ring
    depth = torch.cat([torch.arange(1, int(length) + 1) for length in lengths])
    depth = F.pad(depth, (0, sharding.num_tokens - len(depth)))
    for window in (1 << 40, 4096):
        areas = []
        for runs in sharding.members:
            parts = [depth[a : a + n].clamp(max=window).sum() for a, n in runs]
            areas.append(sum(parts))
        assert max(areas) * ring < 1.05 * sum(areas)
    inside = {
        edge for runs in sharding.members for run in runs for edge in (run[0], sum(run))
    } - set(starts)
    assert len({bisect_right(starts, edge) for edge in inside}) <= 2 * ring


def received_tokens(starts, ring, window=None):
    """Return how many tokens' k and v each member receives. Checks that as many are sent, and the
    maximum per round."""
    sharding = shard_tokens(starts, ring, 1)
    of_members = [
        Docs((*starts, sharding.num_tokens), sharding, member).rounds(True, window)
        for member in range(ring)
    ]
    counts = [
        [(sum(r.num_received), sum(r.num_sent)) for r in of_rounds] for of_rounds in of_members
    ]
    for of_round in zip(*counts, strict=True):
        assert sum(received for received, _ in of_round) == sum(sent for _, sent in of_round)
        assert max(map(max, of_round)) <= facts_sizes.ring_round_tokens(sharding.num_tokens // ring)
    return [sum(received for received, _ in of_rounds) for of_rounds in counts]


def test_unattended_keys_are_not_sent():
    """In zigzag, member i of 4 attends to the first 8 - i of 8 pieces and holds two. Packed
    documents stay intact."""
    assert received_tokens((0, 1 << 20), 4) == [(6 - i) << 17 for i in range(4)]
    assert received_tokens(tuple(range(0, (1 << 20) + 1, 1 << 12)), 4) == [0] * 4
    assert received_tokens((0, 1 << 20), 4, window=4096) == [4095, 2 * 4095, 2 * 4095, 4095]


def test_inputs_determine_how_tokens_are_sharded():
    def sharding():
        mesh = make_mesh(2, ring=2)
        tokens = torch.arange(40)[None]
        ways = (
            {"document_ids": tokens // 25},
            {"position_ids": tokens % 25},
            {"attention_mask": tokens < 25},
            {},
        )
        return [pack_batch(inputs, tokens.shape, mesh).sharding for inputs in ways]

    (of_documents, of_positions, of_mask, of_nothing), _ = run_on_threads(2, sharding)
    assert of_documents == of_positions == of_mask != of_nothing


# ---- runs


def step_values(run_dir):
    names = ("loss", "val_loss", "grad_norm")
    return [record[name] for record in metrics(run_dir) for name in names if record.get(name)]


# test_resume_is_bitwise.py resumes on other ranks, test_time_limits.py has a run with a ring
@pytest.mark.slow
def test_a_run_resumes_with_another_ring(ranks, tmp_path):
    """Compares one rank, two replicated groups of two, and a ring of four that shards the model,
    resumed from these."""

    def config(name, **parallel):
        steps = {"steps": 3, "save_every": 2, "keep_last": 3, "validate_every": 0}
        return tiny_run(tmp_path / name, parallel=parallel, train=steps)

    alone = config("alone", cp=1)
    two = config("2x2", cp=4, ring=2, replicas=2)
    ranks.run(1, run, alone)
    ranks.run(4, run, two)
    again = copy_run_at_step(two.train.run_dir, tmp_path / "again", step=2)
    resumed = config("2x2", cp=4, ring=4)
    ranks.run(4, run, replace(resumed, train=replace(resumed.train, run_dir=again)), again)
    losses = [step_values(run_dir) for run_dir in (alone.train.run_dir, two.train.run_dir, again)]
    assert len(losses[0]) == 7  # including one validation loss
    for record in metrics(two.train.run_dir):
        # documents of few tokens
        assert 1.0 <= record["balance"] < 1.5 and record["ring_bytes"] > 0
    for resumed_losses in losses[1:]:
        assert resumed_losses == pytest.approx(losses[0], rel=1e-5)


def test_a_configuration_determines_the_ring():
    shapes = [
        layout_from_config(parse_config({"parallel": {"ring": ring}}), 2, 8, on_gpu=False)
        for ring in ("auto", 1, 2, 8)
    ]
    assert [(layout.ulysses, layout.ring) for layout in shapes] == [(8, 1), (8, 1), (4, 2), (1, 8)]
    for fixed, fragments in (
        ({"cp": 8, "ring": 3}, ("parallel.ring=3", "parallel.cp=8", "use 2, 4 or 8")),
        ({"ring": 3}, ("parallel.ring=3", "8 ranks", "use 1, 2, 4 or 8")),
        (
            {"cp": 8, "ring": 1},
            ("parallel.cp=8", "4 query heads", "parallel.cp=1, 2 or 4", "parallel.ring=2, 4 or 8"),
        ),
        (
            {"cp": 8, "ring": 2, "heads_per_stage": 2},
            ("heads_per_stage=2", "cp=8 / parallel.ring=2", "use 4 or all"),
        ),
    ):
        with pytest.raises(ConfigError) as error:
            check_parallelism(8, 4, **fixed)
        assert all(fragment in str(error.value) for fragment in fragments)
    check_parallelism(8, 4, cp=8, ring=2, heads_per_stage=4)
    # the fewest
    assert layout_from_config(parse_config({}), 2, 8, on_gpu=False, num_heads=3).ring == 4


def test_an_impossible_ring_is_refused():
    def refused():
        model = tiny_model(tiny_config("llama", 2, 1))
        three = partial(parallelize_model, model, 4, ring=3)
        assert_refused(three, "parallel.ring=3", "parallel.cp=4", fix="1, 2 or 4")
        no_ring = partial(parallelize_model, model, 4)
        assert_refused(no_ring, "parallel.cp=4", "2 query heads", fix="parallel.ring=2")
        assert parallelize_model(model, 4, ring=2).ithaka_mesh.ring_group.size() == 2

    run_on_threads(4, refused)
