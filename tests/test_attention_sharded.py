"""The public entry: sequence-sharded q, k, v and a process group, both ways, on 1, 2 and 4 ranks."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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
    """This rank's tokens of (out, dq, dk, dv)."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, size = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
    own = slice(rank * 64 // size, (rank + 1) * 64 // size)
    q, k, v, dout = (x[own] for x in tensors(*heads))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = sharded_attention(*leaves, group, blocks=(16, 16), **mask)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, dout))]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1), (6, 3), (7, 7), (6, 2), (3, 1)], ids=str)
def test_matches_the_twin_on_any_number_of_ranks(ranks, heads, mask):
    q, k, v, dout = tensors(*heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    settings = {"causal": False} | MASKS[mask]
    out, _ = attention_reference(*leaves, scale=8**-0.5, **settings)
    expected = (out, *torch.autograd.grad(out, leaves, dout))
    runs = [[shard_gradients(heads, MASKS[mask])]]
    runs += [ranks.run(n, shard_gradients, heads, MASKS[mask]) for n in (2, 4)]
    for shards in runs:
        for name, ours, theirs in zip(
            ("out", "dq", "dk", "dv"), map(torch.cat, zip(*shards, strict=True)), expected, strict=True
        ):
            assert (ours - theirs).abs().max() < 1e-10, (name, len(shards))


def test_heads_that_do_not_pair_are_refused():
    q, k, v, _ = tensors(4, 3)
    with pytest.raises(ConfigError, match="4 query heads"):
        sharded_attention(q, k, v)


def example():
    spec = importlib.util.spec_from_file_location("dit_block", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dit_step():
    module = example()
    torch.manual_seed(0)
    group = dist.group.WORLD if dist.is_initialized() else None
    loss, grads = module.train_step(module.DiTBlock(32, 4).double(), group)
    return loss.detach(), grads


def test_dit_example_is_the_same_on_two_ranks(ranks):
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


def test_dit_attention_is_pytorchs_own():
    """One rank against nn.functional.scaled_dot_product_attention, not against our own twin."""
    module = example()
    torch.manual_seed(0)
    block, x = module.DiTBlock(32, 4), torch.randn(40, 32)
    q, k, v = block.qkv(x).unflatten(-1, (3, 4, -1)).unbind(1)
    plain = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)))
    expected = block.out(plain.transpose(0, 1).flatten(1))
    torch.testing.assert_close(block.attend(x, None), expected)
