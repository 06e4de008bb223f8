"""Attention whose keys are spread over the members of a ring: to their own first, then, round by round, to the others'.

Shapes: S tokens of this member, n query and m kv heads, K head dim, p tokens of a round. While the pairs of one round
are computed, the next round's k and v are on their way, and so are the dk and dv of the round before. Without a ring,
or where no row sees a key of another member, there are no rounds, and nothing is copied or sent.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.attention.blocks import AttentionSpec, Docs, attention, attention_backward
from ithaka.dist.exchange import Exchange, add_returned, start_return, start_round
from ithaka.layer.tiles import sum_dtype
from ithaka.phases import phase
from ithaka.plan.rounds import RingRound


def ring_attention(
    q_SnK: Tensor, k_SmK: Tensor, v_SmK: Tensor, ring: dist.ProcessGroup, how: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """out_SnK and lse_nS of this member's rows. Across rounds, `out` is summed in fp32 (fp64 for fp64)."""
    rounds = _rounds(how)
    if not rounds:
        return attention(q_SnK, k_SmK, v_SmK, **how)
    coming = _start(rounds[0], k_SmK, v_SmK, ring, how)
    out_SnK = torch.zeros_like(q_SnK, dtype=sum_dtype(q_SnK.dtype))
    lse_nS = out_SnK.new_full((q_SnK.shape[1], q_SnK.shape[0]), float("-inf"))
    attention(q_SnK, k_SmK, v_SmK, sums=(out_SnK, lse_nS), **how)
    for part in range(1, len(rounds) + 1):
        k_pmK, v_pmK = _wait(coming)
        coming = _start(rounds[part], k_SmK, v_SmK, ring, how) if part < len(rounds) else []
        attention(q_SnK, k_pmK, v_pmK, part=part, sums=(out_SnK, lse_nS), **how)
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
    how: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Writes dq over `out`; returns dk and dv of this member's tokens, with `sums` as in `attention_backward`.

    Across rounds dq is summed in fp32 (fp64 for fp64), in which dk and dv travel to their owners as well.
    """
    rounds, of_rows = _rounds(how), (out_SnK, lse_nS)
    if not rounds:
        return attention_backward(dout_SnK, q_SnK, k_SmK, v_SmK, *of_rows, sums=sums, **how)[1:]
    coming, going = _start(rounds[0], k_SmK, v_SmK, ring, how), list[Exchange]()
    dq_SnK = torch.zeros_like(q_SnK, dtype=sum_dtype(q_SnK.dtype))
    sums = attention_backward(dout_SnK, q_SnK, k_SmK, v_SmK, *of_rows, dq=dq_SnK, sums=sums, **how)[1:]
    for part in range(1, len(rounds) + 1):
        k_pmK, v_pmK = _wait(coming)
        coming = _start(rounds[part], k_SmK, v_SmK, ring, how) if part < len(rounds) else []
        d_kv = attention_backward(dout_SnK, q_SnK, k_pmK, v_pmK, *of_rows, part=part, dq=dq_SnK, **how)[1:]
        del k_pmK, v_pmK
        with phase("exchange"):
            _add(sums, going, rounds[part - 2])
            going = _counted([start_return(d, rounds[part - 1], ring) for d in d_kv], how)
        del d_kv
    with phase("exchange"):
        _add(sums, going, rounds[-1])
    out_SnK.copy_(dq_SnK)
    return sums


def _rounds(how: AttentionSpec) -> list[RingRound]:
    docs, causal = how.get("docs"), how.get("causal", True)
    return docs.rounds(causal, how.get("window")) if isinstance(docs, Docs) else []


@phase("exchange")
def _start(
    round_: RingRound, k_SmK: Tensor, v_SmK: Tensor, ring: dist.ProcessGroup, how: AttentionSpec
) -> list[Exchange]:
    return _counted([start_round(t_SmK, round_, ring) for t_SmK in (k_SmK, v_SmK)], how)


def _counted(started: list[Exchange], how: AttentionSpec) -> list[Exchange]:
    docs = how["docs"]
    assert isinstance(docs, Docs)
    docs.sent_bytes += sum(each.send.nbytes for each in started if each.send is not None)
    return started


@phase("exchange")
def _wait(coming: list[Exchange]) -> Any:
    return [coming.pop(0).wait() for _ in range(len(coming))]


def _add(sums: tuple[Tensor, Tensor], going: list[Exchange], round_: RingRound) -> None:
    for sum_SmK in sums if going else ():
        add_returned(sum_SmK, going.pop(0).wait(), round_)
