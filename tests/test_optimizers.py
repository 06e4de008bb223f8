"""optim.name: adamw8bit follows AdamW, has the planned bytes and resumes; muon orthogonalizes full
matrices."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from faults import moved
from ithaka.comm.mesh import make_mesh
from ithaka.config import OptimConfig, load_config
from ithaka.config.sections import EntryConfig
from ithaka.layout import Layout
from ithaka.model.optimizers import MuonAndAdamW, make_optimizer
from ithaka.plan.bytes import gpu_phases, saved_bytes
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.search import make_search_space
from ithaka.plan.shape import StepShape
from ithaka.run import rules
from ithaka.run.road import model_shape
from ithaka.trace.shapes import find_shape
from ithaka.train.prepare import prepare
from refusals import assert_refused
from runs import bitwise_metrics, copy_run_at_step, run, tiny_run, validate

SIZES = {"hidden_size": 64, "intermediate_size": 192}  # rows are multiples of a block


def optimizer_run(folder, name, **sections):
    return tiny_run(folder, model=SIZES, optim={"name": name, "lr": 1e-2}, **sections)


def state_bytes(optimizer) -> int:
    """Return the bytes of this rank's moments, without torchao's tables of 256 values."""
    moments = [
        value.to_local()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    parts = [(m.codes, m.scale) if hasattr(m, "codes") else (m,) for m in moments]
    return sum(part.nbytes for each in parts for part in each)


def losses_of(config):
    return [loss for step, loss, *_ in bitwise_metrics(config.train.run_dir) if step > 0]


@pytest.mark.parametrize("name", ["adamw8bit", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_run_resumes_bitwise_also_on_other_ranks_and_has_the_planned_bytes(ranks, tmp_path, name):
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    config = optimizer_run(tmp_path, name, train={"steps": 3, "save_every": 2, "validate_every": 0})
    ranks.run(2, run, config)
    again = moved(config, copy_run_at_step(config.train.run_dir, tmp_path / "again", 2))
    ranks.run(2, run, again, again.train.run_dir)
    assert bitwise_metrics(again.train.run_dir) == bitwise_metrics(config.train.run_dir)
    alone = moved(config, copy_run_at_step(config.train.run_dir, tmp_path / "alone", 2))
    ranks.run(1, run, alone, alone.train.run_dir)
    losses = losses_of(config)
    losses_alone = losses_of(alone)
    assert losses_alone == pytest.approx(losses, rel=1e-4)
    plain = optimizer_run(
        tmp_path / "plain", "adamw", train={"steps": 3, "save_every": 0, "validate_every": 0}
    )
    run(plain)
    adamw_losses = losses_of(plain)
    assert losses != adamw_losses and losses[0] == pytest.approx(adamw_losses[0], rel=1e-5)
    assert losses[-1] == pytest.approx(adamw_losses[-1], rel=0.02 if name == "adamw8bit" else 0.3)
    half = moved(config, copy_run_at_step(config.train.run_dir, tmp_path / "half", 2))
    trainer = prepare(validate(half, half.train.run_dir), trains=False)
    planned = model_shape(config).moment_bytes(1)
    assert state_bytes(trainer.optimizer) == pytest.approx(planned, rel=0.02)
    dist.destroy_process_group()
    changed = dataclasses.replace(half, optim=dataclasses.replace(half.optim, name="adamw"))
    refused = lambda: validate(changed, half.train.run_dir)  # noqa: E731
    assert_refused(refused, f"optim.name={name}", fix="start a new run")


def test_unsupported_combinations_are_refused(tmp_path, monkeypatch):
    for name in ("adamw8bit", "muon"):
        config = optimizer_run(tmp_path, name, memory={"offload_optimizer": True})
        refused = lambda: validate(config)  # noqa: B023, E731
        assert_refused(
            refused, "memory.offload_optimizer=true", f"optim.name={name}", fix="optim.name=adamw"
        )
    monkeypatch.setattr(rules, "find_spec", lambda package: None if package == "torchao" else True)
    refused = lambda: validate(optimizer_run(tmp_path, "adamw8bit"))  # noqa: E731
    assert_refused(refused, "optim.name=adamw8bit", fix="pip install -e '.[adamw8bit]'")
    refused = lambda: EntryConfig(context=61, steps=2, optim={"name": "muon"})  # noqa: E731
    assert_refused(refused, "curriculum.optim.name", fix="set optim.name")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 10), nn.Linear(10, 37), nn.Linear(37, 5)])
        self.embed_tokens = nn.Embedding(7, 24)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Layers()

    def forward(self, ids):
        return self.model(self.model.embed_tokens(ids))


def muon_steps(model):
    optimizer = make_optimizer(model, OptimConfig(name="muon", lr=0.05))
    assert isinstance(optimizer, MuonAndAdamW)
    for step in range(3):
        model(torch.arange(7).roll(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def sharded_steps():
    torch.manual_seed(0)
    model = Model().double()
    alone = muon_steps(copy.deepcopy(model))
    mesh = make_mesh(1)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh.fsdp)  # averages the equal gradients of all ranks
    return [float((a - b).norm() / a.norm()) for a, b in zip(alone, muon_steps(model), strict=True)]


def test_muon_on_shards_equals_muon_on_full_matrices(ranks):
    """Compares in fp64. PyTorch orthogonalizes in bfloat16, where sums in another order differ by
    percents."""
    for errors in ranks.run(2, wide_sharded_steps):
        assert max(errors) < 1e-10


def wide_sharded_steps():
    """Muon casts with `bfloat16()` in torch 2.13, with `to(dtype=...)` in 2.15."""

    def keep_or_cast(self, *args, **options):
        return (
            self.clone() if options.get("dtype") == torch.bfloat16 else cast(self, *args, **options)
        )

    cast = torch.Tensor.to
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
        patch.setattr(torch.Tensor, "to", keep_or_cast)
        return sharded_steps()


def test_plans_count_the_state_and_never_offload_it():
    shape = find_shape("llama3-8b")
    hardware = parse_gpus("8xH100")
    layout = Layout(cp=8)
    matrices = 32 * shape.measured.parameters
    expected = {"adamw": 8 * shape.num_parameters, "adamw8bit": 2.125 * shape.num_parameters}
    expected["muon"] = 4 * matrices + 8 * (shape.num_parameters - matrices)
    for name, num_bytes in expected.items():
        planned = dataclasses.replace(shape, optimizer=name)
        _, holders = gpu_phases(planned, layout, hardware, StepShape(1 << 17))[-1]
        assert holders["optimizer"] == pytest.approx(num_bytes / 8, rel=1e-4)
        saved = saved_bytes(planned, layout, hardware)
        assert saved == pytest.approx(4 * shape.num_parameters + num_bytes, rel=1e-4)
    config = load_config(None, ["optim.name=muon", "data.context=1M"])
    space = make_search_space(
        config, dataclasses.replace(shape, optimizer="muon"), parse_gpus("1xH100-80GB")
    )
    plan = space.choose(StepShape(1 << 20))
    assert not plan.layout.offload_optimizer and not plan.fits
