"""`Root`: what surrounds the layers of a model, and what the rest of ithaka needs to know of it."""

import copy
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ithaka.attention.choose import kernel_for
from ithaka.blocks.dropout import DropoutState
from ithaka.blocks.routing import LoadBalancingLoss
from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError
from ithaka.facts.attention import AttentionKind
from ithaka.inputs.calls import (
    CallCounts,
    ReadCall,
    check_modules,
    check_torch_modes,
    count_changes,
    guard_backward,
)
from ithaka.layer.inputs import CurrentCall
from ithaka.layer.mixer import LayerSpec, MixerSpec
from ithaka.layer.schedule import LayerSchedule
from ithaka.layer.store import Store
from ithaka.layout import ActivationPolicy, Layout
from ithaka.weights.adapters import ADAPTER_PREFIX, check_adapters

if TYPE_CHECKING:
    from peft import LoraConfig

Inputs = TypeVar("Inputs")  # what `read_call` passes on to `make_call`
Call = TypeVar("Call")  # what `make_call` returns


class Root(ABC, Generic[Inputs, Call]):
    """What surrounds the layers of a model; a parallel model keeps it as `model.ithaka_root`.

    `parallelize_model` checks the model (`check`), shards it (`units`, `outer_dtype`) and replaces
    its forwards (`attach`). In each call, `CallChecker` turns the user's arguments into a call with
    `read_call` on every rank and, once all ranks agree, `make_call`; `run` embeds this rank's
    tokens, runs the layers and computes the output.
    """

    library = "Hugging Face"  # that loads the model
    # saved weights
    file_stem = "model"
    adapter_file = "adapter_model.safetensors"
    adapter_prefix = ADAPTER_PREFIX
    lora_options: ClassVar[dict[str, Any]] = {}  # required values of options of PEFT's LoRA
    layers_name: str  # the path of its list of layers
    # Modules whose own forward still runs once, so hooks work. "": the model (no forward pre-hooks)
    hookable: re.Pattern = re.compile("")
    # Modules whose own forward still runs, so a replaced one takes effect.
    patchable: re.Pattern = re.compile(r".*(norm|rotary|mlp).*")
    call_type: type[Call]
    predicts_tokens = True  # whether it has labels and a loss of its own
    needs_sft_trainer = False  # other trainers of TRL do not pass all arguments of its calls

    encoders: Sequence[nn.Module] = ()  # encode images and videos into the sequence of tokens
    dropout: DropoutState | None = None
    balancing: LoadBalancingLoss | None = None  # if the model's configuration has it
    specs: Sequence[LayerSpec] = ()  # per layer
    mesh: Mesh  # set by `attach`, as are layout and dtype
    layout: Layout
    dtype: torch.dtype  # in which layers compute

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model  # or a ModelMixin of diffusers
        self.current = CurrentCall()

    # ---- the model

    @property
    def layers(self) -> Any:  # a ModuleList
        return self.model.get_submodule(self.layers_name)

    @property
    def has_layers(self) -> bool:
        with suppress(AttributeError):
            return isinstance(self.layers, nn.ModuleList)
        return False

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    def config_values(self) -> dict[str, Any]:
        return self.model.config.to_dict()

    def planned_target(self, name: str) -> str:
        """The planner's name of an adapted module, in model.layers; empty if plans leave it out."""
        prefix = f"{self.layers_name}."
        return f"model.layers.{name.removeprefix(prefix)}" if name.startswith(prefix) else ""

    def check(self, layout: Layout, device: torch.device) -> None:
        """Find out how to run the model's layers. Raises ConfigError if it cannot run."""
        self.check_model()
        check_modules(self.model, self.hookable, self.patchable)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            self.find_specs(device)

    def check_model(self) -> None:
        """Refuse what the layers would not compute."""
        if isinstance(self.model, FSDPModule):
            fix = f"call parallelize once, on the model as {self.library} loads it"
            raise ConfigError(f"the model is already sharded; {fix}")
        check_adapters(self.model, **self.lora_options)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Dropout) and module.p:
                raise ConfigError(
                    f"{name} is dropout with p={module.p}, which is not supported; set it to 0"
                )

    @abstractmethod
    def find_specs(self, device: torch.device) -> None:
        """Set `specs`, and compare layers run by them with the model's own on `device`."""

    def check_positions(self, reach: str, num_positions: int) -> None:  # noqa: B027 - may be none
        """Raise ConfigError if `reach`, which has this many positions, exceeds the model's."""

    @property
    def mixers(self) -> list[MixerSpec]:
        return [mixer for spec in self.specs for mixer in spec.mixers]

    @property
    def split_mixers(self) -> list[MixerSpec]:
        """The mixers whose heads Ulysses splits; without any, all mixers."""
        return [mixer for mixer in self.mixers if mixer.exchanges_heads] or self.mixers

    @property
    def attention_kinds(self) -> list[AttentionKind]:
        return [mixer.kind for mixer in self.split_mixers]

    @property
    def num_heads(self) -> int:
        return min(mixer.num_heads for mixer in self.split_mixers)

    def why_not(self, feature: Literal["ring", "parents"]) -> str:
        """Why a layout may not have a ring, or a call parents, for an error; empty if it may."""
        return next(filter(None, (mixer.why_not(feature) for mixer in self.mixers)), "")

    def check_ring(self, ring: int) -> None:
        if ring > 1 and (reason := self.why_not("ring")):
            model_type = self.model.config.model_type
            raise ConfigError(
                f"parallel.ring={ring} is not supported for model_type={model_type}: {reason}; use "
                f"parallel.ring=1, with parallel.cp of at most {self.num_heads}, the query heads"
            )

    # ---- apply parallelism

    @property
    def units(self) -> list[nn.Module]:
        """The modules that FSDP2 gathers separately; other parameters belong to the root unit."""
        return list(self.layers)

    def outer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the root unit, if the layers compute in `dtype`."""
        return dtype

    def attach(self, mesh: Mesh, layout: Layout, dtype: torch.dtype, store: Store) -> None:
        """Replace the forwards of the model, of its layers and around them."""
        self.mesh = mesh
        self.layout = layout
        self.dtype = dtype
        policies = layout.layer_policies(len(self.layers))
        for index, (layer, keeps) in enumerate(zip(self.layers, policies, strict=True)):
            layer.forward = self.make_layer(index, store, keeps)
            layer.gradient_checkpointing = False
            layer.forward.experts.check(f"layer {index}", layout)
        self.model.forward = MethodType(self.forward, self.model)
        self.model.gradient_checkpointing = False

    def make_layer(self, index: int, store: Store, keeps: ActivationPolicy) -> LayerSchedule:
        """The forward of a layer, which runs the layer's own in tiles."""
        spec = self.specs[index]
        layer = self.layers[index]
        layout = replace(self.layout, compile=self.compiles(spec))
        if spec.mixers:
            layout = replace(layout, kernel=kernel_for(layout.kernel, spec.mixers[0].kind))
        return LayerSchedule(
            f"layer {index}",
            layer,
            spec,
            self.mesh.ulysses_group,
            self.mesh.ring_group,
            store,
            layout,
            keeps,
            partial(count_changes, layer),
            index=index,
            dropout=self.dropout,
            current=self.current,
            balancing=self.balancing,
        )

    @property
    def schedules(self) -> list[LayerSchedule]:
        """The forwards of all layers, after `attach`."""
        return [layer.forward for layer in self.layers]

    def compiles(self, spec: LayerSpec) -> bool:
        """Whether a layer is compiled. With blocks for its norms and MLP, it is faster without."""
        if self.layout.compile != "auto":
            return self.layout.compile is True
        on_gpu = self.mesh.device.type == "cuda"
        is_possible = self.predicts_tokens and on_gpu and self.dropout is None
        return is_possible and not spec.has_mlp_block

    # ---- a call

    @cached_property
    def argument_names(self) -> list[str]:
        """The arguments of the model's own forward, in order."""
        params = inspect.signature(type(self.model).forward).parameters.values()
        return [param.name for param in params if param.kind is param.POSITIONAL_OR_KEYWORD][1:]

    @abstractmethod
    def read_call(self, named: dict[str, Any]) -> ReadCall:
        """Check arguments on this rank."""

    @abstractmethod
    def make_call(self, named: dict[str, Any], inputs: Inputs, totals: CallCounts) -> Call:
        """Return the argument of `run`. `totals`: counts of the global batch."""

    @staticmethod
    def forward(model: PreTrainedModel, call: object, *_: object, **__: object) -> object:
        """The forward of a parallel model, whose arguments CallChecker has replaced with a call."""
        return model.ithaka_root.check_and_run(call)

    def check_and_run(self, call: object) -> object:
        if not isinstance(call, self.call_type):
            raise TypeError("model.forward(...) bypasses the checks and FSDP2; call model(...)")
        # Again, because some libraries wrap forward in autocast.
        check_torch_modes(self.mesh.device)
        return self.run(call)

    @abstractmethod
    def run(self, call: Call) -> object:
        """Embed this rank's tokens, run the layers and return the output of a call."""

    def outer_units(self) -> dict[str, tuple[nn.Module, ...]]:
        """The FSDP2 units other than layers whose parameters backward reads, by name."""
        return {"the head": (self.model,)}

    def guard_backward(self, outputs: Iterable[Tensor]) -> None:
        """Make backward from `outputs` raise if its parameters changed since forward."""
        units = {schedule.name: schedule.num_changes for schedule in self.schedules}
        for name, modules in self.outer_units().items():
            units[name] = partial(count_changes, *modules)
        guard_backward(units, outputs)

    # ---- saved files

    def write_config(self, directory: Path) -> None:
        config = self.model.config
        config.dtype = str(self.model.dtype).removeprefix("torch.")
        config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
        config.save_pretrained(directory)
        self.model.generation_config.save_pretrained(directory)

    def write_adapter_config(self, config: "LoraConfig", directory: Path) -> dict[str, str]:
        """Write PEFT's configuration of an adapter. Return metadata for the file of its tensors."""
        config = copy.copy(config)
        config.inference_mode = True  # as PEFT writes it
        config.save_pretrained(directory)
        return {}

    def revert_conversion(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under the names, and in the shapes, of the library's files."""
        return revert_weight_conversion(self.model, tensors)

    # ---- examples

    @abstractmethod
    def example_inputs(self, num_tokens: int, document_tokens: int | None = None) -> dict[str, Any]:
        """Random arguments of a call with this many tokens, in documents of `document_tokens`."""
