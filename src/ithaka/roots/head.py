"""Run any decoder of transformers on general layers: its own forward before, between and after them.

Shapes as in layer/schedule.py.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from ithaka.blocks.block import TileState
from ithaka.blocks.linear import as_linear, is_linear
from ithaka.blocks.norm import find_norm
from ithaka.blocks.routing import LoadBalancingLoss
from ithaka.blocks.tiles import sum_dtype
from ithaka.comm.mesh import Mesh
from ithaka.inputs.calls import CheckedCall
from ithaka.layer.inputs import CallState
from ithaka.layer.loss import GraphHead, Head, LinearHead
from ithaka.layer.passes import compute_like_autocast
from ithaka.layer.store import Store
from ithaka.layout import Layout
from ithaka.mixers.scan_call import SsdTap
from ithaka.phases import mark_backward, phase
from ithaka.roots.decoder import Decoder
from ithaka.roots.probe import probe_layers
from ithaka.roots.recorder import Recorder, copy_config, randomized_copy, refusal
from ithaka.roots.rotary import ExactRotary, rotary_modules
from ithaka.weights.adapters import find_decoder


class GeneralDecoder(Decoder):
    """Any decoder of transformers whose layers mix tokens through the mixers of mixers/kinds.py, or not at all."""

    # The layers run every module of theirs, once per tile.
    hookable = re.compile(r"model\.(language_model\.)?(embed_tokens|embeddings|layers\.\d+)|")
    patchable = re.compile(r"model\.(language_model\.)?(embed_tokens|embeddings|norm|layers\.\d+\..*)|.*rotary.*")
    norm: nn.Module | None  # the last module of the base model, which the head runs tile by tile
    norm_forward: Callable[[Tensor], Tensor]  # its own forward, or a block
    has_linear_head: bool  # the logits are what lm_head returns for the base model's output, and it is linear

    def find_specs(self, device: torch.device) -> None:
        model = self.model
        counts = Counter(id(param) for layer in self.layers for param in {*layer.parameters()})
        if max(counts.values(), default=0) > 1:
            raise refusal(model, "shares parameters between layers, which FSDP2 gathers one by one")
        for module in model.modules():
            if hasattr(module, "A_log") and hasattr(module, "D") and not SsdTap.is_called_by(module):
                raise refusal(model, "mixes tokens with the recurrence of Mamba 1, which has a decay for each channel")
        recorder = Recorder(model, self.layers_name)
        self.specs = probe_layers(model, recorder, device)
        self.norm, self.has_linear_head = recorder.find_norm(self.base), _has_linear_head(model)
        self.head_tile = TileState()
        if self.norm is not None:
            block = find_norm("norm", randomized_copy(self.norm))
            self.norm_forward = self.norm.forward if block is None else block.make(self.norm, self.head_tile)
        self.balancing = _find_balancing_loss(model, len(self.layers))

    def attach(self, mesh: Mesh, layout: Layout, dtype: torch.dtype, store: Store) -> None:
        super().attach(mesh, layout, dtype, store)
        config, own_config = self.base.config, copy_config(self.base.config)  # other models of it keep their attention
        for module in self.base.modules():
            if getattr(module, "config", None) is config:
                module.config = own_config
        for module in rotary_modules(self.base):
            module.forward = ExactRotary(module, self.current)
        if self.norm is not None:
            self.norm.forward = lambda x: x  # `make_head` runs it
        if type(self).embed is GeneralDecoder.embed:
            embeddings = self.base.get_input_embeddings()
            embeddings.forward = partial(_embed, embeddings.forward)

    def embed(self, call: CheckedCall) -> dict[str, Any]:
        """Return the arguments of the base model for this rank's tokens."""
        return {"input_ids": call.share.ids_s[None], "position_ids": call.share.positions_s[None]}

    def run_layers(self, call: CheckedCall, state: CallState) -> Tensor:
        """Run the base model's own forward on this rank's tokens, up to its last norm; return x_1sD."""
        inputs = self.embed(call)
        with self.current.running(state):
            return self.base(**inputs, use_cache=False).last_hidden_state

    def make_head(self) -> Head:
        model, lm_head = self.model, self.model.lm_head
        norm = nn.Identity() if self.norm is None else _BareModule(self.norm, self.norm_forward)
        if self.has_linear_head:
            return LinearHead(norm, as_linear(lm_head), self.head_tile)

        def run(x_tD: Tensor) -> Tensor:
            with compute_like_autocast(x_tD):
                h_1tD = norm(x_tD[None].to(sum_dtype(x_tD.dtype)))
                head = _BareModule(lm_head, MethodType(type(lm_head).forward, lm_head))
                return _run_after_layers(model, h_1tD, head).logits.squeeze(0)

        return GraphHead(run, [*lm_head.parameters(), *norm.parameters()])


def _embed(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with phase("embedding"):
        return mark_backward(forward(*args, **kwargs), "embedding backward")


def _run_after_layers(
    model: PreTrainedModel, hidden: Tensor, lm_head: nn.Module, router_logits: Any = None, **inputs: Any
) -> Any:
    """Run the model's forward with another head, and with a base model that returns `hidden`."""
    base, own_head = model.model, model.lm_head
    result = _BaseModelOutput(last_hidden_state=hidden, router_logits=router_logits)
    base.forward = lambda *args, **kwargs: result
    if hasattr(find_decoder(model).config, "output_router_logits"):
        inputs.setdefault("output_router_logits", False)
    model._modules["lm_head"] = lm_head
    ids = torch.empty(hidden.shape[:2], dtype=torch.long, device="meta")  # a forward may read its shape, not its values
    try:
        return type(model).forward(model, input_ids=ids, use_cache=False, **inputs)
    finally:
        model._modules["lm_head"] = own_head
        del base.forward


def _has_linear_head(model: PreTrainedModel) -> bool:
    hidden, logits = torch.randn(1, 2, 4, dtype=torch.float32), torch.randn(1, 2, 3, dtype=torch.float32)
    head = _Constant(logits)
    try:
        with torch.enable_grad():
            found = _run_after_layers(model, hidden, head).logits
    except Exception as error:
        problem = f"computes its logits from more than lm_head ({type(error).__name__}: {error})"
        raise refusal(model, problem) from error
    if found.requires_grad or head.input.requires_grad:
        raise refusal(model, "has trained parameters after its layers other than its last norm and lm_head")
    return torch.equal(head.input, hidden) and torch.equal(found, logits) and is_linear(model.lm_head)


def _find_balancing_loss(model: PreTrainedModel, num_layers: int) -> LoadBalancingLoss | None:
    """The load-balancing loss, if the configuration has it. Refuses one that is not transformers' usual one."""
    base = find_decoder(model)
    config = base.config
    if not getattr(config, "output_router_logits", False):
        return None
    recorder = (base._can_record_outputs or {}).get("router_logits")
    top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_k", None)
    if not isinstance(recorder, OutputRecorder) or top_k is None:
        raise refusal(model, "has output_router_logits=True, but does not record its routers as usual")
    logits = [torch.randn(5, model.num_experts, dtype=torch.float32) for _ in range(num_layers)]
    hidden, labels = torch.randn(1, 5, 4, dtype=torch.float32), torch.zeros(1, 5, dtype=torch.long)
    head = _Constant(torch.zeros(1, 5, config.vocab_size, dtype=torch.float32))
    outputs = [
        _run_after_layers(model, hidden, head, labels=labels, output_router_logits=on, router_logits=tuple(logits))
        for on in (False, True)
    ]
    # TRL may have changed the configuration's coefficient, which the model does not read again.
    coefficient = getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0.0))
    balancing = LoadBalancingLoss(top_k, coefficient, recorder, torch.ones(5, dtype=torch.bool))
    for layer_logits in logits:
        balancing.add(layer_logits, slice(0, 5))
    added = outputs[1].loss - outputs[0].loss
    if not torch.allclose(added, coefficient * balancing.mean_loss(), rtol=1e-3, atol=1e-5):
        raise refusal(model, "has output_router_logits=True, but another load-balancing loss than the usual one")
    return balancing


class _BaseModelOutput(dict):
    """The output of a base model that did nothing: the given hidden states, and None for everything else."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


class _BareModule(nn.Module):
    """Runs another module, without its hooks."""

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.forward = module, forward


class _Constant(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value, self.input = value, value.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.input = x
        return self.value
