"""LoRA by PEFT, parallel: loss and the gradient of every adapter equal those of PEFT on plain Hugging Face, in fp64."""

import warnings
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ithaka.dist.mesh import make_mesh
from ithaka.layer.store import Store
from ithaka.layout import EVERYTHING, LayerKeeps, Layout
from ithaka.model.build import parallelize
from models import CONSTRUCTING, tiny_config, tiny_model
from parity import check, gradient_errors, plain_sum, random_ids, relative
from threads import on_threads

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = [*LINEARS, "lm_head"]


def with_lora(config, targets=ALL, **changes):
    """A PeftModel whose A and B are random: with B zero, as it starts, A has no gradient."""
    lora = LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": targets, **changes})
    model = tiny_model(config)
    with CONSTRUCTING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for param in (param for param in model.parameters() if param.requires_grad):
            param.copy_(0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return model


def compare(cp, config, layout=Layout(), documents=None, **lora):
    """Errors of every rank. `documents`: their lengths, packed."""
    ids = random_ids(1, sum(documents or (21,)))
    given = {} if documents is None else {"document_ids": torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))[None]}
    plain = with_lora(config, **lora)
    parts = ids.split(documents or ids.shape[1], dim=1)
    labels = torch.cat([part.clone().index_fill_(1, torch.tensor([0]), -100) for part in parts], dim=1)
    expected = sum(plain_sum(plain, part, part) for part in parts) / (labels != -100).sum()
    expected.backward()

    def work():
        mesh = make_mesh(cp)
        model = parallelize(with_lora(config, **lora), mesh=mesh, layout=replace(layout, cp=cp), store=Store(mesh.device))
        loss = model(input_ids=ids, labels=labels, **given).loss
        loss.backward()
        return {"loss": relative(loss.detach(), expected.detach()), **gradient_errors(model, plain)}

    errors = on_threads(cp, work)
    trained = sum(param.requires_grad for param in plain.parameters())
    assert all(len(each) == 1 + trained for each in errors)
    return errors


SUBSETS = [subset for n in range(8) for subset in combinations(LINEARS, n)]


@pytest.mark.parametrize("cp, head", [(1, True), (2, False), (4, True), (1, False)])
def test_every_combination_of_targets(cp, head):
    """128 subsets of a layer's modules, each in a layer of its own."""
    first = 32 * [(1, True), (2, False), (4, True), (1, False)].index((cp, head))
    names = [f"layers.{i}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}" for i, subset in enumerate(SUBSETS[first:first + 32]) for name in subset]
    config = tiny_config("llama", num_hidden_layers=32, tie_word_embeddings=not head)
    check(compare(cp, config, Layout(heads_per_stage=cp, tile_tokens=8), targets=[*names, *["lm_head"] * head]))
