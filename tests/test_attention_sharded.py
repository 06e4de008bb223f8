"""sharded_attention on sequence-sharded q, k and v: forward and backward on 1, 2 and 4 ranks."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from grids import diagonal
from ithaka.config import ConfigError
from ithaka.layer.sharded import sharded_attention
from reference import attention_reference

EXAMPLE = Path(__file__).parents[1] / "examples" / "dit_block.py"
MASKS = {
    "bidirectional": {},
    "causal": {"causal": True},
    "documents across shards": {"causal": True, "docs": (0, 5, 30, 37, 64)},
    "window": {"causal": True, "window": 7},
}


def tensors(H, G):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, h, 8, generator=generator, dtype=torch.float64) for h in (H, G, G, H)]


def shard_gradients(heads, mask):
    """Return this rank's tokens of (out, dq, dk, dv)."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, size = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
    shard = slice(rank * 64 // size, (rank + 1) * 64 // size)
    q, k, v, dout = (x[shard] for x in tensors(*heads))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = sharded_attention(*leaves, group, blocks=(16, 16), **mask)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, dout))]


@pytest.mark.parametrize(
    "heads, mask",
    diagonal([(4, 4), (8, 2), (4, 1), (6, 3), (7, 7), (6, 2), (3, 1)], MASKS),
    ids=str,
)
def test_sharded_attention_matches_the_reference_on_any_number_of_ranks(ranks, heads, mask):
    q, k, v, dout = tensors(*heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    settings = {"causal": False} | MASKS[mask]
    out, _ = attention_reference(*leaves, scale=8**-0.5, **settings)
    expected = (out, *torch.autograd.grad(out, leaves, dout))
    runs = [[shard_gradients(heads, MASKS[mask])]]
    runs += [ranks.run(n, shard_gradients, heads, MASKS[mask]) for n in (2, 4)]
    for shards in runs:
        for name, ours, theirs in zip(
            ("out", "dq", "dk", "dv"),
            map(torch.cat, zip(*shards, strict=True)),
            expected,
            strict=True,
        ):
            assert (ours - theirs).abs().max() < 1e-10, (name, len(shards))


def test_query_heads_that_kv_heads_do_not_divide_are_refused():
    q, k, v, _ = tensors(4, 3)
    with pytest.raises(ConfigError, match="4 query heads"):
        sharded_attention(q, k, v)


def load_example():
    spec = importlib.util.spec_from_file_location("dit_block", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dit_step():
    module = load_example()
    torch.manual_seed(0)
    group = dist.group.WORLD if dist.is_initialized() else None
    loss, grads = module.train_step(module.DiTBlock(32, 4).double(), group)
    return loss.detach(), grads


def test_dit_example_gives_the_same_results_on_two_ranks(ranks):
    torch.set_default_dtype(torch.float64)
    try:
        loss, grads = dit_step()
    finally:
        torch.set_default_dtype(torch.float32)
    for rank_loss, rank_grads in ranks.run(2, dit_step_fp64):
        assert (loss - rank_loss).abs() < 1e-10
        for ours, theirs in zip(rank_grads, grads, strict=True):
            assert (ours - theirs).abs().max() < 1e-10


def dit_step_fp64():
    torch.set_default_dtype(torch.float64)
    try:
        return dit_step()
    finally:
        torch.set_default_dtype(torch.float32)


def test_dit_attention_matches_sdpa():
    """On one rank, attention with ignored padding matches PyTorch rather than our own reference."""
    module = load_example()
    torch.manual_seed(0)
    block = module.DiTBlock(32, 4)
    x = torch.randn(2, 40, 32)
    prompt = torch.randn(2, 8, 32)
    q, k, v = block.qkv(x).unflatten(-1, (3, 4, -1)).unbind(2)
    words = block.prompt(prompt[:, :5]).unflatten(-1, (2, 4, -1)).unbind(2)
    k, v = (torch.cat(pair, dim=1) for pair in zip(words, (k, v), strict=True))
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v))
    )
    expected = block.out(plain.transpose(1, 2).flatten(2))
    torch.testing.assert_close(block.attend(x, prompt, 5, None), expected)


# ---- batches, queries and keys of different lengths, block masks


RANGES = [
    (0, 20, 0, 7),
    (20, 48, 3, 30),
    (0, 30, 40, 96),
    (30, 48, 90, 96),
    (33, 40, 30, 31),
]  # rows [48, 64) see no key


def batch_errors(ranges, num_keys=96):
    """Return errors of out, dq, dk and dv for this rank's tokens of two sequences, against an
    unsharded reference."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 6), (num_keys, 2), (num_keys, 2), (64, 6))
    unsharded = [
        torch.randn(2, *shape, 8, generator=generator, dtype=torch.float64) for shape in shapes
    ]
    rank = dist.get_rank()
    size = dist.get_world_size()
    q, k, v, dout = (x.chunk(size, dim=1)[rank].clone() for x in unsharded)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = sharded_attention(*leaves, dist.group.WORLD, ranges=ranges, blocks=(16, 16))
    ours = [x.detach() for x in (out, *torch.autograd.grad(out, leaves, dout))]
    leaves = [x.requires_grad_() for x in unsharded[:3]]
    mask = torch.zeros(64, num_keys, dtype=torch.bool)
    for a, b, c, d in ranges or [(0, 64, 0, num_keys)]:
        mask[a:b, c:d] = True
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
    scores = (q @ k.mT * 8**-0.5).masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0)
    out = (scores @ v).transpose(1, 2)
    theirs = (out, *torch.autograd.grad(out, leaves, unsharded[3]))
    return [
        float((x - y.chunk(size, dim=1)[rank]).abs().max())
        for x, y in zip(ours, theirs, strict=True)
    ]


@pytest.mark.parametrize("ranges", [None, RANGES])
def test_batches_with_more_keys_than_queries_match_the_reference(ranks, ranges):
    for n in (1, 2, 4):
        for errors in ranks.run(n, batch_errors, ranges):
            assert max(errors) < 1e-10


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"causal": True}, "causal .*64 queries and 96 keys; .*ranges"),
        ({"ranges": [(0, 64, 0, 96)], "docs": (0, 64)}, "docs .*ranges; .*ranges"),
        ({"ranges": [(0, 64, 90, 97)]}, r"\(0, 64, 90, 97\) .*; .* keys within \[0, 96\)"),
        ({"ranges": [(0, 9, 0, 9), (8, 10, 8, 9)]}, r"\(0, 9, 0, 9\) and \(8, 10, 8, 9\) overlap"),
    ],
)
def test_masks_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        sharded_attention(torch.zeros(64, 2, 8), *torch.zeros(2, 96, 2, 8), **settings)
