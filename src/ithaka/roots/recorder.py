"""Record the arguments of each layer, from a copy of the model without its layers; read the calls
of mixers; shrink a layer."""

import copy
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ithaka.attention.docs import Docs
from ithaka.blocks.experts import shrink_experts
from ithaka.blocks.mlp import shrink_mlp
from ithaka.blocks.routing import no_router_logits
from ithaka.config import ConfigError
from ithaka.foreign.hugging_face import init_module, set_attention
from ithaka.foreign.torch_core import HOOK_DICTS, pytree
from ithaka.layer.inputs import CallState, CurrentCall, LayerInputs
from ithaka.layer.mixer import LayerSpec, ProbedLayer
from ithaka.mixers.attention_call import ATTENTION, FAR_POSITION, PlaceholderMask
from ithaka.mixers.kinds import MIXERS
from ithaka.roots.rotary import ExactRotary, rotary_modules
from ithaka.weights.adapters import find_decoder

LENGTHS = (24, 17)  # tokens of the two recorded calls
SMALL_VOCABULARY = 16  # token ids in the recorded calls; the copy keeps their embeddings only
# A layer's input, its other positional arguments, and its keyword arguments.
RecordedCall = tuple[Tensor, tuple[Any, ...], dict[str, Any]]
# Settings for what surrounds the layers, or of no effect on a probe, which is in fp32. A layer's
# own entry of layer_types counts.
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
COMPUTED_OPTIONS = (
    "scaling",
    "sliding_window",
    "s_aux",
    "softcap",
    "use_qk_l2norm_in_kernel",
    "chunk_size",
)


def refusal(model: PreTrainedModel, problem: str) -> ConfigError:
    return ConfigError(
        f"model_type={model.config.model_type} {problem}, so its layers cannot be split over "
        "tokens exactly; use a decoder whose layers mix tokens only through transformers' "
        "attention interface, the gated delta rule, Mamba2 or short convolutions"
    )


def copy_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy a configuration with our attention. Layers record router logits (layer/passes.py)."""
    own = copy.deepcopy(config)
    set_attention(own, ATTENTION)
    own.update(no_router_logits(own))
    return own


class _RecordedLayer(nn.Module):
    """Takes the place of a layer, records its arguments and returns its input."""

    num_outputs: int | None = None  # length of the tuple that the layer returns; None: a tensor

    def __init__(self, layer: nn.Module, calls: list[RecordedCall]) -> None:
        super().__init__()
        self.__dict__["_recorded"] = (layer, calls)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        if name in ("_modules", "_parameters", "_buffers"):
            raise AttributeError(name)
        return getattr(self.__dict__["_recorded"][0], name)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor | tuple:
        self.__dict__["_recorded"][1].append((x, args, kwargs))
        return x if self.num_outputs is None else (x, *[None] * (self.num_outputs - 1))


class Recorder:
    """A copy of the model without its layers: random, on the CPU, with a small vocabulary."""

    def __init__(self, model: PreTrainedModel, layers_name: str = "model.layers") -> None:
        path, _, self.list_name = layers_name.rpartition(".")
        base: PreTrainedModel = model.get_submodule(path)
        self.model = model
        self.config = copy_config(base.config)
        self.current = CurrentCall()
        self.calls: list[RecordedCall] = []
        self.layers = layers = getattr(base, self.list_name)  # the model's own
        self.memo = {id(param): param for param in model.parameters()}
        self.memo[id(base.config)] = self.config
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
            init_module(base, module)
            module.forward = ExactRotary(module, self.current)

    def call(
        self, length: int, first: int = 0, attention: str = ATTENTION, end: int = 0
    ) -> list[RecordedCall]:
        """Return the arguments of each layer, for `length` tokens from position `first` on."""
        self.calls.clear()
        set_attention(self.config, attention)
        self.start(end or first + length)
        try:
            with torch.no_grad():
                self.output = self._run(self.inputs(length, first))
        except ConfigError:
            raise
        except Exception as error:
            problem = f"does not run without its layers ({type(error).__name__}: {error})"
            raise refusal(self.model, problem) from error
        if len(self.calls) != len(self.layers):
            raise refusal(self.model, f"calls {len(self.calls)} layers, but has {len(self.layers)}")
        return list(self.calls)

    def _run(self, inputs: dict[str, Any]) -> Tensor:
        """Run the model. If it unpacks or indexes a layer's tensor, run it again with tuples."""
        num_outputs = 1
        try:
            output = self.base(**inputs).last_hidden_state
            residuals = [output, *(x for x, _, _ in self.calls)]
            if all(x.dim() == 3 for x in residuals):
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
        ids = (torch.arange(first, first + length) % SMALL_VOCABULARY)[None]
        positions = torch.arange(first, first + length)[None]
        if find_decoder(self.model) is not self.model.model:  # a vision-language model
            positions = positions.expand(3, 1, -1)
        return {"input_ids": ids, "position_ids": positions, "use_cache": False}

    def find_norm(self, base: nn.Module) -> nn.Module | None:
        """Return the child of `base` that maps the last layer's output to that of `base`: the final
        norm. None if there is none, or if it is called for anything else."""
        results: list[tuple[str, tuple, object]] = []

        def record(name: str, module: nn.Module, args: tuple, out: object) -> None:
            results.append((name, args, out))

        hooks = [
            child.register_forward_hook(partial(record, name))
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
    """Replace parameters, and buffers on the meta device, by random fp32 values on `device`. Remove
    hooks: they must only see the user's calls."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        values = torch.empty(t.shape, dtype=torch.float32, device=device)
        values.uniform_(-1, 1, generator=generator)
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
            if buffer.is_floating_point():
                random = draw(buffer)
            else:
                random = torch.zeros_like(buffer, device=device)
            submodule._buffers[name] = random if buffer.is_meta else buffer.to(device)
    # Adapters become as large as the maps they adapt: fp32 is inaccurate for values in thousands.
    adapted: list[Any] = [part for part in module.modules() if hasattr(part, "lora_B")]
    for wrapper in adapted:
        for name, b in wrapper.lora_B.items():
            b.weight.data.div_(max(1.0, abs(wrapper.scaling[name])))


def largest(t: Tensor) -> Tensor:
    """The largest absolute value, without a copy of the tensor."""
    return torch.stack(torch.aminmax(t)).abs().max()


def randomized_copy(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module, {id(param): param for param in module.parameters()})
    randomize(copied, torch.device("cpu"))
    return copied


def describe_config(config: PreTrainedConfig, index: int) -> tuple[str, tuple[str, ...]]:
    """Equal for configurations with the same settings that layers read, and the same layer type."""
    values = {
        k: v for k, v in vars(config).items() if not k.startswith("_") and k not in UNREAD_BY_LAYERS
    }
    settings = json.dumps(values, sort_keys=True, default=repr)  # files list them in any order
    return settings, tuple((getattr(config, "layer_types", None) or ())[index : index + 1])


def describe_arguments(calls: list[RecordedCall], index: int) -> tuple[str, tuple[int | str, ...]]:
    """Equal for layers that get the same tensors and masks, and other arguments of equal value."""
    numbers: dict[int, int] = {}
    for call in calls:
        for leaf in pytree.tree_leaves(call[1:]):
            numbers.setdefault(id(leaf), len(numbers))
    leaves, tree_spec = pytree.tree_flatten(calls[index][1:])
    return str(tree_spec), tuple(
        numbers[id(leaf)] if isinstance(leaf, Tensor | PlaceholderMask) else repr(leaf)
        for leaf in leaves
    )


def token_dims(
    model: PreTrainedModel, name: str, long: RecordedCall, short: RecordedCall
) -> tuple[int | None, ...]:
    """For each leaf of a layer's arguments, return the dim of its tokens; None if it has none.
    `long` and `short` are calls of LENGTHS tokens."""
    leaves, tree_spec = pytree.tree_flatten(long[1:])
    others, other_spec = pytree.tree_flatten(short[1:])
    if tree_spec != other_spec:
        raise refusal(model, f"passes different arguments to {name} for different lengths")
    return tuple(_token_dim(model, name, *both) for both in zip(leaves, others, strict=True))


def _token_dim(model: PreTrainedModel, name: str, long: object, short: object) -> int | None:
    if not isinstance(long, Tensor):
        return None
    assert isinstance(short, Tensor)
    sizes = list(zip(long.shape, short.shape, strict=True))
    dims = [dim for dim, (size, other) in enumerate(sizes) if size != other]
    if len(dims) > 1 or any(sizes[dim] != LENGTHS for dim in dims):
        shape = tuple(long.shape)
        raise refusal(model, f"passes {name} a tensor of shape {shape} for {LENGTHS[0]} tokens")
    return dims[0] if dims else None


# ---- the mixer's call


def read_calls(
    model: PreTrainedModel, name: str, calls: Sequence[Any], inputs: LayerInputs
) -> LayerSpec:
    """Return the spec of a layer from its mixers' calls; refuse options that we do not compute."""
    for option, value in (item for call in calls for item in call.options.items()):
        if option in (*IGNORED_OPTIONS, *COMPUTED_OPTIONS) or value is None or value is False:
            continue
        if (option == "dropout" and not value) or (option, value) == ("is_causal", True):
            continue
        passed = f"{option}={'a tensor' if isinstance(value, Tensor) else value}"
        problem = f"passes {passed} to the attention of {name}, which is not supported"
        raise refusal(model, problem)
    lengths = config_lengths(find_decoder(model).config)
    layer = ProbedLayer(name, inputs, lengths, partial(refusal, model))
    return LayerSpec(tuple(MIXERS[type(call)].read(call, layer) for call in calls))


def config_lengths(config: PreTrainedConfig) -> set[int]:
    """Return every number in the configuration that may be a number of tokens."""
    numbers = [
        value
        for value in pytree.tree_leaves(config.to_dict())
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return {int(number) for number in numbers if 1 < number <= FAR_POSITION}


# ---- small copies of layers


def shrink(layer: nn.Module) -> bool:
    """Replace experts and MLPs of known structure by few and narrow ones, for `randomize`. Return
    whether anything changed."""
    sizes = [param.shape for param in layer.parameters()]
    for module in list(layer.modules()):
        shrink_experts(module)
        shrink_mlp(module)
    return sizes != [param.shape for param in layer.parameters()]
