"""Without labels every rank gets differentiable logits of the full batch, equal to Hugging
Face's."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from decoders import DECODERS, HYBRIDS, RECURRENT, tiny_decoder
from grids import diagonal
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig
from ithaka.layout import Layout
from ithaka.model.build import build_model, parallelize_model
from models import FAMILIES, tiny_config, tiny_model
from parity import check, gradient_errors, parallel, random_ids, relative

WINDOWED = ("gpt_oss", "gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4")


def own_loss(logits):
    """An arbitrary user loss that depends on every logit."""
    weight = torch.linspace(-1, 2, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (weight * logits.tanh()).sum() + logits[:, 0].square().mean()


def compare(family, cp, tokens):
    config = tiny_config(family)
    ids = random_ids(2, tokens)
    plain = tiny_model(config)
    (model, _) = parallel(cp, config)
    expected = plain(input_ids=ids).logits
    out = model(input_ids=ids)
    assert out.loss is None and out.logits.shape == (2, tokens, 61)
    own_loss(expected).backward()
    own_loss(out.logits).backward()
    return {
        "logits": relative(out.logits.detach(), expected.detach()),
        **gradient_errors(model, plain),
    }


@pytest.mark.parametrize("family, sizes", diagonal(FAMILIES, [(1, 9), (2, 9), (4, 11)]), ids=str)
def test_logits_and_their_gradients_match(ranks, family, sizes):
    cp, tokens = sizes
    check(ranks.run(cp, compare, family, cp, tokens))


def scale_in_place(tokens):
    """Scale the logits in place. FSDP2's hooks must not be on a view, which this would replace."""
    config = tiny_config("llama")
    ids = random_ids(1, tokens)
    plain = tiny_model(config)
    (model, _) = parallel(2, config)
    for each in (plain, model):
        logits = each(input_ids=ids).logits
        assert not logits._is_view() or each is plain
        own_loss(logits.mul_(3.0)).backward()
    return gradient_errors(model, plain)


@pytest.mark.parametrize("tokens", [8, 9])
def test_logits_may_be_changed_in_place(ranks, tokens):
    check(ranks.run(2, scale_in_place, tokens))


def errors_of_own_rows():
    """Compare the logits and generated tokens of this data-parallel rank's own rows."""
    config = tiny_config("llama")
    ids = random_ids(2, 7)
    model, mesh = parallel(2, config)
    mine = ids[mesh.dp_rank][None]
    plain = tiny_model(config)
    errors = {"logits": relative(model(input_ids=mine).logits, plain(input_ids=mine).logits)}
    # ends the first row early
    stop = int(plain.eval().generate(ids[:1], max_new_tokens=2, do_sample=False)[0, -1])
    options = {
        "inputs": mine,
        "max_new_tokens": 5,
        "do_sample": False,
        "eos_token_id": stop,
        "pad_token_id": 0,
    }
    # parameters stay gathered, or each forward gathers them on all ranks
    for fits in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ithaka.model.generate._fits_gathered", lambda model, fits=fits: fits)
            equal = torch.equal(model.generate(**options), plain.generate(**options))
        errors[f"tokens, {fits}"] = 0.0 if equal else 1.0
    return errors


def test_each_data_parallel_rank_gets_the_logits_of_its_own_rows(ranks):
    check(ranks.run(4, errors_of_own_rows))


def sample_tokens():
    """Return what this rank samples, from a random state of its own, and the number that it draws
    next."""
    model, mesh = parallel(2)
    torch.manual_seed(7 + mesh.rank)
    return model.generate(inputs=random_ids(2, 7), max_new_tokens=5, do_sample=True), torch.rand(())


@torch.random.fork_rng()
def test_the_ranks_of_a_group_sample_the_tokens_of_one_process(ranks):
    plain = tiny_model(tiny_config("llama")).eval()
    torch.manual_seed(7)
    tokens = plain.generate(inputs=random_ids(2, 7), max_new_tokens=5, do_sample=True)
    number = torch.rand(())
    for sampled, drawn in ranks.run(2, sample_tokens):
        assert torch.equal(sampled, tokens) and drawn == number


@pytest.mark.parametrize(
    "family",
    [
        name if name == "qwen3_next" else pytest.param(name, marks=pytest.mark.slow)
        for name in (*DECODERS, *HYBRIDS, *RECURRENT)
    ],
)
def test_other_decoders_generate_the_tokens_of_transformers(family, quiet_transformers):
    """Prompts exceed the windows. Experts, sinks, latent attention and recurrent states have caches
    of their own."""
    # otherwise transformers caches only a window
    changes = {} if family in WINDOWED else {"sliding_window": None}
    plain, model = (tiny_decoder(family, torch.bfloat16, **changes) for _ in range(2))
    parallelize_model(model, mesh=make_mesh(1))
    options = {"inputs": random_ids(2, 7), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**options), plain.eval().generate(**options))


def test_adapters_on_experts_generate_the_tokens_of_peft():
    options = {"input_ids": random_ids(2, 7), "max_new_tokens": 5, "do_sample": False}
    targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    config = LoraConfig(r=2, init_lora_weights=False, **targets)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(get_peft_model(tiny_model(tiny_config("qwen3_moe")), config))
    plain = models[0].eval()
    model = parallelize_model(models[1], mesh=make_mesh(1))
    assert torch.equal(model.generate(**options), plain.generate(**options))
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(model.generate(**options), plain.generate(**options))


@pytest.mark.parametrize(
    "family, settings",
    [
        pytest.param("llama", {"dropout": 0.5}, marks=pytest.mark.slow),
        ("qwen3_moe", {"targets": ("q_proj", "experts.gate_up_proj", "experts.down_proj")}),
    ],
)
def test_a_four_bit_base_generates_the_tokens_of_its_parallel_forward(family, settings):
    """Dropout, which the preceding training step uses, is off."""
    adapter = AdapterConfig(rank=2, base="nf4", **settings)
    model = build_model(
        tiny_config(family, heads=8).to_dict(),
        make_mesh(1),
        Layout(dtype="float32"),
        adapter=adapter,
    )
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param.data.to_local())
    ids = random_ids(2, 7)
    model(input_ids=ids, labels=ids).loss.backward()
    options = {"input_ids": ids, "max_new_tokens": 5, "do_sample": False}
    tokens = model.generate(**options)
    assert torch.equal(tokens, model.generate(**options, use_cache=False))


def without_logits():
    model, _ = parallel(1)
    ids = random_ids(1, 8)
    out = model(input_ids=ids, labels=ids)
    return out.logits, out.num_tokens, list(out.keys())


def test_a_call_with_labels_returns_no_logits(ranks):
    assert ranks.run(1, without_logits) == [
        (None, 7, ["loss", "num_tokens", "docs", "own_loss", "packed"])
    ]
