"""Hooks get the values and gradients of plain Hugging Face, or are refused."""

import sys
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decoders import tiny_decoder
from ithaka.comm.mesh import make_mesh
from ithaka.layer import schedule
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import random_ids
from refusals import assert_refused

IDS = random_ids(1, 8)
ATTENTION = [
    f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
]
IGNORED = [
    *(
        f"model.layers.1.{name}"
        for name in ("self_attn", *ATTENTION, "input_layernorm", "post_attention_layernorm")
    ),
    *("model", "model.norm", "model.rotary_emb", "lm_head"),
]
REGISTER = {
    "forward hook": "register_forward_hook",
    "forward pre-hook": "register_forward_pre_hook",
    "backward hook": "register_full_backward_hook",
    "backward pre-hook": "register_full_backward_pre_hook",
}


def nothing(*args):
    return None


def make(family="qwen3", **changes):
    return tiny_model(tiny_config(family, **changes))


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("tied", [False, True])
def test_hooks_that_would_be_ignored_are_refused(kind, tied):
    """Hooks may be registered before parallelize, or after it, when FSDP2 has hooks of its own."""
    model = make(tie_word_embeddings=tied)
    parallel = parallelize_model(make(tie_word_embeddings=tied), mesh=make_mesh(1))
    for name in IGNORED:
        handle = getattr(model.get_submodule(name), REGISTER[kind])(nothing)
        parallelize = partial(parallelize_model, model, mesh=make_mesh(1))
        assert_refused(parallelize, f"{name} has a {kind}", fix="decoder layer")
        handle.remove()
        handle = getattr(parallel.get_submodule(name), REGISTER[kind])(nothing)
        assert_refused(
            partial(parallel, input_ids=IDS), f"{name} has a {kind}", fix="decoder layer"
        )
        handle.remove()
    assert parallel(input_ids=IDS).logits.shape == (1, 8, 61)


def test_a_forward_pre_hook_on_the_model_is_refused():
    model = parallelize_model(make(), mesh=make_mesh(1))
    model.register_forward_pre_hook(nothing)
    assert_refused(
        partial(model, input_ids=IDS), "model has a forward pre-hook", fix="remove the hook"
    )


def test_hooks_that_transformers_leaves_behind_are_accepted():
    """transformers captures outputs with hooks that stay registered and do nothing."""
    model = make()
    model(input_ids=IDS, output_attentions=True, output_hidden_states=True)
    assert model.model.layers[0].self_attn._forward_hooks
    parallel = parallelize_model(model, mesh=make_mesh(1))
    parallel(input_ids=IDS, labels=IDS).loss.backward()
    parallel.model.layers[1].self_attn.register_forward_hook(nothing)
    assert_refused(
        partial(parallel, input_ids=IDS), "layers.1.self_attn has a forward hook", fix="remove"
    )


class HookRecorder:
    """Records the values and gradients that hooks on layers and embeddings receive. Gradients are
    not copied."""

    def __init__(self, model) -> None:
        self.values = {}
        self.grads = {}
        self.grad_inputs = {}
        self.grad_outputs = {}
        for name in ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2"):
            module = model.get_submodule(name)
            module.register_forward_hook(
                lambda module, args, out, name=name: self.record_output(name, out)
            )
            if name != "model.embed_tokens":
                module.register_full_backward_hook(
                    lambda module, dx, dy, name=name: self.record_grads(name, dx, dy)
                )

    def record_output(self, name, out):
        self.values[name] = out.detach().clone()
        out.register_hook(lambda grad: self.grads.__setitem__(name, grad))

    def record_grads(self, name, dx, dy):
        self.grad_inputs[name] = dx[0]
        self.grad_outputs[name] = dy[0]

    def all(self):
        for what in ("values", "grads", "grad_inputs", "grad_outputs"):
            for name, tensor in getattr(self, what).items():
                yield f"{what} {name}", tensor.reshape(8, -1)


@pytest.mark.parametrize("keep_everything", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_layers_and_embeddings_get_plain_values_and_gradients(when, keep_everything):
    """Gradients stay valid after backward, although its buffers are reused by the next layer."""
    plain = make(num_hidden_layers=3)
    model = make(num_hidden_layers=3)
    layout = Layout(keep_everything=keep_everything)
    expected = HookRecorder(plain)
    if when == "before":
        recorded = HookRecorder(model)
    model = parallelize_model(model, mesh=make_mesh(1), layout=layout)
    if when == "after":
        recorded = HookRecorder(model)
    for each in (plain, model):
        each(input_ids=IDS).logits.square().sum().backward()
    unmatched = dict(expected.all())
    assert len(unmatched) == 4 + 4 + 3 + 3
    for name, tensor in recorded.all():
        torch.testing.assert_close(tensor, unmatched.pop(name), rtol=1e-10, atol=1e-10, msg=name)
    assert not unmatched


def test_a_tensor_hook_outlives_the_module_hook_that_set_it():
    model = parallelize_model(make(num_hidden_layers=3), mesh=make_mesh(1))
    kept = []
    handle = model.model.layers[1].register_forward_hook(
        lambda module, args, out: (
            out.register_hook(lambda grad: kept.extend([grad, grad.clone()])) and None
        )
    )
    loss = model(input_ids=IDS, labels=IDS).loss
    handle.remove()
    model(input_ids=IDS, labels=IDS)
    loss.backward()
    assert torch.equal(*kept) and kept[0].abs().max() > 0


class Copies(TorchDispatchMode):
    """Counts copies of a residual stream of 8 tokens."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.shape = (8, hidden)
        self.num_copies = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_copies += (
            function is torch.ops.aten.clone.default and args[0].shape[-2:] == self.shape
        )
        return function(*args, **(kwargs or {}))


def test_a_debugger_does_not_change_the_reference_count():
    """A tracer may hold every function's local variables, including the gradient."""
    held = []
    tracer = sys.gettrace()

    def trace(frame, event, argument):
        held.append(frame.f_locals)
        return trace

    schedule.references_of_a_new_gradient.cache_clear()
    expected = schedule.references_of_a_new_gradient()
    schedule.references_of_a_new_gradient.cache_clear()
    try:
        sys.settrace(trace)
        traced = schedule.references_of_a_new_gradient()
    finally:
        sys.settrace(tracer)
    assert held and traced == expected


@pytest.mark.parametrize(
    "hook, num_copies",
    [(None, 0), (lambda out, kept: out.register_hook(lambda grad: None), 0)]
    + [(lambda out, kept: out.register_hook(kept.append), 1)]
    + [(lambda out, kept: out.register_hook(lambda grad: kept.append(grad[0])), 1)]
    + [(lambda out, kept: out.retain_grad() or kept.append(out), 1)],  # PyTorch copies it
    ids=["none", "keeps nothing", "keeps it", "keeps a view", "retained"],
)
@pytest.mark.parametrize(
    "make_one",
    [make, pytest.param(partial(tiny_decoder, "olmo2"), marks=pytest.mark.slow)],
    ids=["qwen3", "olmo2"],
)
def test_a_gradient_is_copied_only_if_something_else_holds_it(make_one, hook, num_copies):
    model = parallelize_model(make_one(num_hidden_layers=3), mesh=make_mesh(1))
    kept = []
    if hook is not None:
        model.model.layers[1].register_forward_hook(
            lambda module, args, out: hook(out, kept) and None
        )
    loss = model(input_ids=IDS, labels=IDS).loss
    with Copies(model.config.hidden_size) as copies:
        loss.backward()
    assert copies.num_copies == num_copies


def test_a_hook_may_change_an_output():
    """Forward hooks on a layer and on the embeddings (such as noise) take effect as in Hugging
    Face."""
    losses = []
    for parallel in (False, True):
        model = make()
        model = parallelize_model(model, mesh=make_mesh(1)) if parallel else model
        model.model.embed_tokens.register_forward_hook(lambda module, args, out: 1.5 * out)
        model.model.layers[0].register_forward_hook(lambda module, args, out: out - 0.5)
        losses.append(float(model(input_ids=IDS).logits.detach().square().sum()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("make_one", [make, partial(tiny_decoder, "olmo2")], ids=["qwen3", "olmo2"])
def test_a_hook_may_return_another_dtype(make_one):
    """Layers and the head still compute in their own dtype."""
    model = parallelize_model(make_one(), mesh=make_mesh(1), layout=Layout(dtype="bfloat16"))
    expected = model(input_ids=IDS, labels=IDS).loss
    for module in (model.model.embed_tokens, *model.model.layers):
        module.register_forward_hook(lambda module, args, out: out.double())
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_only_post_accumulate_hooks_on_parameters_are_accepted(when):
    """FSDP2 calls post-accumulate hooks and no others."""
    model = make()
    grads = []
    if when == "after":
        model = parallelize_model(model, mesh=make_mesh(1))
        model.model.norm.weight.register_post_accumulate_grad_hook(
            lambda param: grads.append(param.grad)
        )
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert torch.equal(grads[0].full_tensor(), model.model.norm.weight.grad.full_tensor())
    model.model.embed_tokens.weight.register_hook(nothing)
    call = (
        partial(model, input_ids=IDS)
        if when == "after"
        else partial(parallelize_model, model, mesh=make_mesh(1))
    )
    assert_refused(
        call, "model.embed_tokens.weight", "hook", fix="register_post_accumulate_grad_hook"
    )
