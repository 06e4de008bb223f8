"""A router gets the same bits in backward's recomputation as in forward, so it never picks other
experts."""

from functools import partial

import pytest
import torch

from ithaka.comm.mesh import make_mesh
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import EXPERTS, tiny_config, tiny_model


@pytest.mark.parametrize(
    "family, heads_per_stage",
    [
        (EXPERTS[0], 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((EXPERTS[0], 1), (EXPERTS[1], 1), (EXPERTS[1], 4))
        ),
    ],
)
def test_no_expert_changes_in_backward(family, heads_per_stage):
    """Runs in bf16, where different rounding of the router's logits would sometimes change the
    choice."""
    config = tiny_config(family, 4, 2, vocab_size=512, hidden_size=64, num_hidden_layers=2)
    model = tiny_model(config, torch.float32)
    layout = Layout(
        1,
        heads_per_stage,
        tile_tokens=24,
        keep_attention=2,
        dtype="bfloat16",
    )
    model = parallelize_model(model, mesh=make_mesh(1), layout=layout)
    logits: list[list[torch.Tensor]] = []
    for layer in model.model.layers:
        layer_logits: list[torch.Tensor] = []
        logits.append(layer_logits)
        layer.mlp.gate.forward = partial(_record, layer.mlp.gate.forward, layer_logits)
    ids = torch.randint(512, (1, 120), generator=torch.Generator().manual_seed(5))
    loss = model(input_ids=ids, labels=ids).loss
    tiles = [len(layer_logits) for layer_logits in logits]
    loss.backward()
    for layer_logits, count in zip(logits, tiles, strict=True):
        assert count == 5 and len(layer_logits) == 2 * count
        forward, backward = (
            torch.cat(part) for part in (layer_logits[:count], layer_logits[count:])
        )
        assert torch.equal(forward, backward)


def _record(forward, layer_logits, x):
    out = forward(x)
    layer_logits.append((out[0] if isinstance(out, tuple) else out).clone())
    return out
