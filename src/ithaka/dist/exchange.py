"""Tokens-sharded <-> heads-sharded, by one all-to-all, the identity on one rank; a ring's k and v in rounds.

Shapes: S tokens of a ring member, s = S / c tokens on this rank, c Ulysses ranks, n head slots per rank, K head dim. In
the functions for rings, R tokens of the sequence, p of a round, m kv slots.
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
from ithaka.plan.rounds import RingRound

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # a group of one, which needs no torch.distributed
# torch 2.13's name, or the one before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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


def start_round(t_SmK: torch.Tensor, round_: RingRound, group: dist.ProcessGroup) -> Exchange:
    """Starts sending this member's tokens of a round, [S, m, K] -> those that it receives, [p, m, K]."""
    send = torch.cat([t_SmK[row : row + length] for runs in round_.sent for row, length in runs] or [t_SmK[:0]])
    return _between(send, round_.num_sent, round_.num_received, group)


def start_return(d_pmK: torch.Tensor, round_: RingRound, group: dist.ProcessGroup) -> Exchange:
    """Starts sending gradients of the tokens received in a round back to their owners."""
    return _between(d_pmK, round_.num_received, round_.num_sent, group)


def add_returned(sum_SmK: torch.Tensor, d_pmK: torch.Tensor, round_: RingRound) -> None:
    """Adds what `start_return` brought to the sums of this member's tokens."""
    runs = [run for runs in round_.sent for run in runs]
    for (row, length), d in zip(runs, d_pmK.split([length for _, length in runs]), strict=True):
        sum_SmK[row : row + length] += d


def _between(send: torch.Tensor, counts: list[int], to_receive: list[int], group: dist.ProcessGroup) -> Exchange:
    received = send.new_empty(sum(to_receive), *send.shape[1:])
    work = dist.all_to_all_single(received, send, to_receive, counts, group=group, async_op=True)
    return Exchange(received, send, work)


def to_sequence_order(dealt_R: torch.Tensor, deal: Deal) -> torch.Tensor:
    """The tokens of all members, member by member -> in the sequence's order."""
    if len(deal.members) == 1:
        return dealt_R
    return torch.cat([dealt_R[row : row + length] for row, length in deal.in_order])
