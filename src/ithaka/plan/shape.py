"""The shape of a model, with its counts of parameters and bytes, and the work of a step. No torch.

D hidden size, H query heads, G key/value heads, K head dim, F MLP size, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ithaka.config import AdapterConfig, ConfigError
from ithaka.config.base_formats import BASE_FORMATS, BaseFormat
from ithaka.facts.attention import AttentionKind, span_pairs
from ithaka.facts.families import DECODER, ROOTS, RootKind
from ithaka.facts.sizes import MOMENT_BLOCK
from ithaka.layout import Layout


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer as trace/measure.py measures it: the largest layer's bytes, the mean of costs.

    The capture pass projects, the resume pass finishes the layer (layer/passes.py). Bytes are per
    token, in 16 bits.
    """

    parameters: int
    total_parameters: int  # in the model, without embeddings and lm_head
    # Name, inputs, outputs, and whether it is part of a mixture of experts; of all layers.
    linears: tuple[tuple[str, int, int, bool], ...]
    slices_heads: bool  # projects the heads of one stage at a time (`qkv` of a LayerSpec)
    slices_output: bool  # the same for the gradient of attention's output (`output`)
    skips_mlp: bool  # recomputes no output of its MLP, on which no gradient depends
    # Peaks of a run without gradients, and of one with its backward; the graph in between.
    project_bytes: int
    finish_bytes: int
    project_backward_bytes: int
    finish_backward_bytes: int
    project_graph: int
    finish_graph: int
    kept_graph: int  # the mean of `finish_graph`, which layers that keep everything keep
    # Bytes that element-wise kernels move, and multiply-adds with weights, per token.
    project_moved: int
    finish_moved: int
    project_backward_moved: int  # with its forward
    finish_backward_moved: int
    projection_macs: int
    other_macs: int
    expert_macs: int  # a part of `other_macs`, multiplied in groups
    arguments: int = 0  # bytes per token of all arguments of layers: position embeddings
    stacked: tuple[tuple[str, int], ...] = ()  # 3-D weights, of experts: name and parameters
    compiles: bool = False  # with train.compile=auto, on a GPU
    root: int = 0  # parameters around the layers, gathered in the sum dtype for all of a step

    @property
    def expert_parameters(self) -> int:
        return sum(size for _, size in self.stacked)

    @property
    def per_token(self) -> dict[str, int]:
        """What differs between the layers of a hybrid: bytes, and multiply-adds."""
        ends = ("_bytes", "_graph", "_moved", "_macs")
        return {name: size for name, size in vars(self).items() if name.endswith(ends)}


@dataclass(frozen=True)
class Encoder:
    """The image encoder of a vision-language model. Bytes are per patch, in 16 bits."""

    parameters: int
    values: int  # input values per patch
    patches: int  # per feature, which replaces a token
    outputs: int  # features per token: one for the embeddings, and one for each DeepStack layer
    forward_bytes: int  # peak of a block without gradients
    graph_bytes: int  # saved for backward by all blocks, and what the last one computes with
    products: int  # multiply-adds per patch with weights, and with other patches of its frame
    moved: int  # bytes that element-wise kernels move, forward
    backward_moved: int  # with its forward
    is_frozen: bool = False


class MixerCost:
    """What mixes the tokens of a layer: the frozen dataclasses in plan/mixers.py."""

    name: str
    attention: tuple[AttentionKind, ...] = ()  # softmax attention that it computes
    causal: bool = True
    why_no_ring: str | None = None  # "... which {why_no_ring}"
    sizes: Any  # (shape, layout, s, policy) -> LayerBytes

    def seconds(self, layer: Any, work: StepShape) -> tuple[float, float]:
        """(forward, backward), without exchanges. `layer`: a LayerSeconds."""
        return 0.0, 0.0

    def exchange_seconds(self, layer: Any) -> tuple[float, float]:
        """(forward, backward) of exchanges that compute does not hide."""
        return 0.0, 0.0


@dataclass(frozen=True)
class Correction:
    """Traced bytes of plans of one kind, relative to the estimate: on the device without parameters
    and optimizer; in host memory, what layers keep and offloaded states; in all-to-alls."""

    device: float = 1.0
    host: float = 1.0
    sent: float = 1.0


@dataclass(frozen=True)
class ModelShape:
    family: str
    num_layers: int
    hidden: int  # D
    heads: int  # H
    kv_heads: int  # G
    head_dim: int  # K
    mlp: int  # F
    vocab: int  # V
    tied: bool  # lm_head shares the embedding's weight
    mixers: tuple[MixerCost, ...]  # per layer
    measured: MeasuredLayer
    # Values of `per_token`, if `sizes` differ.
    measured_by_mixer: tuple[tuple[MixerCost, tuple[int, ...]], ...] = ()
    adapter: AdapterConfig | None = None  # None: all parameters are trained
    reference: bool = False  # whether a frozen copy of the base model is kept too
    teacher: ModelShape | None = None  # another frozen model; an adapter has the format of its base
    encoders: tuple[Encoder, ...] = ()  # image encoders; `measured` includes their parameters
    optimizer: str = "adamw"  # as optim.name
    corrections: Mapping[str, Correction] = field(default_factory=dict)  # by `plan_kind`

    def __hash__(self) -> int:
        """Hash a few fields only: the planner's caches hash a shape at every lookup."""
        return hash((self.num_layers, self.hidden, self.heads, self.mlp, self.vocab))

    def correction(self, kind: str) -> Correction:
        """An unknown kind is estimated as the one that needs most."""
        known = self.corrections
        if kind in known or not known:
            return known.get(kind, Correction())
        return Correction(
            device=max(1.0, *(other.device for other in known.values())),
            host=max(1.0, *(other.host for other in known.values())),
            sent=max(1.0, *(other.sent for other in known.values())),
        )

    @property
    def root(self) -> RootKind:
        return ROOTS.get(self.family, DECODER)

    @cached_property
    def format(self) -> BaseFormat:
        return BASE_FORMATS[self.adapter.base if self.adapter else "bf16"]

    @cached_property
    def mixer_kinds(self) -> tuple[MixerCost, ...]:
        """The different mixers, in the order of their first layers."""
        return tuple(dict.fromkeys(self.mixers))

    @cached_property
    def by_mixer(self) -> dict[MixerCost, ModelShape]:
        """For each mixer: this shape, with what its layers measured."""
        if not self.measured_by_mixer:
            return dict.fromkeys(self.mixer_kinds, self)
        names = self.measured.per_token
        sizes = dict(self.measured_by_mixer)
        shapes = {}
        for mixer in self.mixer_kinds:
            costs: dict[str, Any] = dict(zip(names, sizes[mixer], strict=True))
            shapes[mixer] = replace(self, measured=replace(self.measured, **costs))
        return shapes

    @cached_property
    def kinds_of_sizes(self) -> tuple[tuple[Any, ModelShape], ...]:
        """The different `sizes` of mixers, each with the shape for them."""
        return tuple(dict.fromkeys((mixer.sizes, shape) for mixer, shape in self.by_mixer.items()))

    @cached_property
    def size_indices(self) -> tuple[int, ...]:
        """Per layer: the index of its mixer's entry in `kinds_of_sizes`."""
        kinds = [
            self.kinds_of_sizes.index((mixer.sizes, shape))
            for mixer, shape in self.by_mixer.items()
        ]
        return tuple(kinds[index] for index in self.mixer_indices)

    @cached_property
    def mixer_indices(self) -> tuple[int, ...]:
        """Per layer: the index of its mixer in `mixer_kinds`."""
        return tuple(map(self.mixer_kinds.index, self.mixers))

    @cached_property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of softmax attention, in the order of their first layers."""
        kinds = dict.fromkeys(kind for mixer in self.mixer_kinds for kind in mixer.attention)
        return tuple(kinds) or (AttentionKind(self.head_dim, self.heads // self.kv_heads),)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of all layers with softmax attention."""
        return tuple(kind.window for mixer in self.mixers for kind in mixer.attention)

    @cached_property
    def why_no_ring(self) -> str | None:
        return next((mixer.why_no_ring for mixer in self.mixer_kinds if mixer.why_no_ring), None)

    @cached_property
    def encoder_parameters(self) -> int:
        return sum(encoder.parameters for encoder in self.encoders)

    @cached_property
    def trained_encoders(self) -> tuple[Encoder, ...]:
        """An adapter freezes all of them."""
        if self.adapter:
            return ()
        return tuple(encoder for encoder in self.encoders if not encoder.is_frozen)

    @cached_property
    def trained_encoder(self) -> int:
        """Trained parameters of encoders."""
        return sum(encoder.parameters for encoder in self.trained_encoders)

    @cached_property
    def mlp_parameters(self) -> int:
        """All parameters of one layer but the projections to q, k and v."""
        return self.measured.parameters - self.measured.projection_macs

    @cached_property
    def num_parameters(self) -> int:
        """All parameters of the base model. A tied embedding counts once."""
        return self.measured.total_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    def keep_layers(self, layers: Sequence[int], dropped: int | None = None) -> ModelShape:
        """Return the same model with these layers only. `dropped`: the parameters of all others;
        without it, parameters are scaled in proportion."""
        mixers = tuple(self.mixers[i] for i in layers)
        total = self.measured.total_parameters
        if dropped is None:
            encoders = self.encoder_parameters
            kept = encoders + (total - encoders) * len(layers) // self.num_layers
        else:
            kept = total - dropped
        measured = replace(self.measured, total_parameters=kept)
        return replace(self, num_layers=len(layers), mixers=mixers, measured=measured)

    def shards(self, num_ranks: int) -> tuple[int, int]:
        """(trained, frozen) parameters of one rank. Trained ones are fp32, with AdamW's moments."""
        saved = self.num_trained  # of the base model
        if self.adapter:
            embedding = 0 if self.tied else self.trained_parameters("embed_tokens")
            saved = self.trained_parameters("lm_head") + embedding
        frozen = self.num_parameters * (1 + self.reference) - saved
        return -(-self.num_trained // num_ranks), -(-frozen // num_ranks)

    def moment_bytes(self, num_ranks: int) -> int:
        """Bytes of one rank's optimizer state: two fp32 moments, two in 8 bits with their scales,
        or one for Muon. Of adapters, 8-bit moments are planned in fp32, because the rows of B may
        be too short for blocks."""
        trained = self.shards(num_ranks)[0]
        if self.optimizer == "adamw":
            return 8 * trained
        adapted = sum(sum(sizes.values()) for sizes in self.adapter_parameters)
        in_fp32 = adapted // num_ranks
        other_bytes = 2 * (1 + 4 / MOMENT_BLOCK)
        if self.optimizer == "muon":
            stacked = self.num_layers * self.measured.expert_parameters
            embedding = 0 if self.tied else self.trained_parameters("embed_tokens")
            ends = self.trained_head + embedding
            in_fp32 = -(-(stacked * (not self.adapter) + ends) // num_ranks)
            other_bytes = 4
        return 8 * in_fp32 + int(other_bytes * (trained - in_fp32))

    @cached_property
    def packed_layer(self) -> tuple[int, int]:
        """(parameters, bytes) of one layer's four-bit weights."""
        skipped = tuple(f".{name}" for name in self.adapter.unquantized) if self.adapter else ()
        stacked = dict(self.measured.stacked)
        sizes = []
        if self.format.packs_linears:
            names = [name for name in self.linears if not f".{name}".endswith(skipped)]
            sizes += [math.prod(self.linears[name]) for name in names if name not in stacked]
        if self.format.packs_experts:
            sizes.append(sum(stacked.values()))
        return sum(sizes), sum(map(self.format.num_bytes, sizes))

    def frozen_bytes(self, num_ranks: int, element_bytes: int) -> int:
        """Bytes of one rank's frozen parameters."""
        packed, num_bytes = self.packed_layer
        in_layers = self.measured.total_parameters - self.encoder_parameters
        layers = in_layers / self.measured.parameters
        saved = int(layers * (packed * element_bytes - num_bytes)) // num_ranks
        frozen = self.shards(num_ranks)[1] * element_bytes - saved
        if self.teacher:  # all of it is frozen
            teacher = self.teacher.with_adapter(self.teacher.adapter or AdapterConfig())
            frozen += teacher.frozen_bytes(num_ranks, element_bytes)
        return frozen

    def gathered_bytes(self, element_bytes: int) -> int:
        """Bytes of one layer's parameters with their adapters, gathered but not unpacked."""
        packed, num_bytes = self.packed_layer
        dense = self.measured.parameters + sum(self.most_adapted.values()) - packed
        return dense * element_bytes + num_bytes

    # ---- trained parameters

    @cached_property
    def used_experts(self) -> float:
        """The fraction of the stacked experts that a token uses."""
        return self.measured.expert_macs / max(1, self.measured.expert_parameters)

    @cached_property
    def num_idle(self) -> int:
        """Parameters of the adapters of experts that a token does not use."""
        names = [name for name, _ in self.measured.stacked]
        stacked = sum(layer.get(name, 0) for layer in self.adapter_parameters for name in names)
        return round((1 - self.used_experts) * stacked)

    @property
    def num_products(self) -> int:
        """Multiply-adds per token, without attention."""
        layer = self.measured.projection_macs + self.measured.other_macs
        return self.num_layers * layer + self.vocab * self.hidden

    @property
    def num_active(self) -> int:
        """Parameters that a token uses, with only the experts to which it is routed."""
        layer = self.measured
        stacked = layer.expert_parameters * layer.total_parameters / layer.parameters
        return self.num_parameters - round(stacked) + self.num_layers * layer.expert_macs

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of a layer's linear modules, by path in the layer."""
        return {name: (inputs, outputs) for name, inputs, outputs, _ in self.measured.linears}

    def has_adapter(self, module: str) -> bool:
        """Whether a module is adapted. PEFT: a target is a dot-separated suffix of its name."""
        targets = self.adapter.targets if self.adapter else ()
        if targets == "all-linear":
            return module != "lm_head"
        return f".{module}".endswith(tuple(f".{target}" for target in targets))

    @cached_property
    def adapter_parameters(self) -> tuple[dict[str, int], ...]:
        """Per layer: linear module -> parameters of its adapter."""
        rank = self.adapter.rank if self.adapter else 0
        mixture = {name for name, *_, in_mixture in self.measured.linears if in_mixture}
        if self.adapter and self.adapter.targets != "all-linear":
            mixture = set()
        sizes = {
            name: rank * sum(size) for name, size in self.linears.items() if name not in mixture
        }
        layers = []
        for i in range(self.num_layers):
            names = [name for name in sizes if self.has_adapter(f"model.layers.{i}.{name}")]
            layers.append({name: sizes[name] for name in names})
        return tuple(layers)

    @cached_property
    def most_adapted(self) -> dict[str, int]:
        """`adapter_parameters` of the layer that has the most."""
        return max(self.adapter_parameters, key=lambda sizes: sum(sizes.values()))

    def trained_parameters(self, module: str) -> int:
        """Parameters of embed_tokens or lm_head if they are trained without an adapter, else 0."""
        names = (module,) if self.adapter is None else self.adapter.modules_to_save
        return self.vocab * self.hidden if module in names or (self.tied and names) else 0

    @cached_property
    def trained_layer(self) -> int:
        """Trained parameters of one layer; with adapters, of the layer that has the most."""
        return sum(self.most_adapted.values()) if self.adapter else self.measured.parameters

    @cached_property
    def trained_head(self) -> int:
        rank = self.adapter.rank if self.adapter and self.has_adapter("lm_head") else 0
        return self.trained_parameters("lm_head") or rank * (self.vocab + self.hidden)

    @cached_property
    def num_trained(self) -> int:
        if self.adapter is None:
            return self.num_parameters - self.encoder_parameters + self.trained_encoder
        layers = sum(sum(sizes.values()) for sizes in self.adapter_parameters)
        embedding = 0 if self.tied else self.trained_parameters("embed_tokens")
        return layers + self.trained_head + embedding

    @cached_property
    def first_trained(self) -> int:
        """The first layer with a backward. If no layer needs one, the last is planned with one."""
        if self.adapter is None or self.trained_parameters("embed_tokens"):
            return 0
        return [*map(bool, self.adapter_parameters[:-1]), True].index(True)

    def compiles(self, layout: Layout) -> bool:
        """Whether the layers are compiled. train.compile=true does not change plans with blocks."""
        return bool(layout.compile and self.measured.compiles)

    def with_adapter(self, adapter: AdapterConfig | None) -> ModelShape:
        """Return the shape with an adapter. Refuses targets without module, and a tied lm_head."""
        for target in adapter.targets if adapter and adapter.targets != "all-linear" else ():
            only = replace(self, adapter=AdapterConfig(targets=(target,)))
            if not any(only.adapter_parameters) and not only.has_adapter("lm_head"):
                names = ", ".join(sorted({name.rpartition(".")[2] for name in self.linears}))
                fix = f"use one of {names}, or of one layer, such as 0.{[*self.linears][0]}"
                raise ConfigError(f"adapter.targets={target} names no module of the model; {fix}")
        unquantized = {*adapter.unquantized} - {*AdapterConfig.unquantized} if adapter else ()
        for name in sorted(unquantized):
            module = re.sub(r"^\.\d+(?=\.)", "", f".{name}.")  # 31.mlp.up_proj: of one layer
            if not any(module in f".{name}." for name in self.linears):
                fix = "use a name such as o_proj"
                raise ConfigError(f"adapter.unquantized={name} names no module of the model; {fix}")
        if adapter:
            BASE_FORMATS[adapter.base].check_family(self.family)
        if adapter and self.tied and "lm_head" in adapter.targets:
            rule = "cannot be merged into a model that ties it to embed_tokens"
            fix = "leave it out, or train both with adapter.modules_to_save=[embed_tokens]"
            raise ConfigError(f"adapter.targets=lm_head {rule}; {fix}")
        return replace(self, adapter=adapter)


@dataclass(frozen=True)
class StepShape:
    """One micro-step of a cp group: `batch` sequences of `context` tokens, packed into one."""

    context: int
    batch: int = 1
    document_tokens: int | None = None  # length of packed documents; None: one per sequence
    # Nodes of a forest in each sequence: tokens of ancestors, and its own.
    spans: tuple[tuple[int, int], ...] = ()
    accumulate: int = 1  # micro-steps per optimizer step
    trains: bool = True  # False: forward only, without gradients
    reference: bool = False  # also a forward of a reference model or a teacher
    distills: bool = False  # its last hidden states stay until the loss
    # With trains=False: during a run, whose weights and optimizer state stay in memory.
    between_steps: bool = False

    @property
    def tokens(self) -> int:
        return self.context * self.batch

    def local_tokens(self, cp: int) -> int:
        return -(-self.tokens // cp)

    @property
    def length(self) -> int:
        """Tokens of a document, or of the longest path of a forest."""
        if self.spans:
            return max(map(sum, self.spans))
        return min(self.document_tokens or self.context, self.context)

    def pairs(self, window: int | None, causal: bool = True) -> float:
        """Query-key pairs per head."""
        length = self.length
        if not causal:
            return self.tokens * length
        if self.spans:
            return self.batch * sum(span_pairs(*span, window) for span in self.spans)
        if window is None or window >= length:
            return self.tokens * length / 2
        return self.tokens / length * (window * length - window**2 / 2)
