"""model.rope gives the loss and gradients of Hugging Face with the same rope_parameters, and is
exported."""

import dataclasses
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from general import fp64_tiles
from ithaka.checkpoint.export import export
from ithaka.checks import verify
from ithaka.cli import app
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig, RopeConfig, parse_config, to_dict
from ithaka.layout import Layout
from ithaka.model.build import build_model, read_hf_config
from ithaka.train.journal import describe_run
from ithaka.train.prepare import prepare
from models import plain_loss, tiny_config, tiny_model, widen
from parity import check, gradient_errors, random_ids, relative
from refusals import assert_refused
from runs import MODEL, run, tiny_run, validate

ORIGINAL = 16
CONTEXT = 50
OWN = {"rope_type": "default", "rope_theta": 100.0}  # angles differ within few positions
# model.rope -> rope_parameters
TYPES = [
    ({"theta": 400.0}, {"rope_type": "default", "rope_theta": 400.0}),
    ({"type": "linear", "factor": 4}, {"rope_type": "linear", "factor": 4.0}),
    (
        {"type": "llama3", "factor": 8, "theta": 200.0},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 200.0},
    ),
    (
        {"type": "yarn", "factor": 8, "original_max_position_embeddings": 8, "beta_fast": 3},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 3.0,
        },
    ),
]
# Only the second of two ranks has positions beyond the original ones.
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 9.0, 20.0]}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 28, **LONG}
TYPES.append(({name.removeprefix("rope_"): value for name, value in LONGROPE.items()}, LONGROPE))
NUM_POSITIONS = {
    "longrope": 4 * 28,
    "default": CONTEXT,
    "llama3": CONTEXT,
    "linear": 4 * ORIGINAL,
    "yarn": 64,
}


def saved(folder, **changes):
    sizes = {"max_position_embeddings": ORIGINAL, "rope_parameters": OWN, **changes}
    tiny_model(tiny_config("llama", **sizes)).save_pretrained(folder)
    return folder


@fp64_tiles()
def errors_of(folder):
    """Return this rank's errors for every type, compared with a plain model whose rope_parameters
    are set by hand."""
    ids = random_ids(1, CONTEXT)
    mesh = make_mesh(2)
    errors = []
    layout = Layout(
        2,
        heads_per_stage=2,
        tile_tokens=5,
        keep_attention=1,
        dtype="float64",
    )
    for rope, parameters in TYPES:
        config = AutoConfig.from_pretrained(folder)
        config.rope_parameters = OWN | parameters
        plain = widen(
            AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64).train()
        )
        expected = plain_loss(plain, ids, ids)
        expected.backward()
        model = build_model(folder, mesh, layout, rope=RopeConfig(**rope), context=CONTEXT)
        assert model.config.rope_parameters == OWN | parameters
        assert model.config.max_position_embeddings == NUM_POSITIONS[parameters["rope_type"]]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        errors.append(
            {"loss": relative(loss.detach(), expected.detach()), **gradient_errors(model, plain)}
        )
    return errors


@fp64_tiles()
def errors_of_longrope(folder):
    """Return this rank's errors for a model stored with longrope, like Phi: first two forwards,
    short and long, before one backward; then two data-parallel ranks, only one of them beyond the
    original positions."""
    ids = random_ids(2, 2 * ORIGINAL)
    errors = []

    def pair(cp):
        layout = Layout(cp, heads_per_stage=2, tile_tokens=5, dtype="float64")
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        return widen(plain.train()), build_model(folder, make_mesh(cp), layout, context=CONTEXT)

    def append_errors(model, plain, loss, expected):
        loss.backward()
        expected.backward()
        errors.append(
            {"loss": relative(loss.detach(), expected.detach()), **gradient_errors(model, plain)}
        )

    plain, model = pair(2)
    squared = 1 + math.log(64 / ORIGINAL) / math.log(ORIGINAL)  # Phi's rule
    assert model.model.rotary_emb.attention_scaling**2 == pytest.approx(squared)
    both = [ids[:1], ids[:1, :ORIGINAL]]
    losses = [model(input_ids=each, labels=each).loss for each in both]
    append_errors(model, plain, sum(losses), sum(plain_loss(plain, each, each) for each in both))
    plain, model = pair(1)
    near = ids[:, :ORIGINAL]
    at = torch.arange(ORIGINAL) + torch.tensor([[0], [1]])
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    loss = model(input_ids=near[mine], labels=near[mine], position_ids=at[mine]).loss
    append_errors(model, plain, loss, plain_loss(plain, near, near, position_ids=at))
    return errors


def test_longrope_is_chosen_once_for_all_ranks_and_kept_for_backward(ranks, tmp_path):
    phi = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": 64}
    saved(tmp_path, rope_parameters=OWN | {"rope_type": "longrope", **LONG}, **phi)
    for errors in ranks.run(2, errors_of_longrope, tmp_path):
        check(errors)


def test_each_type_has_the_loss_and_gradients_of_hugging_face(ranks, tmp_path):
    for errors in ranks.run(2, errors_of, saved(tmp_path, num_hidden_layers=1)):
        assert len(errors) == len(TYPES)
        check(errors)


def test_rope_on_part_of_each_head_keeps_its_type(tmp_path):
    """With rope_type=proportional, theta can change; another type would rotate all dimensions."""
    own = OWN | {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    saved(tmp_path, rope_parameters=own)
    config = AutoConfig.from_pretrained(tmp_path)
    ids = random_ids(1, CONTEXT)
    config.rope_parameters = moved = own | {"rope_theta": 9.0}
    plain = widen(
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float64).train()
    )
    expected = plain_loss(plain, ids, ids)
    expected.backward()
    layout = Layout(tile_tokens=5, dtype="float64")
    model = build_model(tmp_path, make_mesh(1), layout, rope=RopeConfig(theta=9.0), context=CONTEXT)
    assert (
        model.config.rope_parameters == moved
        and int((model.model.rotary_emb.inv_freq == 0).sum()) == 2
    )
    with fp64_tiles():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    check([{"loss": relative(loss.detach(), expected.detach()), **gradient_errors(model, plain)}])
    yarn = RopeConfig(type="yarn", factor=4)
    named = "model.rope.type=yarn", "rope_type=proportional"
    assert_refused(lambda: read_hf_config(tmp_path, yarn, CONTEXT), *named, fix="change theta")


def header_and_logits(config, ids):
    """Load a run's latest checkpoint and return its header and logits."""
    longer = replace(config, train=replace(config.train, steps=100))
    trainer = prepare(validate(longer, config.train.run_dir))
    with torch.no_grad():
        return describe_run(trainer), trainer.model(input_ids=ids).logits


def moved_run(folder, **rope):
    base = folder / "base"
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**MODEL, "max_position_embeddings": ORIGINAL})
    )
    model.save_pretrained(base)
    config = tiny_run(folder, train={"steps": 1})
    moved = RopeConfig(**rope or {"type": "yarn", "factor": 4})
    return replace(config, model=dataclasses.replace(config.model, path=base, rope=moved)), base


def test_a_run_with_longrope_is_exported_with_it(tmp_path):
    config = parse_config(to_dict(moved_run(tmp_path, type="longrope", **LONG)[0]))
    ids = torch.arange(61)[None] * 13 % MODEL["vocab_size"]
    run(config)
    header, logits = header_and_logits(config, ids)
    assert "long_factor (4), type longrope" in header["rope"]
    out = export(config.train.run_dir, tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    assert written["rope_parameters"] == LONG | {"rope_type": "longrope", "rope_theta": 10000.0} | {
        "original_max_position_embeddings": ORIGINAL
    }
    assert written["max_position_embeddings"] == 61  # sets the attention factor
    model = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_export_equals_the_trained_model_beyond_the_original_length(ranks, tmp_path):
    config, _ = moved_run(tmp_path)
    ids = torch.arange(2 * 61).reshape(2, 61) * 13 % MODEL["vocab_size"]
    ranks.run(2, run, config)
    header, logits = ranks.run(2, header_and_logits, config, ids)[0]
    assert header["rope"].startswith(
        "original_max_position_embeddings 16, factor 4.0, type yarn, theta 10000.0"
    )
    assert header["rope"].endswith("for 64 positions")
    out = export(config.train.run_dir, tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    assert written["max_position_embeddings"] == 64
    assert written["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
    } | {"original_max_position_embeddings": 16}
    torch.testing.assert_close(
        AutoModelForCausalLM.from_pretrained(out)(ids).logits, logits, rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_an_adapter_is_exported_with_the_positions_it_was_trained_at(ranks, tmp_path):
    config, base = moved_run(tmp_path)
    config = replace(config, adapter=AdapterConfig(rank=2, alpha=64))
    ids = torch.arange(2 * 61).reshape(2, 61) * 13 % MODEL["vocab_size"]
    ranks.run(2, run, config)
    _, logits = ranks.run(2, header_and_logits, config, ids)[0]
    merged = AutoModelForCausalLM.from_pretrained(
        export(config.train.run_dir, tmp_path / "merged", True)
    )
    torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-5, atol=1e-5)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(config.train.run_dir), str(out)])
    assert result.exit_code == 0 and "config.json" in result.stdout
    model = AutoModelForCausalLM.from_pretrained(base, config=AutoConfig.from_pretrained(out))
    adapted = PeftModel.from_pretrained(model, str(out))
    torch.testing.assert_close(adapted(ids).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "rope, named, fix",
    [
        (
            None,
            ["data.context=50", "max_position_embeddings=16"],
            "{theta: 8.0e6} or {type: yarn, factor: 4}",
        ),
        ({"type": "yarn"}, ["model.rope.factor", "yarn"], "at least 4 "),
        (
            {"type": "yarn", "factor": 2},
            ["model.rope.factor=2.0", "32 positions", "data.context=50"],
            "at least 4",
        ),
        ({"type": "linear", "factor": 3}, ["model.rope.factor=3.0", "48 positions"], "at least 4"),
        ({"factor": 4}, ["model.rope.factor=4.0", "type default"], "linear or llama3 or yarn or"),
        (
            {"type": "longrope", "factor": 2, **LONG},
            ["model.rope.factor=2.0", "32 positions"],
            "at least 4",
        ),
        ({"type": "longrope"}, ["model.rope.short_factor", "0 numbers", "longrope"], "give 4"),
        (
            {"type": "longrope", **LONG, "long_factor": [1, 2]},
            ["model.rope.long_factor", "2 numbers"],
            "give 4",
        ),
        (
            {"type": "llama3", "factor": 4, "beta_fast": 9},
            ["model.rope.beta_fast=9.0", "llama3"],
            "type yarn",
        ),
    ],
)
def test_trained_weights_are_refused_beyond_their_positions(tmp_path, rope, named, fix):
    saved(tmp_path)
    rope = rope and RopeConfig(**rope)
    assert_refused(lambda: read_hf_config(tmp_path, rope, CONTEXT), *named, fix=fix)
    assert read_hf_config(tmp_path, None, ORIGINAL).max_position_embeddings == ORIGINAL


def test_long_contexts_are_refused_before_ranks_start_unless_from_scratch(tmp_path):
    config, _ = moved_run(tmp_path)
    assert validate(config)
    unmoved = replace(config, model=replace(config.model, rope=None))
    assert_refused(
        lambda: validate(unmoved),
        "data.context=61",
        "max_position_embeddings=16",
        fix="model.rope=",
    )
    scratch = tiny_run(tmp_path, model={"max_position_embeddings": ORIGINAL})
    assert validate(scratch)
    assert read_hf_config(scratch.model.path, None, 61).max_position_embeddings == 61


def test_verify_checks_the_moved_positions(tmp_path):
    config, base = moved_run(tmp_path)
    verify.write_truncated_model(base, tmp_path / "cut", config)
    cut = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert cut["rope_parameters"]["rope_type"] == "yarn" and cut["max_position_embeddings"] == 64


def test_an_extended_model_is_extended_from_its_original_positions(tmp_path):
    """Its max_position_embeddings already include the first extension."""
    own = OWN | {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 5.0,
    }
    saved(tmp_path, rope_parameters=own)
    longer = read_hf_config(tmp_path, RopeConfig(factor=8), CONTEXT)
    assert longer.rope_parameters == own | {"factor": 8.0} and longer.max_position_embeddings == 64
    plain = read_hf_config(tmp_path, RopeConfig(type="linear", factor=7), CONTEXT)
    assert plain.rope_parameters == {"rope_type": "linear", "rope_theta": 100.0, "factor": 7.0}
    assert plain.max_position_embeddings == 56
    # outside of rope_parameters
    phi = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": 64}
    saved(tmp_path / "phi", rope_parameters=OWN | {"rope_type": "longrope", **LONG}, **phi)
    config = read_hf_config(tmp_path / "phi", RopeConfig(original_max_position_embeddings=8), 80)
    config.standardize_rope_params()
    assert (
        config.rope_parameters["original_max_position_embeddings"] == 8
        and config.max_position_embeddings == 80
    )
