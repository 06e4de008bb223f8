"""All-to-alls between token-sharded and head-sharded tensors (Ulysses), and the rounds of a ring.

Shapes: S tokens of a ring member, s = S / c tokens on this rank, c Ulysses ranks, n head slots per
rank, K head dim. In the ring functions, T tokens of the sequence, p tokens of a round, m kv slots.
Token-sharded tensors are [c, s, n, K]: this rank's tokens, for the heads of every rank.
Head-sharded tensors are [S, n, K]: every token, for this rank's heads. Both are laid out in the
order in which the all-to-all sends and receives, so neither direction needs a copy. On one rank the
exchange is the identity.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ithaka.sharding.tokens import RingRound, TokenSharding

SINGLE_RANK: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # stands in for a process group
# the names of torch 2.13, or the earlier ones
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Exchange:
    """An all-to-all in flight. Holds a reference to `send` until `wait`, so that its memory is not
    reused."""

    received: torch.Tensor
    send: torch.Tensor | None
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        self.send = self.work = None
        return self.received


def start_tokens_to_heads(t_csnK: torch.Tensor, group: dist.ProcessGroup) -> Exchange:
    """Start [c, s, n, K] -> [S, n, K]. Do not write to the input before `wait`."""
    return _start_all_to_all(t_csnK, t_csnK.flatten(0, 1).shape, group)


def start_heads_to_tokens(t_SnK: torch.Tensor, group: dist.ProcessGroup) -> Exchange:
    """Start [S, n, K] -> [c, s, n, K]. Do not write to the input before `wait`."""
    c = group.size()
    return _start_all_to_all(t_SnK, (c, t_SnK.shape[0] // c, *t_SnK.shape[1:]), group)


def _start_all_to_all(
    send: torch.Tensor, shape: tuple[int, ...], group: dist.ProcessGroup
) -> Exchange:
    if group.size() == 1:
        return Exchange(send.view(shape), None, None)
    send = send.contiguous()
    received = torch.empty(shape, dtype=send.dtype, device=send.device)
    work = dist.all_to_all_single(received.view(-1), send.view(-1), group=group, async_op=True)
    return Exchange(received, send, work)


# ---- rings


def start_round(t_SmK: torch.Tensor, round_: RingRound, group: dist.ProcessGroup) -> Exchange:
    """Start a round: send rows of this member's [S, m, K], receive [p, m, K] from the others."""
    rows = [t_SmK[row : row + length] for runs in round_.sent for row, length in runs]
    send = torch.cat(rows or [t_SmK[:0]])
    return start_uneven_all_to_all(send, round_.num_sent, round_.num_received, group)


def start_return(d_pmK: torch.Tensor, round_: RingRound, group: dist.ProcessGroup) -> Exchange:
    """Start sending the gradients of a round's received tokens back to their owners."""
    return start_uneven_all_to_all(d_pmK, round_.num_received, round_.num_sent, group)


def add_returned(sum_SmK: torch.Tensor, d_pmK: torch.Tensor, round_: RingRound) -> None:
    """Add the gradients received through `start_return` to the sums of this member's tokens."""
    runs = [run for runs in round_.sent for run in runs]
    pieces = d_pmK.split([length for _, length in runs])
    for (row, length), d in zip(runs, pieces, strict=True):
        sum_SmK[row : row + length] += d


def start_uneven_all_to_all(
    send: torch.Tensor, num_sent: list[int], num_received: list[int], group: dist.ProcessGroup
) -> Exchange:
    """Start an all-to-all of rows that are grouped by receiver; they arrive grouped by sender."""
    if group.size() == 1:
        return Exchange(send, None, None)
    received = send.new_empty(sum(num_received), *send.shape[1:])
    work = dist.all_to_all_single(
        received, send, num_received, num_sent, group=group, async_op=True
    )
    return Exchange(received, send, work)


def to_sequence_order(by_member_T: torch.Tensor, sharding: TokenSharding) -> torch.Tensor:
    """Reorder tokens that are grouped by ring member into sequence order."""
    if len(sharding.members) == 1:
        return by_member_T
    return torch.cat([by_member_T[row : row + length] for row, length in sharding.in_order])
