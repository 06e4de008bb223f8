"""Record the arguments that a model passes to each of its layers, from a copy of the model without its layers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.layer.general import BatchState
from ithaka.layer.runs import ATTENTION
from ithaka.model.families import find_decoder, has_encoder
from ithaka.model.rotary import ExactRotary, rotary_modules

LENGTHS = (24, 17)  # tokens of the two recorded calls
SMALL_VOCABULARY = 16  # token ids in the recorded calls; the copy keeps their embeddings only


def refusal(model: PreTrainedModel, problem: str) -> ConfigError:
    return ConfigError(
        f"model_type={model.config.model_type} {problem}, so its layers cannot be split over tokens exactly; use a "
        "decoder whose layers mix tokens only through transformers' attention interface or the gated delta rule"
    )


def copy_config(config: Any) -> Any:
    """Copy a configuration and select our attention. Router logits are off: the layers record them (layer/runs.py)."""
    own = copy.deepcopy(config)
    own._attn_implementation = ATTENTION
    if hasattr(own, "output_router_logits"):
        own.output_router_logits = False
    return own


class _RecordedLayer(nn.Module):
    """Takes the place of a layer and records its arguments."""

    def __init__(self, layer: nn.Module, calls: list[Any]) -> None:
        super().__init__()
        self.__dict__["_recorded"] = (layer, calls)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        if name in ("_modules", "_parameters", "_buffers"):
            raise AttributeError(name)
        return getattr(self.__dict__["_recorded"][0], name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.__dict__["_recorded"][1].append((x, args, kwargs))
        return x


class Recorder:
    """A copy of the model without its layers, on the CPU, with random parameters and a small vocabulary."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config, self.batch = model, copy_config(find_decoder(model).config), BatchState()
        self.calls: list[Any] = []
        base = find_decoder(model)
        layers = base.layers
        self.memo = {id(param): param for param in model.parameters()} | {id(base.config): self.config}
        base.layers = nn.ModuleList(_RecordedLayer(layer, self.calls) for layer in layers)
        try:
            self.base = copy.deepcopy(base, self.memo | {id(m): m for m in base.layers})
        finally:
            base.layers = layers
        for module in self.base.modules():
            if isinstance(module, nn.Embedding):
                module.weight = nn.Parameter(module.weight[:SMALL_VOCABULARY], requires_grad=False)
                module.padding_idx = None
        randomize(self.base, torch.device("cpu"))
        for module in rotary_modules(self.base):
            base._init_weights(module)
            module.forward = ExactRotary(module, self.batch)

    def call(self, length: int, first: int = 0, attention: str = ATTENTION, end: int = 0) -> list[Any]:
        """Return the input and arguments of each layer, for `length` tokens from position `first` on."""
        self.calls.clear()
        self.config._attn_implementation = attention
        self.batch.num_positions = end or first + length
        ids = (torch.arange(first, first + length) % SMALL_VOCABULARY)[None]
        positions = torch.arange(first, first + length)[None]
        if has_encoder(self.model):
            positions = positions.expand(3, 1, -1)
        num_layers = len(find_decoder(self.model).layers)
        try:
            with torch.no_grad():
                self.output = self.base(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        except ConfigError:
            raise
        except Exception as error:
            raise refusal(self.model, f"does not run without its layers ({type(error).__name__}: {error})") from error
        if len(self.calls) != num_layers:
            raise refusal(self.model, f"calls {len(self.calls)} layers, but has {num_layers}")
        return list(self.calls)

    def find_norm(self, base: nn.Module) -> nn.Module | None:
        """Return the child of `base` that maps the last layer's output to that of `base`, such as the final norm. None
        if there is no such module, or if it is called for anything else."""
        results: list[tuple[str, Any, Any]] = []
        hooks = [
            child.register_forward_hook(lambda m, args, out, name=name: results.append((name, args, out)))
            for name, child in self.base.named_children()
        ]
        last = self.call(LENGTHS[0])[-1][0]
        for hook in hooks:
            hook.remove()
        names = [name for name, *_ in results]
        for name, args, out in results[-1:]:
            if out is self.output and len(args) == 1 and args[0] is last and names.count(name) == 1:
                return base.get_submodule(name)
        return None


def randomize(module: nn.Module, device: torch.device, seed: int = 0) -> None:
    """Replace all parameters, and buffers on the meta device, by random fp32 values on `device`."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        values = torch.empty(t.shape, dtype=torch.float32, device=device).uniform_(-1, 1, generator=generator)
        return 1 + 0.2 * values if t.dim() < 2 else values.mul_((3 / t.shape[-1]) ** 0.5)

    drawn: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for name, param in submodule._parameters.items():
            if param is not None and id(param) not in drawn:
                drawn[id(param)] = nn.Parameter(draw(param), param.requires_grad)
            submodule._parameters[name] = None if param is None else drawn[id(param)]
        for name, buffer in submodule._buffers.items():
            if buffer is None:
                continue
            random = draw(buffer) if buffer.is_floating_point() else torch.zeros_like(buffer, device=device)
            submodule._buffers[name] = random if buffer.is_meta else buffer.to(device)


def token_dims(model: PreTrainedModel, name: str, long: Any, short: Any) -> tuple[int | None, ...]:
    """For each leaf of a layer's arguments, return the dim of its tokens; None if it has none. `long` and `short` are
    recorded calls of LENGTHS tokens."""
    (leaves, tree_spec), (others, other_spec) = (pytree.tree_flatten(call[1:]) for call in (long, short))
    if tree_spec != other_spec:
        raise refusal(model, f"passes different arguments to {name} for different lengths")
    return tuple(_token_dim(model, name, *both) for both in zip(leaves, others, strict=True))


def _token_dim(model: PreTrainedModel, name: str, long: Any, short: Any) -> int | None:
    if not isinstance(long, Tensor):
        return None
    dims = [dim for dim, sizes in enumerate(zip(long.shape, short.shape, strict=True)) if sizes[0] != sizes[1]]
    if len(dims) > 1 or any((long.shape[dim], short.shape[dim]) != LENGTHS for dim in dims):
        raise refusal(model, f"passes {name} a tensor of shape {tuple(long.shape)} for {LENGTHS[0]} tokens")
    return dims[0] if dims else None
