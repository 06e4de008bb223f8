"""A call that a parallel model would get wrong without a word is refused by name; one that changes nothing is taken."""

from functools import partial
from types import MethodType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import ithaka
from ithaka.config import ConfigError
from ithaka.dist.mesh import make_mesh
from ithaka.layout import Layout, make_layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import plain_sum, random_ids

IDS = random_ids(2, 6)


def parallel(layout: Layout | None = None, **changes):
    return parallelize_model(tiny_model(tiny_config("llama", **changes)), mesh=make_mesh(1), layout=layout)


@pytest.fixture
def model():
    return parallel()


@pytest.fixture(scope="module")
def expected():
    return float(plain_sum(tiny_model(tiny_config("llama")), IDS, IDS).detach()) / 10


def loss_of(model, **inputs) -> float:
    return float(model(**{"input_ids": IDS, "labels": IDS, **inputs}).loss.detach())


def refused(model, error=ConfigError, **inputs) -> str:
    with pytest.raises(error) as caught:
        loss_of(model, **inputs)
    return str(caught.value)


# ---- arguments


def test_arguments_by_position_are_those_of_transformers(model, expected):
    mask, positions = torch.ones_like(IDS), torch.arange(6).expand(2, 6)
    for given in ((IDS,), (IDS, mask), (IDS, mask, positions)):
        assert float(model(*given, labels=IDS).loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(model(IDS, None, None, None, None, IDS).loss.detach()) == pytest.approx(expected, rel=1e-12)
    padded, labels = changed(mask, 0, 0, 0), changed(IDS, 0, 1, -100)
    by_name = loss_of(model, attention_mask=padded, labels=labels)
    assert float(model(IDS, padded, labels=labels).loss.detach()) == by_name != pytest.approx(expected)


@pytest.mark.parametrize(
    "given, named, words",
    [
        ((IDS, None, None, ((IDS, IDS),)), {}, "past_key_values is not supported"),
        ((IDS,), {"input_ids": IDS}, "input_ids was passed twice; pass arguments by name"),
        ((IDS,) * 9, {}, "9 positional arguments are too many; pass arguments by name, or in the order input_ids, att"),
    ],
)
def test_arguments_by_position_that_cannot_be(model, given, named, words):
    with pytest.raises(TypeError, match=words):
        model(*given, **named)


NEUTRAL = {
    "use_cache": False,
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": None,
    "past_key_values": None,
    "inputs_embeds": None,
    "logits_to_keep": 0,
    "token_type_ids": None,
}


def test_arguments_that_change_nothing_are_taken(model, expected):
    assert loss_of(model, **NEUTRAL) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "name,value",
    [
        ("use_cache", True),
        ("past_key_values", ((IDS, IDS),)),
        ("inputs_embeds", torch.zeros(2, 6, 32)),
        ("output_attentions", True),
        ("output_hidden_states", True),
        ("output_router_logits", True),
        ("return_dict", False),
        ("logits_to_keep", 1),
        ("logits_to_keep", torch.tensor([5])),
    ],
)
def test_arguments_that_would_be_ignored(model, name, value):
    message = refused(model, TypeError, **{name: value})
    assert f"{name} is not supported" in message and "which takes input_ids, labels" in message


def test_labels_that_are_shifted_already(model, expected):
    shifted = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], dim=1)
    assert loss_of(model, labels=None, shift_labels=shifted) == pytest.approx(expected, rel=1e-12)


def test_documents_as_kernels_take_them(model):
    """cu_seq_lens_q runs through the rows; what goes with it changes nothing."""
    ends = torch.tensor([0, 4, 6, 12], dtype=torch.int32)
    of_kernels = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
    documents = torch.tensor([[0, 0, 0, 0, 1, 1], [2] * 6])
    assert loss_of(model, **of_kernels) == loss_of(model, document_ids=documents)
    assert "it must end at the 12 input_ids" in refused(model, ValueError, cu_seq_lens_q=ends[:-1])


def test_generating(model):
    prompt = {"input_ids": IDS, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}
    expected = tiny_model(tiny_config("llama")).eval().generate(**prompt, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.train().generate(**prompt, max_new_tokens=3, do_sample=False), expected)
    assert model.training


def test_a_call_of_forward_itself(model):
    with pytest.raises(TypeError, match=r"call model\(\.\.\.\), not model.forward"):
        model.forward(IDS)


# ---- inputs


def test_integers_of_any_width(model, expected):
    assert loss_of(model, input_ids=IDS.int(), labels=IDS.to(torch.int16)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "inputs,message",
    [
        ({"input_ids": IDS.tolist()}, "input_ids is a list"),
        ({"input_ids": None}, "input_ids is a NoneType"),
        ({"labels": IDS.double()}, "labels is torch.float64; pass integers"),
        ({"document_ids": IDS > 3}, "document_ids is torch.bool; pass integers"),
    ],
)
def test_inputs_of_another_kind(model, inputs, message):
    assert message in refused(model, TypeError, **inputs)


def changed(tensor, row, column, value):
    tensor = tensor.clone()
    tensor[row, column] = value
    return tensor


@pytest.mark.parametrize("value", [-1, -101, 61])
@pytest.mark.parametrize(
    "name,way_out", [("labels", "set labels that do not count to -100"), ("input_ids", "tokenizer")]
)
def test_tokens_outside_the_vocabulary(model, name, value, way_out):
    message = refused(model, ValueError, **{name: changed(IDS, 1, 3, value)})
    assert f"{name}[1, 3]={value} is not in the vocabulary of 61 tokens" in message and way_out in message


def test_a_label_that_is_shifted_away_may_be_anything(model, expected):
    """As with Hugging Face: nothing predicts a row's first token."""
    assert loss_of(model, labels=changed(IDS, 1, 0, -1)) == pytest.approx(expected, rel=1e-12)


def test_documents_in_the_mask(model):
    mask = torch.tensor([[1, 1, 2, 2, 3, 3]] * 2)
    assert "mark documents with document_ids" in refused(model, ValueError, attention_mask=mask)


def test_the_next_call_is_right_after_a_refused_one(model, expected):
    refused(model, ValueError, labels=changed(IDS, 1, 3, -1))
    assert loss_of(model) == pytest.approx(expected, rel=1e-12)


# ---- what is around the call


def test_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        message = refused(model)
    assert "Layout(dtype='bfloat16')" in message and "model.dtype" in message


def test_backward_under_autocast_computes_as_forward_did():
    grads = []
    for around in (False, True):
        model = parallelize_model(tiny_model(tiny_config("llama"), torch.float32), mesh=make_mesh(1))
        loss = model(input_ids=IDS, labels=IDS).loss
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            loss.backward()
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(torch.equal(plain, inside) for plain, inside in zip(*grads, strict=True))


def test_autocast_inside_forward(model):
    """As accelerate wraps it."""
    cast = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)

    def forward(*args, **kwargs):
        return cast(*args, **kwargs)

    forward.__wrapped__ = cast
    model.forward = MethodType(forward, model)
    assert "torch.autocast('cpu', bfloat16) is on" in refused(model)


def test_inference_mode(model, expected):
    """FSDP2 keeps the weights it gathered, which autograd then cannot take."""
    with torch.inference_mode():
        assert "use torch.no_grad()" in refused(model)
    assert loss_of(model) == pytest.approx(expected, rel=1e-12)


def test_torch_compile_around_the_model(model, recwarn):
    """Found at the first call: nothing in torch.compile asks the model."""
    unsupported = torch._dynamo.exc.Unsupported  # which cites the ConfigError
    with pytest.raises(unsupported, match="torch.compile is on around a parallel model"):
        torch.compile(model, backend="eager", fullgraph=True)(input_ids=IDS)
    assert "torch.compile is on" in (message := refused(torch.compile(model, backend="eager")))
    assert "Layout(compile=True)" in message and not [each for each in recwarn if "ynamo" in str(each.message)]
    with pytest.raises(ConfigError, match=r"compile\(\) .*Layout\(compile=True\)"):
        model.compile()
    torch._dynamo.reset()


def test_ddp_around_the_model(model):
    adapted = get_peft_model(tiny_model(tiny_config("llama")), LoraConfig(target_modules=["q_proj"]))
    for each in (model, parallelize_model(adapted, mesh=make_mesh(1))):
        with pytest.raises(ConfigError, match="DistributedDataParallel cannot wrap .*; use what parallelize returned"):
            nn.parallel.DistributedDataParallel(each)


def test_parallelize_twice(model):
    with pytest.raises(ConfigError, match="is sharded already; call parallelize once"):
        parallelize_model(model, mesh=make_mesh(1))


@pytest.mark.parametrize(
    "wrap, name",
    [
        (nn.DataParallel, "module"),
        (nn.parallel.DistributedDataParallel, "module"),
        (partial(torch.compile, backend="eager"), "_orig_mod"),
    ],
)
@pytest.mark.parametrize("context", [None, 64])
def test_a_wrapped_model(wrap, name, context):
    mesh = make_mesh(1)
    wrapped = wrap(tiny_model(tiny_config("llama")))
    with pytest.raises(ConfigError, match=f"inside a {type(wrapped).__name__}; pass model.{name}"):
        ithaka.parallelize(wrapped, mesh=mesh, context=context)


def test_a_second_backward():
    loss = parallel(make_layout(2, keep_everything=1))(input_ids=IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the model again instead of using retain_graph"):
        loss.backward()


def step(model, params, **how):
    for param in params.values():
        param.grad = torch.ones_like(param)
    torch.optim.AdamW({*params.values()}, lr=0.1, **how).step()  # a tied one is named twice


@torch.no_grad()
def change(name, how, model, params):
    how(params[name])


UP, Q = "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"
# Ways to change parameters, and what the message names.
CHANGES = {
    "fused step": (partial(step, fused=True), "layer 0"),
    "foreach step": (partial(step, foreach=True), "layer 0"),
    "step": (partial(step, foreach=False), "layer 0"),
    "one weight": (partial(change, UP, lambda param: param.mul_(2)), "layer 1"),
    "a shard": (partial(change, Q, lambda param: param.to_local().mul_(2)), "layer 1"),
    "the head": (partial(change, "lm_head.weight", lambda param: param.add_(1)), "the head"),
    "the last norm": (partial(change, "model.norm.weight", lambda param: param.add_(1)), "the head"),
    "a gathered one": (lambda model, _: change("weight", torch.zero_, model, model.model.norm._parameters), "the head"),
    "other weights": (lambda model, params: model.load_state_dict(model.state_dict()), "layer 0"),
}


def mean_loss(model):
    return model(input_ids=IDS, labels=IDS).loss


def mean_of_tokens(model):
    return ithaka.token_logprobs(model, IDS, IDS).logprobs.mean()


def mean_of_logits(model):
    return model(input_ids=IDS).logits.div_(2).mean()  # changed in place, as many samplers do


@pytest.mark.parametrize("of", [mean_loss, mean_of_tokens, mean_of_logits])
def test_parameters_that_change_between_forward_and_backward(model, of):
    """torch raises too: backward would use other weights than forward did. The model can be called again."""
    params = dict(model.named_parameters(remove_duplicate=False))
    for act, name in CHANGES.values():
        loss = of(model)
        act(model, params)
        with pytest.raises(RuntimeError, match=f"parameters of {name} changed in place .* call backward first"):
            loss.backward()
        of(model).backward()


def test_parameters_that_change_where_a_hook_takes_the_output_of_a_layer(model):
    seen = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
    params = dict(model.named_parameters())
    model(input_ids=IDS)
    step(model, params)
    with pytest.raises(RuntimeError, match="parameters of layer 0 changed in place"):
        seen[0].sum().backward()


@pytest.mark.parametrize("tied", [True, False])
def test_changes_that_backward_does_not_see_are_taken(tied):
    """Steps between backward and forward, steps in backward, accumulation, evaluation; embeddings that are not tied."""
    model = parallel(tie_word_embeddings=tied)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        losses = [mean_loss(model), mean_of_tokens(model)]
        with torch.no_grad():
            mean_loss(model.eval())
        model.train().requires_grad_(True)
        sum(losses).backward()
        mean_loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    each = {param: torch.optim.SGD([param], lr=0.01) for param in model.parameters()}
    for param in each:
        param.register_post_accumulate_grad_hook(lambda param: each[param].step())
    before = [param.to_local().clone() for param in each]
    for _ in range(2):
        mean_loss(model).backward()
    assert not any(torch.equal(param.to_local(), old) for param, old in zip(each, before, strict=True))
    loss = mean_loss(model)
    change("model.embed_tokens.weight", torch.zero_, model, dict(zip(names, each, strict=True)))
    if tied:
        with pytest.raises(RuntimeError, match="parameters of the head changed in place"):
            loss.backward()
    else:
        loss.backward()


def test_a_call_after_a_backward_that_failed(model):
    """FSDP2 would give some parameters no gradient."""
    first = model(input_ids=IDS, labels=IDS).loss
    first.register_hook(lambda grad: 1 / 0)  # after FSDP2's own hook: its backward has begun
    with pytest.raises(ZeroDivisionError):
        first.backward()
    assert "an earlier backward of this model did not finish" in refused(model)


def test_a_call_after_a_second_backward():
    model = parallel(make_layout(2, keep_everything=1))
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()
    assert "parallelize the model again" in refused(model)


def test_two_calls_before_their_backward_are_taken(model, expected):
    losses = [model(input_ids=IDS, labels=IDS).loss for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert loss_of(model) == pytest.approx(expected)


# ---- changes after parallelize


def test_another_dtype(model):
    model.half()
    message = refused(model)
    assert "converted after parallelize" in message and "Layout(dtype=" in message


def test_conversions_that_change_nothing(model, expected):
    assert loss_of(model.to("cpu").double().eval()) == pytest.approx(expected, rel=1e-12)


def new_head(model):
    model.lm_head = nn.Linear(32, 61, bias=False, dtype=torch.float64)


def new_embeddings(model):
    model.set_input_embeddings(nn.Embedding(61, 32, dtype=torch.float64))


def adapter(model):
    attn = model.model.layers[1].self_attn
    attn.q_proj = nn.Sequential(attn.q_proj)


def adapter_of_the_mlp(model):
    mlp = model.model.layers[0].mlp
    mlp.up_proj = nn.Sequential(mlp.up_proj)


def soft_prompt(model):
    model.model.prompt = nn.Parameter(torch.zeros(3, 32))


@pytest.mark.parametrize("change", [new_head, new_embeddings, adapter, adapter_of_the_mlp, soft_prompt])
def test_other_modules_and_parameters(model, change):
    change(model)
    assert "replaced, tied or converted after parallelize" in refused(model)


def test_embeddings_of_another_size(model):
    with pytest.raises(ConfigError, match="resize_token_embeddings.*then parallelize"):
        model.resize_token_embeddings(64)


@pytest.mark.parametrize("tied", [True, False])
def test_tying_and_untying(tied):
    model = parallel(tie_word_embeddings=tied)
    weight = model.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(weight.detach().clone()) if tied else weight
    assert refused(model).startswith("lm_head.weight was added, removed, replaced, tied")


def test_gradient_checkpointing_of_hugging_face(model):
    for enable in (model.gradient_checkpointing_enable, partial(model.gradient_checkpointing_enable, {})):
        with pytest.raises(ConfigError, match="gradient_checkpointing_enable.*its layers recompute already; leave it"):
            enable()


def test_gradient_checkpointing_before_parallelize_is_replaced(expected):
    model = tiny_model(tiny_config("llama"))
    model.gradient_checkpointing_enable()
    assert loss_of(parallelize_model(model, mesh=make_mesh(1))) == pytest.approx(expected, rel=1e-12)


def test_a_replaced_forward():
    model = tiny_model(tiny_config("llama"))
    attn = model.model.layers[1].self_attn
    attn.forward = MethodType(lambda self, *args, **kwargs: None, attn)
    with pytest.raises(ConfigError, match="model.layers.1.self_attn has a forward of its own"):
        parallelize_model(model, mesh=make_mesh(1))


def test_evaluation_without_gradients(model, expected):
    with torch.no_grad():
        assert loss_of(model.eval()) == pytest.approx(expected, rel=1e-12)
        assert model(input_ids=IDS).logits.shape == (2, 6, 61)


def test_an_optimizer_of_the_parameters_before_parallelize():
    """Its parameters get no gradients any more: it would train nothing."""
    model = tiny_model(tiny_config("llama"))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model = parallelize_model(model, mesh=make_mesh(1))
    model(input_ids=IDS, labels=IDS).loss.backward()
    with pytest.raises(ConfigError, match="SGD was made before parallelize.*make it from model.parameters"):
        early.step()
    before = loss_of(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert loss_of(model) < before
