"""Record the arguments that a model passes to each of its layers, from a copy of the model without its layers; read the
call of its mixer; shrink a layer."""

import copy
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ithaka.attention.docs import Docs
from ithaka.blocks.block import HOOK_DICTS
from ithaka.blocks.experts import shrink_experts
from ithaka.blocks.mlp import shrink_mlp
from ithaka.blocks.routing import no_router_logits
from ithaka.config import ConfigError
from ithaka.layer.inputs import CallState, CurrentCall, LayerInputs
from ithaka.layer.mixer import LayerSpec, ProbedLayer
from ithaka.mixers.attention_call import ATTENTION, FAR_POSITION, PlaceholderMask
from ithaka.mixers.kinds import MIXERS
from ithaka.roots.rotary import ExactRotary, rotary_modules
from ithaka.weights.adapters import find_decoder

LENGTHS = (24, 17)  # tokens of the two recorded calls
SMALL_VOCABULARY = 16  # token ids in the recorded calls; the copy keeps their embeddings only
# Settings for what surrounds the layers, or of no effect on a probe, which is in fp32. A layer's own entry of
# layer_types counts.
UNREAD_BY_LAYERS = (
    "num_hidden_layers",
    "layer_types",
    "vocab_size",
    "max_position_embeddings",
    "dtype",
    "transformers_version",
)
# Options of an attention call that change nothing, or that every model passes along.
IGNORED_OPTIONS = ("position_ids", "cache_position", "use_cache", "output_router_logits")
COMPUTED_OPTIONS = ("scaling", "sliding_window", "s_aux", "softcap", "use_qk_l2norm_in_kernel", "chunk_size")


def refusal(model: PreTrainedModel, problem: str) -> ConfigError:
    return ConfigError(
        f"model_type={model.config.model_type} {problem}, so its layers cannot be split over tokens exactly; use a "
        "decoder whose layers mix tokens only through transformers' attention interface, the gated delta rule, Mamba2 "
        "or short convolutions"
    )


def copy_config(config: Any) -> Any:
    """Copy a configuration and select our attention. Router logits are off: layers record them (layer/passes.py)."""
    own = copy.deepcopy(config)
    own._attn_implementation = ATTENTION
    own.update(no_router_logits(own))
    return own


class _RecordedLayer(nn.Module):
    """Takes the place of a layer, records its arguments and returns its input."""

    num_outputs: int | None = None  # length of the tuple that the layer returns; None: a tensor

    def __init__(self, layer: nn.Module, calls: list[Any]) -> None:
        super().__init__()
        self.__dict__["_recorded"] = (layer, calls)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        if name in ("_modules", "_parameters", "_buffers"):
            raise AttributeError(name)
        return getattr(self.__dict__["_recorded"][0], name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_recorded"][1].append((x, args, kwargs))
        return x if self.num_outputs is None else (x, *[None] * (self.num_outputs - 1))


class Recorder:
    """A copy of the model without its layers, on the CPU, with random parameters and a small vocabulary."""

    def __init__(self, model: PreTrainedModel, layers_name: str = "model.layers") -> None:
        path, _, self.list_name = layers_name.rpartition(".")
        base: Any = model.get_submodule(path)
        self.model, self.config, self.current = model, copy_config(base.config), CurrentCall()
        self.calls: list[Any] = []
        self.layers = layers = getattr(base, self.list_name)  # the model's own
        self.memo = {id(param): param for param in model.parameters()} | {id(base.config): self.config}
        self.recorded: Any = nn.ModuleList(_RecordedLayer(layer, self.calls) for layer in layers)
        setattr(base, self.list_name, self.recorded)
        try:
            self.base = copy.deepcopy(base, self.memo | {id(m): m for m in self.recorded})
        finally:
            setattr(base, self.list_name, layers)
        for module in self.base.modules():
            if isinstance(module, nn.Embedding):
                module.weight = nn.Parameter(module.weight[:SMALL_VOCABULARY], requires_grad=False)
                module.padding_idx = None
        randomize(self.base, torch.device("cpu"))
        for module in rotary_modules(self.base):
            base._init_weights(module)
            module.forward = ExactRotary(module, self.current)

    def call(self, length: int, first: int = 0, attention: str = ATTENTION, end: int = 0) -> list[Any]:
        """Return the input and arguments of each layer, for `length` tokens from position `first` on."""
        self.calls.clear()
        self.config._attn_implementation = attention
        self.start(end or first + length)
        try:
            with torch.no_grad():
                self.output = self._run(self.inputs(length, first))
        except ConfigError:
            raise
        except Exception as error:
            raise refusal(self.model, f"does not run without its layers ({type(error).__name__}: {error})") from error
        if len(self.calls) != len(self.layers):
            raise refusal(self.model, f"calls {len(self.calls)} layers, but has {len(self.layers)}")
        return list(self.calls)

    def _run(self, inputs: dict[str, Any]) -> Tensor:
        """Run the model. If its layers return tuples, it unpacks or indexes the tensors of recorded layers instead."""
        num_outputs = 1
        try:
            output = self.base(**inputs).last_hidden_state
            if all(x.dim() == 3 for x in (output, *(call[0] for call in self.calls))):
                return output
        except (ValueError, IndexError) as error:
            expected = re.match(r"not enough values to unpack \(expected (\d+)", str(error))
            if expected is None and all(call[0].dim() == 3 for call in self.calls):
                raise
            num_outputs = int(expected[1]) if expected else 1
        if self.recorded[0].num_outputs is not None:
            raise ValueError(f"its layers do not return {self.recorded[0].num_outputs} values each")
        for layer in self.recorded:
            layer.num_outputs = num_outputs
        self.calls.clear()
        return self._run(inputs)

    def start(self, num_positions: int) -> None:
        """Begin a call with one document. It stays current, for layers that run after it."""
        self.current.state = CallState(Docs((0, num_positions)), num_positions)

    def inputs(self, length: int, first: int = 0) -> dict[str, Any]:
        """The arguments of a call of `base`."""
        ids = (torch.arange(first, first + length) % SMALL_VOCABULARY)[None]
        positions = torch.arange(first, first + length)[None]
        if find_decoder(self.model) is not self.model.model:  # a vision-language model
            positions = positions.expand(3, 1, -1)
        return {"input_ids": ids, "position_ids": positions, "use_cache": False}

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
    """Replace all parameters, and buffers on the meta device, by random fp32 values on `device`. Remove hooks: they
    must only see the user's calls."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        values = torch.empty(t.shape, dtype=torch.float32, device=device).uniform_(-1, 1, generator=generator)
        return 1 + 0.2 * values if t.dim() < 2 else values.mul_((3 / t.shape[-1]) ** 0.5)

    drawn: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for hooks in HOOK_DICTS:
            getattr(submodule, hooks).clear()
        for name, param in submodule._parameters.items():
            if param is not None and id(param) not in drawn:
                drawn[id(param)] = nn.Parameter(draw(param), param.requires_grad)
            submodule._parameters[name] = None if param is None else drawn[id(param)]
        for name, buffer in submodule._buffers.items():
            if buffer is None:
                continue
            random = draw(buffer) if buffer.is_floating_point() else torch.zeros_like(buffer, device=device)
            submodule._buffers[name] = random if buffer.is_meta else buffer.to(device)
    # Adapters become as large as the maps they adapt: with values in the thousands, fp32 would be inaccurate.
    adapted: list[Any] = [submodule for submodule in module.modules() if hasattr(submodule, "lora_B")]
    for wrapper in adapted:
        for name, b in wrapper.lora_B.items():
            b.weight.data.div_(max(1.0, abs(wrapper.scaling[name])))


def largest(t: Tensor) -> Tensor:
    """The largest absolute value, without a copy of the tensor."""
    return torch.stack(torch.aminmax(t)).abs().max()


def randomized_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module with random parameters, on the CPU."""
    copied = copy.deepcopy(module, {id(param): param for param in module.parameters()})
    randomize(copied, torch.device("cpu"))
    return copied


def describe_layer(layer: nn.Module) -> Any:
    """Equal for layers that compute the same function, apart from the values of their parameters."""
    description = []
    for name, module in layer.named_modules():
        scalars = {
            k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None) and k != "layer_idx"
        }
        shapes = {k: (tuple(v.shape), v.requires_grad) for k, v in module._parameters.items() if v is not None}
        description.append((name, type(module), repr(scalars), repr(sorted(shapes.items()))))
    return tuple(description)


def describe_config(config: Any, index: int) -> Any:
    """Equal for configurations that agree in all settings that layers may read, and in the layer's own type."""
    values = {k: v for k, v in vars(config).items() if not k.startswith("_") and k not in UNREAD_BY_LAYERS}
    settings = json.dumps(values, sort_keys=True, default=repr)  # files list them in any order
    return settings, tuple((getattr(config, "layer_types", None) or ())[index : index + 1])


def describe_arguments(calls: list[Any], index: int) -> Any:
    """Equal for layers that get the same tensors and masks, and other arguments with equal values."""
    numbers: dict[int, int] = {}
    for call in calls:
        for leaf in pytree.tree_leaves(call[1:]):
            numbers.setdefault(id(leaf), len(numbers))
    leaves, tree_spec = pytree.tree_flatten(calls[index][1:])
    return str(tree_spec), tuple(
        numbers[id(leaf)] if isinstance(leaf, Tensor | PlaceholderMask) else repr(leaf) for leaf in leaves
    )


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


# ---- the mixer's call


def read_calls(model: PreTrainedModel, name: str, calls: Sequence[Any], inputs: LayerInputs) -> LayerSpec:
    """Return the spec of a layer, given its mixers' calls. Raises ConfigError for options that we do not compute."""
    for option, value in (item for call in calls for item in call.options.items()):
        known = option in (*IGNORED_OPTIONS, *COMPUTED_OPTIONS) or value is None or value is False
        if not known and not (option == "dropout" and not value) and (option, value) != ("is_causal", True):
            shown = "a tensor" if isinstance(value, Tensor) else value
            raise refusal(model, f"passes {option}={shown} to the attention of {name}, which is not supported")
    layer = ProbedLayer(name, inputs, config_lengths(find_decoder(model).config), partial(refusal, model))
    return LayerSpec(tuple(MIXERS[type(call)].read(call, layer) for call in calls))


def config_lengths(config: Any) -> set[int]:
    """Return every number in the configuration that may be a number of tokens."""
    values = pytree.tree_leaves(config.to_dict())
    return {int(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and 1 < v <= FAR_POSITION}


# ---- small copies of layers


def shrink(layer: nn.Module) -> bool:
    """Replace experts and MLPs whose structure is known by few and narrow ones, without values; `randomize` draws them.
    Return whether anything changed."""
    sizes = [param.shape for param in layer.parameters()]
    for module in list(layer.modules()):
        shrink_experts(module)
        shrink_mlp(module)
    return sizes != [param.shape for param in layer.parameters()]
