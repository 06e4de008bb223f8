"""Blocks reproduce modules of transformers in output and every gradient. Modules that compute
anything else stay."""

import gc
import weakref
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from decoders import tiny_decoder
from general import add_lora, assert_equal, compare
from ithaka.blocks import norm as norm_module
from ithaka.blocks.block import TileState
from ithaka.blocks.dropout import replace_dropout
from ithaka.blocks.linear import Linear, LinearBlock, find_linear
from ithaka.blocks.mlp import find_mlp
from ithaka.blocks.norm import NormSpec, find_norm
from ithaka.blocks.rope import RopeBlock, RopeSpec
from ithaka.blocks.tiles import GradSum
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import ResidualSums
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from ithaka.ops.token_wise import NormForm, RopeForm, apply_norm, norm_backward
from ithaka.roots import probe
from ithaka.roots.find import find_root
from parity import random_ids

D = 12
WIDTH = 20
TOKENS = 7
CUT = 3


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def randomized(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = module.to(dtype)
    for i, param in enumerate(module.parameters()):
        scale = param.shape[-1] ** -0.5 if param.dim() > 1 else 1.0
        param.data = draw(*param.shape, seed=i).to(dtype) * scale
    return module


def assert_reproduces(spec, module: nn.Module, x: Tensor, tolerance: float = 1e-5) -> None:
    """Compare a block with its module: in one call with autograd, and in two tiles that add to sums
    of gradients."""
    assert spec is not None
    params = [param for param in module.parameters() if param.requires_grad]
    dy = draw(*x.shape, dtype=x.dtype, seed=9)
    x = x.requires_grad_()
    y = module(x)
    expected = [y, *torch.autograd.grad(y, [x, *params], dy[..., : y.shape[-1]])]
    tile = TileState()
    block = spec.make(module, tile)
    y = block(x)
    ours = [y, *torch.autograd.grad(y, [x, *params], dy[..., : y.shape[-1]])]
    sums = GradSum()
    tiles = []
    for rows in (slice(0, CUT), slice(CUT, None)):
        y_tile = block(x[:, rows])
        with tile.set(grads=sums):
            found = torch.autograd.grad(
                y_tile, [x, *params], dy[:, rows, : y.shape[-1]], allow_unused=True
            )
        assert found[1:] == (None,) * len(params), "nothing is returned to autograd"
        tiles.append((y_tile, found[0]))
    outs, dxs = zip(*tiles, strict=True)
    summed = [torch.cat(outs, 1), sum(dxs), *map(sums.take, params)]
    for results in (ours, summed):
        for got, wanted in zip(results, expected, strict=True):
            assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


# ---- norms


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (LlamaRMSNorm, NormForm(1e-6, 0.0, False)),
        (Gemma3RMSNorm, NormForm(1e-6, 1.0, False)),
        (CohereLayerNorm, NormForm(1e-5, 0.0, True)),
    ],
)
def test_norms(kind, form):
    """In fp64, the module runs, because transformers computes norms in fp32."""
    module = randomized(kind(D))
    x = draw(1, TOKENS, D)
    spec = find_norm("norm", module)
    assert spec == NormSpec("norm", form)
    assert_reproduces(spec, module, x)
    block = spec.make(module.double(), TileState())
    assert torch.equal(block(x.double()), module(x.double()))


def test_norms_of_heads():
    module = randomized(Qwen3RMSNorm(D, eps=1e-5))
    x = draw(1, TOKENS, 5, D)
    assert_reproduces(find_norm("q_norm", module), module, x)


def test_a_frozen_norm_gets_no_gradient():
    module = randomized(LlamaRMSNorm(D)).requires_grad_(False)
    assert_reproduces(find_norm("norm", module), module, draw(1, TOKENS, D))


# ---- MLPs


def make_mlp(act: str = "silu", bias: bool = False, kind: type[nn.Module] = LlamaMLP) -> nn.Module:
    sizes = {"hidden_size": D, "num_attention_heads": 1, "intermediate_size": WIDTH}
    return randomized(kind(LlamaConfig(hidden_act=act, mlp_bias=bias, **sizes)))


class UpFirst(Phi3MLP):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


@pytest.mark.parametrize(
    ("act", "activation"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gated_mlps(act, activation, dtype):
    module = make_mlp(act)
    spec = find_mlp("mlp", module)
    assert (spec.inputs, spec.down, spec.activation) == (
        ("gate_proj", "up_proj"),
        "down_proj",
        activation,
    )
    assert_reproduces(spec, module.to(dtype), draw(1, TOKENS, D, dtype=dtype))


@pytest.mark.parametrize("kind", [Phi3MLP, UpFirst])
def test_mlps_with_one_map_for_gate_and_up(kind):
    module = make_mlp(kind=kind)
    spec = find_mlp("mlp", module)
    assert spec.inputs == ("gate_up_proj",) and spec.up_first == (kind is UpFirst)
    assert_reproduces(spec, module, draw(1, TOKENS, D))


@pytest.mark.parametrize("bias", [False, True])
def test_mlps_with_adapters_biases_and_frozen_weights(bias):
    module = add_lora(
        nn.ModuleDict({"mlp": make_mlp(bias=bias)}), target_modules=["gate_proj", "down_proj"]
    )
    mlp = module.base_model.model["mlp"].float()
    assert sum(param.requires_grad for param in mlp.parameters()) == 4
    assert_reproduces(find_mlp("mlp", mlp), mlp, draw(1, TOKENS, D))


def test_a_skipped_mlp_has_the_same_gradients():
    module = make_mlp()
    tile = TileState()
    x = draw(1, TOKENS, D).requires_grad_()
    block = find_mlp("mlp", module).make(module, tile)
    grads = []
    for skips in (False, True):
        with tile.set(skips_mlp=skips):
            y = block(x)
        assert bool(y.any()) != skips
        grads.append(torch.autograd.grad(y, [x, *module.parameters()], draw(1, TOKENS, D)))
    assert all(map(torch.equal, *grads))


# ---- linear maps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_linear_maps(bias, adapted, dtype):
    module = nn.ModuleDict({"q": randomized(nn.Linear(D, D, bias=bias))})
    module = (add_lora(module, target_modules=["q"]).base_model.model if adapted else module).to(
        dtype
    )
    assert_reproduces(find_linear("q", module["q"]), module["q"], draw(1, TOKENS, D, dtype=dtype))


def test_dropout_in_an_adapter():
    """Each tile has the keys of its tokens."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q": nn.Linear(D, D)})])})
    wrapper = (
        add_lora(model, target_modules=["q"], lora_dropout=0.4)
        .base_model.model["layers"][0]["q"]
        .float()
    )
    state = replace_dropout(
        nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleDict({"0": wrapper})})})
    )
    keys = torch.arange(TOKENS, dtype=torch.int32) + 17
    x = draw(1, TOKENS, D).requires_grad_()
    params = [p for p in wrapper.parameters() if p.requires_grad]
    block = LinearBlock(wrapper, TileState())
    undropped = wrapper(x)
    for rows in (slice(0, TOKENS), slice(CUT, TOKENS)):
        state.keys_t = keys[rows]
        results = []
        for run in (block, wrapper):
            y = run(x[:, rows])
            results.append([y, *torch.autograd.grad(y, [x, *params], draw(*y.shape))])
        assert (results[0][0] - undropped[:, rows]).abs().max() > 1e-2
        torch.testing.assert_close(*results)


def test_some_heads_of_a_map_are_rows_or_columns_of_its_weight():
    linear = Linear(draw(12, 6), draw(12), draw(2, 6), draw(12, 2), scale=1.5)
    x = draw(4, 6)
    heads = torch.tensor([2, 0])
    full = linear(x).unflatten(1, (3, 4))
    torch.testing.assert_close(linear.select_heads(heads, 4)(x), full[:, heads].flatten(1))
    inner = linear.select_heads(torch.tensor([1]), 2, dim=1)
    torch.testing.assert_close(
        inner.input_grad(full.flatten(1), None), full.flatten(1) @ linear.weight_MD[:, 2:4]
    )


@pytest.mark.parametrize(
    "find, make", [(find_linear, lambda: randomized(nn.Linear(D, D))), (find_mlp, make_mlp)]
)
def test_results_of_blocks_may_be_changed_in_place(find, make):
    module = make()
    x = draw(1, TOKENS, D).requires_grad_()
    results = []
    for function in (find("module", module).make(module, TileState()), module):
        y = function(x).clamp_(-0.2, 0.4)
        results.append(
            [y, *torch.autograd.grad(y, [x, *module.parameters()], draw(*y.shape, seed=1))]
        )
    torch.testing.assert_close(*results)


# ---- RoPE


# how dims are paired in the input and output, where cos and sin of a pair are; changes of the
# configuration
ROPE = {
    "llama": (RopeForm(False, False, "halves"), {}),
    "gpt_oss": (RopeForm(False, False, "half"), {}),
    "glm4": (RopeForm(True, True, "first half"), {}),
    "cohere2": (RopeForm(True, True, "neighbors"), {}),
    "phi3": (RopeForm(False, False, "halves"), {"partial_rotary_factor": 0.5}),
    "deepseek_v3": (RopeForm(True, False, "first half"), {}),
}


def specs_of(model: nn.Module) -> list[LayerSpec]:
    root = find_root(model)
    root.find_specs(torch.device("cpu"))
    return root.specs


@pytest.mark.parametrize("family", ROPE)
def test_rope(family):
    """With the tables of the model's rotary embedding, at other lengths and numbers of heads than
    in the probe."""
    form, changes = ROPE[family]
    model = tiny_decoder(family, torch.float32, num_hidden_layers=1, layer_types=None, **changes)
    (spec,) = (block for block in specs_of(model)[0].blocks if isinstance(block, RopeSpec))
    assert spec.form == form
    module = model.model.layers[0].get_submodule(spec.path)
    original = type(module).forward.__globals__[spec.function]
    tables = model.model.rotary_emb(draw(1, 5, 4), torch.arange(5)[None] + 9)
    size = 8 if family == "deepseek_v3" else 16
    results = []
    for function in (RopeBlock(original, form, TileState()), original):
        q, k = (draw(1, heads, 5, size).requires_grad_() for heads in (3, 1))
        outs = function(q, k, *tables)
        results.append(
            [*outs, *torch.autograd.grad(outs, [q, k], [draw(*out.shape, seed=1) for out in outs])]
        )
    torch.testing.assert_close(*results)


# ---- modules that almost match


class ClampedNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-20, 20))


class OtherEpsilon(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (
            self.weight * x * (x.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon).rsqrt()
        )


class ScaledNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


class ShiftedNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01


class PartialNorm(LlamaRMSNorm):
    """Measures all dims but one."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.weight
            * x
            * (x[..., 1:].pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        )


class ClampedMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))


class ScaledMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


class ResidualMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * x


class OtherActivation(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(1.1 * gate) * self.up_proj(x))


class GateOfUp(LlamaMLP):
    """Gates with the input of the activation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(
            self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 0.01 * self.gate_proj(x))
        )


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


def rotate_scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    return q, 1.01 * k


class ScaledRope(LlamaAttention):
    forward = FunctionType(
        LlamaAttention.forward.__code__,
        {**LlamaAttention.forward.__globals__, "apply_rotary_pos_emb": rotate_scaled},
        "forward",
        LlamaAttention.forward.__defaults__,
    )


# In each model: a norm, an MLP, and a projection or its attention.
PLANTED = [
    (ClampedNorm, ClampedMlp, ScaledLinear),
    (OtherEpsilon, ScaledMlp, ScaledRope),
    (ScaledNorm, ResidualMlp, None),
    (ShiftedNorm, OtherActivation, None),
    (PartialNorm, GateOfUp, None),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda kinds: kinds[0].__name__)
def test_modules_that_almost_match_are_not_replaced(planted, monkeypatch):
    monkeypatch.setattr(probe, "SEEDS", probe.SEEDS[:1])
    norm, mlp, other = planted
    model = tiny_decoder("llama", torch.float32, num_hidden_layers=1)
    layer = model.model.layers[0]
    layer.input_layernorm.__class__ = norm
    layer.mlp.__class__ = mlp
    if other is not None:
        (layer.self_attn.o_proj if other is ScaledLinear else layer.self_attn).__class__ = other
    (spec,) = specs_of(model)
    paths = {block.path for block in spec.blocks}
    assert {"post_attention_layernorm", "self_attn.q_proj"} < paths
    assert not {"input_layernorm", "mlp"} & paths
    assert ("self_attn.o_proj" in paths) == (other is not ScaledLinear)
    assert ("self_attn" in paths) == (other is not ScaledRope)
    assert_equal(compare(model, Layout(tile_tokens=9), wide=False), tolerance=1e-4)


def test_swapped_maps_of_an_mlp_are_recognized():
    module = make_mlp()
    module.gate_proj, module.up_proj = module.up_proj, module.gate_proj
    module.__class__ = type("Swapped", (LlamaMLP,), {"forward": swapped_forward})
    spec = find_mlp("mlp", module)
    assert spec.inputs == ("up_proj", "gate_proj")
    assert_reproduces(spec, module, draw(1, TOKENS, D))


def swapped_forward(self: LlamaMLP, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def hook(mlp):
    mlp.down_proj.register_forward_hook(lambda *args: None)


def wrap(mlp):
    mlp.up_proj = ScaledLinear(D, WIDTH)


def patch(mlp):
    mlp.forward = lambda x: 2 * x


@pytest.mark.parametrize("change", [hook, wrap, patch])
def test_changed_modules_are_not_replaced(change):
    """The effect of a wrapper, hook or patch must not be lost."""
    mlp = make_mlp()
    change(mlp)
    assert find_mlp("mlp", mlp) is None


# ---- in a layer


QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")


@pytest.mark.parametrize(
    ("family", "slices_heads", "slices_output"),
    [
        ("llama", True, True),
        ("gpt_oss", True, True),
        ("gemma3_text", True, False),  # it normalizes the output
        ("olmo2", False, False),  # it normalizes q over all heads
        ("phi3", False, True),  # one map for q, k and v
    ],
)
def test_layers_project_the_heads_of_a_stage_if_they_can(family, slices_heads, slices_output):
    spec = specs_of(tiny_decoder(family, torch.float32, num_hidden_layers=1, layer_types=None))[0]
    assert spec.qkv == (QKV if slices_heads else ())
    # Gemma normalizes q and k, whose gradients then depend on them.
    assert spec.skips_projections == (slices_heads and family != "gemma3_text")
    assert spec.output == ("self_attn.o_proj" if slices_output else "")


@pytest.mark.filterwarnings("ignore:model.layers.0 computes")
@pytest.mark.parametrize(
    ("family", "path", "changes"),
    [
        ("olmo", "self_attn.q_proj", {"clip_qkv": 0.5}),
        ("llama4_text", "feed_forward.shared_expert", {}),
    ],
)
def test_layers_that_change_results_in_place_have_blocks(family, path, changes):
    """OLMo clips q, k and v, Llama 4 adds its experts to the output of the shared one."""
    model = tiny_decoder(family, torch.float32, num_hidden_layers=2, **changes)
    assert all(path in [block.path for block in spec.blocks] for spec in specs_of(model))
    assert_equal(compare(model, Layout(tile_tokens=9), wide=False), tolerance=1e-4)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_weight_gradients_of_tiles_are_not_rounded(family, monkeypatch):
    """Blocks add products to fp32 sums. What autograd returns for a tile is in the dtype of the
    weight."""
    plain = tiny_decoder(family, torch.bfloat16, num_hidden_layers=2)
    model = parallelize_model(plain, layout=Layout(tile_tokens=9, dtype="bfloat16"))
    added = []
    add = GradSum.add
    monkeypatch.setattr(
        GradSum, "add", lambda self, param, grad: added.append(grad) or add(self, param, grad)
    )
    ids = random_ids(1, 24)
    model(input_ids=ids, labels=ids).loss.backward()
    grads = [grad for grad in added if grad is not None]
    assert grads and all(grad.dtype == torch.float32 for grad in grads)


def test_sums_of_the_residual_stream_are_rounded_once():
    x, a, b = (draw(40, 30, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in range(3))
    exact = (x.float() + a.float() + b.float()).bfloat16()
    assert not torch.equal((x + a) + b, exact), "otherwise this test compares nothing"
    with ResidualSums(TileState()):
        y = (x + a) + b
    assert torch.equal(y, exact)
    dy = draw(40, 30, dtype=torch.bfloat16, seed=5)
    assert all(torch.equal(grad, dy) for grad in torch.autograd.grad(y, [x, a, b], dy))


@pytest.mark.parametrize("num_added", [1, 2, 3, 4])
def test_a_sum_is_freed_without_the_garbage_collector(num_added):
    """Falcon-H1 sums four tensors: each tile's output would stay until the next collection."""
    y, *others = (draw(40, 30, dtype=torch.bfloat16, seed=seed) for seed in range(1 + num_added))
    gc.disable()
    try:
        with ResidualSums(TileState()):
            for other in others:
                y = y + other
        freed = weakref.ref(y)
        del y
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_centered", [False, True])
def test_a_norm_of_a_sum_reads_the_sum_before_it_is_rounded(is_centered):
    """Otherwise deepseek_v3's gradients have 1.17 times the error of autocast, instead of 1.10."""
    form = NormForm(1e-6, 0.0, is_centered)
    norm = NormSpec("norm", form).make(
        randomized(nn.LayerNorm(30, bias=False), torch.bfloat16), TileState()
    )
    x, a, b = (draw(40, 30, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in range(3))
    with ResidualSums(TileState()):
        sums = (x + a, x + a + b)
        results = [norm(h) for h in sums]
    for h, y, terms in zip(sums, results, [(x, a), (x, a, b)], strict=True):
        wide = sum(term.float() for term in terms)
        weight = norm.module.weight
        assert torch.equal(y, apply_norm(wide, weight, form)), "rounded before"
        assert not torch.equal(y, apply_norm(h, weight, form)), (
            "otherwise this test compares nothing"
        )
        dy = draw(40, 30, dtype=torch.bfloat16, seed=5)
        expected = norm_backward(h, dy, weight, form)[0]
        assert all(
            torch.equal(grad, expected)
            for grad in torch.autograd.grad(y, terms, dy, retain_graph=True)
        )


def test_backward_recomputes_the_norm_of_a_sum_bit_for_bit(monkeypatch):
    model = parallelize_model(
        tiny_decoder("llama", torch.bfloat16, num_hidden_layers=1),
        layout=Layout(tile_tokens=9, dtype="bfloat16"),
    )
    of_sums = []

    def recorded(x, weight_D, form, terms=()):
        y = apply_norm(x, weight_D, form, terms)
        of_sums.extend([y] if terms else [])
        return y

    monkeypatch.setattr(norm_module, "apply_norm", recorded)
    ids = random_ids(1, 24)
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(of_sums) == 6, "three tiles, in forward and again in backward"
    assert all(torch.equal(a, b) for a, b in zip(of_sums[:3], of_sums[3:], strict=True))


# ---- sums of gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_two_parameters_share_is_not_added_to(dtype):
    """Autograd returns one tensor for both operands of a sum."""
    first, second = (torch.zeros(3, dtype=dtype) for _ in range(2))
    shared = torch.ones(3, dtype=dtype)
    grads = GradSum()
    grads.add(first, shared)
    grads.add(second, shared)
    grads.add(first, torch.ones(3, dtype=dtype))
    grads.sum_of(second).add_(2)
    assert torch.equal(shared, torch.ones(3, dtype=dtype))
    assert grads.take(first).tolist() == [2, 2, 2] and grads.take(second).tolist() == [3, 3, 3]


def test_products_in_16_bits_are_summed_unrounded():
    """One rounding to bfloat16 would give an error of 1e-3."""
    weight = draw(40, 30, dtype=torch.bfloat16)
    grads = GradSum()
    tiles = [
        (draw(16, 40, dtype=torch.bfloat16, seed=i), draw(16, 30, dtype=torch.bfloat16, seed=i))
        for i in range(3)
    ]
    for dout, x in tiles:
        grads.add_product(weight, dout, x)
    exact = sum(dout.double().t() @ x.double() for dout, x in tiles)
    total = grads.take(weight)
    assert total.dtype == torch.float32 and (total - exact).norm() < 1e-6 * exact.norm()
