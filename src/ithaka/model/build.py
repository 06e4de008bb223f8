"""Apply parallelism to a model: meta init, FSDP2, streamed layers, weights."""

from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, TypeGuard

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_model_conversion_mapping

from ithaka.attention.choose import agree_on_kernel
from ithaka.blocks.tiles import sum_dtype
from ithaka.comm.agree import raise_on_all_ranks
from ithaka.comm.mesh import Mesh, default_device, make_mesh, resolve_layout, start_process_group
from ithaka.config import AdapterConfig, ConfigError, RopeConfig
from ithaka.config.formats import check_quantization
from ithaka.inputs.calls import CallChecker, compute_dtype, refuse_wrappers
from ithaka.inputs.positions import set_positions
from ithaka.layer.store import Store
from ithaka.layout import Layout, check_parallelism
from ithaka.model.fsdp import apply_fsdp
from ithaka.model.generate import generate
from ithaka.roots.find import check_arguments
from ithaka.weights.adapters import add_adapter, auto_class, check_adapters, lora_options
from ithaka.weights.formats import choose_packed, convert_bitsandbytes, pack_weights
from ithaka.weights.load import init_weights, load_adapter, load_weights, open_tensor_files
from ithaka.weights.save import save_pretrained

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")  # names in config.json


def parallelize_model(
    model: Any,
    cp: int | None = None,
    *,
    ring: int | None = None,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    store: Store | None = None,
) -> Any:
    """Replace the layers' forwards with streamed ones and apply FSDP2, in place. Parameter names do not change.

    `cp` ranks share a sequence, in `ring` Ulysses groups of at most one rank per query head; the other dimension of the
    mesh is data parallel. `layout` has all settings, cp and ring included; without it every technique is off. `store`
    holds the activations that layers keep.

    The model then takes `(input_ids, *, labels, position_ids, attention_mask, document_ids, parents,
    num_items_in_batch, per_token)`, the same full batch on all ranks of a cp group (checked in inputs/calls.py).
    Gradients are sharded and summed over all ranks. The base model of a PeftModel is parallelized.

    A video transformer of diffusers is called as before, with the same full clips on all ranks of a cp group, and
    returns full samples, from which all of them must compute the same loss. Losses of data-parallel groups add up, so
    divide each by the number of groups.
    """
    root = check_arguments(model, cp, ring)
    convert_bitsandbytes(model)
    if hasattr(model, "get_base_model"):
        check_adapters(model, **root.lora_options)  # on the PeftModel: its base does not show every kind of adapter
        base = parallelize_model(model.get_base_model(), cp, ring=ring, mesh=mesh, layout=layout, store=store)
        model.forward = base.__call__  # PEFT's forward would bypass the checks and FSDP2
        model.save_pretrained = base.save_pretrained
        refuse_wrappers(model)
        return model
    device = mesh.device if mesh else default_device()
    start_process_group(device)
    layout = resolve_layout(cp, ring, mesh, layout)
    dtype = compute_dtype(model, layout)
    raise_on_all_ranks(root.check, layout, device)
    root.check_ring(layout.ring)
    sizes = {name: getattr(layout, name) for name in ("cp", "ring", "replicas", "heads_per_stage")}
    check_parallelism(num_heads=root.num_heads, **sizes)
    mesh = mesh or make_mesh(layout.cp, ring=layout.ring, replicas=layout.replicas)
    # Test the kernel here, so that it does not fail in the first step.
    kernel = agree_on_kernel(layout.kernel, mesh.device, dtype, root.attention_kinds)
    layout = replace(layout, kernel=kernel)
    pack_weights(model, dtype)
    apply_fsdp(model, root.units, mesh, layout, dtype, root.outer_dtype(dtype))
    root.attach(mesh, layout, dtype, store or Store(mesh.device))
    CallChecker(root)
    model.ithaka_root, model.ithaka_mesh, model.save_pretrained = root, mesh, MethodType(save_pretrained, model)
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
    rope: RopeConfig | None = None,
    context: int = 0,
    trains: bool = True,
) -> Any:
    """Build a parallel model from a Hugging Face directory, a config.json or a config dict.

    The model is built on the meta device. Weights are read from safetensors straight into this rank's shards; without
    files they are drawn from `seed`, with values that do not depend on the number of ranks. A `vocab_size` above the
    source's resizes the embeddings: each new row is the mean of the stored rows. With an adapter, all other parameters
    are frozen, in the compute dtype; with `trains=False`, all parameters are. For `rope` and `context`, see
    `read_hf_config`. A config dict may also be that of a video transformer.
    """
    if isinstance(source, dict) and "_class_name" in source:
        return _build_transformer(source, mesh, layout or Layout(), adapter, trains)
    dtype = getattr(torch, layout.dtype or "float32") if layout else torch.float32
    config = read_hf_config(source, rope, context)
    text = config.get_text_config()
    stored_vocab, text.vocab_size = text.vocab_size, vocab_size or text.vocab_size
    with torch.device("meta"):
        stored_dtype = sum_dtype(dtype) if trains and not adapter else dtype
        model = auto_class(config.model_type).from_config(config, dtype=stored_dtype)
        if adapter is not None:
            add_adapter(model, adapter, source if isinstance(source, Path) else None)
        choose_packed(model, adapter, open_tensor_files(source) if has_weights(source) else {})
    transforms = get_model_conversion_mapping(model)  # FSDP2 changes the model's class, which they depend on
    parallelize_model(model, mesh=mesh, layout=layout, store=store)
    model.to_empty(device=torch.device("cpu") if layout and layout.offload_optimizer else mesh.device)
    init_weights(model, seed, mesh.device, has_files=has_weights(source))
    if has_weights(source):
        load_weights(model, source, stored_vocab, transforms)
    if adapter is not None and adapter.path is not None:
        load_adapter(model, adapter.path)
    for module in model.modules():  # an offloaded optimizer keeps only parameters on the host
        module._buffers |= {
            name: buffer.to(mesh.device) for name, buffer in module._buffers.items() if buffer is not None
        }
    return model.train(trains)


def _build_transformer(
    config: dict[str, Any], mesh: Mesh, layout: Layout, adapter: AdapterConfig | None, trains: bool
) -> Any:
    """Build a parallel video transformer of diffusers, with random weights."""
    import diffusers

    with torch.device(mesh.device):
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    dtype = getattr(torch, layout.dtype or "float32")
    model.requires_grad_(trains and adapter is None)
    for param in model.parameters():
        param.data = param.data.to(sum_dtype(dtype) if param.requires_grad else dtype)
    if adapter is not None:
        from peft import LoraConfig

        targets = "all-linear" if adapter.targets == "all-linear" else list(adapter.targets)
        model.add_adapter(LoraConfig(**lora_options(adapter), target_modules=targets))
    return parallelize_model(model, mesh=mesh, layout=layout).train(trains)


def has_weights(source: Path | dict) -> TypeGuard[Path]:
    return isinstance(source, Path) and any(source.glob("*.safetensors"))


def check_values(config: Any, source: str) -> None:
    """Refuse an unknown activation, which transformers finds only when it builds the model."""
    for name, value in vars(config).items():
        if name in ACTIVATIONS and isinstance(value, str) and value not in ACT2FN:
            raise ConfigError(f"{name}={value} of {source} is not an activation of transformers; use silu, for example")


def read_hf_config(source: Path | dict, rope: RopeConfig | None = None, context: int = 0) -> Any:
    """Read a Hugging Face configuration from a directory, a config.json or a dict, and extend its positions to
    `context` tokens with `rope`. Raises ConfigError for a context beyond the positions of trained weights."""
    name = "the configuration" if isinstance(source, dict) else f"config.json in {source}"
    try:
        if isinstance(source, dict):
            config = AutoConfig.for_model(**source)
        else:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    except StrictDataclassError as error:  # a value of the wrong type
        raise ConfigError(f"{name} is not valid ({' '.join(str(error).split())}); fix the value") from None
    check_values(config.get_text_config(), name)
    # `load_weights` reads MXFP4 and bitsandbytes' 4 bits.
    check_quantization(vars(config).pop("quantization_config", None), str(source))
    set_positions(config.get_text_config(), rope, context, trained=has_weights(source))
    return config
