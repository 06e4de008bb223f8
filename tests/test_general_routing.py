"""Mixtures of experts of many types: the load-balancing loss, compiled layers and saved models."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from decoders import tiny_decoder
from general import assert_equal, compare, fp64_tiles, gradient_errors
from ithaka.checks.verify import InFloat64
from ithaka.comm.mesh import make_mesh
from ithaka.layer.loss import LinearHead
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from parity import random_ids, relative
from refusals import assert_refused
from threads import run_on_threads

COEFFICIENT = 0.7
BALANCED = {
    "num_hidden_layers": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": COEFFICIENT,
}
IDS = random_ids(4, 18)
MASK = torch.ones_like(IDS)
MASK[0, -5:] = 0  # padding is not counted
LABELS = IDS.masked_fill(MASK == 0, -100)


def plain_loss(plain, num_groups: int, num_items: int):
    """Return the mean loss over labels plus the mean of the groups' load-balancing losses."""
    total = 0.0
    for rows in torch.arange(len(IDS)).chunk(num_groups):
        out = plain(input_ids=IDS[rows], attention_mask=MASK[rows], use_cache=False)
        labels = LABELS[rows][:, 1:].flatten()
        total += (
            F.cross_entropy(
                out.logits[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction="sum"
            )
            / num_items
        )
        total += COEFFICIENT * out.aux_loss / num_groups
    return total


def errors_of_rank(family: str, layout: Layout):
    num_items = int((LABELS[:, 1:] != -100).sum())
    mesh = make_mesh(layout.cp, ring=layout.ring)
    plain = tiny_decoder(family, **BALANCED)
    with InFloat64():
        expected = plain_loss(plain, mesh.dp_size, num_items)
    expected.backward()
    model = parallelize_model(tiny_decoder(family, **BALANCED), mesh=mesh, layout=layout)
    rows = torch.arange(len(IDS)).chunk(mesh.dp_size)[mesh.dp_rank]
    with fp64_tiles(), InFloat64():
        out = model(input_ids=IDS[rows], labels=LABELS[rows], attention_mask=MASK[rows])
        (3 * out.loss).backward()
    for param in plain.parameters():
        if param.grad is not None:
            param.grad *= 3
    return {"loss": relative(out.loss.detach(), expected.detach()), **gradient_errors(model, plain)}


@pytest.mark.parametrize(
    ("family", "num_ranks", "layout"),
    [
        pytest.param("mixtral", 1, Layout(tile_tokens=7), marks=pytest.mark.slow),
        ("gpt_oss", 4, Layout(2, heads_per_stage=4, tile_tokens=5)),
        pytest.param(
            "qwen2_moe",
            2,
            Layout(2, ring=2, keep_everything=2, tile_tokens=11),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_load_balancing_loss_equals_that_of_plain_transformers(family, num_ranks, layout):
    assert_equal(run_on_threads(num_ranks, lambda: errors_of_rank(family, layout)))


def test_micro_batches_share_the_load_balancing_loss():
    """With num_items_in_batch, the losses of two calls add up to averages weighted by labels."""
    model = parallelize_model(tiny_decoder("mixtral", **BALANCED), layout=Layout())
    plain = tiny_decoder("mixtral", num_hidden_layers=2)
    parts = (IDS[1:2], IDS[2:4])
    losses = [model(input_ids=ids, labels=ids, num_items_in_batch=51).loss for ids in parts]
    # no rank has a label
    assert model(input_ids=IDS, labels=torch.full_like(IDS, -100), per_token=True).aux_loss == 0
    expected = 0.0
    for ids in parts:
        out = plain(input_ids=ids, use_cache=False, output_router_logits=True)
        ce = (
            F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            / 51
        )
        expected += ce + COEFFICIENT * out.aux_loss * (17 * len(ids) / 51)
    assert relative(sum(losses).detach(), expected.detach()) < 1e-6


def test_the_load_balancing_loss_has_the_coefficient_of_the_model():
    """TRL changes the coefficient in the configuration, which the model does not read again."""
    model = tiny_decoder("mixtral", **BALANCED)
    model.config.router_aux_loss_coef = 0.1
    assert parallelize_model(model).ithaka_root.balancing.coefficient == COEFFICIENT


def test_another_load_balancing_loss_is_refused(monkeypatch):
    monkeypatch.setattr(
        "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func",
        lambda *a: torch.ones(()),
    )
    model = tiny_decoder("mixtral", **BALANCED)
    assert_refused(
        lambda: parallelize_model(model), "output_router_logits=True", fix="use a decoder"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo3", "gpt_oss"])
def test_compiled_layers_equal_plain_transformers(family, monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: compiler(function, backend="aot_eager", **options),
    )
    assert_equal(
        compare(tiny_decoder(family, num_hidden_layers=2), Layout(tile_tokens=5, compile=True))
    )


@pytest.mark.parametrize(
    "family", [pytest.param("gemma3_text", marks=pytest.mark.slow), "deepseek_v3"]
)
def test_a_saved_model_loads_into_plain_transformers(family, tmp_path):
    """Gemma has tied embeddings and two rope bases, DeepSeek experts and a persistent buffer."""
    plain = tiny_decoder(family, torch.float32, num_hidden_layers=2)
    model = parallelize_model(tiny_decoder(family, torch.float32, num_hidden_layers=2))
    for either in (plain, model):
        either(input_ids=IDS, labels=IDS).loss.backward()
        torch.optim.SGD(either.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (
        relative(loaded(input_ids=IDS).logits.detach(), plain.eval()(input_ids=IDS).logits.detach())
        < 1e-4
    )
    assert set(loaded.state_dict()) == set(plain.state_dict())


@pytest.mark.parametrize(("family", "is_linear"), [("olmo2", True), ("granite", False)])
def test_scaled_logits_are_computed_by_the_models_head(family, is_linear):
    """Granite divides its logits. Most models do not, and share the streamed path's head."""
    model = parallelize_model(tiny_decoder(family, num_hidden_layers=1))
    assert isinstance(model.ithaka_root.make_head(), LinearHead) == is_linear


def test_each_backward_uses_the_routing_of_its_own_call():
    """Also with a call of another length in between, and without the load-balancing loss."""
    model = parallelize_model(tiny_decoder("mixtral", **BALANCED), layout=Layout(tile_tokens=7))
    params = [param for name, param in model.named_parameters() if name.endswith("gate.weight")]
    grads = []
    for interrupts in (False, True):
        model.zero_grad()
        loss = model(input_ids=IDS[:2], labels=LABELS[:2], attention_mask=MASK[:2]).loss
        if interrupts:
            model(input_ids=IDS[2:3, :9], labels=IDS[2:3, :9])
        loss.backward()
        grads.append([param.grad.full_tensor().clone() for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    model(input_ids=IDS, labels=IDS, per_token=True).tokens.logprobs.sum().backward()
