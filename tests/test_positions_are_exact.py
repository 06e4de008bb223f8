"""RoPE angles equal Hugging Face's at short positions and are exact at long ones, where fp32 angles are not."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ithaka.layer import stages
from ithaka.layout import Layout
from ithaka.ops.fused import Positions, apply_rope
from parity import parallel, random_ids

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
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


def tables(module: torch.nn.Module, positions: torch.Tensor, dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return Positions(positions, module.inv_freq, module.attention_scaling).tables(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_short_positions_are_those_of_hugging_face(kind):
    module, positions = rotary(kind), torch.arange(512)
    cos, sin = module(torch.zeros(1, dtype=torch.float32), positions[None])
    ours_cos, ours_sin = tables(module, positions)
    assert ours_cos.dtype == ours_sin.dtype == torch.float32
    torch.testing.assert_close(ours_cos, cos[0], rtol=0, atol=5e-5)
    torch.testing.assert_close(ours_sin.chunk(2, -1)[1], sin[0].chunk(2, -1)[1], rtol=0, atol=5e-5)
    torch.testing.assert_close(ours_sin.chunk(2, -1)[0], -sin[0].chunk(2, -1)[0], rtol=0, atol=5e-5)


def phases(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return angles in [0, 2 pi) from a table's two columns per frequency."""
    half = cos.shape[-1] // 2
    return torch.atan2(sin[..., half:].double(), cos[..., half:].double()) % (2 * math.pi)


def off_by(angles: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest distance on the circle."""
    return float(((angles - exact + math.pi) % (2 * math.pi) - math.pi).abs().max())


def test_phases_are_exact_at_ten_million_tokens():
    module, positions = rotary(), torch.arange(FAR - 1000, FAR)
    exact = (positions.double()[:, None] * module.inv_freq.double()) % (2 * math.pi)
    theirs = off_by(phases(*(table[0] for table in module(torch.zeros(1), positions[None]))), exact)
    ours = off_by(phases(*tables(module, positions)), exact)
    assert theirs > 0.1, "otherwise this test compares nothing"
    assert ours < 1e-6


def test_scores_depend_on_the_distance_alone():
    """Compares a query and a key 1000 tokens apart at the start and after ten million tokens."""
    module = rotary()
    q, k = torch.randn(2, 1, 1, 1, 128)

    def score(position: int) -> float:
        turned = []
        for x, at in ((q, position), (k, position - 1000)):
            turned.append(torch.empty_like(x, dtype=torch.float64))
            apply_rope(turned[-1], x, Positions(torch.tensor([at]), module.inv_freq, module.attention_scaling))
        return float((turned[0] * turned[1]).sum())

    assert score(FAR) == pytest.approx(score(1000), abs=1e-5)


def frequencies_in_bfloat16() -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Return whether the layers' frequencies are wide, these frequencies, and the model's."""
    model, _ = parallel(1, layout=Layout(dtype="bfloat16"))
    used = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "apply_rope", lambda into, x, at: used.append(at.inv_freq_k) or apply_rope(into, x, at))
        model(input_ids=random_ids(1, 8), labels=random_ids(1, 8)).loss.backward()
    return all(each.dtype != torch.bfloat16 for each in used), torch.stack(used), model.model.rotary_emb.inv_freq


def test_bf16_computation_does_not_round_frequencies(ranks):
    """FSDP2 casts the tensors among a layer's arguments."""
    ((are_wide, used, own),) = ranks.run(1, frequencies_in_bfloat16)
    assert are_wide and len(used) > 2 and torch.equal(used, own.expand_as(used))
