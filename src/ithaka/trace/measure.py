"""Measure the sizes, multiply-adds and bytes per token of a model's layers.

One layer of each kind runs on fake tensors (without storage), as layer/passes.py runs a tile.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ithaka.config import ConfigError
from ithaka.facts.families import VIDEO_SCALES
from ithaka.facts.sizes import FRAME_PATCHES
from ithaka.foreign import torch_operators
from ithaka.foreign.torch_core import (
    FakeTensorMode,
    TorchDispatchMode,
    mutates_inputs,
    pytree,
    without_modes,
)
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import LayerSpec, MixerSpec
from ithaka.layer.passes import LayerPasses
from ithaka.mixers.attention_call import PlaceholderMask
from ithaka.mixers.convolution import ConvolutionSpec
from ithaka.mixers.delta import DeltaSpec
from ithaka.mixers.mamba2 import SsdSpec
from ithaka.mixers.softmax import SoftmaxSpec
from ithaka.model.build import check_text_config
from ithaka.plan.mixers import (
    AttentionCost,
    ConvolutionCost,
    DeltaRuleCost,
    SideBySideCost,
    SsdCost,
)
from ithaka.plan.shape import Encoder, MeasuredLayer, MixerCost, ModelShape
from ithaka.profile.live import RecordOutputs, StorageTracker, flatten
from ithaka.profile.memory import Allocation
from ithaka.roots.find import find_root
from ithaka.roots.probe import probe_once
from ithaka.roots.recorder import LENGTHS, Recorder
from ithaka.roots.root import Root
from ithaka.roots.video import TOKEN_DIMS, SelfAttention, Tokens
from ithaka.roots.vision import FrameAttention
from ithaka.weights.adapters import auto_class, is_stacked

TOKENS = (128, 256)  # the lengths of two runs: their difference is what grows with the tokens
TEXT_TOKENS = 512  # Wan's text encoder pads prompts to this length
COORDINATE_BYTES = 24  # three int64 coordinates per patch
# Experts per token, in configurations.
TOP_K = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk")
DECODERS = "a decoder such as llama, qwen3 or gemma3_text (docs/models.md)"  # in messages
GROUPED_MATMULS = (torch_operators.grouped_mm.__name__, "grouped_mm_fallback")
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "linear", *GROUPED_MATMULS)


def measure_model(values: Mapping[str, Any], source: str) -> ModelShape:
    """The shape of the model that a config.json describes. Raises ConfigError if it cannot run."""
    if "_class_name" in values:
        return measure_video(values, source)
    name = values.get("model_type")
    if name not in CONFIG_MAPPING:
        rule = f"is unknown to transformers {transformers.__version__}"
        raise ConfigError(
            f"model_type={name} of {source} {rule}; use {DECODERS}, or a newer transformers"
        )
    try:
        config = AutoConfig.for_model(**copy.deepcopy(dict(values)))  # it changes rope_parameters
        check_text_config(config.get_text_config(), source)
        with torch.device("meta"):
            model_class = auto_class(config.model_type)
            model = model_class.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:
        # Nested errors end with the cause.
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[-1].strip()
        fix = "fix the value in its config.json"
        if "Unrecognized configuration class" in str(error):
            reason = "it is not a decoder"
            fix = "use one that AutoModelForCausalLM builds, such as gemma3_text"
        raise ConfigError(
            f"model_type={name} of {source} cannot be built by transformers ({reason}); {fix}"
        ) from error
    if not find_root(model).has_layers:
        rule = "has no list of decoder layers at model.layers"
        raise ConfigError(f"model_type={name} of {source} {rule}; use {DECODERS}")
    return measure_layers(model)


def measure_layers(model: PreTrainedModel) -> ModelShape:
    root: Any = find_root(model)
    config = root.base.config
    recorder = Recorder(model, root.layers_name)
    calls = recorder.call(LENGTHS[0])
    specs = probe_once(model, recorder, torch.device("cpu"))
    measured: dict[int, MeasuredLayer] = {}  # by the identity of its spec
    parts = []
    arguments_by_id: dict[int, int] = {}  # bytes of arguments with a dimension of tokens
    for index, spec in enumerate(specs):
        leaves = zip(pytree.tree_leaves(calls[index][1:]), spec.token_dims, strict=True)
        arguments_by_id |= {id(leaf): leaf.nbytes for leaf, dim in leaves if dim is not None}
        if id(spec) not in measured:
            measured[id(spec)] = _Measurement(root, recorder, index, spec.token_dims, spec).run()
        parts.append(measured[id(spec)])
    mixers = [mixer for spec in specs for mixer in spec.mixers]
    widest = max(
        [mixer for mixer in mixers if mixer.exchanges_heads] or mixers,
        key=lambda mixer: (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim,
    )
    arguments = sum(arguments_by_id.values()) // LENGTHS[0]
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    inner = [param for param in model.parameters() if param is not embedding and param is not head]
    num_parameters = sum(param.numel() for param in inner)
    by_mixer: dict[MixerCost, list[MeasuredLayer]] = {}
    for spec, part in zip(specs, parts, strict=True):
        by_mixer.setdefault(_plan_mixers(spec), []).append(part)
    costs = []
    if len({mixer.sizes for mixer in by_mixer}) > 1:
        for mixer, layers in by_mixer.items():
            costs.append((mixer, tuple(combine_layers(layers, 0, 0).per_token.values())))
    return ModelShape(
        family=model.config.model_type,
        num_layers=len(specs),
        hidden=embedding.shape[1],
        heads=widest.num_heads,
        kv_heads=widest.num_kv_heads,
        head_dim=widest.head_dim,
        mlp=getattr(config, "intermediate_size", 0) or 0,
        vocab=config.vocab_size,
        tied=embedding is head,
        mixers=tuple(_plan_mixers(spec) for spec in specs),
        measured=combine_layers(parts, num_parameters, arguments),
        measured_by_mixer=tuple(costs),
        encoders=tuple(map(measure_encoder, root.encoders)),
    )


def measure_encoder(visual: PreTrainedModel) -> Encoder:
    """Run one block of the encoder on fake tensors, and count the rest."""
    config = visual.config
    merged = config.spatial_merge_size**2
    dim = visual.blocks[0].norm1.weight.shape[0]
    peak, graph, backward_peak, moved, backward_moved = _run_block(visual.blocks[0])
    matrices = {name: param.numel() for name, param in visual.named_parameters() if param.dim() > 1}
    matrices.pop("pos_embed.weight", None)
    merging = sum(size for name, size in matrices.items() if "merger" in name)  # runs on features
    depth = len(visual.blocks)
    num_outputs = 1 + len(getattr(config, "deepstack_visual_indexes", ()))
    merger_bytes = num_outputs * 8 * dim  # each keeps four tensors
    products = 2 * depth * FRAME_PATCHES * dim  # with other patches
    return Encoder(
        parameters=sum(param.numel() for param in visual.parameters()),
        values=config.in_channels * config.temporal_patch_size * config.patch_size**2,
        patches=merged,
        outputs=num_outputs,
        forward_bytes=peak,
        graph_bytes=(depth - 1) * graph + backward_peak + merger_bytes,
        products=sum(matrices.values()) - merging + merging // merged + products,
        moved=depth * moved,
        backward_moved=depth * backward_moved,
    )


def _run_block(block: GradientCheckpointingLayer) -> list[int]:
    """Bytes per patch of a block of the encoder: its peak without gradients, its graph, its peak
    with them, and what it moves, forward and with backward."""
    dim = block.norm1.weight.shape[0]
    block = copy.deepcopy(block)
    runs = []
    with FakeTensorMode():
        for name, param in list(block.named_parameters()):
            owner = block.get_submodule(name.rpartition(".")[0])
            fake = nn.Parameter(torch.empty(param.shape, dtype=torch.bfloat16))
            owner._parameters[name.rpartition(".")[2]] = fake
        # It takes lengths: a fake tensor has no values.
        block.attn.forward = FrameAttention(block.attn, list)
        for num_patches in TOKENS:
            angles = torch.empty(num_patches, dim // block.attn.num_heads, dtype=torch.float32)
            lengths = [TOKENS[0] // 2] * (2 * num_patches // TOKENS[0])
            x = torch.empty(num_patches, dim, dtype=torch.bfloat16)
            inputs = {"position_embeddings": (angles, angles)}
            with torch.no_grad(), _LiveBytes() as forward:
                block(x, lengths, **inputs)
            with torch.enable_grad(), _LiveBytes() as backward:
                y = block(x.requires_grad_(), lengths, **inputs)
                graph = backward.now
                torch.autograd.grad(y, [x], torch.empty_like(y))
            runs.append((forward.peak, graph, backward.peak, forward.moved, backward.moved))
    short, long = runs
    return [(b - a) // (TOKENS[1] - TOKENS[0]) for a, b in zip(short, long, strict=True)]


def _plan_mixers(spec: LayerSpec) -> MixerCost:
    mixers: list[Any] = [_plan_mixer(mixer) for mixer in spec.mixers]
    return SideBySideCost(*mixers) if len(mixers) > 1 else next(iter(mixers), ConvolutionCost())


def _plan_mixer(spec: MixerSpec) -> MixerCost:
    if isinstance(spec, DeltaSpec | SsdSpec):
        kind = SsdCost if isinstance(spec, SsdSpec) else DeltaRuleCost
        return kind(spec.num_heads, spec.num_key_heads, spec.key_dim, spec.v_head_dim)
    if isinstance(spec, ConvolutionSpec):
        return ConvolutionCost(spec.head_dim)
    assert isinstance(spec, SoftmaxSpec)
    return AttentionCost(spec.kind, spec.causal)


def combine_layers(
    layers: Sequence[MeasuredLayer], total_parameters: int, arguments: int
) -> MeasuredLayer:
    """Combine layers into one that has the maximum of each byte count and the mean of each cost."""
    largest = max(layers, key=lambda layer: layer.parameters)
    combined: dict[str, Any] = {"total_parameters": total_parameters, "arguments": arguments}
    for name, value in vars(largest).items():
        values = [getattr(layer, name) for layer in layers]
        if isinstance(value, bool):
            combined[name] = all(values)
        elif name.endswith(("kept_graph", "_moved", "_macs")):
            combined[name] = round(sum(values) / len(values))
        elif name.endswith(("_bytes", "_graph")):
            combined[name] = max(values)
    linears = {linear[0]: linear for layer in layers for linear in layer.linears}
    return replace(largest, **combined, linears=tuple(linears.values()))


class _Measurement:
    """A copy of one layer on fake tensors."""

    def __init__(
        self,
        root: Root,
        recorder: Recorder,
        index: int,
        dims: tuple[int | None, ...],
        spec: LayerSpec,
    ) -> None:
        self.root: Any = root
        self.model = root.model
        self.recorder = recorder
        self.index = index
        self.dims = dims
        self.name = f"model.layers.{index}"
        self.mode = FakeTensorMode()
        self.layer = copy.deepcopy(root.layers[index], dict(recorder.memo)).train()
        self.spec = spec
        self._make_fake(self.layer)

    def _make_fake(self, layer: nn.Module) -> None:
        with self.mode:
            for module in layer.modules():
                for name, param in module._parameters.items():
                    if param is not None:
                        fake = torch.empty(param.shape, dtype=param.dtype)
                        module._parameters[name] = nn.Parameter(fake)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)

    def run(self) -> MeasuredLayer:
        try:
            with torch.enable_grad():
                return self._run()
        except ConfigError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            rule = f"{self.name} does not run on tensors without memory ({reason})"
            raise ConfigError(
                f"{type(self.model).__name__} cannot be planned: {rule}; call ithaka.parallelize "
                "with a layout"
            ) from error

    def _run(self) -> MeasuredLayer:
        projected = sum(sum(self._products(module)) for module in self._projecting_modules())
        products = [self._products(module) for module in self.layer.modules()]
        dense = sum(macs for macs, _ in products)
        experts = sum(macs for _, macs in products)
        short, long = (self._measure_bytes(tokens) for tokens in TOKENS)
        per_token: dict[str, Any] = {
            name: round((long[name] - short[name]) / (TOKENS[1] - TOKENS[0])) for name in long
        }
        stacked = {name: p for name, p in self.layer.named_parameters() if is_stacked(p)}
        parameters = sum(param.numel() for param in self.layer.parameters())
        spec = self.spec
        return MeasuredLayer(
            parameters,
            parameters,
            self._linears(stacked),
            slices_heads=bool(spec.qkv),
            slices_output=bool(spec.output),
            skips_mlp=spec.skips_mlp and spec.has_mlp_block,
            compiles=not spec.has_mlp_block and self.root.predicts_tokens,
            projection_macs=projected,
            other_macs=dense + experts - projected,
            expert_macs=experts,
            stacked=tuple((name, param.numel()) for name, param in stacked.items()),
            **per_token,
        )

    def _projecting_modules(self) -> set[nn.Module]:
        """The modules that run in capture passes."""
        used: set[nn.Module] = set()
        hooks = [m.register_forward_hook(lambda m, *_: used.add(m)) for m in self.layer.modules()]
        spec = replace(self.spec, blocks=(), qkv=(), output="")
        passes = LayerPasses(self.name, self.layer, spec)
        with self.mode:
            x, arguments = self._inputs(TOKENS[0])
            for index in range(len(self.spec.mixers)):
                passes.capture(x, arguments, index)
        for hook in hooks:
            hook.remove()
        passes.restore()
        return used

    def _linears(self, stacked: dict[str, nn.Parameter]) -> tuple[tuple[str, int, int, bool], ...]:
        """`MeasuredLayer.linears`. A stacked weight has an adapter per expert."""
        mixtures = {name.partition(".")[0] for name in stacked if "." in name}
        linears = []
        for name, module in self.layer.named_modules():
            if type(module) is nn.Linear:
                in_mixture = name.partition(".")[0] in mixtures
                linears.append((name, module.in_features, module.out_features, in_mixture))
        for name, param in stacked.items():
            num_experts, rows, columns = param.shape
            linears.append((name, num_experts * rows, num_experts * columns, True))
        return tuple(linears)

    def _products(self, module: nn.Module) -> tuple[int, int]:
        """Multiply-adds per token with the module's own weights: dense ones, and of its experts."""
        params = list(module.parameters(recurse=False))
        config = self.root.base.config
        counts = [getattr(config, name, None) for name in TOP_K]
        top_k = next((count for count in counts if isinstance(count, int)), 1)
        experts = {len(p) for p in params if p.dim() == 3}  # their biases are 2-D
        flat = sum(p.numel() for p in params if p.dim() == 2 and len(p) not in experts)
        return flat, sum(p.numel() // len(p) * top_k for p in params if is_stacked(p))

    def _inputs(self, num_tokens: int) -> tuple[Tensor, LayerInputs]:
        with without_modes():
            x, args, kwargs = self.recorder.call(num_tokens)[self.index]
        arguments = LayerInputs.pack(args, kwargs, self.dims, num_tokens)
        leaves = [
            self.mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf
            for leaf in arguments.leaves
        ]
        return torch.empty(x.shape[1:], dtype=torch.bfloat16), replace(arguments, leaves=leaves)

    def _measure_bytes(self, num_tokens: int) -> dict[str, int]:
        passes = LayerPasses(self.name, self.layer, self.spec)
        mixers = self.spec.mixers
        skips = {"skips_mlp": self.spec.skips_mlp, "skips_projections": self.spec.skips_projections}
        with self.mode:
            x, arguments = self._inputs(num_tokens)
            sizes = [(num_tokens, mixer.num_heads, mixer.head_dim) for mixer in mixers]
            outs = [torch.empty(size, dtype=x.dtype) for size in sizes]

            def capture(x: Tensor) -> list[Tensor]:
                captured = []
                for i, mixer in enumerate(mixers):
                    captured += passes.capture(x, arguments, i)[: mixer.num_token_inputs]
                return captured

            def resume(x: Tensor, *outs: Tensor) -> Any:
                return passes.resume(x, outs, arguments)

            parts = ("bytes", "moved", "graph", "backward_bytes", "backward_moved")
            counts = {f"project_{part}": 0 for part in parts}  # stays 0 without a mixer
            runs: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {}
            if mixers:
                runs["project"] = (capture, [x])
            runs["finish"] = (resume, [x, *outs])
            for name, (run, inputs) in runs.items():
                with torch.no_grad(), _LiveBytes() as live:
                    run(*inputs)
                counts |= {f"{name}_bytes": live.peak, f"{name}_moved": live.moved}
                leaves = [t.detach().requires_grad_() for t in inputs]
                with _LiveBytes() as live, passes.tile.set(**skips):
                    outputs = run(*leaves)
                    outputs = outputs if isinstance(outputs, list) else [outputs]
                    outputs = [t for t in outputs if t.requires_grad]
                    douts = [torch.empty_like(t) for t in outputs]
                    edges = [get_gradient_edge(t) for t in outputs]
                    del outputs
                    counts[f"{name}_graph"] = live.now - sum(d.nbytes for d in douts)
                    # Weight gradients do not grow with the tokens.
                    torch.autograd.grad(edges, leaves, douts)
                counts[f"{name}_backward_bytes"] = live.peak
                counts[f"{name}_backward_moved"] = live.moved
        passes.restore()
        return counts | {"kept_graph": counts["finish_graph"]}


def measure_video(values: Mapping[str, Any], source: str) -> ModelShape:
    """The shape of a video transformer of diffusers: its vocabulary is the values of a patch."""
    import diffusers

    kind = values["_class_name"]
    if kind not in VIDEO_SCALES:
        fix = f"use {' or '.join(VIDEO_SCALES)}"
        raise ConfigError(f"_class_name={kind} of {source} is not supported; {fix}")
    with torch.device("meta"):
        model = getattr(diffusers, kind).from_config({**values, "num_layers": 1})
    for param in model.parameters():
        param.data = param.data.to(torch.bfloat16)
    root = find_root(model)
    root.check_model()
    layer = _BlockMeasurement(root).run()
    spec = cast(Any, root).spec
    (attention,) = spec.mixers
    hidden = attention.num_heads * attention.head_dim
    vocab = model.proj_out.out_features
    outer = sum(param.numel() for param in model.parameters()) - layer.parameters
    num_layers = values["num_layers"]
    total = outer + num_layers * layer.parameters - 2 * vocab * hidden
    modules = dict(root.layers[0].named_modules())
    mlp = next(module for name, module in modules.items() if name.endswith("net.0.proj"))
    sizes = {"total_parameters": total, "root": outer, "arguments": COORDINATE_BYTES}
    return ModelShape(
        family=kind,
        num_layers=num_layers,
        hidden=hidden,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        mlp=mlp.out_features,
        vocab=vocab,
        tied=False,
        mixers=(_plan_mixers(spec),) * num_layers,
        measured=replace(layer, **sizes),
    )


class _BlockMeasurement(_Measurement):
    """A block of a video transformer. Keys and values of cross-attention do not grow with the
    tokens."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.model = root.model
        self.name = "blocks.0"
        self.mode = FakeTensorMode()
        self.layer = root.layers[0]
        self.spec = self.root.spec
        block: Any = self.layer
        block.attn1.processor = SelfAttention()
        self._make_fake(block)
        for module in block.modules():
            if isinstance(module, nn.RMSNorm):
                module.forward = _FusedNorm.apply  # type: ignore[method-assign]
        self._make_fake(root.model.rope)

    def _products(self, module: nn.Module) -> tuple[int, int]:
        cross = self.layer.attn2
        if module is cross:
            return 2 * TEXT_TOKENS * self.hidden, 0
        names = ("to_k", "to_v", "add_k_proj", "add_v_proj")
        if module in [getattr(cross, name, None) for name in names]:
            return 0, 0
        matrices = [param for param in module.parameters(recurse=False) if param.dim() == 2]
        return sum(param.numel() for param in matrices), 0

    @property
    def hidden(self) -> int:
        (attention,) = self.spec.mixers
        return attention.num_heads * attention.head_dim

    def _inputs(self, num_tokens: int) -> tuple[Tensor, LayerInputs]:
        # Few, so that both runs peak at the same point: the text's bytes do not grow with the
        # tokens.
        num_text = 520 if getattr(self.layer.attn2, "add_k_proj", None) is not None else 8
        x = torch.empty(num_tokens, self.hidden, dtype=torch.bfloat16)
        text = torch.empty(1, num_text, self.hidden)
        modulations = torch.empty(1, 6 * self.hidden)
        coords = self.root.positions(**self.root.example_sizes((1, 1, num_tokens)))
        tokens = Tokens(self.root.rotary, coords, None)
        arguments = (text, None, modulations, tokens, PlaceholderMask())
        return x, LayerInputs.pack(arguments, {}, TOKEN_DIMS, num_tokens)


class _FusedNorm(torch.autograd.Function):
    """Allocates and moves what PyTorch's RMSNorm, fused, does on a GPU."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return -x

    @staticmethod
    def backward(ctx, dout):
        return dout + ctx.saved_tensors[0]


class _LiveBytes(StorageTracker):
    """Counts bytes of new tensors while they exist, and those that all but matmuls move."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 0
        self.peak = 0
        self.moved = 0
        self.num_new = 0

    def make_mode(self) -> TorchDispatchMode:
        return _CountMoved(self)

    def own_tensors(self, values: Iterable[Any]) -> Iterator[Tensor]:
        """Fake tensors, too: nothing else is measured."""
        return (t for t in flatten(values) if isinstance(t, Tensor))

    def set_category(self, tensor: Tensor, category: str) -> None:
        """Older tensors do not count."""

    def on_change(self, old: Allocation | None, new: Allocation) -> None:
        self.num_new += old is None
        self.now += new.num_bytes - (old.num_bytes if old is not None else 0)
        self.peak = max(self.peak, self.now)

    def on_free(self, allocation: Allocation) -> None:
        self.now -= allocation.num_bytes


class _CountMoved(RecordOutputs):
    tracker: _LiveBytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        num_before = self.tracker.num_new
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_written = self.tracker.num_new > num_before or mutates_inputs(func)
        if is_written and func.overloadpacket.__name__ not in MATMULS:
            tensors = self.tracker.own_tensors((*args, *(kwargs or {}).values(), result))
            self.tracker.moved += sum(t.nbytes for t in tensors)
        return result
