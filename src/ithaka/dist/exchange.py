"""Tokens-sharded <-> heads-sharded, by one all-to-all; a ring's k and v on all its members. Both the identity on one.

Shapes: S tokens of a ring member, s = S / c tokens on this rank, c Ulysses ranks, n head slots per rank, K head dim. In
the functions for rings, R tokens of the sequence, S = R / r of each of r members.
Tokens-sharded tensors are [c, s, n, K]: this rank's tokens, for the heads of every rank.
Heads-sharded tensors are [S, n, K]: every token, for this rank's heads. Both lie in memory in the order in which
the all-to-all sends and receives, so neither direction needs a copy.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ithaka.plan.deal import Deal

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # a group of one, which needs no torch.distributed
# torch 2.13's names, or the ones before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Exchange:
    """An exchange under way. Holds `send` until `wait`, so that its memory is not reused before then."""

    received: torch.Tensor
    send: torch.Tensor | None
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        self.send = self.work = None
        return self.received


def start_tokens_to_heads(t_csnK: torch.Tensor, group: dist.ProcessGroup) -> Exchange:
    """Starts [c, s, n, K] -> [S, n, K]. The tensor sent must not be written before `wait`."""
    return _start(t_csnK, t_csnK.flatten(0, 1).shape, group)


def start_heads_to_tokens(t_SnK: torch.Tensor, group: dist.ProcessGroup) -> Exchange:
    """Starts [S, n, K] -> [c, s, n, K]. The tensor sent must not be written before `wait`."""
    c = group.size()
    return _start(t_SnK, (c, t_SnK.shape[0] // c, *t_SnK.shape[1:]), group)


def _start(send: torch.Tensor, shape: tuple[int, ...], group: dist.ProcessGroup) -> Exchange:
    if group.size() == 1:
        return Exchange(send.view(shape), None, None)
    send = send.contiguous()
    received = torch.empty(shape, dtype=send.dtype, device=send.device)
    work = dist.all_to_all_single(received.view(-1), send.view(-1), group=group, async_op=True)
    return Exchange(received, send, work)


# ---- rings


def gather_members(t_SmK: torch.Tensor, group: dist.ProcessGroup, deal: Deal) -> torch.Tensor:
    """[S, m, K] of each member -> [R, m, K] of all, in the sequence's order."""
    gathered = t_SmK.new_empty(group.size() * len(t_SmK), *t_SmK.shape[1:])
    all_gather(gathered, t_SmK.contiguous(), group=group)
    return in_order(gathered, deal)


def sum_members(t_RmK: torch.Tensor, group: dist.ProcessGroup, deal: Deal) -> torch.Tensor:
    """[R, m, K] of each member, in the sequence's order -> the sum over members of this one's tokens, [S, m, K]."""
    dealt = _chunks(t_RmK, deal.chunk, deal.dealt)
    del t_RmK
    mine = dealt.new_empty(len(dealt) // group.size(), *dealt.shape[1:])
    reduce_scatter(mine, dealt, group=group)
    return mine


def in_order(dealt_R: torch.Tensor, deal: Deal) -> torch.Tensor:
    """The tokens of all members, member by member -> in the sequence's order."""
    return _chunks(dealt_R, deal.chunk, deal.places)


def _chunks(t_R: torch.Tensor, chunk: int, numbers: list[int]) -> torch.Tensor:
    chunks = t_R.split(chunk)
    return t_R if numbers == list(range(len(chunks))) else torch.cat([chunks[number] for number in numbers])
