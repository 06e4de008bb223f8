"""Ring attention: first to this member's own keys, then to the other members', in rounds.

Shapes: S tokens of this member, n query and m kv heads, K head dim, p tokens of a round. While one
round is computed, the next round's k and v and the previous round's dk and dv are in flight.
Without a ring, or if no row attends to another member's keys, there are no rounds, and nothing is
copied or sent.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.attention.blocks import AttentionSpec, attention, attention_backward
from ithaka.attention.docs import Docs
from ithaka.blocks.tiles import sum_dtype
from ithaka.comm.exchange import Exchange, add_returned, start_return, start_round
from ithaka.phases import phase
from ithaka.sharding.tokens import RingRound


def ring_attention(
    q_SnK: Tensor, k_SmK: Tensor, v_SmK: Tensor, ring: dist.ProcessGroup, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return out_SnK and lse_nS of this member's rows. Rounds sum `out` in fp32 (fp64 for fp64)."""
    rounds = _ring_rounds(spec)
    if not rounds:
        return attention(q_SnK, k_SmK, v_SmK, **spec)
    incoming = _start_round(rounds[0], k_SmK, v_SmK, ring, spec)
    out_SnK = torch.zeros_like(q_SnK, dtype=sum_dtype(q_SnK.dtype))
    lse_nS = out_SnK.new_full((q_SnK.shape[1], q_SnK.shape[0]), float("-inf"))
    attention(q_SnK, k_SmK, v_SmK, sums=(out_SnK, lse_nS), **spec)
    for part in range(1, len(rounds) + 1):
        k_pmK, v_pmK = _wait_all(incoming)
        if part < len(rounds):
            incoming = _start_round(rounds[part], k_SmK, v_SmK, ring, spec)
        attention(q_SnK, k_pmK, v_pmK, part=part, sums=(out_SnK, lse_nS), **spec)
        del k_pmK, v_pmK
    return out_SnK.to(q_SnK.dtype), lse_nS


def ring_attention_backward(
    dout_SnK: Tensor,
    q_SnK: Tensor,
    k_SmK: Tensor,
    v_SmK: Tensor,
    out_SnK: Tensor,
    lse_nS: Tensor,
    sums: tuple[Tensor, Tensor] | None,
    ring: dist.ProcessGroup,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Overwrite `out` with dq; return dk and dv of this member's tokens. `sums` as in
    `attention_backward`. Rounds sum dq in fp32 (fp64 for fp64), and send dk and dv in that dtype.
    """
    rounds = _ring_rounds(spec)
    out_lse = (out_SnK, lse_nS)
    if not rounds:
        return attention_backward(dout_SnK, q_SnK, k_SmK, v_SmK, *out_lse, sums=sums, **spec)[1:]
    incoming = _start_round(rounds[0], k_SmK, v_SmK, ring, spec)
    returning = list[Exchange]()
    dq_SnK = torch.zeros_like(q_SnK, dtype=sum_dtype(q_SnK.dtype))
    sums = attention_backward(
        dout_SnK, q_SnK, k_SmK, v_SmK, *out_lse, dq=dq_SnK, sums=sums, **spec
    )[1:]
    for part in range(1, len(rounds) + 1):
        k_pmK, v_pmK = _wait_all(incoming)
        if part < len(rounds):
            incoming = _start_round(rounds[part], k_SmK, v_SmK, ring, spec)
        d_kv = attention_backward(
            dout_SnK, q_SnK, k_pmK, v_pmK, *out_lse, part=part, dq=dq_SnK, **spec
        )[1:]
        del k_pmK, v_pmK
        with phase("exchange"):
            _add_returned_grads(sums, returning, rounds[part - 2])
            returning = _count_sent_bytes(
                [start_return(d, rounds[part - 1], ring) for d in d_kv], spec
            )
        del d_kv
    with phase("exchange"):
        _add_returned_grads(sums, returning, rounds[-1])
    out_SnK.copy_(dq_SnK)
    return sums


def _ring_rounds(spec: AttentionSpec) -> list[RingRound]:
    docs = spec.get("docs")
    causal = spec.get("causal", True)
    return docs.rounds(causal, spec.get("window")) if isinstance(docs, Docs) else []


@phase("exchange")
def _start_round(
    round_: RingRound, k_SmK: Tensor, v_SmK: Tensor, ring: dist.ProcessGroup, spec: AttentionSpec
) -> list[Exchange]:
    return _count_sent_bytes([start_round(t_SmK, round_, ring) for t_SmK in (k_SmK, v_SmK)], spec)


def _count_sent_bytes(started: list[Exchange], spec: AttentionSpec) -> list[Exchange]:
    docs = spec["docs"]
    assert isinstance(docs, Docs)
    sent = [exchange.send for exchange in started]
    docs.sent_bytes += sum(tensor.nbytes for tensor in sent if tensor is not None)
    return started


@phase("exchange")
def _wait_all(incoming: list[Exchange]) -> list[Tensor]:
    return [incoming.pop(0).wait() for _ in range(len(incoming))]


def _add_returned_grads(
    sums: tuple[Tensor, Tensor], returning: list[Exchange], round_: RingRound
) -> None:
    if returning:
        for sum_SmK in sums:
            add_returned(sum_SmK, returning.pop(0).wait(), round_)
