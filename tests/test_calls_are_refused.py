"""Calls that a parallel model would silently compute wrongly are refused; harmless ones are
accepted."""

from functools import partial
from types import MethodType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import ithaka
from ithaka.comm.mesh import make_mesh
from ithaka.config import ConfigError
from ithaka.layer.sharded import sharded_attention
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import plain_sum, random_ids
from refusals import assert_refused

IDS = random_ids(2, 6)


def parallel(layout: Layout | None = None, **changes):
    return parallelize_model(
        tiny_model(tiny_config("llama", **changes)), mesh=make_mesh(1), layout=layout
    )


@pytest.fixture
def model():
    return parallel()


@pytest.fixture(scope="module")
def expected():
    return float(plain_sum(tiny_model(tiny_config("llama")), IDS, IDS).detach()) / 10


def loss_of(model, **inputs) -> float:
    return float(model(**{"input_ids": IDS, "labels": IDS, **inputs}).loss.detach())


def refusal(model, error=ConfigError, **inputs) -> str:
    """Return the message of the error that the call raises."""
    with pytest.raises(error) as caught:
        loss_of(model, **inputs)
    return str(caught.value)


# ---- arguments


def test_positional_arguments_follow_the_order_of_transformers(model, expected):
    mask = torch.ones_like(IDS)
    positions = torch.arange(6).expand(2, 6)
    for positional in ((IDS,), (IDS, mask), (IDS, mask, positions)):
        assert float(model(*positional, labels=IDS).loss.detach()) == pytest.approx(
            expected, rel=1e-12
        )
    assert float(model(IDS, None, None, None, None, IDS).loss.detach()) == pytest.approx(
        expected, rel=1e-12
    )
    padded = changed(mask, 0, 0, 0)
    labels = changed(IDS, 0, 1, -100)
    by_name = loss_of(model, attention_mask=padded, labels=labels)
    assert (
        float(model(IDS, padded, labels=labels).loss.detach()) == by_name != pytest.approx(expected)
    )


@pytest.mark.parametrize(
    "args, kwargs, named, fix",
    [
        ((IDS, None, None, ((IDS, IDS),)), {}, "past_key_values", "input_ids, labels"),
        ((IDS,), {"input_ids": IDS}, "input_ids", "by name"),
        (
            (IDS,) * 9,
            {},
            "9 positional arguments",
            "by name, or in the order input_ids, attention_mask",
        ),
    ],
)
def test_wrong_positional_arguments_are_refused(model, args, kwargs, named, fix):
    assert_refused(lambda: model(*args, **kwargs), named, fix=fix, error=TypeError)


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


def test_arguments_that_change_nothing_are_accepted(model, expected):
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
def test_arguments_that_would_be_ignored_are_refused(model, name, value):
    assert_refused(refusal(model, TypeError, **{name: value}), name, fix="input_ids, labels")


def test_shifted_labels_are_accepted(model, expected):
    shifted = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], dim=1)
    assert loss_of(model, labels=None, shift_labels=shifted) == pytest.approx(expected, rel=1e-12)


def test_documents_are_read_from_cu_seq_lens(model):
    """cu_seq_lens_q covers all rows; the other kernel arguments change nothing."""
    ends = torch.tensor([0, 4, 6, 12], dtype=torch.int32)
    kernel_arguments = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 6,
        "max_length_k": 6,
    }
    documents = torch.tensor([[0, 0, 0, 0, 1, 1], [2] * 6])
    assert loss_of(model, **kernel_arguments) == loss_of(model, document_ids=documents)
    for wrong, problem in (
        (ends[:-1], "ends at 6"),
        (ends[1:], "starts at 4"),
        (ends[:1], "has shape (1,)"),
    ):
        assert_refused(
            refusal(model, ValueError, cu_seq_lens_q=wrong), f"cu_seq_lens_q {problem}", fix="12"
        )


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf"), "hot", torch.ones(2)])
def test_a_temperature_that_cannot_divide_logits_is_refused(model, temperature):
    call = partial(ithaka.token_logprobs, model, IDS, IDS, temperature=temperature)
    assert_refused(call, f"temperature={temperature!r}", fix="leave it out", error=ValueError)


def test_labels_and_their_values_that_do_not_match_are_refused(model):
    twice = partial(ithaka.token_logprobs, model, IDS, IDS, shift_labels=IDS)
    assert_refused(twice, "shift_labels", fix="labels only", error=TypeError)
    assert_refused(
        partial(model, IDS, labels=IDS, temperature=0.5),
        "0.5",
        fix="token_logprobs",
        error=ValueError,
    )
    share = partial(ithaka.label_share, model)
    assert_refused(partial(share, IDS / 2, docs=IDS), "docs", fix="token_logprobs", error=TypeError)
    assert_refused(partial(share, [0.5]), "list", fix="[batch, tokens]", error=TypeError)
    assert_refused(
        partial(share, torch.ones(2)), "shape (2,)", fix="[batch, tokens]", error=TypeError
    )
    shorter = partial(share, torch.ones(2, 5), document_ids=IDS)
    assert_refused(
        shorter, "(2, 5)", "document_ids", "(2, 6)", fix="one value per token", error=ValueError
    )


def test_generate_matches_hugging_face(model, expected):
    """With a cache, forwards after the prompt get one token per row, without one all tokens.
    Training still works."""
    prompt = {"input_ids": IDS, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}
    options = {**prompt, "max_new_tokens": 3, "do_sample": False}
    num_tokens = []
    tokens = tiny_model(tiny_config("llama")).eval().generate(**options)
    hook = model.model.layers[0].register_forward_hook(
        lambda layer, args, out: num_tokens.append(out[..., 0].numel())
    )
    for use_cache, counts in (({}, [12, 2, 2]), ({"use_cache": False}, [12, 14, 16])):
        assert torch.equal(model.train().generate(**options, **use_cache), tokens)
        assert num_tokens == counts and model.training
        num_tokens.clear()
    hook.remove()
    assert loss_of(model) == pytest.approx(expected, rel=1e-12)
    assert_refused(
        lambda: model.generate(IDS, max_new_tokens=513, use_cache=False),
        "max_new_tokens=513",
        fix="leave",
    )
    assert_refused(
        lambda: model.generate(IDS + 61), "input_ids[0, 0]", fix="tokenizer", error=ValueError
    )


@torch.random.fork_rng()
def test_generate_samples_the_tokens_of_hugging_face(model):
    """And leaves the same random state, so that training draws the same numbers afterwards."""
    options = {
        "input_ids": IDS,
        "attention_mask": torch.ones_like(IDS),
        "max_new_tokens": 5,
        "do_sample": True,
    }
    plain = tiny_model(tiny_config("llama")).eval()
    torch.manual_seed(7)
    tokens = plain.generate(**options)
    state = torch.get_rng_state()
    for use_cache in (True, False):
        torch.manual_seed(7)
        assert torch.equal(model.generate(**options, use_cache=use_cache), tokens)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_direct_call_of_forward_is_refused(model):
    assert_refused(lambda: model.forward(IDS), "model.forward", fix="model(...)", error=TypeError)


# ---- inputs


def test_integers_of_any_width_are_accepted(model, expected):
    assert loss_of(model, input_ids=IDS.int(), labels=IDS.to(torch.int16)) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize(
    "inputs, kind, fix",
    [
        ({"input_ids": IDS.tolist()}, "list", "tensor"),
        ({"input_ids": None}, "NoneType", "tensor"),
        ({"labels": IDS.double()}, "torch.float64", "integers"),
        ({"document_ids": IDS > 3}, "torch.bool", "integers"),
        ({"cu_seq_lens_q": [0, 6, 12]}, "list", "tensor"),
    ],
)
def test_inputs_of_the_wrong_type_are_refused(model, inputs, kind, fix):
    assert_refused(refusal(model, TypeError, **inputs), *inputs, kind, fix=fix)


def changed(tensor, row, column, value):
    tensor = tensor.clone()
    tensor[row, column] = value
    return tensor


@pytest.mark.parametrize("value", [-1, -101, 61])
@pytest.mark.parametrize("name,fix", [("labels", "to -100"), ("input_ids", "tokenizer")])
def test_tokens_outside_the_vocabulary_are_refused(model, name, value, fix):
    message = refusal(model, ValueError, **{name: changed(IDS, 1, 3, value)})
    assert_refused(message, f"{name}[1, 3]={value}", "61 tokens", fix=fix)


def test_the_first_label_of_a_row_may_be_anything(model, expected):
    """No token predicts it, as in Hugging Face."""
    assert loss_of(model, labels=changed(IDS, 1, 0, -1)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "count", [0, -3, torch.tensor(0), "all", float("inf"), True, torch.tensor([5, 5])]
)
def test_a_count_that_cannot_divide_the_loss_is_refused(model, count):
    value = repr(count.item() if isinstance(count, torch.Tensor) and count.numel() == 1 else count)
    message = refusal(model, ValueError, num_items_in_batch=count)
    assert_refused(message, f"num_items_in_batch={value}", "10 valid labels", fix="leave it out")


def test_a_count_of_zero_without_labels_is_accepted(model):
    assert loss_of(model, labels=torch.full_like(IDS, -100), num_items_in_batch=0) == 0


def test_positions_beyond_the_limit_of_the_model_are_refused(expected):
    """This holds without a planned context too. A longer row of documents within the limit is
    accepted."""
    model = parallel(max_position_embeddings=4)
    positions = torch.arange(6).expand(2, 6)
    for inputs, count in (({}, 6), ({"position_ids": positions + 50}, 56)):
        message = refusal(model, **inputs)
        assert_refused(
            message, f"{count} positions", "max_position_embeddings=4", fix="from_pretrained"
        )
    with torch.no_grad():  # evaluation may exceed the limit
        assert model(input_ids=torch.zeros(1, 6, dtype=torch.long)).logits.shape[1] == 6
    assert loss_of(model, position_ids=positions % 4) == loss_of(
        parallel(), position_ids=positions % 4
    )


def test_negative_positions_are_refused(model):
    positions = torch.arange(6).expand(2, 6) - 3
    assert_refused(
        refusal(model, ValueError, position_ids=positions),
        "position_ids has -3",
        fix="attention_mask",
    )
    mask = (positions >= 0).long()
    labels = IDS.masked_fill(positions <= 0, -100)
    padded = [
        loss_of(model, labels=labels, attention_mask=mask, position_ids=p)
        for p in (positions, positions * mask)
    ]
    assert padded[0] == padded[1], "padding may have any position"


def test_backward_without_trained_parameters_is_refused():
    model = parallelize_model(
        tiny_model(tiny_config("llama")).requires_grad_(False), mesh=make_mesh(1)
    )
    loss = model(input_ids=IDS, labels=IDS).loss
    assert_refused(loss.backward, "no parameter", fix="model.requires_grad_(True)")


def test_document_ids_in_the_attention_mask_are_refused(model):
    mask = torch.tensor([[1, 1, 2, 2, 3, 3]] * 2)
    assert_refused(
        refusal(model, ValueError, attention_mask=mask), "attention_mask", fix="document_ids"
    )


def test_a_call_after_a_refused_one_is_right(model, expected):
    refusal(model, ValueError, labels=changed(IDS, 1, 3, -1))
    assert loss_of(model) == pytest.approx(expected, rel=1e-12)


# ---- torch modes and wrappers


def test_autocast_is_refused(model):
    with torch.autocast("cpu", torch.bfloat16):
        assert_refused(refusal(model), "torch.autocast", fix="Layout(dtype='bfloat16')")


def test_autocast_around_backward_changes_nothing():
    grads = []
    for enabled in (False, True):
        model = parallelize_model(
            tiny_model(tiny_config("llama"), torch.float32), mesh=make_mesh(1)
        )
        loss = model(input_ids=IDS, labels=IDS).loss
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss.backward()
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(torch.equal(plain, autocast) for plain, autocast in zip(*grads, strict=True))


def test_autocast_inside_forward_is_refused(model):
    """accelerate wraps forward like this."""
    cast = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)

    def forward(*args, **kwargs):
        return cast(*args, **kwargs)

    forward.__wrapped__ = cast
    model.forward = MethodType(forward, model)
    assert_refused(
        refusal(model), "torch.autocast('cpu', bfloat16)", fix="Layout(dtype='bfloat16')"
    )


def test_inference_mode_is_refused(model, expected):
    """FSDP2 would keep gathered weights that autograd cannot use later."""
    with torch.inference_mode():
        assert_refused(refusal(model), "torch.inference_mode()", fix="torch.no_grad()")
    assert loss_of(model) == pytest.approx(expected, rel=1e-12)


def test_torch_compile_around_the_model_is_refused(model, recwarn):
    """The first call raises: torch.compile itself does not consult the model."""
    unsupported = torch._dynamo.exc.Unsupported  # which quotes the ConfigError
    full = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(unsupported, match=r"torch\.compile"):
        full(input_ids=IDS)
    assert_refused(
        refusal(torch.compile(model, backend="eager")), "torch.compile", fix="Layout(compile=True)"
    )
    assert not [warning for warning in recwarn if "ynamo" in str(warning.message)]
    assert_refused(model.compile, "compile()", fix="Layout(compile=True)")
    torch._dynamo.reset()


def test_ddp_around_the_model_is_refused(model):
    adapted = get_peft_model(
        tiny_model(tiny_config("llama")), LoraConfig(target_modules=["q_proj"])
    )
    for parallel_model in (model, parallelize_model(adapted, mesh=make_mesh(1))):
        wrap = partial(nn.parallel.DistributedDataParallel, parallel_model)
        assert_refused(wrap, "DistributedDataParallel", fix="parallelize")


def test_parallelize_twice_is_refused(model):
    assert_refused(lambda: parallelize_model(model, mesh=make_mesh(1)), "sharded", fix="once")


@pytest.mark.parametrize(
    "wrap, name",
    [
        (nn.DataParallel, "module"),
        (nn.parallel.DistributedDataParallel, "module"),
        (partial(torch.compile, backend="eager"), "_orig_mod"),
    ],
)
@pytest.mark.parametrize("context", [None, 64])
def test_a_wrapped_model_is_refused(wrap, name, context):
    mesh = make_mesh(1)
    wrapped = wrap(tiny_model(tiny_config("llama")))
    parallelize = partial(ithaka.parallelize, wrapped, mesh=mesh, context=context)
    assert_refused(parallelize, type(wrapped).__name__, fix=f"model.{name}")


def test_a_second_backward_and_a_call_after_it_are_refused():
    model = parallel(Layout(keep_everything=1))
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    assert_refused(loss.backward, "backward", fix="call the model again", error=RuntimeError)
    assert_refused(refusal(model), "backward", fix="parallelize the model again")


def step(model, params, **options):
    for param in params.values():
        param.grad = torch.ones_like(param)
    torch.optim.AdamW({*params.values()}, lr=0.1, **options).step()  # tied parameters appear twice


@torch.no_grad()
def change(name, function, model, params):
    function(params[name])


UP = "model.layers.1.mlp.up_proj.weight"
Q = "model.layers.1.self_attn.q_proj.weight"
# Ways to change parameters, and the module that the message names.
CHANGES = {
    "fused step": (partial(step, fused=True), "layer 0"),
    "foreach step": (partial(step, foreach=True), "layer 0"),
    "step": (partial(step, foreach=False), "layer 0"),
    "one weight": (partial(change, UP, lambda param: param.mul_(2)), "layer 1"),
    "a shard": (partial(change, Q, lambda param: param.to_local().mul_(2)), "layer 1"),
    "the head": (partial(change, "lm_head.weight", lambda param: param.add_(1)), "the head"),
    "the last norm": (
        partial(change, "model.norm.weight", lambda param: param.add_(1)),
        "the head",
    ),
    "a gathered one": (
        lambda model, _: change("weight", torch.zero_, model, model.model.norm._parameters),
        "the head",
    ),
    "other weights": (lambda model, params: model.load_state_dict(model.state_dict()), "layer 0"),
}


def mean_loss(model):
    return model(input_ids=IDS, labels=IDS).loss


def mean_of_tokens(model):
    return ithaka.token_logprobs(model, IDS, IDS).logprobs.mean()


def mean_of_logits(model):
    return model(input_ids=IDS).logits.div_(2).mean()  # changed in place, as many samplers do


@pytest.mark.parametrize(
    "loss_function",
    [mean_loss, mean_of_logits, pytest.param(mean_of_tokens, marks=pytest.mark.slow)],
)
def test_parameters_that_change_between_forward_and_backward_are_refused(model, loss_function):
    """Backward would use other weights than forward. After the error, the model can be called
    again."""
    params = dict(model.named_parameters(remove_duplicate=False))
    for act, name in CHANGES.values():
        loss = loss_function(model)
        act(model, params)
        assert_refused(loss.backward, name, "changed", fix="backward", error=RuntimeError)
        loss_function(model).backward()


def test_parameters_that_change_before_backward_from_a_hooked_layer_are_refused(model):
    outputs = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    params = dict(model.named_parameters())
    model(input_ids=IDS)
    step(model, params)
    assert_refused(
        outputs[0].sum().backward, "layer 0", "changed", fix="backward", error=RuntimeError
    )


@pytest.mark.parametrize("tied", [True, False])
def test_changes_that_backward_does_not_use_are_accepted(tied):
    """Steps between backward and forward, or in backward; accumulation; evaluation; changes to
    untied embeddings."""
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
    optimizers = {param: torch.optim.SGD([param], lr=0.01) for param in model.parameters()}
    for param in optimizers:
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
    before = [param.to_local().clone() for param in optimizers]
    for _ in range(2):
        mean_loss(model).backward()
    assert not any(
        torch.equal(param.to_local(), old) for param, old in zip(optimizers, before, strict=True)
    )
    loss = mean_loss(model)
    change(
        "model.embed_tokens.weight", torch.zero_, model, dict(zip(names, optimizers, strict=True))
    )
    if tied:
        assert_refused(loss.backward, "the head", "changed", fix="backward", error=RuntimeError)
    else:
        loss.backward()


def test_a_call_after_a_failed_backward_is_refused(model):
    """FSDP2 would silently skip gradients."""
    first = model(input_ids=IDS, labels=IDS).loss
    # runs after FSDP2's own hook, when its backward has begun
    first.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.backward()
    assert_refused(refusal(model), "backward", fix="parallelize the model again")


def test_two_calls_before_their_backwards_are_accepted(model, expected):
    losses = [model(input_ids=IDS, labels=IDS).loss for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert loss_of(model) == pytest.approx(expected)


# ---- changes after parallelize


def test_a_later_dtype_change_is_refused(model):
    model.half()
    assert_refused(refusal(model), "after parallelize", fix="Layout(dtype=")


def test_conversions_that_change_nothing_are_accepted(model, expected):
    assert loss_of(model.to("cpu").double().eval()) == pytest.approx(expected, rel=1e-12)


def new_head(model):
    model.lm_head = nn.Linear(32, 61, bias=False, dtype=torch.float64)


def new_embeddings(model):
    model.set_input_embeddings(nn.Embedding(61, 32, dtype=torch.float64))


def adapter(model):
    attn = model.model.layers[1].self_attn
    attn.q_proj = nn.Sequential(attn.q_proj)


def mlp_adapter(model):
    mlp = model.model.layers[0].mlp
    mlp.up_proj = nn.Sequential(mlp.up_proj)


def soft_prompt(model):
    model.model.prompt = nn.Parameter(torch.zeros(3, 32))


@pytest.mark.parametrize("change", [new_head, new_embeddings, adapter, mlp_adapter, soft_prompt])
def test_later_changes_to_modules_and_parameters_are_refused(model, change):
    change(model)
    assert_refused(refusal(model), "replaced", "after parallelize", fix="then parallelize")


def test_later_resizing_of_embeddings_is_refused(model):
    assert_refused(
        partial(model.resize_token_embeddings, 64),
        "resize_token_embeddings",
        fix="then parallelize",
    )


@pytest.mark.parametrize("tied", [True, False])
def test_later_tying_and_untying_are_refused(tied):
    model = parallel(tie_word_embeddings=tied)
    weight = model.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(weight.detach().clone()) if tied else weight
    assert_refused(refusal(model), "lm_head.weight", "tied", fix="then parallelize")


def test_weights_of_a_plain_model_are_refused(model, expected):
    """The function in the message loads them. With an adapter, which adds a prefix to names, they
    are refused too."""
    state = tiny_model(tiny_config("llama")).state_dict()
    fix = "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))"
    assert_refused(
        partial(model.load_state_dict, state), "model.embed_tokens.weight", "sharded", fix=fix
    )
    adapted = get_peft_model(
        tiny_model(tiny_config("llama")), LoraConfig(target_modules=["q_proj"])
    )
    state_of_adapted = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    adapted = parallelize_model(adapted, mesh=make_mesh(1))
    assert_refused(
        partial(adapted.load_state_dict, state_of_adapted), "embed_tokens.weight", fix=fix
    )
    with torch.no_grad():
        model.lm_head.weight.zero_()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    assert loss_of(model) == pytest.approx(expected, rel=1e-12)


def test_weights_and_prefixes_of_the_wrong_type_are_refused():
    plain = tiny_model(tiny_config("llama"))
    assert_refused(
        lambda: next(ithaka.iterate_weights(plain)), "LlamaForCausalLM", fix="ithaka.parallelize"
    )
    ids = [1, 2, 3]
    row = torch.tensor([1, 2, 3])
    for arguments, *named in (
        ((None,), "sequences=None"),
        (([row], 5), "labels=5", "int"),
        ((7,), "sequences=7"),
    ):
        assert_refused(
            partial(ithaka.pack_prefixes, *arguments),
            *named,
            fix="one tensor of integers per sequence",
        )
    for keys, named in ((None, "keys=None"), ([5], "keys[0]=5")):
        assert_refused(partial(ithaka.pack_prefixes, [row], keys=keys), named, fix="pass a list")
    assert_refused(partial(ithaka.pack_prefixes, []), "sequences is empty", fix="one per sequence")
    assert_refused(
        partial(ithaka.pack_prefixes([row]).unpack, [1, 2, 3]), "list", fix="one value per token"
    )
    for arguments, *named in (
        (([ids, ids],), "sequences[0]", "list"),
        (([row], [ids]), "labels[0]", "list"),
        (([row, row / 2],), "sequences[1]", "float32"),
        (([row > 1],), "sequences[0]", "bool"),
        (([row], torch.ones(1, 3)), "labels[0]", "float32"),
    ):
        assert_refused(partial(ithaka.pack_prefixes, *arguments), *named, fix="torch.tensor(")
    for key, kind in ((row / 2, "float32"), (["a"], "list")):
        pack = partial(ithaka.pack_prefixes, [row], keys=[[key]])
        assert_refused(pack, "keys[0][0]", kind, fix="torch.tensor([1, 2]), or a name")
    for count in (0, -5, 1.5, "x"):
        pack = partial(ithaka.pack_prefixes, [row], min_tokens=count)
        assert_refused(pack, f"min_tokens={count!r}", fix="1 or more")
    for values in (torch.zeros(3), torch.zeros(1, 2), torch.zeros(1, 4)):
        unpack = partial(ithaka.pack_prefixes([row]).unpack, values)
        assert_refused(unpack, f"shape {tuple(values.shape)}", fix="(1, 3)")


Q6 = torch.randn(6, 4, 8)
K6 = torch.randn(6, 2, 8)


@pytest.mark.parametrize(
    "tensors, settings, named, fix",
    [
        ((Q6, K6, torch.randn(6, 4, 8)), {}, "v (6, 4, 8)", "[tokens, heads"),
        ((Q6[:, 0], K6[:, 0], K6[:, 0]), {}, "q (6, 8)", "[tokens, heads"),
        ((Q6[None], K6, K6), {}, "q (1, 6, 4, 8), k (6, 2, 8)", "[batch, tokens"),
        (
            (Q6.expand(2, 6, 4, 8), K6.expand(4, 6, 2, 8), K6.expand(4, 6, 2, 8)),
            {},
            "k (4, 6, 2, 8)",
            "[batch, tokens",
        ),
        ((Q6.double(), K6, K6), {}, "q is torch.float64", "one dtype"),
        ((Q6.numpy(), K6, K6), {}, "q is a ndarray", "tensor"),
        ((Q6, K6, K6), {"ranges": [(0, 6, 0)]}, "(0, 6, 0) has 3 numbers", "(a, b, c, d)"),
        ((Q6, K6, K6), {"group": 2}, "group=2", "torch.distributed.group.WORLD"),
        ((Q6, K6, K6), {"ring": "all"}, "ring='all'", "torch.distributed.new_group"),
        ((Q6, K6, K6), {"scale": "1"}, "scale='1'", "0.125"),
        ((Q6, K6, K6), {"window": 2.5}, "window=2.5", "1 or more"),
        ((Q6, K6, K6), {"blocks": 5}, "blocks=5", "(1024, 1024)"),
        ((Q6.long(), K6.long(), K6.long()), {}, "torch.int64", "the dtype of q, k and v"),
        ((Q6, K6, K6), {"causal": 1}, "causal=1", "True or False"),
        ((Q6, K6, K6), {"kernel": "magic"}, "kernel=magic", "use auto"),
    ],
)
def test_attention_of_tensors_that_do_not_match_is_refused(tensors, settings, named, fix):
    assert_refused(partial(sharded_attention, *tensors, **settings), named, fix=fix)
    starts = {"causal": True, "docs": torch.tensor([0, 4, 6])}  # a tensor, as FlashAttention takes
    assert sharded_attention(Q6, K6, K6, **starts).equal(
        sharded_attention(Q6, K6, K6, causal=True, docs=(0, 4, 6))
    )


def test_saving_to_no_directory_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(partial(model.save_pretrained, ""), "save_pretrained('')", fix="'.'")
    assert not [*tmp_path.iterdir()]


def test_gradient_checkpointing_of_hugging_face_is_refused(model):
    for enable in (
        model.gradient_checkpointing_enable,
        partial(model.gradient_checkpointing_enable, {}),
    ):
        assert_refused(enable, "gradient_checkpointing_enable", fix="gradient_checkpointing=False")


def test_gradient_checkpointing_before_parallelize_is_replaced(expected):
    model = tiny_model(tiny_config("llama"))
    model.gradient_checkpointing_enable()
    assert loss_of(parallelize_model(model, mesh=make_mesh(1))) == pytest.approx(
        expected, rel=1e-12
    )


def test_a_replaced_forward_is_refused():
    """Modules in a layer run as they are."""
    for name in ("model.layers.1", "lm_head"):
        model = tiny_model(tiny_config("llama"))
        module = model.get_submodule(name)
        module.forward = MethodType(lambda self, *args, **kwargs: None, module)
        parallelize = partial(parallelize_model, model, mesh=make_mesh(1))
        assert_refused(parallelize, name, "forward", fix="without patches")


def test_evaluation_without_gradients_is_accepted(model, expected):
    with torch.no_grad():
        assert loss_of(model.eval()) == pytest.approx(expected, rel=1e-12)
        assert model(input_ids=IDS).logits.shape == (2, 6, 61)


def test_an_optimizer_made_before_parallelize_is_refused():
    """Its parameters get no gradients, so it would train nothing."""
    model = tiny_model(tiny_config("llama"))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model = parallelize_model(model, mesh=make_mesh(1))
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert_refused(early.step, "SGD", fix="model.parameters()")
    before = loss_of(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert loss_of(model) < before
