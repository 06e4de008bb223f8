"""Apply parallelism to a model: meta init, FSDP2, streamed layers, weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from types import MethodType
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import ModelOutput

from ithaka.attention.choose import agree_on_kernel, kernel_for
from ithaka.attention.docs import Docs
from ithaka.attention.fused import Positions
from ithaka.config import AdapterConfig, ConfigError, RopeConfig
from ithaka.dist.agree import raise_on_all_ranks
from ithaka.dist.mesh import Mesh, default_device, make_mesh, resolve_layout, start_process_group
from ithaka.layer.delta import LAYERS
from ithaka.layer.dropout import POSITION_BITS, replace_dropout
from ithaka.layer.linear import as_linear
from ithaka.layer.loss import (
    IGNORE_INDEX,
    Head,
    LinearHead,
    ScaledHead,
    TokenResults,
    linear_cross_entropy,
    summed_cross_entropy,
)
from ithaka.layer.store import Store
from ithaka.layer.streamed import StreamedLayer
from ithaka.layer.tiles import sum_dtype
from ithaka.layout import Layout, check_parallelism
from ithaka.model.adapters import add_adapter, auto_class, check_adapters
from ithaka.model.batch import GatherTokens, select_own_tokens
from ithaka.model.calls import (
    CallChecker,
    CheckedCall,
    check_arguments,
    check_modules,
    check_torch_modes,
    compute_dtype,
    count_changes,
    guard_backward,
    mark_replaced_parameters,
    refuse_wrappers,
)
from ithaka.model.families import (
    check_supported,
    check_values,
    find_decoder,
    find_layers,
    has_encoder,
    has_known_layers,
    map_layer,
)
from ithaka.model.general import Decoder, attach_decoder, attention_kinds, make_head, prepare_decoder, run_decoder
from ithaka.model.generate import generate
from ithaka.model.positions import compute_frequencies, set_positions
from ithaka.model.quantized import choose_packed, convert_bitsandbytes, pack_weights
from ithaka.model.save import save_pretrained
from ithaka.model.vision import VisionChecker, attach_encoder, embed_tokens_and_media
from ithaka.model.weights import init_weights, load_adapter, load_weights, open_tensor_files
from ithaka.phases import Holder, mark_backward, phase, tag
from ithaka.plan.bytes import logits_tile_tokens
from ithaka.plan.heads import head_table
from ithaka.plan.read_config import check_quantization


@dataclass
class ParallelOutput(ModelOutput):
    """`loss` is the mean over the valid labels of the global batch, equal on all ranks."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    num_tokens: int | None = None
    tokens: TokenResults | None = None  # this rank's share
    docs: Docs | None = None  # documents of the sequence, and what was exchanged for them
    own_loss: Tensor | None = None  # this rank's term of the loss
    aux_loss: Tensor | None = None  # the load-balancing loss of this cp group, without its coefficient


def parallelize_model(
    model: PreTrainedModel,
    cp: int | None = None,
    *,
    ring: int | None = None,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    store: Store | None = None,
) -> PreTrainedModel:
    """Replace the layers' forwards with streamed ones and apply FSDP2, in place. Parameter names do not change.

    `cp` ranks share a sequence, in `ring` Ulysses groups of at most one rank per query head; the other dimension of the
    mesh is data parallel. `layout` has all settings, cp and ring included; without it every technique is off. `store`
    holds the activations that layers keep.

    The model then takes `(input_ids, *, labels, position_ids, attention_mask, document_ids, parents,
    num_items_in_batch, per_token)`, the same full batch on all ranks of a cp group (checked in model/calls.py).
    Gradients are sharded and summed over all ranks. The base model of a PeftModel is parallelized.
    """
    check_arguments(model, cp, ring)
    convert_bitsandbytes(model)
    if hasattr(model, "get_base_model"):
        check_adapters(model)  # on the PeftModel: its base model does not show every kind of adapter
        base = parallelize_model(model.get_base_model(), cp, ring=ring, mesh=mesh, layout=layout, store=store)
        model.forward = base.__call__  # PEFT's forward would bypass the checks and FSDP2
        model.save_pretrained = base.save_pretrained
        refuse_wrappers(model)
        return model
    device = mesh.device if mesh else default_device()
    start_process_group(device)
    layout = resolve_layout(cp, ring, mesh, layout)
    dtype = compute_dtype(model, layout)
    dropout, decoder = raise_on_all_ranks(_inspect, model, layout, device)
    num_heads = model.config.num_attention_heads if decoder is None else decoder.num_heads
    if decoder is not None:
        decoder.check_ring(model, layout.ring)
    check_parallelism(
        num_heads=num_heads,
        cp=layout.cp,
        ring=layout.ring,
        replicas=layout.replicas,
        heads_per_stage=layout.heads_per_stage,
    )
    mesh = mesh or make_mesh(layout.cp, ring=layout.ring, replicas=layout.replicas)
    # Test the kernel here, so that it does not fail in the first step.
    kernel = agree_on_kernel(layout.kernel, mesh.device, dtype, attention_kinds(model, decoder))
    layout = replace(layout, kernel=kernel)
    pack_weights(model, dtype)
    ends = find_decoder(model).embed_tokens, model.lm_head
    is_tied = set.intersection(*(set(end.parameters()) for end in ends))  # tied weights belong to the root unit
    encoder = [model.model.visual] if has_encoder(model) else []
    apply_fsdp(model, [*encoder, *find_layers(model), *(() if is_tied else ends)], mesh, layout, dtype)
    _swap_forwards(model, mesh, layout, store or Store(mesh.device), decoder)
    model.ithaka_dropout, model.ithaka_loss = dropout, None  # the trainer sets a custom loss
    for layer in find_layers(model):
        layer.forward.dropout = dropout
    if encoder:
        attach_encoder(model)
    (VisionChecker if encoder else CallChecker)(model, mesh)
    model.ithaka_mesh = mesh
    model.save_pretrained, model.generate = MethodType(save_pretrained, model), MethodType(generate, model)
    refuse_wrappers(model)
    return model


def _inspect(model: PreTrainedModel, layout: Layout, device: torch.device) -> tuple[Any, Decoder | None]:
    """Check the model; return its dropout and, if its layers are general, how to run them. Either may be None."""
    dropout = replace_dropout(model)
    check_supported(model)
    check_modules(model)
    if dropout is not None and layout.compile:
        raise ConfigError("train.compile=true cannot be used with adapter.dropout; set one of them to false or 0")
    return dropout, None if has_known_layers(model) else prepare_decoder(model, device)


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
) -> PreTrainedModel:
    """Build a parallel model from a Hugging Face directory, a config.json or a config dict.

    The model is built on the meta device. Weights are read from safetensors straight into this rank's shards; without
    files they are drawn from `seed`, with values that do not depend on the number of ranks. A `vocab_size` above the
    source's resizes the embeddings: each new row is the mean of the stored rows. With an adapter, all other parameters
    are frozen, in the compute dtype; with `trains=False`, all parameters are. For `rope` and `context`, see
    `read_hf_config`.
    """
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


def has_weights(source: Path | dict) -> TypeGuard[Path]:
    return isinstance(source, Path) and any(source.glob("*.safetensors"))


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
    if quantization := getattr(config, "quantization_config", None):
        check_quantization(quantization, str(source))
        del config.quantization_config  # `load_weights` reads MXFP4 and bitsandbytes' 4 bits
    set_positions(config.get_text_config(), rope, context, trained=has_weights(source))
    return config


def apply_fsdp(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: Mesh,
    layout: Layout,
    dtype: torch.dtype,
    root_dtype: torch.dtype | None = None,
) -> None:
    """Shard over all ranks, or over the ranks of each replica, in FSDP2 units; the root unit has all other parameters,
    in `root_dtype`. Gradients are summed, not averaged: the loss is already divided by the global count."""
    mark_replaced_parameters(model)
    params = [param for param in model.parameters() if param.requires_grad]
    widest = reduce(torch.promote_types, {param.dtype for param in params} or {dtype})
    for param in params:  # FSDP2 needs one dtype; PEFT copies modules_to_save in the base's
        param.data = param.data.to(widest)
    reduce_dtype = torch.float32 if dtype.itemsize == 2 else None
    pin_memory = mesh.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if layout.offload_optimizer else OffloadPolicy()

    def shard(module: nn.Module, param_dtype: torch.dtype) -> None:
        # Layers cast their input and nothing else: angles must stay in fp32.
        precision = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh.fsdp, mp_policy=precision, offload_policy=offload)

    for unit in units:
        shard(unit, dtype)
    shard(model, root_dtype or dtype)
    if mesh.fsdp.size() == 1:
        _cast_in_one_pass(model)
        return  # the settings below would cost a pass and a copy
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for unit in cast(Sequence[Any], units):
        if not layout.prefetches(sum(param.numel() for param in unit.parameters()) * dtype.itemsize):
            unit.set_modules_to_backward_prefetch([unit])  # a no-op: the unit is already gathered


class _OneRankParam(FSDPParam):
    """A parameter on one rank. FSDP2 casts it, then copies it into the gathered buffer; this casts into the buffer."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        is_sharded, data, dtype = self.sharded_state == ShardedState.SHARDED, self._sharded_param_data, self.param_dtype
        has_own_way = hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")
        if not is_sharded or has_own_way or self.offload_to_cpu or dtype is None:
            return super().all_gather_inputs
        self.init_all_gather_outputs([data.numel()], [dtype], 1, self.device)
        (gathered,) = self.all_gather_outputs
        alloc_storage(gathered)
        with torch.autograd._unsafe_preserve_version_counter(gathered):
            gathered.copy_(data)
        return [gathered]  # FSDP2 copies it onto itself, which does nothing


class _OneRankReduce(ReduceScatter):
    """Gradients on one rank. FSDP2 casts them into one buffer and copies it to another; here both are the same."""

    def __init__(self) -> None:
        self._input: Tensor | None = None  # allocated before the output, of the same size

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer, self._input = self._input, None
        if buffer is None:
            buffer = self._input = tag(torch.empty(*size, dtype=dtype, device=device), Holder.GRADIENTS)
        elif buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream())  # FSDP2 reads its output on another stream
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("one rank reduces nothing")


def _cast_in_one_pass(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            module.set_custom_reduce_scatter(_OneRankReduce())
            for param in group.fsdp_params:
                param.__class__ = _OneRankParam


def _swap_forwards(model: PreTrainedModel, mesh: Mesh, layout: Layout, store: Store, decoder: Decoder | None) -> None:
    config, groups = model.config, (mesh.ulysses_group, mesh.ring_group)
    layers = find_layers(model)
    for index, (layer, keeps) in enumerate(zip(layers, layout.layer_policies(len(layers)), strict=True)):
        if decoder is None:
            heads = config.num_attention_heads, config.num_key_value_heads
        else:
            heads = decoder.specs[index].num_heads, decoder.specs[index].num_kv_heads
        has_states = decoder is not None and decoder.specs[index].delta is not None
        split = (1, None) if has_states else (layout.ulysses, layout.heads_per_stage)
        name, table = f"layer {index}", head_table(*heads, *split)
        kernel = layout.kernel if decoder is None else kernel_for(layout.kernel, decoder.specs[index].kind)
        settings = replace(layout, kernel=kernel)
        others = (*groups, table, store, settings, keeps, partial(count_changes, layer))
        if decoder is None:
            layer.forward = StreamedLayer(name, layer, map_layer(model, index), *others)
        else:
            spec = decoder.specs[index]
            layer.forward = LAYERS[spec.mixer](name, layer, spec, *others, batch=decoder.batch)
        layer.gradient_checkpointing = False
        adapted = next((n for n, module in layer.named_modules() if hasattr(module, "parameter_name")), None)
        if adapted is not None and layer.forward.experts.block is None:
            rule = "train.compile=true" if layout.compile else "experts of this structure"
            raise ConfigError(f"{name}: adapters on {adapted} are not supported with {rule}; leave out its targets")
    model.ithaka_decoder = decoder
    if decoder is not None:
        attach_decoder(model, decoder)
    model.lm_head.forward = _LossHead(model, layout.tile_tokens)
    model.forward = MethodType(_forward, model)


@dataclass(eq=False, repr=False)
class _LossHead:
    """Replaces the forward of lm_head, which makes FSDP2 gather its weight."""

    model: PreTrainedModel
    tile_tokens: int | None

    def __call__(self, x: Tensor, call: CheckedCall) -> TokenResults | Tensor:
        """Return this rank's loss, or TokenResults if call.per_token, or logits if there are no labels. x: [s, D] or
        [1, s, D]."""
        model, labels_s = self.model, call.share.labels_s
        x = x.to(model.get_output_embeddings().weight.dtype).contiguous()  # a user's hook may have replaced it
        head: Head
        if model.ithaka_decoder is None:
            head = LinearHead(model.model.norm, as_linear(model.lm_head))
        else:
            head = make_head(model, model.ithaka_decoder)
        if call.temperature != 1:
            head = ScaledHead(head, 1 / call.temperature)
        if labels_s is None:
            logits_sV = head.logits(x.view(x.shape[-2:]))
            return GatherTokens.apply(logits_sV, call.mesh, call.share.docs.sharding, call.shape)
        num_logits = model.get_output_embeddings().weight.shape[0]
        tile = logits_tile_tokens(self.tile_tokens, x.shape[-2], num_logits * x.element_size())
        inputs = x, labels_s, head, tile
        rows_e = call.share.branch_rows_e
        if call.per_token or (model.ithaka_loss and model.training):
            return linear_cross_entropy(*inputs, rows_e)
        return summed_cross_entropy(*inputs, call.divisor, rows_e)


def _forward(
    model: PreTrainedModel,
    input_ids: Tensor | CheckedCall,
    *,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    parents: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: int | None = None,
    per_token: bool = False,
    temperature: float = 1.0,
    expert_indices: Tensor | None = None,
    **others: Any,
) -> ParallelOutput:
    """Has the user's signature, but CallChecker has already replaced the arguments with a CheckedCall."""
    call = input_ids
    if not isinstance(call, CheckedCall):
        raise TypeError("model.forward(...) bypasses the checks and FSDP2; call model(...)")
    check_torch_modes(call.mesh.device)  # again, because some libraries wrap forward in autocast
    share = call.share
    if share.labels_s is not None and not call.num_tokens and torch.is_grad_enabled():
        return _make_zero_output(model, call)
    if model.ithaka_dropout is not None:
        dropout = model.ithaka_dropout
        dropout.start_call(_number_tokens(call, dropout.num_calls) if model.training else None)
    for index, layer in enumerate(find_layers(model)):
        layer.forward.experts.given_sk = None if call.chosen_sLk is None else call.chosen_sLk[:, index]
    if model.ithaka_decoder is None:
        x = _run_streamed_layers(model, call)
    else:
        inputs = None if call.media is None else embed_tokens_and_media(model, call)
        x = run_decoder(model, model.ithaka_decoder, call, inputs)
    head = model.lm_head(x, call)
    if share.labels_s is None:
        guard_backward(model, [head])
        return ParallelOutput(logits=head)
    tokens = head if isinstance(head, TokenResults) else None
    own = head if tokens is None else _token_losses(model, tokens, share.labels_s).sum() / call.divisor
    routing, aux_loss = model.ithaka_decoder and model.ithaka_decoder.batch.routing, None
    if routing is not None:
        own_aux = routing.loss(x, call.mesh.cp_group)
        # Averaged over data-parallel groups and, by their tokens, over micro-batches.
        own = own + routing.coefficient * call.num_tokens / call.divisor / call.mesh.dp_size * own_aux
        aux_loss = own_aux + (call.mesh.cp_size - 1) * own_aux.detach()  # its backward covers this rank's tokens
    loss = GlobalSum.apply(own)
    guard_backward(model, [loss, *(tokens or ()), *([] if aux_loss is None else [aux_loss])])
    return ParallelOutput(
        loss=loss,
        num_tokens=call.num_tokens,
        tokens=tokens if call.per_token else None,
        docs=share.docs,
        own_loss=own.detach(),
        aux_loss=aux_loss,
    )


def _token_losses(model: PreTrainedModel, tokens: TokenResults, labels_s: Tensor) -> Tensor:
    """Compute the cross-entropy or, in training, the custom loss per label; 0 where there is no label."""
    if model.ithaka_loss is None or not model.training:
        return -tokens.logprobs
    losses_s = model.ithaka_loss(tokens, labels_s)
    if not isinstance(losses_s, Tensor) or losses_s.shape != labels_s.shape:
        found = tuple(losses_s.shape) if isinstance(losses_s, Tensor) else type(losses_s).__name__
        raise ConfigError(f"loss.type returned {found}; return one loss per label, of shape {tuple(labels_s.shape)}")
    return torch.where(labels_s != IGNORE_INDEX, losses_s, 0)


def _number_tokens(call: CheckedCall, num_calls: int) -> Tensor:
    """Number this rank's tokens by their sequence in the step and their position in it. Micro-batch `num_calls` has
    its sequences in the order of data/stream.py."""
    mesh, (num_rows, length) = call.mesh, call.shape
    sequences_B = (num_calls * num_rows + torch.arange(num_rows)) * mesh.dp_size + mesh.dp_rank
    tokens_BN = (sequences_B[:, None] << POSITION_BITS) + torch.arange(length)
    return select_own_tokens(tokens_BN.flatten(), mesh, call.share.docs.sharding, 0).to(mesh.device)


def _run_streamed_layers(model: PreTrainedModel, call: CheckedCall) -> Tensor:
    share = call.share
    with phase("embedding"):
        x_sD = mark_backward(model.model.embed_tokens(share.ids_s), "embedding backward")
    rotary = model.model.rotary_emb
    positions = Positions(share.positions_s, compute_frequencies(rotary, call.num_positions), rotary.attention_scaling)
    for layer in model.model.layers:
        x_sD = layer(x_sD, positions, share.docs)
    return x_sD


def _make_zero_output(model: PreTrainedModel, call: CheckedCall) -> ParallelOutput:
    """Return zeros that do not depend on the parameters, for a call in which no rank has a label.

    Gradients stay None, so the optimizer skips the parameters. With zero gradients, AdamW would still move them.
    """
    share, labels_s = call.share, call.share.labels_s
    assert labels_s is not None
    zero = torch.zeros((), dtype=sum_dtype(model.dtype), device=share.ids_s.device)
    loss, logprobs_s, entropies_s = (
        zero.new_zeros(shape).requires_grad_() for shape in ((), labels_s.shape, labels_s.shape)
    )
    correct_s, means_s = torch.zeros_like(labels_s, dtype=torch.bool), zero.new_zeros(labels_s.shape)
    tokens = TokenResults(logprobs_s, entropies_s, correct_s, means_s)
    routing = model.ithaka_decoder and model.ithaka_decoder.batch.routing
    tokens_or_none, aux = tokens if call.per_token else None, None if routing is None else zero
    return ParallelOutput(loss, num_tokens=0, tokens=tokens_or_none, docs=share.docs, own_loss=zero, aux_loss=aux)


class GlobalSum(torch.autograd.Function):
    """All-reduce; backward is the identity, because FSDP2 sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, value, group=None):
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, dtotal):
        return dtotal, None
