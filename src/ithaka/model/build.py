"""Apply parallelism to a model: meta init, FSDP2, streamed layers, weights."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeGuard, cast
from unittest.mock import patch

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_model_conversion_mapping

from ithaka.attention.choose import agree_on_kernel
from ithaka.blocks.tiles import sum_dtype
from ithaka.comm.agree import raise_on_all_ranks
from ithaka.comm.mesh import Mesh, default_device, make_mesh, resolve_layout, start_process_group
from ithaka.config import AdapterConfig, ConfigError, RopeConfig
from ithaka.config.base_formats import check_quantization
from ithaka.foreign.torch_core import keep_version
from ithaka.foreign.torch_fsdp import (
    FSDPParam,
    ReduceScatter,
    ShardedState,
    alloc_storage,
    flat_shard,
    fsdp_local_shard,
    param_group,
)
from ithaka.inputs.calls import (
    CallChecker,
    compute_dtype,
    mark_replaced_parameters,
    refuse_wrappers,
)
from ithaka.inputs.positions import set_positions
from ithaka.layer.store import Store
from ithaka.layout import Layout, check_float8, check_parallelism
from ithaka.model.generate import generate
from ithaka.model.truncate import read_kinds, truncate_config
from ithaka.phases import MemoryCategory, set_category
from ithaka.roots.find import check_arguments
from ithaka.roots.layer_kinds import LayerKind
from ithaka.weights.adapters import add_adapter, auto_class, check_adapters, lora_options
from ithaka.weights.formats import choose_packed, convert_bitsandbytes, pack_weights
from ithaka.weights.load import init_weights, load_adapter, load_weights, open_tensor_files
from ithaka.weights.save_pretrained import save_pretrained

if TYPE_CHECKING:
    from diffusers import ModelMixin  # an optional package

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")  # names in config.json


def parallelize_model(
    model: "PreTrainedModel | ModelMixin",
    cp: int | None = None,
    *,
    ring: int | None = None,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    store: Store | None = None,
) -> "PreTrainedModel | ModelMixin":
    """Replace the layers' forwards with streamed ones and apply FSDP2, in place. Parameter names do
    not change.

    `cp` ranks share a sequence, in `ring` Ulysses groups of at most one rank per query head; the
    other dimension of the mesh is data parallel. `layout` has all settings, cp and ring included;
    without it every technique is off. `store` holds the activations that layers keep.

    The model then takes `(input_ids, *, labels, position_ids, attention_mask, document_ids,
    parents, num_items_in_batch, per_token)`, the same full batch on all ranks of a cp group
    (checked in inputs/calls.py). Gradients are sharded and summed over all ranks. The base model of
    a PeftModel is parallelized.

    A video transformer of diffusers is called as before, with the same full clips on all ranks of a
    cp group, and returns full samples, from which all of them must compute the same loss. Losses of
    data-parallel groups add up, so divide each by the number of groups.
    """
    root = check_arguments(model, cp, ring)
    convert_bitsandbytes(model)
    if hasattr(model, "get_base_model"):
        # On the PeftModel: its base does not show every kind of adapter.
        check_adapters(model, **root.lora_options)
        base = model.get_base_model()
        parallelize_model(base, cp, ring=ring, mesh=mesh, layout=layout, store=store)
        model.forward = base.__call__  # PEFT's forward would bypass the checks and FSDP2
        model.save_pretrained = base.save_pretrained
        refuse_wrappers(model)
        return model
    device = mesh.device if mesh else default_device()
    start_process_group(device)
    layout = resolve_layout(cp, ring, mesh, layout)
    dtype = compute_dtype(model, layout)
    if device.type == "cuda" and layout.stored_dtype:
        capability = torch.cuda.get_device_capability(device)
        has_float8 = torch.version.hip is None and capability >= (8, 9)
        name = torch.cuda.get_device_name(device)
        raise_on_all_ranks(check_float8, layout.stored_dtype, name, has_float8)
    raise_on_all_ranks(root.check, layout, torch.device("cpu") if device.type == "meta" else device)
    root.check_ring(layout.ring)
    sizes = {name: getattr(layout, name) for name in ("cp", "ring", "replicas", "heads_per_stage")}
    check_parallelism(num_heads=root.num_heads, **sizes, has_rings=not root.why_not("ring"))
    mesh = mesh or make_mesh(layout.cp, ring=layout.ring, replicas=layout.replicas)
    # Test the kernel here, so that it does not fail in the first step.
    kernel = agree_on_kernel(layout.kernel, mesh.device, dtype, root.attention_kinds)
    layout = replace(layout, kernel=kernel)
    pack_weights(model, dtype)
    if mesh.device.type == "meta":
        model.to(mesh.device)
    apply_fsdp(model, root.units, mesh, layout, dtype, root.outer_dtype(dtype))
    root.attach(mesh, layout, dtype, store or Store(mesh.device))
    CallChecker(root)
    model.ithaka_root = root
    model.ithaka_mesh = mesh
    model.save_pretrained = MethodType(save_pretrained, model)
    if root.predicts_tokens:
        model.generate = MethodType(generate, model)
    refuse_wrappers(model)
    return model


def build_model(
    source: Path | dict,
    mesh: Mesh,
    layout: Layout | None = None,
    *,
    store: Store | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
    adapter: AdapterConfig | None = None,
    packing: AdapterConfig | None = None,
    rope: RopeConfig | None = None,
    context: int = 0,
    trains: bool = True,
) -> "PreTrainedModel | ModelMixin":
    """Build a parallel model from a Hugging Face directory, a config.json or a config dict.

    The model is built on the meta device. Weights are read from safetensors straight into this
    rank's shards; without files they are drawn from `seed`, with values that do not depend on the
    number of ranks. A `vocab_size` above the source's resizes the embeddings: each new row is the
    mean of the stored rows. With an adapter, all other parameters are frozen, in the compute dtype;
    with `trains=False`, all parameters are, in the base format of `packing`, if set. For `rope` and
    `context`, see `read_hf_config`. A config dict may also be that of a video transformer.
    """
    if isinstance(source, dict) and "_class_name" in source:
        return _build_transformer(source, mesh, layout or Layout(), store, adapter, trains)
    dtype = getattr(torch, layout.dtype or "float32") if layout else torch.float32
    config = read_hf_config(source, rope, context)
    text = config.get_text_config()
    stored_vocab = text.vocab_size
    text.vocab_size = vocab_size or text.vocab_size
    with torch.device("meta"):
        stored_dtype = sum_dtype(dtype) if trains and not adapter else dtype
        model_class = auto_class(config.model_type)
        model = model_class.from_config(config, dtype=stored_dtype, trust_remote_code=False)
        if adapter is not None:
            add_adapter(model, adapter, source if isinstance(source, Path) else None)
        if packing is not None:
            model.requires_grad_(False)
        if has_weights(source):
            choose_packed(model, adapter or packing, open_tensor_files(source))
        else:
            choose_packed(model, adapter or packing, {})
    # FSDP2 changes the model's class, which they depend on.
    transforms = get_model_conversion_mapping(model)
    parallelize_model(model, mesh=mesh, layout=layout, store=store)
    is_offloaded = layout is not None and layout.offload_optimizer
    model.to_empty(device=torch.device("cpu") if is_offloaded else mesh.device)
    if mesh.device.type != "meta":
        init_weights(model, seed, mesh.device, has_files=has_weights(source))
    if has_weights(source):
        load_weights(model, source, stored_vocab, transforms)
    if adapter is not None and adapter.path is not None:
        load_adapter(model, adapter.path)
    for module in model.modules():  # an offloaded optimizer keeps only parameters on the host
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(mesh.device)
    return model.train(trains)


def read_layers(values: dict[str, Any]) -> list[LayerKind]:
    """The kind of each layer. All blocks of a video transformer are of one kind."""
    if "_class_name" in values:
        return [LayerKind((), (), 0, "")] * values["num_layers"]
    return read_kinds(read_hf_config(values))


def keep_layers(values: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The config.json of a model with these layers only."""
    if "_class_name" in values:
        return {**values, "num_layers": len(layers)}
    return truncate_config(read_hf_config(values), layers).to_dict()


def _build_transformer(
    config: dict[str, Any],
    mesh: Mesh,
    layout: Layout,
    store: Store | None,
    adapter: AdapterConfig | None,
    trains: bool,
) -> "ModelMixin":
    """Build a parallel video transformer of diffusers, with random weights."""
    import diffusers

    with _parameters_on_meta() if mesh.device.type == "meta" else torch.device(mesh.device):
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    dtype = getattr(torch, layout.dtype or "float32")
    model.requires_grad_(trains and adapter is None)
    for param in model.parameters():
        param.data = param.data.to(sum_dtype(dtype) if param.requires_grad else dtype)
    if adapter is not None:
        from peft import LoraConfig

        targets = "all-linear" if adapter.targets == "all-linear" else list(adapter.targets)
        model.add_adapter(LoraConfig(**lora_options(adapter), target_modules=targets))
    return parallelize_model(model, mesh=mesh, layout=layout, store=store).train(trains)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters on meta, but buffers with their values, which the model's check needs."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def has_weights(source: Path | dict) -> TypeGuard[Path]:
    return isinstance(source, Path) and any(source.glob("*.safetensors"))


def check_text_config(config: PreTrainedConfig, source: str) -> None:
    """Refuse an unknown activation, which transformers finds only when it builds the model."""
    for name, value in vars(config).items():
        if name in ACTIVATIONS and isinstance(value, str) and value not in ACT2FN:
            rule = "is not an activation of transformers"
            raise ConfigError(f"{name}={value} of {source} {rule}; use silu, for example")


def read_hf_config(
    source: Path | dict, rope: RopeConfig | None = None, context: int = 0
) -> PreTrainedConfig:
    """Read a directory, a config.json or a dict, and extend the positions to `context` with
    `rope`. Raises ConfigError for a context beyond the positions of trained weights."""
    name = "the configuration" if isinstance(source, dict) else f"config.json in {source}"
    try:
        if isinstance(source, dict):
            config = AutoConfig.for_model(**copy.deepcopy(source))  # it changes nested values
        else:
            config = AutoConfig.from_pretrained(
                source, trust_remote_code=False, local_files_only=True
            )
    except StrictDataclassError as error:  # a value of the wrong type
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name} is not valid ({reason}); fix the value") from None
    check_text_config(config.get_text_config(), name)
    # `load_weights` reads MXFP4 and bitsandbytes' 4 bits.
    check_quantization(vars(config).pop("quantization_config", None), str(source))
    set_positions(config.get_text_config(), rope, context, trained=has_weights(source))
    return config


def apply_fsdp(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: Mesh,
    layout: Layout,
    dtype: torch.dtype,
    root_dtype: torch.dtype,
) -> None:
    """Shard over the ranks of each replica, in FSDP2 units; the root has all other parameters, in
    `root_dtype`. Gradients are summed: the loss is divided by the global count."""
    mark_replaced_parameters(model)
    params = [param for param in model.parameters() if param.requires_grad]
    widest = reduce(torch.promote_types, {param.dtype for param in params} or {dtype})
    for param in params:  # FSDP2 needs one dtype; PEFT copies modules_to_save in the base's
        param.data = param.data.to(widest)
    reduce_dtype = torch.float32 if dtype.itemsize == 2 else None
    offload = OffloadPolicy()
    if layout.offload_optimizer:
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")

    def shard(module: nn.Module, param_dtype: torch.dtype) -> None:
        # Layers cast their input and nothing else: angles must stay in fp32.
        precision = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh.fsdp, mp_policy=precision, offload_policy=offload)

    for unit in units:
        shard(unit, dtype)
    shard(model, root_dtype)
    if mesh.fsdp.size() == 1:
        _cast_in_one_pass(model)
        return  # the settings below would cost a pass and a copy
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for unit in cast(Sequence[Any], units):
        num_parameters = sum(param.numel() for param in unit.parameters())
        if not layout.prefetches(num_parameters * dtype.itemsize):
            unit.set_modules_to_backward_prefetch([unit])  # a no-op: the unit is already gathered


class _OneRankParam(FSDPParam):
    """A parameter on one rank. FSDP2 casts it, then copies it; this casts into the buffer."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        is_sharded = self.sharded_state == ShardedState.SHARDED
        data = flat_shard(self)
        dtype = self.param_dtype
        has_own_way = hasattr(fsdp_local_shard(self), "fsdp_pre_all_gather")
        if not is_sharded or has_own_way or self.offload_to_cpu or dtype is None:
            return super().all_gather_inputs
        self.init_all_gather_outputs([data.numel()], [dtype], 1, self.device)
        (gathered,) = self.all_gather_outputs
        alloc_storage(gathered)
        with keep_version(gathered):
            gathered.copy_(data)
        return [gathered]  # FSDP2 copies it onto itself, which does nothing


class _OneRankReduce(ReduceScatter):
    """Gradients on one rank. FSDP2 casts them, then copies; here both buffers are the same."""

    def __init__(self) -> None:
        self._input: Tensor | None = None  # allocated before the output, of the same size

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        buffer = self._input
        self._input = None
        if buffer is None:
            buffer = torch.empty(*size, dtype=dtype, device=device)
            self._input = set_category(buffer, MemoryCategory.GRADIENTS)
        elif buffer.is_cuda:  # FSDP2 reads its output on another stream
            buffer.record_stream(torch.cuda.current_stream())
        return buffer

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("one rank reduces nothing")


def _cast_in_one_pass(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := param_group(module)):
            module.set_custom_reduce_scatter(_OneRankReduce())
            for param in group.fsdp_params:
                param.__class__ = _OneRankParam
