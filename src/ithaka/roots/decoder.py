"""Run any decoder of transformers on general layers: its own forward before, between and after them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from ithaka.blocks.linear import as_linear, is_linear
from ithaka.blocks.routing import LoadBalancingLoss
from ithaka.blocks.tiles import sum_dtype
from ithaka.config import ConfigError
from ithaka.inputs.calls import CheckedCall
from ithaka.layer.inputs import CallState, CurrentCall
from ithaka.layer.loss import GraphHead, Head, LinearHead
from ithaka.layer.mixer import LayerSpec, MixerSpec
from ithaka.layer.passes import compute_like_autocast
from ithaka.plan.shape import AttentionKind
from ithaka.roots.families import find_decoder, map_layer
from ithaka.roots.probe import probe_layers
from ithaka.roots.recorder import Recorder, copy_config, refusal
from ithaka.roots.rotary import ExactRotary, rotary_modules


@dataclass
class Decoder:
    """How the general layers run a model."""

    specs: list[LayerSpec]  # per layer
    current: CurrentCall
    balancing: LoadBalancingLoss | None  # if the configuration has it
    norm: nn.Module | None  # the last module of the base model, which the head runs tile by tile
    has_linear_head: bool  # the logits are what lm_head returns for the base model's output, and it is linear

    @property
    def mixers(self) -> list[MixerSpec]:
        return [mixer for spec in self.specs for mixer in spec.mixers]

    @property
    def split_mixers(self) -> list[MixerSpec]:
        """The mixers whose heads Ulysses splits; without any, all mixers."""
        return [mixer for mixer in self.mixers if mixer.exchanges_heads] or self.mixers

    @property
    def num_heads(self) -> int:
        return min(mixer.num_heads for mixer in self.split_mixers)

    def check_ring(self, model: PreTrainedModel, ring: int) -> None:
        reason = next(filter(None, (mixer.why_not("ring") for mixer in self.mixers)), None)
        if ring > 1 and reason is not None:
            raise ConfigError(
                f"parallel.ring={ring} is not supported for model_type={model.config.model_type}: {reason}; use "
                f"parallel.ring=1, with parallel.cp of at most {self.num_heads}, the query heads"
            )


def prepare_decoder(model: PreTrainedModel, device: torch.device) -> Decoder:
    """Find out how to run each layer. Raises ConfigError if the model cannot run; does not change it."""
    base = find_decoder(model)
    if any(hasattr(module, "A_log") and hasattr(module, "D") for module in model.modules()):
        raise refusal(model, "mixes tokens with Mamba's recurrence, whose states are not passed between ranks")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        recorder = Recorder(model)
        specs = probe_layers(model, recorder, device)
        norm, has_linear_head = recorder.find_norm(base), _has_linear_head(model)
        balancing = _find_balancing_loss(model, len(base.layers))
    return Decoder(specs, CurrentCall(), balancing, norm, has_linear_head)


def attention_kinds(model: PreTrainedModel, decoder: Decoder | None) -> list[AttentionKind]:
    """Return the attention of each layer. `decoder`: None if the layers map to LayerParts."""
    if decoder is not None:
        return [mixer.kind for mixer in decoder.split_mixers]
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    layers = (map_layer(model, index) for index in range(len(model.model.layers)))
    return [AttentionKind(layer.head_dim, group, layer.window) for layer in layers]


def attach_decoder(model: PreTrainedModel, decoder: Decoder) -> None:
    """Make the modules around the layers work with them."""
    base = find_decoder(model)
    config, own_config = base.config, copy_config(base.config)  # other models made from it keep their attention
    for module in base.modules():
        if getattr(module, "config", None) is config:
            module.config = own_config
    for module in rotary_modules(base):
        module.forward = ExactRotary(module, decoder.current)
    if decoder.norm is not None:
        decoder.norm.forward = _pass_through  # `make_head` runs it


def run_decoder(
    model: PreTrainedModel,
    decoder: Decoder,
    call: CheckedCall,
    state: CallState,
    inputs: dict[str, Any] | None = None,
) -> Tensor:
    """Run the model's own forward on this rank's tokens, or on `inputs` for them, up to its last norm; return x_1sD."""
    inputs = inputs or {"input_ids": call.share.ids_s[None], "position_ids": call.share.positions_s[None]}
    with decoder.current.running(state):
        return find_decoder(model)(**inputs, use_cache=False).last_hidden_state


def make_head(model: PreTrainedModel, decoder: Decoder) -> Head:
    """The model's own forward after its layers: last norm, output projection, scaling and softcap of the logits."""
    lm_head = model.lm_head
    norm = nn.Identity() if decoder.norm is None else _BareModule(decoder.norm)
    if decoder.has_linear_head:
        return LinearHead(norm, as_linear(lm_head))

    def run(x_tD: Tensor) -> Tensor:
        with compute_like_autocast(x_tD):
            h_1tD = norm(x_tD[None].to(sum_dtype(x_tD.dtype)))
            return _run_after_layers(model, h_1tD, _BareModule(lm_head)).logits.squeeze(0)

    return GraphHead(run, [*lm_head.parameters(), *norm.parameters()])


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
    """Runs the forward of another module's class, without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return type(self.module).forward(self.module, x)


class _Constant(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value, self.input = value, value.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.input = x
        return self.value


def _pass_through(x: Tensor) -> Tensor:
    return x
