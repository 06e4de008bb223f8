"""The shape of a model, read from a Hugging Face `config.json` without torch or transformers.

D hidden size, H query heads, G key/value heads, K head dim, F MLP size, V vocabulary.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from ithaka.config import LAYER_LINEARS, AdapterConfig, ConfigError, input_error
from ithaka.hub import HUB_ID

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
GIVE_MODEL = "give a model directory or a config.json"
CORRECT = "correct the model's config.json"
PACKED_ROW, PACKED_ROW_BYTES = 16384, 8464  # weights of an nf4 row (layer/fourbit.py), and its bytes
MXFP4_ROW_BYTES = 8704


@dataclass(frozen=True)
class Family:
    """Facts about a model_type that its `config.json` may omit. Defaults match transformers."""

    qkv_bias: str | bool = False  # a key of config.json, or a constant
    out_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False  # RMS norms of size K on queries and keys
    # all: sliding_window, if set, applies to every layer. switched: use_sliding_window enables it, layer by layer.
    window: Literal["none", "all", "switched"] = "none"
    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int = 32768
    experts: bool = False  # a mixture of experts, which has no formula


DEFAULT_WINDOW = 4096  # for every family that has windows
# To add a family: one entry here, one case in tests/test_shape.py and one in tests/models.py. model/families.py maps
# its modules to the layer's parts.
FAMILIES: dict[str, Family] = {
    "llama": Family("attention_bias", "attention_bias", "mlp_bias", positions=2048),
    "mistral": Family(window="all", kv_heads=8, positions=131072),
    "qwen2": Family(True, window="switched", kv_heads=32),
    "qwen3": Family("attention_bias", "attention_bias", qk_norm=True, window="switched", kv_heads=32, head_dim=128),
    "qwen3_moe": Family(qk_norm=True, window="switched", experts=True),
    "mixtral": Family(window="all", experts=True),
}
# Video transformers -> frames and pixels per latent of their autoencoders.
VIDEO_SCALES = {"WanTransformer3DModel": (4, 8), "LTXVideoTransformer3DModel": (8, 32)}
# Vision-language models: an encoder whose frames are independent, and a language model with 3-D positions.
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
PATCHES_PER_TILE = 8192  # in one tile of the encoder, which has at least one frame
FRAME_PATCHES = 1024  # assumed in plans: frames of 512 x 512 pixels
PLANNED_FAMILIES = [name for name, family in FAMILIES.items() if not family.experts]
MOMENT_BLOCK = 64  # consecutive elements of a row that share the scale of a moment in 8 bits


def has_moment_blocks(shape: Sequence[int]) -> bool:
    """Whether optim.name=adamw8bit stores the moments of a parameter in 8 bits."""
    return len(shape) > 1 and math.prod(shape[1:]) % MOMENT_BLOCK == 0


@dataclass(frozen=True)
class MeasuredLayer:
    """A decoder layer without a formula, measured by model/shape.py: the largest layer's bytes, the mean of costs.

    Run 1 projects, run 2 finishes the layer (layer/general.py). Bytes are per token, in 16 bits.
    """

    parameters: int
    total_parameters: int  # in the model, without embeddings and lm_head
    # Name, inputs, outputs, and whether it is part of a mixture of experts; of all layers.
    linears: tuple[tuple[str, int, int, bool], ...]
    is_streamed: bool  # attention runs as in the families with a formula, and only the rest of the layer was measured
    # Peaks of a run without gradients, and of one with its backward; the graph in between.
    project_bytes: int
    finish_bytes: int
    project_backward_bytes: int
    finish_backward_bytes: int
    project_graph: int
    finish_graph: int
    # Bytes that element-wise kernels move, and multiply-adds with weights, per token.
    project_moved: int
    finish_moved: int
    project_backward_moved: int  # with its forward
    finish_backward_moved: int
    projections: int
    others: int
    experts: int  # a part of `others`, multiplied in groups
    arguments: int = 0  # bytes per token of all arguments of layers: position embeddings
    stacked: tuple[tuple[str, int], ...] = ()  # 3-D weights, of experts: name and parameters
    root: int = 0  # parameters around the layers that stay gathered, in the sum dtype, for all of a step

    bytes_per_token: ClassVar = tuple(
        f"{run}_{what}" for run in ("project", "finish") for what in ("bytes", "backward_bytes", "graph")
    )
    costs: ClassVar = (
        *(f"{run}_{what}" for run in ("project", "finish") for what in ("moved", "backward_moved")),
        "projections",
        "others",
        "experts",
    )


@dataclass(frozen=True)
class Encoder:
    """The image encoder of a vision-language model, measured by model/shape.py. Bytes are per patch, in 16 bits."""

    parameters: int
    values: int  # input values per patch
    patches: int  # per feature, which replaces a token
    outputs: int  # features per token: one for the embeddings, and one for each DeepStack layer
    forward_bytes: int  # peak of a block without gradients
    graph_bytes: int  # saved for backward by all blocks, and what the last one computes with
    products: int  # multiply-adds per patch with weights, and with other patches of its frame
    moved: int  # bytes that element-wise kernels move, forward
    backward_moved: int  # with its forward


@dataclass(frozen=True)
class DeltaShape:
    """Heads of the gated delta rule, and their dims."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int


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
    # Per layer: tokens that a query attends to, with its own; None: all earlier ones; 0: it has the gated delta rule.
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    causal: bool = True  # False: every token attends to all others, as in video transformers
    adapter: AdapterConfig | None = None  # None: all parameters are trained
    measured: MeasuredLayer | None = None  # a family without a formula, whose layers were measured
    reference: bool = False  # whether a frozen copy of the base model is kept too
    delta: DeltaShape | None = None
    encoder: Encoder | None = None  # image encoder; `measured` includes its parameters
    freezes_encoder: bool = False
    optimizer: str = "adamw"  # as optim.name

    def __hash__(self) -> int:
        """Hash a few fields only: the planner's caches hash a shape at every lookup."""
        return hash((self.num_layers, self.hidden, self.heads, self.mlp, self.vocab))

    @cached_property
    def trained_encoder(self) -> int:
        """Trained parameters of the encoder. An adapter freezes it."""
        return self.encoder.parameters if self.encoder and not self.freezes_encoder and not self.adapter else 0

    @cached_property
    def mlp_parameters(self) -> int:
        """Gate, up and down projections of one layer, with biases; of a measured layer, all but the projections."""
        if self.measured:
            return self.measured.parameters - self.measured.projections
        return 3 * self.hidden * self.mlp + self.mlp_bias * (2 * self.mlp + self.hidden)

    @cached_property
    def layer_parameters(self) -> int:
        """One layer: attention projections with biases and norms, the MLP, two norms. The largest measured layer."""
        if self.measured:
            return self.measured.parameters
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * q_size + 2 * kv_size) + self.qk_norm * 2 * self.head_dim
        biases = self.qkv_bias * (q_size + 2 * kv_size) + self.out_bias * self.hidden
        return weights + biases + self.mlp_parameters + 2 * self.hidden

    @cached_property
    def num_parameters(self) -> int:
        """All parameters of the base model. A tied embedding counts once."""
        if self.measured:
            return self.measured.total_parameters + self.vocab * self.hidden * (1 if self.tied else 2)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.num_layers * self.layer_parameters + embeddings + self.hidden

    def first_layers(self, num_layers: int) -> ModelShape:
        """Return the same model with fewer layers. The parameters of a measured model are scaled in proportion."""
        measured = self.measured
        if measured:
            rest = self.encoder.parameters if self.encoder else 0
            total = rest + (measured.total_parameters - rest) * num_layers // self.num_layers
            measured = replace(measured, total_parameters=total)
        return replace(self, num_layers=num_layers, windows=self.windows[:num_layers], measured=measured)

    def shards(self, num_ranks: int) -> tuple[int, int]:
        """(trained, frozen) parameters of one rank. Trained ones are fp32, with a gradient and two AdamW moments."""
        return -(-self.num_trained // num_ranks), -(-self._num_frozen // num_ranks)

    @cached_property
    def _num_frozen(self) -> int:
        saved = self.trained_parameters("lm_head") + self.trained_parameters("embed_tokens") * (not self.tied)
        frozen = (self.num_parameters - saved) * bool(self.adapter) + self.num_parameters * self.reference
        return frozen + (self.num_parameters - self.num_trained if self.adapter is None else 0)

    def moment_bytes(self, num_ranks: int) -> int:
        """Bytes of one rank's optimizer state: two fp32 moments, two in 8 bits with their scales, or one for Muon. Of
        adapters, 8-bit moments are planned in fp32, because the rows of B may be too short for blocks."""
        trained = self.shards(num_ranks)[0]
        if self.optimizer == "adamw":
            return 8 * trained
        adapted = sum(sum(sizes.values()) for sizes in self.adapter_parameters)
        wide, narrow_bytes = adapted // num_ranks, 2 * (1 + 4 / MOMENT_BLOCK)
        if self.optimizer == "muon":
            stacked = self.num_layers * sum(size for _, size in self.measured.stacked) if self.measured else 0
            ends = self.trained_head + self.trained_parameters("embed_tokens") * (not self.tied)
            wide, narrow_bytes = -(-(stacked * (not self.adapter) + ends) // num_ranks), 4
        return 8 * wide + int(narrow_bytes * (trained - wide))

    @cached_property
    def packed_layer(self) -> tuple[int, int]:
        """(parameters, bytes) of one layer's four-bit weights."""
        if self.adapter is None or self.adapter.base == "bf16":
            return 0, 0
        skipped, paths = tuple(f".{name}" for name in self.adapter.unquantized), self._linear_paths
        experts = dict(self.measured.stacked) if self.measured else {}
        names = (n for n in self.linears if n not in experts and not f".{paths[n]}".endswith(skipped))
        sizes, stacked = [math.prod(self.linears[name]) for name in names], sum(experts.values())
        if self.adapter.base == "mxfp4":  # experts only
            return stacked, -(-stacked // PACKED_ROW) * MXFP4_ROW_BYTES
        return sum(sizes) + stacked, sum(-(-size // PACKED_ROW) * PACKED_ROW_BYTES for size in (*sizes, stacked))

    def frozen_bytes(self, num_ranks: int, element_bytes: int) -> int:
        """Bytes of one rank's frozen parameters."""
        frozen, (packed, num_bytes) = self.shards(num_ranks)[1], self.packed_layer
        layers: float = self.num_layers
        if self.measured:
            rest = self.encoder.parameters if self.encoder else 0
            layers = (self.measured.total_parameters - rest) / self.measured.parameters
        return frozen * element_bytes - int(layers * (packed * element_bytes - num_bytes)) // num_ranks

    def gathered_bytes(self, element_bytes: int) -> int:
        """Bytes of one layer's parameters with their adapters, gathered but not unpacked."""
        packed, num_bytes = self.packed_layer
        others = self.layer_parameters + sum(self.most_adapted.values()) - packed
        return others * element_bytes + num_bytes

    # ---- trained parameters

    @property
    def num_products(self) -> int:
        """Multiply-adds per token, without attention."""
        layer = sum(math.prod(size) for size in self.linears.values())
        layer = self.measured.projections + self.measured.others if self.measured else layer
        return self.num_layers * layer + self.vocab * self.hidden

    @property
    def num_active(self) -> int:
        """Parameters that a token uses, with only the experts to which it is routed."""
        layer = self.measured
        if layer is None:
            return self.num_parameters
        stacked = sum(size for _, size in layer.stacked) * layer.total_parameters / layer.parameters
        return self.num_parameters - round(stacked) + self.num_layers * layer.experts

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of a layer's linear modules, by name in the layer."""
        if self.measured:
            return {name: (inputs, outputs) for name, inputs, outputs, _ in self.measured.linears}
        D, F, q_size, kv_size = self.hidden, self.mlp, self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = ((D, q_size), (D, kv_size), (D, kv_size), (q_size, D), (D, F), (D, F), (F, D))
        return dict(zip(LAYER_LINEARS, sizes, strict=True))

    @property
    def _linear_paths(self) -> dict[str, str]:
        """The paths of `linears` in a layer."""
        if self.measured:
            return {name: name for name in self.linears}
        return {name: f"{'self_attn' if name in LAYER_LINEARS[:4] else 'mlp'}.{name}" for name in LAYER_LINEARS}

    def has_adapter(self, module: str) -> bool:
        """Whether a module is adapted. PEFT's rule: a target is its full name or a dot-separated suffix of it."""
        targets = self.adapter.targets if self.adapter else ()
        if targets == "all-linear":
            return module != "lm_head"
        return f".{module}".endswith(tuple(f".{target}" for target in targets))

    @cached_property
    def adapter_parameters(self) -> tuple[dict[str, int], ...]:
        """Per layer: linear module -> parameters of its adapter."""
        rank, modules = self.adapter.rank if self.adapter else 0, self._linear_paths
        mixture = {name for name, *_, in_mixture in self.measured.linears if in_mixture} if self.measured else set()
        if self.adapter and self.adapter.targets != "all-linear":
            mixture = set()
        sizes = {name: rank * sum(size) for name, size in self.linears.items() if name not in mixture}
        return tuple(
            {name: sizes[name] for name in sizes if self.has_adapter(f"model.layers.{i}.{modules[name]}")}
            for i in range(self.num_layers)
        )

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
        return sum(self.most_adapted.values()) if self.adapter else self.layer_parameters

    @cached_property
    def trained_head(self) -> int:
        rank = self.adapter.rank if self.adapter and self.has_adapter("lm_head") else 0
        return self.trained_parameters("lm_head") or rank * (self.vocab + self.hidden)

    @cached_property
    def num_trained(self) -> int:
        if self.adapter is None:
            return self.num_parameters - (self.encoder.parameters if self.encoder and self.freezes_encoder else 0)
        layers = sum(sum(sizes.values()) for sizes in self.adapter_parameters)
        return layers + self.trained_head + self.trained_parameters("embed_tokens") * (not self.tied)

    @cached_property
    def first_trained(self) -> int:
        """The first layer with a backward. If no layer needs one, the last is planned with one."""
        if self.adapter is None or self.trained_parameters("embed_tokens"):
            return 0
        return [*map(bool, self.adapter_parameters[:-1]), True].index(True)

    def with_adapter(self, adapter: AdapterConfig | None) -> ModelShape:
        """Return the shape with an adapter. Raise ConfigError for a target that matches no module, and for a tied
        lm_head."""
        for target in adapter.targets if adapter and adapter.targets != "all-linear" else ():
            only = replace(self, adapter=AdapterConfig(targets=(target,)))
            if not any(only.adapter_parameters) and not only.has_adapter("lm_head"):
                way = f"use a name such as q_proj or {self.num_layers - 1}.self_attn.q_proj"
                if self.measured:
                    way = f"use one of {', '.join(sorted({name.rpartition('.')[2] for name in self.linears}))}"
                raise ConfigError(f"adapter.targets={target} names no module of the model; {way}")
        for name in sorted({*adapter.unquantized} - {*AdapterConfig.unquantized}) if adapter else ():
            module = re.sub(r"^\.\d+(?=\.)", "", f".{name}.")  # 31.mlp.up_proj: of one layer
            if not any(module in f".{path}." for path in self._linear_paths.values()):
                raise ConfigError(f"adapter.unquantized={name} names no module of the model; use a name such as o_proj")
        if adapter and adapter.base == "mxfp4" and self.family != "gpt_oss":
            raise ConfigError("adapter.base=mxfp4 needs a model whose files are in MXFP4 (gpt-oss); use nf4")
        if adapter and self.tied and "lm_head" in adapter.targets:
            rule = "cannot be merged into a model that ties it to embed_tokens"
            way = "leave it out, or train both with adapter.modules_to_save=[embed_tokens]"
            raise ConfigError(f"adapter.targets=lm_head {rule}; {way}")
        return replace(self, adapter=adapter)


@dataclass(frozen=True)
class Work:
    """One micro-step of a cp group: `batch` sequences of `context` tokens, packed into one."""

    context: int
    batch: int = 1
    document_tokens: int | None = None  # length of packed documents; None: one per sequence
    spans: tuple[tuple[int, int], ...] = ()  # nodes of a forest in each sequence: tokens of ancestors, and its own
    accumulate: int = 1  # micro-steps per optimizer step
    trains: bool = True  # False: forward only, without gradients
    reference: bool = False  # also a forward of a reference model
    between_steps: bool = False  # with trains=False: during a run, whose weights and optimizer state stay in memory

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


def span_pairs(before: int, length: int, window: int | None = None) -> int:
    """Return the query-key pairs of `length` tokens that also attend to `before` earlier ones."""

    def count(tokens: int) -> int:
        reach = tokens if window is None else min(tokens, window)
        return reach * tokens - reach * (reach - 1) // 2

    return count(before + length) - count(before)


def read_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a Hugging Face directory or a `config.json` file."""
    file = path / "config.json" if path.is_dir() else path
    hub = f"ORG/{path.name}" if path.parts[:1] == ("models",) else path  # directory names of the documentation
    fetch = f"fetch it with `hf download {hub} --local-dir {path}`, or " if re.fullmatch(HUB_ID, str(path)) else ""
    return shape_from_config(read_json(file, fix=fetch + GIVE_MODEL), str(path))


def read_json(file: Path, name: str = "model.path=", fix: str = GIVE_MODEL) -> dict[str, Any]:
    """Read the object in a JSON file. Raises ConfigError, which names the setting `name`, if there is none."""
    try:
        if isinstance(values := json.loads(file.read_text(encoding="utf-8")), dict):
            return values
        reason = "no JSON object"
    except OSError as error:
        reason = error.strerror or str(error)
        folder = file.parent
        if file.name == "config.json" and (folder / "config.yaml").is_file():
            fix = f"{folder} is a run: use what `ithaka export RUN_DIR OUT_DIR` writes (an adapter: with --merge)"
        elif file.name == "config.json" and (folder / "adapter_config.json").is_file():
            fix = f"{folder} is an adapter: use its base model, and adapter.path={folder} to train on"
        raise input_error(f"{name}{file} cannot be read ({reason}); {fix}", error) from None
    except ValueError:
        reason = "not valid JSON"
    raise ConfigError(f"{name}{file} cannot be read ({reason}); {fix}")


def quant_method(config: Mapping[str, Any]) -> str | None:
    """Return how the weights of a config.json are quantized; None if they are not."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    return method if method is None else str(getattr(method, "value", method))


def check_quantization(quantization: Any, source: str) -> None:
    """Reject quantized weights, except bitsandbytes' 4 bits, and MXFP4 (gpt-oss), which is dequantized on load."""
    settings = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    method = settings.get("quant_method")
    if method != "mxfp4" and not (method == "bitsandbytes" and settings.get("load_in_4bit")):
        fix = "use weights in bfloat16 or float32, in MXFP4 or in bitsandbytes' 4 bits"
        raise ConfigError(f"model.path={source} is quantized ({method}); {fix}")


def shape_from_config(values: Mapping[str, Any], source: str = "the model") -> ModelShape:
    """Return the shape that a `config.json` describes. `source`: its name in errors."""
    name = values.get("model_type") or values.get("_class_name")
    if quantization := values.get("quantization_config"):
        check_quantization(quantization, source)
        values = {key: value for key, value in values.items() if key != "quantization_config"}
    if name not in PLANNED_FAMILIES:
        return _measure(json.dumps(dict(values), sort_keys=True), source)
    family = FAMILIES[name]
    hidden, num_layers, heads, mlp, vocab = (_count(values, key, source) for key in SIZES)
    kv_heads = _count(values, "num_key_value_heads", source, family.kv_heads or heads, null=heads)
    if heads % kv_heads:
        rule = f"does not divide num_attention_heads={heads}"
        raise ConfigError(f"num_key_value_heads={kv_heads} of {source} {rule}; {CORRECT}")
    head_dim = _count(values, "head_dim", source, family.head_dim or hidden // heads, null=hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} of {source} is odd, but RoPE rotates pairs; {CORRECT}")
    windows, tied = _read_windows(values, family, num_layers, source), bool(values.get("tie_word_embeddings", False))
    rules = (family.qkv_bias, family.out_bias, family.mlp_bias)
    qkv_bias, out_bias, mlp_bias = (bool(values.get(rule) if isinstance(rule, str) else rule) for rule in rules)
    sizes = (num_layers, hidden, heads, kv_heads, head_dim, mlp, vocab)
    return ModelShape(name, *sizes, tied, windows, qkv_bias, out_bias, mlp_bias, family.qk_norm)


@lru_cache
def _measure(values: str, source: str) -> ModelShape:
    """Return the shape of a model without a formula: the stored one of a built-in model, or else measured. Measuring
    imports torch and modules above the planner, so its module is imported lazily."""
    for model in built_in_decoders().values():
        if model["config"] == json.loads(values):
            shape = model["shape"] | {"windows": tuple(model["shape"]["windows"])}
            tuples = {key: tuple(map(tuple, shape["measured"][key])) for key in ("linears", "stacked")}
            encoder = Encoder(**shape["encoder"]) if shape.get("encoder") else None
            delta = DeltaShape(**shape["delta"]) if shape.get("delta") else None
            measured = MeasuredLayer(**shape["measured"] | tuples)
            return ModelShape(**shape | {"measured": measured, "encoder": encoder, "delta": delta})
    return import_module("ithaka.model.shape").measure_model(json.loads(values), source)


@lru_cache
def built_in_decoders() -> dict[str, Any]:
    """Built-in models of families without a formula: hub id, config.json, and the measured shape of each. Written by
    benchmarks/measure_decoders.py."""
    return json.loads(Path(__file__).with_name("decoders.json").read_text(encoding="utf-8"))


def count_patches(values: Mapping[str, Any], video: str) -> int:
    """Count the tokens of a `video`, frames x height x width in pixels. `values`: a video transformer's config.json."""
    kind, patch = values.get("_class_name"), values.get("patch_size", 1)
    sizes = [int(size) for size in video.split("x") if size.isdecimal()]
    if kind not in VIDEO_SCALES:
        raise ConfigError(f"--video {video} applies to {' and '.join(VIDEO_SCALES)} only; use --context for this model")
    if len(sizes) != 3 or len(sizes) != video.count("x") + 1 or not all(sizes):
        raise ConfigError(f"--video {video}: use frames x height x width in pixels, as in 81x720x1280")
    frames_scale, scale = VIDEO_SCALES[kind]
    scale *= 2 if values.get("in_channels") == 48 else 1  # the autoencoder of Wan 2.2 5B
    patch = patch if isinstance(patch, list | tuple) else (values.get("patch_size_t", 1), patch, patch)
    latents = ((sizes[0] - 1) // frames_scale + 1, sizes[1] // scale, sizes[2] // scale)
    return math.prod(max(1, size // p) for size, p in zip(latents, patch, strict=True))


def unscaled_positions(positions: int, rope: Mapping[str, Any]) -> int:
    """Return the positions before any scaling. `rope`: for all layers, or by type of layer."""
    rope = rope.get("full_attention", rope)
    return rope.get("original_max_position_embeddings") or int(positions / (rope.get("factor") or 1))


def yarn_factor(positions: int, rope: Mapping[str, Any], context: int) -> int:
    """Return YaRN's factor for `context` tokens, relative to the positions before any scaling."""
    return math.ceil(context / unscaled_positions(positions, rope))


def _count(
    values: Mapping[str, Any], key: str, source: str, default: int | None = None, null: int | None = None
) -> int:
    """Read a positive integer. `default`: if the key is absent. `null`: if its value is null."""
    value = values.get(key, default)
    if value is None and key in values:
        value = null
    if value is None:
        raise ConfigError(f"{key} of {source} is missing; add it to the model's config.json")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key}={value} of {source} is not a positive integer; {CORRECT}")
    return value


def _read_windows(values: Mapping[str, Any], family: Family, num_layers: int, source: str) -> tuple[int | None, ...]:
    """Return each layer's window, by transformers' rules."""
    window = values.get("sliding_window", DEFAULT_WINDOW)
    is_off = family.window == "switched" and not values.get("use_sliding_window", False)
    if family.window == "none" or window is None or is_off:
        return (None,) * num_layers
    if family.window == "all":
        return (_count({"sliding_window": window}, "sliding_window", source),) * num_layers
    first = values.get("max_window_layers", 28)
    kinds = values.get("layer_types") or ["sliding_attention" if i >= first else "" for i in range(num_layers)]
    if len(kinds) != num_layers:
        counts = f"{len(kinds)} entries for num_hidden_layers={num_layers}"
        raise ConfigError(f"layer_types of {source} has {counts}; {CORRECT}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
