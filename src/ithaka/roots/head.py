"""A language model's forward after its layers: is its head linear, and what balances its experts?

Shapes as in layer/schedule.py.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import OutputRecorder

from ithaka.blocks.linear import is_linear
from ithaka.blocks.routing import LoadBalancingLoss, no_router_logits
from ithaka.foreign.hugging_face import recorded_outputs
from ithaka.roots.recorder import refusal
from ithaka.weights.adapters import find_decoder


def run_after_layers(
    model: PreTrainedModel,
    hidden: Tensor,
    lm_head: nn.Module,
    router_logits: tuple[Tensor, ...] | None = None,
    **inputs: object,
) -> ModelOutput:
    """Run the model's forward with another head, and with a base model that returns `hidden`."""
    base = model.model
    own_head = model.lm_head
    result = _BaseModelOutput(last_hidden_state=hidden, router_logits=router_logits)
    base.forward = lambda *args, **kwargs: result
    options = no_router_logits(find_decoder(model).config) | inputs
    model._modules["lm_head"] = lm_head
    # A forward may read its shape, not its values.
    ids = torch.empty(hidden.shape[:2], dtype=torch.long, device="meta")
    try:
        return type(model).forward(model, input_ids=ids, use_cache=False, **options)
    finally:
        model._modules["lm_head"] = own_head
        del base.forward


def has_linear_head(model: PreTrainedModel) -> bool:
    hidden = torch.randn(1, 2, 4, dtype=torch.float32)
    logits = torch.randn(1, 2, 3, dtype=torch.float32)
    head = _Constant(logits)
    try:
        with torch.enable_grad():
            found = run_after_layers(model, hidden, head).logits
    except Exception as error:
        problem = f"computes its logits from more than lm_head ({type(error).__name__}: {error})"
        raise refusal(model, problem) from error
    if found.requires_grad or head.input.requires_grad:
        problem = "has trained parameters after its layers other than its last norm and lm_head"
        raise refusal(model, problem)
    is_unchanged = torch.equal(head.input, hidden) and torch.equal(found, logits)
    return is_unchanged and is_linear(model.lm_head)


def find_balancing_loss(model: PreTrainedModel, num_layers: int) -> LoadBalancingLoss | None:
    """The load-balancing loss, if the configuration has it; refuses one that is not the usual."""
    base = find_decoder(model)
    config = base.config
    if not getattr(config, "output_router_logits", False):
        return None
    recorder = recorded_outputs(base).get("router_logits")
    top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_k", None)
    if not isinstance(recorder, OutputRecorder) or top_k is None:
        problem = "has output_router_logits=True, but does not record its routers as usual"
        raise refusal(model, problem)
    logits = [torch.randn(5, model.num_experts, dtype=torch.float32) for _ in range(num_layers)]
    hidden = torch.randn(1, 5, 4, dtype=torch.float32)
    labels = torch.zeros(1, 5, dtype=torch.long)
    head = _Constant(torch.zeros(1, 5, config.vocab_size, dtype=torch.float32))
    run = partial(run_after_layers, model, hidden, head, tuple(logits), labels=labels)
    without = run(output_router_logits=False).loss
    added = run(output_router_logits=True).loss - without
    # TRL may have changed the configuration's coefficient, which the model does not read again.
    coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    coefficient = getattr(model, "router_aux_loss_coef", coefficient)
    balancing = LoadBalancingLoss(top_k, coefficient, recorder, torch.ones(5, dtype=torch.bool))
    for layer_logits in logits:
        balancing.add(layer_logits, slice(0, 5))
    if not torch.allclose(added, coefficient * balancing.mean_loss(), rtol=1e-3, atol=1e-5):
        problem = "another load-balancing loss than the usual one"
        raise refusal(model, f"has output_router_logits=True, but {problem}")
    return balancing


class _BaseModelOutput(dict):
    """The output of a base model that did nothing: its hidden states, and None for all else."""

    def __getattr__(self, name: str) -> Tensor | tuple[Tensor, ...] | None:
        return self.get(name)

    def __getitem__(self, key: str | int) -> Tensor | tuple[Tensor, ...] | None:
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


class BareModule(nn.Module):
    """Runs another module, without its hooks."""

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.forward = forward


class _Constant(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value
        self.input = value.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.input = x
        return self.value
