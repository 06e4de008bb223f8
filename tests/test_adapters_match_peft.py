"""Parallel LoRA matches PEFT on plain Hugging Face in fp64: the loss and every adapter's
gradient."""

import copy
import warnings
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from general import add_lora
from grids import diagonal
from ithaka.comm.mesh import make_mesh
from ithaka.layer.store import Store
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import check, gradient_errors, plain_sum, random_ids, relative
from refusals import assert_refused
from threads import run_on_threads

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL = [*LINEARS, "lm_head"]


def with_lora(config, **settings):
    return add_lora(tiny_model(config), **settings)


def compare(cp, config, layout, documents=None, **lora):
    """Return the errors of every rank; `documents` has the lengths of packed documents."""
    lengths = documents or (19,)
    ids = random_ids(1, sum(lengths))
    plain = with_lora(config, **lora)
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    inputs = {"document_ids": numbers} if documents else {}
    parts = ids.split(lengths, dim=1)
    labels = torch.cat(
        [part.clone().index_fill_(1, torch.tensor([0]), -100) for part in parts], dim=1
    )
    models = [copy.deepcopy(plain) for _ in range(cp)]
    expected = sum(plain_sum(plain, part, part) for part in parts) / (labels != -100).sum()
    expected.backward()

    def work():
        mesh = make_mesh(cp, ring=layout.ring)
        store = Store(mesh.device)
        model = parallelize_model(
            models[mesh.rank], mesh=mesh, layout=replace(layout, cp=cp), store=store
        )
        loss = model(input_ids=ids, labels=labels, **inputs).loss
        loss.backward()
        return {"loss": relative(loss.detach(), expected.detach()), **gradient_errors(model, plain)}

    errors = run_on_threads(cp, work)
    trained = sum(param.requires_grad for param in plain.parameters())
    assert all(len(rank_errors) == 1 + trained for rank_errors in errors)
    return errors


# An orthogonal array built from parities: any combination of three modules occurs in one of the 16
# layers.
SUBSETS = [
    [name for i, name in enumerate(LINEARS) if (layer & (8 + i)).bit_count() % 2]
    for layer in range(16)
]


@pytest.mark.slow
def test_every_combination_of_three_targets_matches_peft():
    for three in combinations(LINEARS, 3):
        assert len({tuple(name in subset for name in three) for subset in SUBSETS}) == 8
    modules = [(layer, name) for layer, subset in enumerate(SUBSETS) for name in subset]
    names = [
        f"layers.{layer}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
        for layer, name in modules
    ]
    config = tiny_config("llama", 2, 1, num_hidden_layers=16, tie_word_embeddings=False)
    check(
        compare(
            1, config, Layout(heads_per_stage=1, tile_tokens=16), target_modules=[*names, "lm_head"]
        )
    )


LAYOUTS = {
    "default": Layout(),
    "stages": Layout(heads_per_stage=4, tile_tokens=3, overlap=False),
    "kept": Layout(
        heads_per_stage=4,
        tile_tokens=4,
        input_tier="host",
        keep_inputs=1,
        keep_attention=2,
        attention_tier="host",
    ),
    "disk": Layout(heads_per_stage=4, input_tier="disk", keep_attention=1, attention_tier="disk"),
    "everything": Layout(heads_per_stage=4, keep_everything=2),
    "ring": Layout(heads_per_stage=4, tile_tokens=3, ring=2),
}
CASES = [  # family, cp, layout, documents, changes to PEFT's configuration
    ("llama", 1, "default", None, {}),
    ("llama", 2, "kept", (7, 1, 9, 4), {"use_rslora": True}),
    (
        "mistral",
        4,
        "ring",
        None,
        {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"down_proj": 7}},
    ),
    pytest.param("qwen2", 1, "disk", (7, 1, 9, 4), {}, marks=pytest.mark.slow),
    pytest.param("qwen2", 4, "everything", None, {"use_rslora": True}, marks=pytest.mark.slow),
    pytest.param("qwen3", 2, "stages", (7, 1, 9, 4), {}, marks=pytest.mark.slow),
    ("qwen3", 2, "everything", (7, 1, 9, 4), {"modules_to_save": ["lm_head", "q_norm"]}),
    pytest.param(
        *(
            "mistral",
            2,
            "kept",
            None,
            {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["q_proj"]},
        ),
        marks=pytest.mark.slow,
    ),
    (
        "llama",
        2,
        "stages",
        None,
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    pytest.param(
        "llama", 1, "stages", None, {"modules_to_save": ["embed_tokens"]}, marks=pytest.mark.slow
    ),
    pytest.param(
        "llama",
        4,
        "stages",
        None,
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "qwen3_moe", 2, "stages", None, {"target_modules": LINEARS[:4]}, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("family, cp, layout, documents, changes", CASES)
def test_families_layouts_and_options_match_peft(family, cp, layout, documents, changes):
    lora = {"target_modules": LINEARS if "modules_to_save" in changes else ALL, **changes}
    check(compare(cp, tiny_config(family, heads=8), LAYOUTS[layout], documents, **lora))


class MatmulShapes(TorchDispatchMode):
    """Record the shapes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.addmm_,
        ):
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("keep_everything, frozen", diagonal([0, 2], [True, False]))
def test_gradients_of_frozen_weights_are_never_formed(keep_everything, frozen):
    """No matrix product has the shape of a frozen weight."""
    model = with_lora(tiny_config("qwen2", tie_word_embeddings=False), target_modules=ALL)
    weights = {
        name: param for name, param in model.named_parameters() if ".base_layer.weight" in name
    }
    for param in weights.values():
        param.requires_grad_(not frozen)
    shapes = {tuple(param.shape) for param in weights.values()}
    ids = random_ids(1, 19)
    layout = Layout(tile_tokens=7, keep_everything=keep_everything)
    loss = parallelize_model(model, layout=layout)(input_ids=ids, labels=ids).loss
    with MatmulShapes() as products:
        loss.backward()
    assert products.shapes and shapes.isdisjoint(products.shapes) == frozen


@pytest.mark.parametrize("tier", ["host", "device"])
def test_layers_below_the_first_adapter_keep_nothing_and_have_no_backward(tier, monkeypatch):
    config = tiny_config("llama", num_hidden_layers=3)
    ids = random_ids(1, 19)
    outputs = []
    kept = []
    model = with_lora(config, target_modules=["layers.1.mlp.up_proj"])
    for layer in model.get_base_model().model.layers:
        layer.register_forward_hook(lambda module, args, out: outputs.append(out.requires_grad))
    layout = Layout(input_tier=tier, keep_attention=3, attention_tier=tier)
    parallel = parallelize_model(model, layout=layout)
    keep = Store.keep
    monkeypatch.setattr(
        Store,
        "keep",
        lambda self, t, tier, *dtype: kept.append(tier) or keep(self, t, tier, *dtype),
    )
    loss = parallel(input_ids=ids, labels=ids).loss
    assert kept.count(tier) == 2 * 3, "two layers keep their input, attention output and lse"
    assert outputs == [False, True, True]
    loss.backward()


def two_adapters(model):
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])


Q_PROJ = partial(LoraConfig, target_modules=["q_proj"])
REFUSED = [  # PEFT's configuration, what the message names, and the fix
    (Q_PROJ(use_dora=True), "use_dora=True", "use use_dora=False"),
    (Q_PROJ(bias="all"), "bias=all", "use bias=none"),
    (Q_PROJ(lora_bias=True), "lora_bias=True", "use lora_bias=False"),
    (
        Q_PROJ(layer_replication=[(0, 1), (0, 1)]),
        "layer_replication=",
        "use layer_replication=None",
    ),
    (
        LoraConfig(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
        "ParamWrapper",
        "use LoRA on nn.Linear",
    ),
    (
        Q_PROJ(trainable_token_indices=[1]),
        "trainable_token_indices=",
        "use trainable_token_indices=None",
    ),
    (
        LoraConfig(target_modules=["embed_tokens"]),
        "embed_tokens",
        "Embedding",
        "use LoRA on nn.Linear",
    ),
    (
        IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
        "peft_type=IA3",
        "use peft_type=LORA",
    ),
    (
        PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
        "peft_type=PROMPT_TUNING",
        "use peft_type=LORA",
    ),
    (Q_PROJ(), "default, other", "set_adapter()"),
]


@pytest.mark.parametrize(
    "config, named, fix", [(config, named, fix) for config, *named, fix in REFUSED]
)
def test_unsupported_features_of_peft_are_refused(config, named, fix):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(tiny_model(tiny_config("llama", num_hidden_layers=1)), config)
        if fix == "set_adapter()":
            two_adapters(model)
    assert_refused(lambda: parallelize_model(model), *named, fix=fix)


def test_a_disabled_adapter_gives_the_base_model():
    config = tiny_config("llama")
    ids = random_ids(1, 19)
    plain = with_lora(config, target_modules=ALL)
    model = parallelize_model(with_lora(config, target_modules=ALL))
    with torch.no_grad(), plain.disable_adapter(), model.disable_adapter():
        off = model(input_ids=ids).logits
        torch.testing.assert_close(off, plain(input_ids=ids).logits, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        on = model(input_ids=ids).logits
        torch.testing.assert_close(on, plain(input_ids=ids).logits, rtol=1e-10, atol=1e-10)
    assert relative(on, off) > 0.1


def test_adapters_of_a_bfloat16_model_train_in_float32():
    """PEFT makes adapters float32 but copies modules_to_save in bfloat16; both are trained in
    float32."""
    lora = LoraConfig(r=3, target_modules=LINEARS, modules_to_save=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = [
            get_peft_model(tiny_model(tiny_config("qwen2"), torch.bfloat16), lora) for _ in range(2)
        ]
    ids = random_ids(1, 19)

    def work():
        mesh = make_mesh(2)
        model = parallelize_model(models[mesh.rank], mesh=mesh)
        model(input_ids=ids, labels=ids).loss.backward()
        return {
            name: (p.dtype, p.grad is None, p.requires_grad) for name, p in model.named_parameters()
        }

    for params in run_on_threads(2, work):
        for name, (dtype, no_grad, trained) in params.items():
            assert (dtype, no_grad) == (
                (torch.float32, False) if trained else (torch.bfloat16, True)
            ), name


def test_adapters_may_be_disabled_in_the_first_call():
    """FSDP2 reads the gradient dtypes in the first call, while PEFT has the adapters frozen."""
    ids = random_ids(1, 19)
    grads = []
    for first in (False, True):
        torch.manual_seed(2)
        base = tiny_model(tiny_config("llama", num_hidden_layers=1), torch.bfloat16)
        model = parallelize_model(get_peft_model(base, LoraConfig(r=3, target_modules=LINEARS)))
        if first:
            with torch.no_grad(), model.disable_adapter():
                model(input_ids=ids)
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append(
            {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}
        )
    assert all(grad.dtype == torch.float32 for grad in grads[1].values())
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def test_quantized_linears_are_refused():
    """Quantization libraries replace nn.Linear with their own class."""
    model = tiny_model(tiny_config("llama", num_hidden_layers=1))
    model.model.layers[0].mlp.up_proj.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    model = get_peft_model(model, LoraConfig(target_modules=["up_proj"]))
    assert_refused(lambda: parallelize_model(model), "up_proj", "Linear4bit", fix="not quantized")
