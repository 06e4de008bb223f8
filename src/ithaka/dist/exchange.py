"""Tokens-sharded <-> heads-sharded, by one all-to-all; the identity on one rank.

Shapes: S tokens of the sequence, s = S / c tokens on this rank, c ranks, n head slots per rank, K head dim.
Tokens-sharded tensors are [c, s, n, K]: this rank's tokens, for the heads of every rank.
Heads-sharded tensors are [S, n, K]: every token, for this rank's heads. Both lie in memory in the order in which
the all-to-all sends and receives, so neither direction needs a copy.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


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
