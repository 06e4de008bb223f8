"""RoPE angles equal Hugging Face's at short positions and are exact at long ones, where fp32 angles
are not."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ithaka.blocks import rope
from ithaka.layer.inputs import CurrentCall
from ithaka.layout import Layout
from ithaka.ops import token_wise
from ithaka.ops.token_wise import RopeForm, rotate
from ithaka.roots.rotary import ExactRotary
from parity import parallel, random_ids

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "proportional": {"factor": 4.0, "partial_rotary_factor": 0.25},
}
FAR = 10_000_000


def rotary(kind: str = "default") -> torch.nn.Module:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=7,
        intermediate_size=8,
        rope_parameters={"rope_type": kind, "rope_theta": 500_000.0, **KINDS[kind]},
    )
    return AutoModelForCausalLM.from_config(config).model.rotary_emb


def tables(
    module: torch.nn.Module, positions: torch.Tensor, dtype=torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [1, t, K] for layers that compute in `dtype`."""
    return ExactRotary(module, CurrentCall())(torch.zeros(1, dtype=dtype), positions[None])


@pytest.mark.parametrize("kind", KINDS)
def test_short_positions_are_those_of_hugging_face(kind):
    module = rotary(kind)
    positions = torch.arange(512)
    cos, sin = module(torch.zeros(1, dtype=torch.float32), positions[None])
    ours_cos, ours_sin = tables(module, positions)
    assert ours_cos.dtype == ours_sin.dtype == torch.float32
    torch.testing.assert_close((ours_cos, ours_sin), (cos, sin), rtol=0, atol=5e-5)


def phases(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return angles in [0, 2 pi) from a table's two columns per frequency."""
    half = cos.shape[-1] // 2
    return torch.atan2(sin[..., half:].double(), cos[..., half:].double()) % (2 * math.pi)


def off_by(angles: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest distance on the circle."""
    return float(((angles - exact + math.pi) % (2 * math.pi) - math.pi).abs().max())


def test_phases_are_exact_at_ten_million_tokens():
    module = rotary()
    positions = torch.arange(FAR - 1000, FAR)
    exact = (positions.double()[:, None] * module.inv_freq.double()) % (2 * math.pi)
    theirs = off_by(phases(*module(torch.zeros(1), positions[None])), exact)
    ours = off_by(phases(*tables(module, positions)), exact)
    assert theirs > 0.1, "otherwise this test compares nothing"
    assert ours < 1e-6


def test_scores_depend_on_the_distance_alone():
    """Compares a query and a key 1000 tokens apart at the start and after ten million tokens."""
    module = rotary()
    q, k = torch.randn(2, 1, 1, 1, 128)

    def score(position: int) -> float:
        form = RopeForm(reads_neighbors=False, writes_neighbors=False, cos="halves")
        rotated = [
            rotate(x.double(), *tables(module, torch.tensor([at]), torch.float64), form)
            for x, at in ((q, position), (k, position - 1000))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert score(FAR) == pytest.approx(score(1000), abs=1e-5)


def tables_in_bfloat16() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return cos and sin of every rotation in a step of a bfloat16 model."""
    model, _ = parallel(1, layout=Layout(dtype="bfloat16"))
    used = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rope,
            "rotate",
            lambda x, *args, **kwargs: used.append(args[:2]) or rotate(x, *args, **kwargs),
        )
        model(input_ids=random_ids(1, 8), labels=random_ids(1, 8)).loss.backward()
    exact = tables(model.model.rotary_emb, torch.arange(8), torch.float32)
    return [exact, *used]


def test_bf16_computation_does_not_round_angles(ranks):
    """FSDP2 casts the tensors among a layer's arguments."""
    ((exact, *used),) = ranks.run(1, tables_in_bfloat16)
    assert len(used) > 2
    for pair in used:
        assert all(map(torch.equal, pair, exact))


def test_kernels_read_tables_row_by_row(monkeypatch):
    """gpt-oss computes its tables transposed; the kernel gets one stride for each."""
    launched = []
    monkeypatch.setattr(
        token_wise, "launch", lambda kernel, grid, *args, **settings: launched.append(args)
    )
    x = torch.empty(1, 4, 6, 16, device="meta")
    table = torch.empty(1, 8, 6, device="meta").mT
    rotate(x, table, table, RopeForm(False, False, "half"))
    assert [t.stride(-1) for t in launched[0][:4]] == [1, 1, 1, 1]
