"""On CPU a step gives the same bits every time, for every activation policy, tier and overlap."""

import dataclasses

import pytest
import torch

from ithaka.comm.mesh import make_mesh
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import random_ids
from runs import bitwise_metrics, copy_run_at_step, run, tiny_run

# Maps a tier to what both layers keep besides their attention output.
TIERS = {"device": {}, "host": {"keep_projections": 2}, "disk": {"keep_everything": 2}}


def bits_of_a_step(cp, **options):
    """Return the loss and all gradients. Checks that a step on other tokens, which fills the pool,
    changes none."""
    layout = Layout(cp, tile_tokens=5, **options)
    model = tiny_model(tiny_config("qwen3", heads=4, kv_heads=2), torch.float32)
    model = parallelize_model(model, mesh=make_mesh(cp), layout=layout)
    first = random_ids(1, 18)
    steps = []
    for ids in (first, first.flip(1), first):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        steps.append({"loss": loss.detach(), **grads})
        model.zero_grad()
    assert not torch.equal(steps[0]["loss"], steps[1]["loss"])
    different = [name for name in steps[0] if not torch.equal(steps[0][name], steps[2][name])]
    assert different == [], "two equal steps differ"
    return {name: value.numpy() for name, value in steps[0].items()}


def compare_variants(cp, heads_per_stage, kept, every):
    first = None
    wrong = []
    for overlap in (True, False):
        for tier, more in TIERS.items() if overlap or every else [("disk", TIERS["disk"])]:
            options = {"overlap": overlap, "input_tier": tier}
            if kept:
                options |= {"keep_attention": 2, "attention_tier": tier, **more}
            bits = bits_of_a_step(cp, heads_per_stage=heads_per_stage, **options)
            first = first or bits
            wrong += [(options, name) for name in first if (first[name] != bits[name]).any()]
    return wrong


@pytest.mark.parametrize(
    "cp, heads_per_stage, kept",
    [
        (2, 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 1, True), (2, None, True), (2, 2, False))
        ),
    ],
)
def test_bits_do_not_depend_on_tier_or_overlap(ranks, cp, heads_per_stage, kept, pytestconfig):
    """Without overlap only one tier runs, unless --slow is set."""
    for wrong in ranks.run(
        cp, compare_variants, cp, heads_per_stage, kept, pytestconfig.getoption("--slow")
    ):
        assert wrong == []


def with_memory(config, folder, **memory):
    return dataclasses.replace(
        config,
        memory=dataclasses.replace(config.memory, **memory),
        train=dataclasses.replace(config.train, run_dir=folder),
    )


@pytest.mark.slow
def test_an_offloaded_optimizer_gives_identical_runs(ranks, tmp_path, pytestconfig):
    """Every number is equal, also after resuming from a checkpoint of the other run and, with
    --slow, from its own."""
    plain = tiny_run(
        tmp_path,
        model={"num_hidden_layers": 2},
        parallel={"cp": 2},
        train={"steps": 2, "save_every": 1, "validate_every": 0},
    )
    offloaded = with_memory(plain, tmp_path / "offloaded", offload_optimizer=True)
    ranks.run(2, run, plain)
    ranks.run(2, run, offloaded)
    expected = bitwise_metrics(plain.train.run_dir)
    assert bitwise_metrics(offloaded.train.run_dir) == expected
    for made_by in (plain, offloaded) if pytestconfig.getoption("--slow") else (plain,):
        again = with_memory(
            plain, tmp_path / f"after-{made_by.train.run_dir.name}", offload_optimizer=True
        )
        copy_run_at_step(made_by.train.run_dir, again.train.run_dir, step=1)
        ranks.run(2, run, again, again.train.run_dir)
        assert bitwise_metrics(again.train.run_dir) == expected


@pytest.mark.slow
def test_tiers_give_identical_runs(ranks, tmp_path):
    plain = tiny_run(
        tmp_path,
        model={"num_hidden_layers": 2},
        parallel={"cp": 2},
        train={"steps": 2, "validate_every": 0},
    )
    ranks.run(2, run, plain)
    for tier in ("host", "disk"):
        other = with_memory(plain, tmp_path / tier, offload=tier)
        ranks.run(2, run, other)
        assert bitwise_metrics(other.train.run_dir) == bitwise_metrics(plain.train.run_dir)
