"""Expert blocks match transformers' experts in outputs and every gradient, for any distribution of
tokens."""

import re
from collections import deque

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn import functional as F

from decoders import tiny_decoder
from general import add_lora, assert_equal, compare, mean_loss
from ithaka.blocks import experts as expert_blocks
from ithaka.blocks.expert_rows import SortedAssignments
from ithaka.blocks.experts import ExpertBlock, GroupedLinear, _ExpertsFunction
from ithaka.blocks.tiles import GradSum
from ithaka.comm.mesh import make_mesh
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import LayerPasses
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from ithaka.roots import probe
from ithaka.roots.recorder import Recorder, randomize
from ithaka.train.step import expert_loads
from models import tiny_config, tiny_model
from parity import random_ids, relative

E = 4
K = 2
T = 13
GENERATOR = torch.Generator().manual_seed(4)
DISTRIBUTIONS = {
    "mixed": torch.stack([torch.randperm(E, generator=GENERATOR)[:K] for _ in range(T)]),
    "an expert without tokens": torch.tensor([[0, 3], [3, 1]]).repeat(7, 1)[:T],
    "all tokens": torch.tensor([[2, 1]]).repeat(T, 1),
    "one token": torch.cat([torch.tensor([[1, 2]]), torch.tensor([[0, 3]]).repeat(T - 1, 1)]),
    "one expert twice": torch.tensor([[2, 2]]).repeat(T, 1),
}
FAMILIES = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {"swiglu_limit": 0.4},  # some values are clamped
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
    "glm4_moe": {},
    "aria_text": {"moe_num_experts": E},
}


def find_experts(layer: nn.Module) -> nn.Module | None:
    experts = (
        module
        for module in layer.modules()
        if hasattr(module, "down_proj") and hasattr(module, "num_experts")
    )
    return next(experts, None)


def random_inputs(dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(6)
    x, weights, dy = (
        torch.randn(T, n, generator=generator, dtype=torch.float64) for n in (32, K, 32)
    )
    return x.to(dtype).requires_grad_(), weights.sigmoid().to(dtype).requires_grad_(), dy.to(dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_equal_those_of_transformers(family):
    """In one call with autograd, and in two tiles with summed gradients, the second of which skips
    its output."""
    layer = tiny_decoder(family, num_hidden_layers=2, **FAMILIES[family]).model.layers[1]
    module = find_experts(layer)
    if module is None:
        pytest.skip(
            f"{family} has another kind of experts in transformers {transformers.__version__}"
        )
    params = dict(module.named_parameters())
    (x, weights, dy) = random_inputs()
    inputs = [x, weights, *params.values()]
    names = ["x", "weights", *params]
    plain = {}
    for name, chosen in DISTRIBUTIONS.items():
        y = module(x, chosen, weights)
        plain[name] = y.detach(), torch.autograd.grad(y, inputs, dy)
    spec = LayerSpec(blocks=tuple(expert_blocks.find_experts(layer).values()))
    experts = LayerPasses("layer", layer, spec).experts
    assert experts.block is not None
    errors = {}
    for distribution, chosen in DISTRIBUTIONS.items():
        expected, wanted = plain[distribution]
        y = module(x, chosen, weights)
        autograd_grads = torch.autograd.grad(y, inputs, dy)
        sums = GradSum()
        tiles = []
        for rows, skips in ((slice(0, 5), False), (slice(5, T), True)):
            with experts.repeat_tile(deque(), skips_mlp=skips):
                y_tile = module(x[rows], chosen[rows], weights[rows])
            assert bool(y_tile.any()) != skips
            with experts.tile.set(grads=sums, is_only_tile=False):
                tiles.append(torch.autograd.grad(y_tile, inputs, dy[rows], allow_unused=True))
        summed = [a + b for a, b in zip(*(tile[:2] for tile in tiles), strict=True)]
        summed += [sums.take(param) for param in params.values()]
        errors[distribution] = relative(y.detach(), expected)
        for name, *grads, grad in zip(names, autograd_grads, summed, wanted, strict=True):
            errors[distribution, name] = max(relative(ours, grad) for ours in grads)
    assert_equal([errors])


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt_oss", Layout(4, heads_per_stage=4, tile_tokens=5)),
        pytest.param("deepseek_v3", Layout(2, ring=2, tile_tokens=7), marks=pytest.mark.slow),
        pytest.param(
            "glm4_moe", Layout(2, keep_everything=1, tile_tokens=7), marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_may_have_no_token_of_an_expert(family, layout, monkeypatch):
    used = []
    run = ExpertBlock.__call__

    def record(self, x, chosen, weights):
        used.append(chosen.unique().numel())
        assert self.num_experts == 8
        return run(self, x, chosen, weights)

    monkeypatch.setattr(ExpertBlock, "__call__", record)
    changes = {
        "num_experts": 8,
        "num_local_experts": 8,
        "n_routed_experts": 8,
        "first_k_dense_replace": 0,
    }
    assert_equal(
        compare(tiny_decoder(family, num_hidden_layers=1, **FAMILIES[family], **changes), layout)
    )
    assert min(used) < 8


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bf16_uses_the_grouped_kernel(family, monkeypatch):
    calls = []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(
        F, "grouped_mm", lambda *args, **kwargs: calls.append(args) or grouped_mm(*args, **kwargs)
    )
    model = tiny_decoder(family, torch.float32, num_hidden_layers=1)
    layout = Layout(tile_tokens=16, dtype="bfloat16", keep_attention=1)
    model = parallelize_model(model, mesh=make_mesh(1), layout=layout)
    ids = torch.randint(61, (1, 32), generator=torch.Generator().manual_seed(5))
    loss = model(input_ids=ids, labels=ids).loss
    assert len(calls) == 2 * 2  # two tiles
    loss.backward()
    # the first product again and two input gradients; weight gradients are summed
    assert len(calls) == 2 * (2 + 1 + 2)


@pytest.mark.parametrize("is_transposed", [False, True])
@torch.no_grad()
def test_weight_gradients_are_summed_over_tiles_unrounded(is_transposed):
    """Compare bf16 with fp64 products of the same inputs; rounding each tile's product would give
    an error of 1e-3."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    shape = (E, 16, 24) if is_transposed else (E, 24, 16)
    weight = draw(*shape)
    a_AD = draw(E * 8, 16)
    b_MA = draw(24, 8 * E)
    linear = GroupedLinear(
        nn.Parameter(weight), None, is_transposed, nn.Parameter(a_AD), nn.Parameter(b_MA)
    )
    wide = GroupedLinear(weight.double(), None, is_transposed, a_AD.double(), b_MA.double())
    for tensor in wide.tensors:
        tensor.requires_grad_()
    sums = GradSum()
    expected = GradSum()
    for _ in range(4):
        x = draw(T * K, 16)
        dy = draw(T * K, 24)
        rows = SortedAssignments.sort(DISTRIBUTIONS["mixed"], E)
        linear.add_grads(dy, x, rows, sums, is_only_tile=False)
        wide.add_grads(dy.double(), x.double(), rows, expected, is_only_tile=False)
    pairs = zip(linear.tensors, wide.tensors, strict=True)
    errors = [relative(sums.take(a).double(), expected.take(b)) for a, b in pairs]
    # the input of an adapter's second matrix is rounded
    assert errors[0] < 1e-6 and max(errors) < 3e-3


EXPERT_WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("family", "targets", "layout"),
    [
        ("gpt_oss", EXPERT_WEIGHTS, Layout(2, tile_tokens=7)),
        pytest.param(
            "deepseek_v3",
            EXPERT_WEIGHTS[1:],
            Layout(tile_tokens=9, keep_everything=1),
            marks=pytest.mark.slow,
        ),
        ("qwen3_moe", EXPERT_WEIGHTS, Layout(2, tile_tokens=5)),
    ],
)
def test_adapters_on_experts_equal_peft(family, targets, layout):
    """With and without transposed weights, on one weight and on both."""
    is_widened = family == "qwen3_moe"
    if is_widened:
        plain = tiny_model(tiny_config(family, num_hidden_layers=1))
    else:
        plain = tiny_decoder(family, num_hidden_layers=1, first_k_dense_replace=0)
    plain = add_lora(plain, target_modules=["q_proj"], target_parameters=targets)
    assert_equal(compare(plain, layout, wide=not is_widened))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("gpt_oss", Layout(2, ring=2, tile_tokens=7), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", Layout(tile_tokens=9), marks=pytest.mark.slow),
        ("qwen3_moe", Layout(4, heads_per_stage=4, tile_tokens=5)),
    ],
)
def test_replayed_choices_equal_a_router_that_makes_them(family, layout):
    is_widened = family == "qwen3_moe"
    if is_widened:
        plain = tiny_model(tiny_config(family, num_hidden_layers=2))
    else:
        plain = tiny_decoder(family, num_hidden_layers=2, first_k_dense_replace=0)
    ids = random_ids(1, 24)
    generator = torch.Generator().manual_seed(9)
    chosen = torch.rand(1, 24, 2, E, generator=generator).topk(K).indices  # batch, tokens, layers

    def plain_loss(model):
        layers = iter(chosen[0].unbind(1))
        original = torch.topk

        def topk(scores, k, *args, **kwargs):
            if scores.dim() != 2 or scores.shape[-1] != E:  # topk over groups of experts
                return original(scores, k, *args, **kwargs)
            indices = next(layers)
            return torch.return_types.topk((scores.gather(-1, indices), indices))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "topk", topk)
            patch.setattr(torch.Tensor, "topk", topk)
            return mean_loss(model, ids, ids)

    inputs = {"input_ids": ids, "labels": ids, "expert_indices": chosen}
    assert_equal(compare(plain, layout, plain_loss, wide=not is_widened, **inputs))


def test_wrong_choices_are_refused():
    model = parallelize_model(tiny_decoder("gpt_oss", torch.float32, num_hidden_layers=1))
    ids = random_ids(1, 6)
    for chosen, problem in (
        (torch.zeros(1, 5, 1, K, dtype=torch.long), "shape (1, 5, 1, 2)"),
        (torch.full((1, 6, 1, K), E), "values from 4 to 4"),
        (torch.zeros(1, 6, 1, K + 1, dtype=torch.long), "3 experts per token"),
    ):
        with pytest.raises(ValueError, match=re.escape(problem)):
            model(input_ids=ids, labels=ids, expert_indices=chosen)
    dense = parallelize_model(tiny_decoder("olmo2", torch.float32, num_hidden_layers=1))
    with pytest.raises(TypeError, match="no layer has experts"):
        dense(input_ids=ids, labels=ids, expert_indices=torch.zeros(1, 6, 1, K, dtype=torch.long))


def test_the_load_of_experts_is_counted_in_training(monkeypatch):
    model = parallelize_model(
        tiny_decoder("gpt_oss", torch.float32, num_hidden_layers=1), layout=Layout(tile_tokens=4)
    )
    ids = random_ids(1, 8)
    chosen = torch.tensor([[0, 1], [0, 2]]).repeat(4, 1).view(1, 8, 1, K)
    model(input_ids=ids, labels=ids, expert_indices=chosen).loss.backward()
    model.eval()
    model(input_ids=ids)
    loads = expert_loads(model)
    assert loads["experts/busiest/0"] == 0.5
    assert loads["experts/entropy/0"] == pytest.approx(0.75)  # shares 1/2, 1/4, 1/4 and 0
    assert expert_loads(model) == {}
    model.train()(input_ids=ids, labels=ids, expert_indices=chosen)
    other_rank = torch.tensor([[0.0, 4, 4, 8]])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda loads_LE: loads_LE.add_(other_rank))
    assert expert_loads(model) == {"experts/busiest/0": 0.25, "experts/entropy/0": pytest.approx(1)}


def test_large_layers_are_not_gathered_ahead(monkeypatch):
    """Without overlap, backward gathers each layer only when it needs it; gradients are the
    same."""
    ahead = []
    unshard = FSDPParamGroup._prefetch_unshard

    def record(group, kind):
        ahead.append(not group.is_unsharded)
        unshard(group, kind)

    monkeypatch.setattr(FSDPParamGroup, "_prefetch_unshard", staticmethod(record))
    for limit in (2**40, 0):
        monkeypatch.setattr("ithaka.layout.PREFETCHED_BYTES", limit)
        ahead.clear()
        assert_equal(
            compare(tiny_decoder("gpt_oss", num_hidden_layers=3), Layout(2, overlap=False))
        )
        # ranks; lm_head, three layers and the embedding, or only lm_head
        assert sum(ahead) == 2 * (5 if limit else 1)


# ---- the probe


LARGE = {
    "num_hidden_layers": 1,
    "num_local_experts": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
}
LARGE |= {
    "n_routed_experts": 64,
    "num_experts": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}


@pytest.mark.parametrize(
    "family, adapted",
    [
        ("gpt_oss", True),
        ("deepseek_v3", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gpt_oss", False), ("qwen2_moe", True))
        ),
    ],
)
def test_the_probe_uses_few_and_narrow_experts(family, adapted, monkeypatch):
    """In the adapted cases, each expert has an adapter."""
    model = tiny_decoder(family, torch.float32, **LARGE)
    sizes = []
    if adapted:
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = add_lora(model, target_modules=[], target_parameters=names).get_base_model()

    def watch(layer, *args, **kwargs):
        sizes.append(sum(param.numel() for param in layer.parameters()))
        randomize(layer, *args, **kwargs)

    monkeypatch.setattr(probe, "randomize", watch)
    (spec,) = probe.probe_layers(model, Recorder(model), torch.device("cpu"))
    assert isinstance(spec.blocks[-1], expert_blocks.ExpertSpec)
    # Qwen2-MoE multiplies the output of its shared expert, so a gradient depends on it.
    assert spec.skips_mlp == (family != "qwen2_moe")
    assert len(sizes) == 2 and max(sizes) < 0.3 * sum(
        param.numel() for param in model.model.layers.parameters()
    )


def test_running_out_of_memory_in_the_probe_is_raised(monkeypatch):
    def run_out(ctx, *inputs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(_ExpertsFunction, "forward", run_out)
    model = tiny_decoder("gpt_oss", torch.float32, num_hidden_layers=1)
    with pytest.raises(torch.OutOfMemoryError):
        probe.probe_layers(model, Recorder(model), torch.device("cpu"))


def test_a_layer_that_falls_back_to_transformers_experts_is_named(monkeypatch):
    def fail(ctx, *inputs):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(_ExpertsFunction, "forward", fail)
    model = tiny_decoder("gpt_oss", torch.float32, num_hidden_layers=1)
    with pytest.warns(
        UserWarning, match=r"model.layers.0 runs its experts as transformers does.*no such kernel"
    ):
        (spec,) = probe.probe_layers(model, Recorder(model), torch.device("cpu"))
    assert not any(isinstance(block, expert_blocks.ExpertSpec) for block in spec.blocks)
