"""Meta init, swap layers, FSDP2, load weights: the one place where parallelism is applied to a model."""

from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from types import MethodType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from ithaka.attention.blocks import Docs
from ithaka.attention.fused import Positions
from ithaka.attention.kernels import agree_on_kernel
from ithaka.config import AdapterConfig, ConfigError, RopeConfig
from ithaka.dist.exchange import all_gather, to_sequence_order
from ithaka.dist.mesh import Mesh, make_mesh
from ithaka.layer.linear import as_linear
from ithaka.layer.loss import TokenResults, linear_cross_entropy, summed_cross_entropy
from ithaka.layer.schedule import StreamedLayer
from ithaka.layer.store import Store
from ithaka.layer.tiles import apply_norm, sum_dtype
from ithaka.layout import Layout, check_parallelism
from ithaka.model.adapters import add_adapter, check_adapters
from ithaka.model.batch import take_own_tokens
from ithaka.model.calls import (
    Call,
    CallCheck,
    check_around,
    check_given,
    check_modules,
    guard_backward,
    mark_replaced,
    num_changes,
    refuse_wrappers,
)
from ithaka.model.families import check_supported, map_layer
from ithaka.model.positions import compute_frequencies, set_positions
from ithaka.model.save import generate, save_pretrained
from ithaka.model.weights import init_weights, load_adapter, load_weights
from ithaka.phases import mark_backward, phase
from ithaka.plan.bytes import logits_tile_tokens
from ithaka.plan.heads import head_table


@dataclass
class ParallelOutput(ModelOutput):
    """`loss` is the mean over the valid labels of the whole global batch, the same on every rank."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    num_tokens: int | None = None
    tokens: TokenResults | None = None  # of this rank's share
    docs: Docs | None = None  # whose documents are where, and what was sent for them
    own_loss: Tensor | None = None  # this rank's part


def parallelize_model(
    model: PreTrainedModel,
    cp: int | None = None,
    *,
    ring: int | None = None,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    store: Store | None = None,
) -> PreTrainedModel:
    """Swaps the layers for streamed ones and applies FSDP2, in place. Parameter names stay Hugging Face's.

    `cp` ranks share a sequence, in `ring` groups that each exchange tokens for heads and have no more ranks than the
    model has query heads; the rest of the world is data parallel. Afterwards the model takes
    `(input_ids, *, labels, position_ids, attention_mask, document_ids, num_items_in_batch, per_token)`, the same full
    batch on every rank of a cp group (model/calls.py checks that). Gradients arrive sharded and summed over all ranks.
    `layout` says the rest, and cp and ring as well; without it every technique is off. `store` holds what layers keep.
    A PeftModel stays one: its base model is parallelized.
    """
    check_given(model, cp, ring)
    if hasattr(model, "get_base_model"):
        check_adapters(model)  # some methods are not in the base model
        base = parallelize_model(model.get_base_model(), cp, ring=ring, mesh=mesh, layout=layout, store=store)
        model.forward = base.__call__  # PEFT's own would call the base's forward, past its checks and FSDP2
        model.save_pretrained = base.save_pretrained
        refuse_wrappers(model)
        return model
    check_supported(model)
    check_modules(model)
    of_mesh = (mesh.cp_size, mesh.ring_group.size()) if mesh else (None, None)
    layout = layout or Layout(cp=cp or of_mesh[0] or 1, ring=ring or of_mesh[1] or 1)
    for name, others, own in (("cp", (cp, of_mesh[0]), layout.cp), ("ring", (ring, of_mesh[1]), layout.ring)):
        for where, other in zip(("", "mesh."), others, strict=True):
            if other is not None and other != own:
                raise ConfigError(f"{where}{name}={other} is not layout.{name}={own}; give one of them, or the same")
    check_parallelism(
        num_heads=model.config.num_attention_heads,
        cp=layout.cp,
        ring=layout.ring,
        replicas=layout.replicas,
        heads_per_stage=layout.heads_per_stage,
    )
    mesh = mesh or make_mesh(layout.cp, ring=layout.ring, replicas=layout.replicas)
    dtype = getattr(torch, layout.dtype) if layout.dtype else model.dtype
    # A kernel that does not work is found here, not in the first step.
    layout = replace(layout, kernel=agree_on_kernel(layout.kernel, mesh.device, dtype, map_layer(model, 0).head_dim))
    mark_replaced(model)
    params = [param for param in model.parameters() if param.requires_grad]
    widest = reduce(torch.promote_types, {param.dtype for param in params} or {dtype})
    for param in params:  # FSDP2 wants one dtype; PEFT copies modules_to_save in the base's
        param.data = param.data.to(widest)
    _shard(model, mesh, layout, dtype)
    _swap_forwards(model, mesh, layout, store or Store(mesh.device))
    CallCheck(model, mesh)
    model.ithaka_mesh = mesh
    model.save_pretrained, model.generate = MethodType(save_pretrained, model), MethodType(generate, model)
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
) -> PreTrainedModel:
    """A parallel model from a Hugging Face directory, a config.json or a config's dict.

    Built on the meta device; weights go straight from the safetensors files into this rank's shards, or, where
    there are none, are drawn from `seed`: the same values for any number of ranks. `vocab_size`: if larger than the
    source's, embeddings are resized, and each new row of stored ones is the mean of the others. With an adapter, all
    else is frozen and in the dtype of the computation, which all parameters are in if the model never `trains`.
    `rope` and `context`: as in `hf_config`.
    """
    dtype = getattr(torch, layout.dtype or "float32") if layout else torch.float32
    config = read_hf_config(source, rope, context)
    stored_vocab, config.vocab_size = config.vocab_size, vocab_size or config.vocab_size
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=sum_dtype(dtype) if trains and not adapter else dtype)
        if adapter is not None:
            add_adapter(model, adapter, source if isinstance(source, Path) else None)
    parallelize_model(model, mesh=mesh, layout=layout, store=store)
    model.to_empty(device=torch.device("cpu") if layout and layout.offload_optimizer else mesh.device)
    model.model.rotary_emb.__init__(config)  # its buffers are computed, not loaded
    model.model.rotary_emb.to(mesh.device)
    init_weights(model, seed, only_adapters=has_weights(source))
    if has_weights(source):
        load_weights(model, source, stored_vocab)
    if adapter is not None and adapter.path is not None:
        load_adapter(model, adapter.path)
    return model


def has_weights(source: Path | dict) -> TypeGuard[Path]:
    return isinstance(source, Path) and any(source.glob("*.safetensors"))


def read_hf_config(source: Path | dict, rope: RopeConfig | None = None, context: int = 0) -> Any:
    """Hugging Face's configuration of a directory, a config.json or a config's dict, with positions for `context`
    tokens as `rope` says. Refuses what trained weights have no positions for."""
    if isinstance(source, dict):
        config = AutoConfig.for_model(**source)
    else:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    how = getattr(config, "quantization_config", None)
    if how:
        raise ConfigError(f"model.path={source} is quantised ({how.get('quant_method')}); give bfloat16 or float32")
    set_positions(config, rope, context, trained=has_weights(source))
    return config


def _shard(model: PreTrainedModel, mesh: Mesh, layout: Layout, dtype: torch.dtype) -> None:
    """FSDP2 over every rank, or those of each replica, one unit per layer. Gradients are summed: the loss is divided
    once, globally."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype.itemsize == 2 else None)
    on_host = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    offload = on_host if layout.offload_optimizer else OffloadPolicy()

    def shard(module: nn.Module) -> None:
        fully_shard(module, mesh=mesh.fsdp, mp_policy=precision, offload_policy=offload)

    for layer in model.model.layers:
        shard(layer)
    ends = model.model.embed_tokens, model.lm_head
    if not set.intersection(*(set(end.parameters()) for end in ends)):  # tied ones stay with the root
        for end in ends:
            shard(end)
    shard(model)
    alone = mesh.fsdp.size() == 1  # then FSDP2 would divide by 1, in one more pass and with one more copy
    for module in model.modules():
        if isinstance(module, FSDPModule) and not alone:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _swap_forwards(model: PreTrainedModel, mesh: Mesh, layout: Layout, store: Store) -> None:
    config, groups = model.config, (mesh.ulysses_group, mesh.ring_group)
    table = head_table(config.num_attention_heads, config.num_key_value_heads, layout.ulysses, layout.heads_per_stage)
    all_keeps = layout.layer_policies(len(model.model.layers))
    for index, (layer, keeps) in enumerate(zip(model.model.layers, all_keeps, strict=True)):
        name, parts = f"layer {index}", map_layer(model, index)
        changes = partial(num_changes, layer)
        layer.forward = StreamedLayer(name, layer, parts, *groups, table, store, layout, keeps, changes)
        layer.gradient_checkpointing = False
    model.lm_head.forward = _Head(model.lm_head, layout.tile_tokens)
    model.forward = MethodType(_forward, model)


@dataclass(eq=False, repr=False)
class _Head:
    """Takes the place of lm_head's forward, so that FSDP2 has its weight ready."""

    lm_head: nn.Module
    tile_tokens: int | None

    def __call__(self, x_sD: Tensor, norm: nn.Module, call: Call) -> TokenResults | Tensor:
        """This rank's part of the loss, what each label gives, or, without labels, logits."""
        head, labels_s = as_linear(self.lm_head), call.share.labels_s
        if labels_s is None:
            logits_sV = head(apply_norm(norm, x_sD))
            return GatherTokens.apply(logits_sV, call.mesh, call.share.docs.deal, call.shape)
        tile = logits_tile_tokens(self.tile_tokens, len(x_sD), len(head.weight_ND) * x_sD.element_size())
        inputs = x_sD.contiguous(), labels_s, norm, head, tile  # a user's hook may have changed it
        return linear_cross_entropy(*inputs) if call.per_token else summed_cross_entropy(*inputs, call.divisor)


def _forward(
    model: PreTrainedModel,
    input_ids: Tensor | Call,
    *,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: int | None = None,
    per_token: bool = False,
    **others: Any,
) -> ParallelOutput:
    """The arguments are the user's; by now CallCheck has put a Call in their place."""
    call = input_ids
    if not isinstance(call, Call):
        raise TypeError("call model(...), not model.forward(...), which skips the checks and FSDP2")
    check_around(call.mesh.device)  # again: some libraries wrap forward in it
    share = call.share
    if share.labels_s is not None and not call.num_tokens and torch.is_grad_enabled():
        return _without_labels(model, call)
    with phase("embedding"):
        x_sD = mark_backward(model.model.embed_tokens(share.ids_s), "embedding backward")
    rotary = model.model.rotary_emb
    positions = Positions(share.positions_s, compute_frequencies(rotary, call.num_positions), rotary.attention_scaling)
    for layer in model.model.layers:
        x_sD = layer(x_sD, positions, share.docs)
    head = model.lm_head(x_sD, model.model.norm, call)
    if share.labels_s is None:
        guard_backward(model, [head])
        return ParallelOutput(logits=head)
    tokens = head if call.per_token else None
    own = head if tokens is None else -tokens.logprobs.sum() / call.divisor
    of_rank = {"tokens": tokens, "docs": share.docs, "own_loss": own.detach()}
    loss = _GlobalSum.apply(own)
    guard_backward(model, [loss, *(tokens or ())])
    return ParallelOutput(loss=loss, num_tokens=call.num_tokens, **of_rank)


def _without_labels(model: PreTrainedModel, call: Call) -> ParallelOutput:
    """No rank has a label: zeros that do not depend on the parameters. Backward leaves gradients as they are, so that
    an optimizer skips parameters whose gradient is None; AdamW would move them by a gradient of zeros."""
    share, s = call.share, len(call.share.ids_s)
    zero = torch.zeros((), dtype=sum_dtype(model.dtype), device=share.ids_s.device)
    loss, logprobs_s, entropies_s = (zero.new_zeros(shape).requires_grad_() for shape in ((), (s,), (s,)))
    tokens = TokenResults(logprobs_s, entropies_s, torch.zeros_like(share.ids_s, dtype=torch.bool))
    tokens_or_none = tokens if call.per_token else None
    return ParallelOutput(loss=loss, num_tokens=0, tokens=tokens_or_none, docs=share.docs, own_loss=zero)


class _GlobalSum(torch.autograd.Function):
    """The sum over ranks; backward passes the gradient on as it is, since FSDP2 sums what ranks contribute."""

    @staticmethod
    def forward(ctx, value):
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, dtotal):
        return dtotal


class GatherTokens(torch.autograd.Function):
    """The batch's tokens on every rank, [B, N, V], in order; backward takes its own: nobody else contributes them.

    Padding is cut here: FSDP2 hooks the output, and an in-place operation on a view would lose the hook.
    """

    @staticmethod
    def forward(ctx, local_sV, mesh, deal, shape):
        ctx.mesh, ctx.deal, V = mesh, deal, local_sV.shape[1]
        whole_SV = local_sV.new_empty(mesh.cp_size * len(local_sV), V)
        all_gather(whole_SV, local_sV.contiguous(), group=mesh.cp_group)
        whole_SV = to_sequence_order(whole_SV, deal)
        return local_sV.new_empty(0).set_(whole_SV.untyped_storage(), 0, (*shape, V))

    @staticmethod
    def backward(ctx, dwhole_BNV):
        return take_own_tokens(dwhole_BNV.flatten(0, 1), ctx.mesh, ctx.deal, 0), None, None, None
