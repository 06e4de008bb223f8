"""The root of a language model: tokens in, their loss or logits out. The model's own forward runs
around its layers, and after them (roots/head.py).

Shapes as in inputs/shard.py and layer/inputs.py; Y vocabulary.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ithaka.attention.docs import Docs
from ithaka.blocks.block import TileState
from ithaka.blocks.dropout import POSITION_BITS, replace_dropout
from ithaka.blocks.linear import as_linear
from ithaka.blocks.norm import find_norm
from ithaka.blocks.tiles import sum_dtype
from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError
from ithaka.facts.families import VISION_FAMILIES
from ithaka.facts.sizes import IGNORE_INDEX, logits_tile_tokens
from ithaka.foreign.torch_core import is_compiled
from ithaka.inputs.calls import (
    CallCounts,
    CheckedCall,
    ReadCall,
    fingerprint_call,
    parse_arguments,
    shard_expert_indices,
)
from ithaka.inputs.positions import check_positions
from ithaka.inputs.shard import (
    GatherTokens,
    PackedBatch,
    Share,
    select_own_tokens,
    shard_batch,
)
from ithaka.layer import loss as losses
from ithaka.layer.inputs import CallState
from ithaka.layer.loss import Distilled, GraphHead, Head, LinearHead, ScaledHead, TokenResults
from ithaka.layer.passes import compute_like_autocast
from ithaka.layer.store import Store
from ithaka.layout import Layout
from ithaka.mixers.scan_call import SsdTap
from ithaka.phases import mark_backward, phase
from ithaka.roots.head import BareModule, find_balancing_loss, has_linear_head, run_after_layers
from ithaka.roots.probe import probe_layers
from ithaka.roots.recorder import Recorder, copy_config, randomized_copy, refusal
from ithaka.roots.root import Root
from ithaka.roots.rotary import ExactRotary, rotary_modules


@dataclass
class ParallelOutput(ModelOutput):
    """`loss` is the mean over the valid labels of the global batch, equal on all ranks."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    num_tokens: int | None = None
    tokens: TokenResults | None = None  # this rank's share
    docs: Docs | None = None  # documents of the sequence, and what was exchanged for them
    own_loss: Tensor | None = None  # this rank's term of the loss
    aux_loss: Tensor | None = None  # load-balancing loss of this cp group, without its coefficient
    distilled: Distilled | None = None  # this rank's share, of a call with a teacher
    hidden: Tensor | None = None  # this rank's share of the last layer's output, if asked for
    packed: PackedBatch | None = None  # for another call with the same documents


class DecoderInputs(NamedTuple):
    share: Share
    shape: torch.Size  # of input_ids
    items: float | None  # num_items_in_batch
    chosen_sLk: Tensor | None
    distillation: Any = None
    media: Any = None  # of vision-language models


class Decoder(Root[DecoderInputs, CheckedCall]):
    """A causal language model of transformers whose layers mix tokens through the mixers of
    mixers/kinds.py, or not at all."""

    call_type = CheckedCall
    layers_name = "model.layers"
    # The layers run every module of theirs, once per tile.
    hookable = re.compile(r"model\.(language_model\.)?(embed_tokens|embeddings|layers\.\d+)|")
    patchable = re.compile(
        r"model\.(language_model\.)?(embed_tokens|embeddings|norm|layers\.\d+\..*)|.*rotary.*"
    )
    norm: nn.Module | None  # the last module of the base model, which the head runs tile by tile
    norm_forward: Callable[[Tensor], Tensor]  # its own forward, or a block
    has_linear_head: bool  # logits are lm_head of the base model's output, and lm_head is linear

    @property
    def base(self) -> PreTrainedModel:
        """The model with the embeddings, the layers and the last norm."""
        return self.model.get_submodule(self.layers_name.rpartition(".")[0])

    def planned_target(self, name: str) -> str:
        return name

    def check(self, layout: Layout, device: torch.device) -> None:
        self.dropout = replace_dropout(self.model)
        super().check(layout, device)
        if self.dropout is not None and layout.compile is True:
            fix = "set one of them to false or 0"
            raise ConfigError(f"train.compile=true cannot be used with adapter.dropout; {fix}")

    def check_model(self) -> None:
        config = self.model.config
        if not self.has_layers:
            families = ", ".join(VISION_FAMILIES)
            raise ConfigError(
                f"model_type={config.model_type} has no list of decoder layers at model.layers; "
                "use a decoder like llama or gemma3_text, or with images one of "
                f"{families} (docs/models.md)"
            )
        if not len(self.layers):
            fix = "use at least 1"
            raise ConfigError(f"num_hidden_layers=0: the model has no decoder layer to run; {fix}")
        for name, param in self.model.named_parameters():
            if not param.is_floating_point() or param.itemsize == 1:
                rule = f"{name} is {param.dtype}, a quantized format that is not supported"
                fix = "load the model in bfloat16 or float32, or in bitsandbytes' 4 bits"
                raise ConfigError(f"{rule}; {fix}")
        for name in ("attention_dropout", "router_jitter_noise"):
            if value := getattr(config.get_text_config(), name, None):
                fix = "set it to 0 or false in config.json"
                raise ConfigError(f"{name}={value} is not supported; {fix}")
        for name, buffer in self.model.named_buffers():
            if name.endswith("inv_freq") and (dtype := buffer.dtype).itemsize < 4:
                fix = f"load the model with dtype={dtype} instead of converting it"
                rule = f"is {dtype}, too coarse for long positions"
                raise ConfigError(f"{name} {rule}; {fix}, or set Layout(dtype=...)")
        super().check_model()
        for index, layer in enumerate(self.layers):
            if is_compiled(layer):
                fix = "use Layout(compile=True) or train.compile"
                name = f"{self.layers_name}.{index}"
                raise ConfigError(f"{name} is compiled, which is not supported; {fix}")

    def find_specs(self, device: torch.device) -> None:
        model = self.model
        counts = Counter(id(param) for layer in self.layers for param in {*layer.parameters()})
        if max(counts.values(), default=0) > 1:
            raise refusal(model, "shares parameters between layers, which FSDP2 gathers one by one")
        for module in model.modules():
            is_mamba = hasattr(module, "A_log") and hasattr(module, "D")
            if is_mamba and not SsdTap.is_called_by(module):
                mixer = "the recurrence of Mamba 1, which has a decay for each channel"
                raise refusal(model, f"mixes tokens with {mixer}")
        recorder = Recorder(model, self.layers_name)
        self.specs = probe_layers(model, recorder, device)
        self.norm = recorder.find_norm(self.base)
        self.has_linear_head = has_linear_head(model)
        self.head_tile = TileState()
        if self.norm is not None:
            self.norm_forward = self.norm.forward
            if (block := find_norm("norm", randomized_copy(self.norm))) is not None:
                self.norm_forward = block.make(self.norm, self.head_tile)
        self.balancing = find_balancing_loss(model, len(self.layers))

    def check_positions(self, reach: str, num_positions: int) -> None:
        check_positions(self.model.config.get_text_config(), reach, num_positions)

    @property
    def units(self) -> list[nn.Module]:
        embeddings = self.model.get_input_embeddings()
        lm_head = self.model.lm_head
        if {*embeddings.parameters()} & {*lm_head.parameters()}:
            return [*self.layers]  # tied weights belong to the root unit
        return [*self.layers, embeddings, lm_head]

    def outer_units(self) -> dict[str, tuple[nn.Module, ...]]:
        return {"the head": (self.model, self.model.lm_head)}

    def attach(self, mesh: Mesh, layout: Layout, dtype: torch.dtype, store: Store) -> None:
        super().attach(mesh, layout, dtype, store)
        self.model.lm_head.forward = self._run_head  # makes FSDP2 gather its weight
        self.model.ithaka_dropout = self.dropout
        self.model.ithaka_loss = None  # the trainer sets a custom loss
        # Other models with the same configuration keep their attention.
        config = self.base.config
        own_config = copy_config(config)
        for module in self.base.modules():
            if getattr(module, "config", None) is config:
                module.config = own_config
        for module in rotary_modules(self.base):
            module.forward = ExactRotary(module, self.current)
        if self.norm is not None:
            self.norm.forward = lambda x: x  # `make_head` runs it
        if type(self).embed is Decoder.embed:
            embeddings = self.base.get_input_embeddings()
            embeddings.forward = partial(_embed, embeddings.forward)

    # ---- a call

    def read_call(self, named: dict[str, Any]) -> ReadCall:
        tensors, items = parse_arguments(named)
        fingerprint = fingerprint_call(tensors, items, named) if self.mesh.world_size > 1 else {}
        if "parents" in tensors and (reason := self.why_no_parents()):
            fix = "leave it out, and pass each branch as a row"
            raise ValueError(f"parents is not supported {reason}; {fix}")
        vocab_size = self.model.get_input_embeddings().num_embeddings
        share = shard_batch(tensors, vocab_size, self.mesh, named.get("packed"))
        if items is not None:
            is_number = isinstance(items, int | float) and not isinstance(items, bool)
            if not (is_number and math.isfinite(items) and items >= min(share.num_valid, 1)):
                raise ValueError(
                    f"num_items_in_batch={items!r} divides the loss of {share.num_valid} valid "
                    "labels, so it must be a number above 0; pass the valid labels of all "
                    "data-parallel ranks and micro-steps, or leave it out"
                )
        shape = tensors["input_ids"].shape
        experts = [schedule.experts.block for schedule in self.schedules]
        chosen_sLk = shard_expert_indices(
            experts, named.get("expert_indices"), shape, share, self.mesh
        )
        distillation = named.get("distillation")
        if distillation is not None:
            distillation = distillation.shard(share, shape)
        inputs = DecoderInputs(share, shape, items, chosen_sLk, distillation)
        return ReadCall(inputs, CallCounts(share.num_valid, share.num_positions, 0), fingerprint)

    def make_call(
        self, named: dict[str, Any], inputs: DecoderInputs, totals: CallCounts
    ) -> CheckedCall:
        divisor: float = max(totals.num_valid, 1)
        if inputs.items is not None:
            divisor = inputs.items or 1
        return CheckedCall(
            self.mesh,
            inputs.share,
            inputs.shape,
            totals.num_valid,
            totals.num_positions,
            divisor,
            per_token=bool(named.get("per_token")),
            temperature=named.get("temperature") or 1.0,
            chosen_sLk=inputs.chosen_sLk,
            hidden_only=bool(named.get("hidden_only")),
            distillation=inputs.distillation,
            media=inputs.media,
        )

    def why_no_parents(self) -> str:
        """Why a call may not have `parents`; empty if it may."""
        if (ring := self.mesh.ring_group.size()) > 1:
            return (
                f"with ring={ring}: a ring sends a rank the keys of its own documents, not those "
                "of their parents; use ring=1, with at most as many ranks per sequence as query "
                "heads"
            )
        return self.why_not("parents")

    @staticmethod
    def forward(  # type: ignore[override]
        model: PreTrainedModel,
        input_ids: object,
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
        **others: object,
    ) -> ParallelOutput:
        """Has the user's signature, but `input_ids` is the CheckedCall that CallChecker made."""
        return model.ithaka_root.check_and_run(input_ids)

    def run(self, call: CheckedCall) -> ParallelOutput:
        model = self.model
        share = call.share
        if share.labels_s is not None and not call.num_tokens and torch.is_grad_enabled():
            return self._make_zero_output(call)
        state = self._make_state(call)
        x = self.run_layers(call, state)
        if call.hidden_only:
            return ParallelOutput(hidden=x, packed=share.packed)
        head, distilled = model.lm_head(x, call)
        if share.labels_s is None:
            self.guard_backward([head])
            return ParallelOutput(logits=head)
        tokens = head if isinstance(head, TokenResults) else None
        own = head
        if tokens is not None:
            own = self._token_losses(tokens, share.labels_s).sum() / call.divisor
        balancing = state.balancing
        aux_loss = None
        if balancing is not None:
            own_aux = balancing.loss(x, call.mesh.cp_group)
            # Averaged over data-parallel groups and, by their tokens, over micro-batches.
            weight = balancing.coefficient * call.num_tokens / call.divisor / call.mesh.dp_size
            own = own + weight * own_aux
            # Its backward covers this rank's tokens.
            aux_loss = own_aux + (call.mesh.cp_size - 1) * own_aux.detach()
        loss = GlobalSum.apply(own)
        outputs = [loss, *(tokens or ())]
        if aux_loss is not None:
            outputs.append(aux_loss)
        self.guard_backward(outputs)
        return ParallelOutput(
            loss,
            num_tokens=call.num_tokens,
            tokens=tokens if call.per_token else None,
            docs=share.docs,
            own_loss=own.detach(),
            aux_loss=aux_loss,
            distilled=distilled,
            packed=share.packed,
        )

    def _make_state(self, call: CheckedCall) -> CallState:
        dropout = self.dropout
        docs = call.share.docs
        balancing = self.balancing and self.balancing.start_call(call.share.real_s)
        keys_s = None
        if dropout is not None and self.model.training:
            keys_s = dropout.start_call(_number_tokens(call, dropout.num_calls))
        return CallState(docs, call.num_positions, balancing, call.chosen_sLk, keys_s)

    def embed(self, call: CheckedCall) -> dict[str, Any]:
        """Return the arguments of the base model for this rank's tokens."""
        return {"input_ids": call.share.ids_s[None], "position_ids": call.share.positions_s[None]}

    def run_layers(self, call: CheckedCall, state: CallState) -> Tensor:
        """Run the base model on this rank's tokens, up to its last norm: x_1sD."""
        inputs = self.embed(call)
        with self.current.running(state):
            return self.base(**inputs, use_cache=False).last_hidden_state

    def make_head(self) -> Head:
        model = self.model
        lm_head = self.model.lm_head
        norm = nn.Identity() if self.norm is None else BareModule(self.norm, self.norm_forward)
        if self.has_linear_head:
            return LinearHead(norm, as_linear(lm_head), self.head_tile)

        def run(x_tD: Tensor) -> Tensor:
            with compute_like_autocast(x_tD):
                h_1tD = norm(x_tD[None].to(sum_dtype(x_tD.dtype)))
                head = BareModule(lm_head, MethodType(type(lm_head).forward, lm_head))
                return run_after_layers(model, h_1tD, head).logits.squeeze(0)

        return GraphHead(run, [*lm_head.parameters(), *norm.parameters()])

    def _run_head(
        self, x: Tensor, call: CheckedCall
    ) -> tuple[TokenResults | Tensor, Distilled | None]:
        """Return this rank's loss, or TokenResults if call.per_token, or logits if there are no
        labels; and what a teacher adds. x: [1, s, D]."""
        model = self.model
        labels_s = call.share.labels_s
        rows_e = call.share.branch_rows_e
        weight_YD = model.get_output_embeddings().weight
        head = self.make_head()
        x = x.to(weight_YD.dtype).contiguous()  # a user's hook may have replaced it
        if call.temperature != 1:
            head = ScaledHead(head, 1 / call.temperature)
        if labels_s is None:
            logits_sY = head.logits(x.view(x.shape[-2:]))
            sharding = call.share.docs.sharding
            return GatherTokens.apply(logits_sY, call.mesh, sharding, call.shape), None
        row_bytes = len(weight_YD) * x.element_size()
        if call.distillation is not None and not call.distillation.is_stored:
            row_bytes *= 2  # a tile has the logits of both models
        tile = logits_tile_tokens(self.layout.tile_tokens, x.shape[-2], row_bytes)
        if call.distillation is not None:
            with call.distillation.teach(call.share) as teacher:
                return losses.summed_divergence(
                    x, labels_s, head, tile, call.divisor, rows_e, teacher
                )
        if call.per_token or (model.ithaka_loss and model.training):
            return losses.linear_cross_entropy(x, labels_s, head, tile, rows_e), None
        loss = losses.summed_cross_entropy(x, labels_s, head, tile, call.divisor, rows_e)
        return loss, None

    def _token_losses(self, tokens: TokenResults, labels_s: Tensor) -> Tensor:
        """Return the cross-entropy or, in training, the custom loss per label; 0 without one."""
        model = self.model
        if model.ithaka_loss is None or not model.training:
            return -tokens.logprobs
        losses_s = model.ithaka_loss(tokens, labels_s)
        is_tensor = isinstance(losses_s, Tensor)
        if not is_tensor or losses_s.shape != labels_s.shape:
            result = tuple(losses_s.shape) if is_tensor else type(losses_s).__name__
            fix = f"return one loss per label, of shape {tuple(labels_s.shape)}"
            raise ConfigError(f"loss.type returned {result}; {fix}")
        return torch.where(labels_s != IGNORE_INDEX, losses_s, 0)

    def _make_zero_output(self, call: CheckedCall) -> ParallelOutput:
        """Return zeros for a call in which no rank has a label.

        Gradients stay None, so the optimizer skips the parameters. With zero gradients, AdamW would
        still move them.
        """
        share = call.share
        labels_s = share.labels_s
        assert labels_s is not None
        zero = torch.zeros((), dtype=sum_dtype(self.model.dtype), device=share.ids_s.device)
        loss, logprobs_s, entropies_s = (
            zero.new_zeros(shape).requires_grad_() for shape in ((), labels_s.shape, labels_s.shape)
        )
        correct_s = torch.zeros_like(labels_s, dtype=torch.bool)
        means_s = zero.new_zeros(labels_s.shape)
        tokens = TokenResults(logprobs_s, entropies_s, correct_s, means_s)
        return ParallelOutput(
            loss,
            num_tokens=0,
            tokens=tokens if call.per_token else None,
            docs=share.docs,
            own_loss=zero,
            aux_loss=None if self.balancing is None else zero,
            packed=share.packed,
        )

    def example_inputs(self, num_tokens: int, document_tokens: int | None = None) -> dict[str, Any]:
        vocab = self.model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(1)
        documents = torch.arange(num_tokens)[None] // document_tokens if document_tokens else None
        return {
            "input_ids": torch.randint(vocab, (1, num_tokens), generator=generator),
            "document_ids": documents,
        }


def _embed(forward: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
    with phase("embedding"):
        return mark_backward(forward(*args, **kwargs), "embedding backward")


def _number_tokens(call: CheckedCall, num_calls: int) -> Tensor:
    """Number this rank's tokens by sequence in the step and position. Micro-batch `num_calls` has
    its sequences in the order of data/stream.py."""
    mesh = call.mesh
    num_rows, length = call.shape
    sequences_B = (num_calls * num_rows + torch.arange(num_rows)) * mesh.dp_size + mesh.dp_rank
    tokens_BN = (sequences_B[:, None] << POSITION_BITS) + torch.arange(length)
    return select_own_tokens(tokens_BN.flatten(), mesh, call.share.docs.sharding, 0).to(mesh.device)


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
