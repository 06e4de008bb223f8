"""Measure models: sizes, multiply-adds and bytes per token of their layers.

One layer of each kind runs on fake tensors (shapes without storage), as layer/passes.py runs it on a tile.
"""

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig

from ithaka.config import ConfigError
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import LayerPasses
from ithaka.mixers.attention_call import PlaceholderMask
from ithaka.mixers.convolution import ConvolutionSpec
from ithaka.mixers.delta import DeltaSpec
from ithaka.mixers.ssd import SsdSpec
from ithaka.model.build import check_values
from ithaka.plan.mixers import Attention, Convolution, DeltaRule, SideBySide, Ssd
from ithaka.plan.read_config import VIDEO_SCALES
from ithaka.plan.shape import FRAME_PATCHES, Encoder, MeasuredLayer, Mixer, ModelShape
from ithaka.roots.find import find_root
from ithaka.roots.probe import probe_once
from ithaka.roots.recorder import LENGTHS, Recorder
from ithaka.roots.video import TOKEN_DIMS, SelfAttention, Tokens
from ithaka.roots.vision import FrameAttention
from ithaka.weights.adapters import auto_class, is_stacked

TOKENS = (128, 256)  # the lengths of two runs: their difference is what grows with the tokens
TEXT_TOKENS = 512  # Wan's text encoder pads prompts to this length
COORDINATE_BYTES = 24  # three int64 coordinates per patch
TOP_K = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk")  # experts per token, in configurations
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "grouped_mm_fallback")


def measure_model(values: Mapping[str, Any], source: str) -> ModelShape:
    """The shape of the model that a config.json describes. Raises ConfigError if it cannot run."""
    if "_class_name" in values:
        return measure_video(values, source)
    name = values.get("model_type")
    if name not in CONFIG_MAPPING:
        raise ConfigError(
            f"model_type={name} of {source} is unknown to transformers {transformers.__version__}; use a decoder such "
            "as llama, qwen3 or gemma3_text (docs/models.md), or a newer transformers"
        )
    try:
        config = AutoConfig.for_model(**copy.deepcopy(dict(values)))  # it changes rope_parameters
        check_values(config.get_text_config(), source)
        with torch.device("meta"):
            model_class = auto_class(config.model_type)
            model = model_class.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[-1].strip()  # nested errors end with the cause
        fix = "fix the value in its config.json"
        if "Unrecognized configuration class" in str(error):
            reason, fix = "it is not a decoder", "use one that AutoModelForCausalLM builds, such as gemma3_text"
        raise ConfigError(f"model_type={name} of {source} cannot be built by transformers ({reason}); {fix}") from error
    if not find_root(model).has_layers:
        raise ConfigError(
            f"model_type={name} of {source} has no list of decoder layers at model.layers; use a decoder such as "
            "llama, qwen3 or gemma3_text (docs/models.md)"
        )
    return measure_layers(model)


def measure_layers(model: Any) -> ModelShape:
    root: Any = find_root(model)
    config, recorder = root.base.config, Recorder(model, root.layers_name)
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
    attention = [mixer for mixer in mixers if mixer.exchanges_heads] or mixers
    widest = max(attention, key=lambda mixer: (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim)
    arguments = sum(arguments_by_id.values()) // LENGTHS[0]
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    num_parameters = sum(param.numel() for param in model.parameters() if id(param) not in ends)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    kinds: dict[Mixer, list[MeasuredLayer]] = {}
    for spec, part in zip(specs, parts, strict=True):
        kinds.setdefault(_plan_mixers(spec), []).append(part)
    by_mixer = tuple((mixer, tuple(combine_layers(like, 0, 0).per_token.values())) for mixer, like in kinds.items())
    return ModelShape(
        family=model.config.model_type,
        num_layers=len(specs),
        hidden=model.get_input_embeddings().weight.shape[1],
        heads=widest.num_heads,
        kv_heads=widest.num_kv_heads,
        head_dim=widest.head_dim,
        mlp=getattr(config, "intermediate_size", 0) or 0,
        vocab=config.vocab_size,
        tied=tied,
        mixers=tuple(_plan_mixers(spec) for spec in specs),
        measured=combine_layers(parts, num_parameters, arguments),
        measured_by_mixer=by_mixer if len({mixer.sizes for mixer in kinds}) > 1 else (),
        encoders=tuple(map(measure_encoder, root.encoders)),
    )


def measure_encoder(visual: Any) -> Encoder:
    """Run one block of the encoder on fake tensors, and count the rest."""
    mode = FakeTensorMode()
    config, block, merged = visual.config, visual.blocks[0], visual.config.spatial_merge_size**2
    dim, runs, block = block.norm1.weight.shape[0], [], copy.deepcopy(block)
    with mode:
        for name, param in list(block.named_parameters()):
            owner = block.get_submodule(name.rpartition(".")[0])
            owner._parameters[name.rpartition(".")[2]] = nn.Parameter(torch.empty(param.shape, dtype=torch.bfloat16))
        block.attn.forward = FrameAttention(block.attn, list)  # takes lengths: a fake tensor has no values
        for num_patches in TOKENS:
            angles = torch.empty(num_patches, dim // block.attn.num_heads, dtype=torch.float32)
            lengths = [TOKENS[0] // 2] * (2 * num_patches // TOKENS[0])
            x, inputs = torch.empty(num_patches, dim, dtype=torch.bfloat16), {"position_embeddings": (angles, angles)}
            with torch.no_grad(), _LiveBytes() as forward:
                block(x, lengths, **inputs)
            with torch.enable_grad(), _LiveBytes() as backward:
                y = block(x.requires_grad_(), lengths, **inputs)
                graph = backward.now
                torch.autograd.grad(y, [x], torch.empty_like(y))
            runs.append((forward.peak, graph, backward.peak, forward.moved, backward.moved))
    peak, graph, backward_peak, moved, backward_moved = (
        (b - a) // (TOKENS[1] - TOKENS[0]) for a, b in zip(*runs, strict=True)
    )
    matrices = {name: param.numel() for name, param in visual.named_parameters() if param.dim() > 1}
    matrices.pop("pos_embed.weight", None)
    merging = sum(size for name, size in matrices.items() if "merger" in name)  # runs on features
    depth, num_outputs = len(visual.blocks), 1 + len(getattr(config, "deepstack_visual_indexes", ()))
    return Encoder(
        parameters=sum(param.numel() for param in visual.parameters()),
        values=config.in_channels * config.temporal_patch_size * config.patch_size**2,
        patches=merged,
        outputs=num_outputs,
        forward_bytes=peak,
        graph_bytes=(depth - 1) * graph + backward_peak + num_outputs * 8 * dim,  # mergers keep four tensors
        products=sum(matrices.values()) - merging + merging // merged + 2 * depth * FRAME_PATCHES * dim,
        moved=depth * moved,
        backward_moved=depth * backward_moved,
    )


def _plan_mixers(spec: LayerSpec) -> Mixer:
    mixers: Any = [_plan_mixer(mixer) for mixer in spec.mixers]
    return SideBySide(*mixers) if len(mixers) > 1 else next(iter(mixers), Convolution())


def _plan_mixer(spec: Any) -> Mixer:
    if isinstance(spec, DeltaSpec | SsdSpec):
        kind = Ssd if isinstance(spec, SsdSpec) else DeltaRule
        return kind(spec.num_heads, spec.num_key_heads, spec.key_dim, spec.v_head_dim)
    return Convolution(spec.head_dim) if isinstance(spec, ConvolutionSpec) else Attention(spec.kind, spec.causal)


def combine_layers(layers: Sequence[MeasuredLayer], total_parameters: int, arguments: int) -> MeasuredLayer:
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
        self, root: Any, recorder: Recorder, index: int, dims: tuple[int | None, ...], spec: LayerSpec
    ) -> None:
        self.root, self.model, self.recorder, self.index, self.dims = root, root.model, recorder, index, dims
        self.name, self.mode = f"model.layers.{index}", FakeTensorMode()
        self.layer = copy.deepcopy(root.layers[index], dict(recorder.memo)).train()
        self.spec = spec
        self._make_fake(self.layer)

    def _make_fake(self, layer: nn.Module) -> None:
        with self.mode:
            for module in layer.modules():
                for tensors in cast(Any, (module._parameters, module._buffers)):
                    for name, t in tensors.items():
                        if t is not None:
                            fake = torch.empty(t.shape, dtype=t.dtype)
                            tensors[name] = nn.Parameter(fake) if isinstance(t, nn.Parameter) else fake

    def run(self) -> MeasuredLayer:
        try:
            with torch.enable_grad():
                return self._run()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(self.model).__name__} cannot be planned: {self.name} does not run on tensors "
                f"without memory ({type(error).__name__}: {error}); call ithaka.parallelize with a layout"
            ) from error

    def _run(self) -> MeasuredLayer:
        used: set[nn.Module] = set()
        hooks = [m.register_forward_hook(lambda m, *_: used.add(m)) for m in self.layer.modules()]
        passes = LayerPasses(self.name, self.layer, replace(self.spec, blocks=(), qkv=(), output=""))
        with self.mode:
            x, arguments = self._inputs(TOKENS[0])
            for index in range(len(self.spec.mixers)):
                passes.capture(x, arguments, index)
        for hook in hooks:
            hook.remove()
        passes.restore()
        short, long = (self._measure_bytes(tokens) for tokens in TOKENS)
        per_token = {name: round((long[name] - short[name]) / (TOKENS[1] - TOKENS[0])) for name in long}
        projected = sum(sum(self._products(module)) for module in used)
        dense, experts = map(sum, zip(*map(self._products, self.layer.modules()), strict=True))
        mixtures = [name for name, child in self.layer.named_children() if any(map(is_stacked, child.parameters()))]
        linears = tuple(
            (name, module.in_features, module.out_features, name.partition(".")[0] in mixtures)
            for name, module in self.layer.named_modules()
            if type(module) is nn.Linear
        )
        # A stacked weight has an adapter per expert.
        stacked = {name: p for name, p in self.layer.named_parameters() if is_stacked(p)}
        linears += tuple((name, len(p) * p.shape[1], len(p) * p.shape[2], True) for name, p in stacked.items())
        parameters = sum(param.numel() for param in self.layer.parameters())
        others: dict[str, Any] = {"slices_heads": bool(self.spec.qkv), "slices_output": bool(self.spec.output)}
        others["skips_mlp"] = self.spec.skips_mlp and self.spec.has_mlp_block
        others |= per_token | {"compiles": not self.spec.has_mlp_block and self.root.predicts_tokens}
        others |= {"projection_macs": projected, "other_macs": dense + experts - projected, "expert_macs": experts}
        sizes = tuple((name, param.numel()) for name, param in stacked.items())
        return MeasuredLayer(parameters, parameters, linears, stacked=sizes, **others)

    def _products(self, module: nn.Module) -> tuple[int, int]:
        """Multiply-adds per token with the module's own weights: dense ones, and those of the experts it is sent to."""
        config, sizes = self.root.base.config, [p.shape for p in module.parameters(recurse=False)]
        top_k = next((k for k in (getattr(config, name, None) for name in TOP_K) if isinstance(k, int)), 1)
        experts = {size[0] for size in sizes if len(size) == 3}  # their biases are 2-D
        flat = sum(size.numel() for size in sizes if len(size) == 2 and size[0] not in experts)
        return flat, sum(p.numel() // len(p) * top_k for p in module.parameters(recurse=False) if is_stacked(p))

    def _inputs(self, num_tokens: int) -> tuple[Tensor, LayerInputs]:
        with torch.utils._python_dispatch._disable_current_modes():
            x, args, kwargs = self.recorder.call(num_tokens)[self.index]
        arguments = LayerInputs.pack(args, kwargs, self.dims, num_tokens)
        leaves = [self.mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves]
        return torch.empty(x.shape[1:], dtype=torch.bfloat16), replace(arguments, leaves=leaves)

    def _measure_bytes(self, num_tokens: int) -> dict[str, int]:
        passes, mixers = LayerPasses(self.name, self.layer, self.spec), self.spec.mixers
        skips = {"skips_mlp": self.spec.skips_mlp, "skips_projections": self.spec.skips_projections}
        with self.mode:
            x, arguments = self._inputs(num_tokens)
            outs = [torch.empty(num_tokens, mixer.num_heads, mixer.head_dim, dtype=x.dtype) for mixer in mixers]

            def capture(x: Tensor, arguments: LayerInputs) -> list[Tensor]:
                captured = [passes.capture(x, arguments, i)[: mixer.num_token_inputs] for i, mixer in enumerate(mixers)]
                return [t for tensors in captured for t in tensors]

            parts = "bytes", "moved", "graph", "backward_bytes", "backward_moved"
            counts = {f"project_{part}": 0 for part in parts}  # stays 0 without a mixer
            both: dict[str, tuple[Any, list[Tensor]]] = {
                "project": (capture, [x]),
                "finish": (lambda x, *outs_and_inputs: passes.resume(x, outs_and_inputs[:-1], arguments), [x, *outs]),
            }
            for name, (run, inputs) in both.items() if mixers else [("finish", both["finish"])]:
                with torch.no_grad(), _LiveBytes() as live:
                    run(*inputs, arguments)
                counts |= {f"{name}_bytes": live.peak, f"{name}_moved": live.moved}
                leaves = [t.detach().requires_grad_() for t in inputs]
                with _LiveBytes() as live, passes.tile.set(**skips):
                    outputs = run(*leaves, arguments)
                    outputs = outputs if isinstance(outputs, list) else [outputs]
                    outputs = [t for t in outputs if t.requires_grad]
                    douts = [torch.empty_like(t) for t in outputs]
                    edges = [get_gradient_edge(t) for t in outputs]
                    del outputs
                    counts[f"{name}_graph"] = live.now - sum(d.nbytes for d in douts)
                    torch.autograd.grad(edges, leaves, douts)  # weight gradients do not grow with the tokens
                counts |= {f"{name}_backward_bytes": live.peak, f"{name}_backward_moved": live.moved}
        passes.restore()
        return counts | {"kept_graph": counts["finish_graph"]}


def measure_video(values: Mapping[str, Any], source: str) -> ModelShape:
    """The shape of a video transformer of diffusers: its vocabulary is the values of a patch."""
    import diffusers

    kind = values["_class_name"]
    if kind not in VIDEO_SCALES:
        raise ConfigError(f"_class_name={kind} of {source} is not supported; use {' or '.join(VIDEO_SCALES)}")
    with torch.device("meta"):
        model = getattr(diffusers, kind).from_config({**values, "num_layers": 1})
    for param in model.parameters():
        param.data = param.data.to(torch.bfloat16)
    root = find_root(model)
    root.check_model()
    blocks = root.layers
    layer = _BlockMeasurement(root).run()
    spec = cast(Any, root).spec
    (attention,) = spec.mixers
    hidden, vocab = attention.num_heads * attention.head_dim, model.proj_out.out_features
    outer, num_layers = sum(param.numel() for param in model.parameters()) - layer.parameters, values["num_layers"]
    total = outer + num_layers * layer.parameters - 2 * vocab * hidden
    sizes = {"total_parameters": total, "root": outer, "arguments": COORDINATE_BYTES}
    return ModelShape(
        family=kind,
        num_layers=num_layers,
        hidden=hidden,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        mlp=next(module.out_features for name, module in blocks[0].named_modules() if name.endswith("net.0.proj")),
        vocab=vocab,
        tied=False,
        mixers=(_plan_mixers(spec),) * num_layers,
        measured=replace(layer, **sizes),
    )


class _BlockMeasurement(_Measurement):
    """A block of a video transformer. Keys and values of cross-attention do not grow with the tokens."""

    def __init__(self, root: Any) -> None:
        self.root, self.model, self.name, self.mode = root, root.model, "blocks.0", FakeTensorMode()
        self.layer, self.spec = root.layers[0], root.spec
        block: Any = self.layer
        block.attn1.processor = SelfAttention()
        self._make_fake(block)
        for module in block.modules():
            if isinstance(module, nn.RMSNorm):
                module.forward = _FusedNorm.apply  # type: ignore[method-assign]
        self._make_fake(root.model.rope)

    def _products(self, module: nn.Module) -> tuple[int, int]:
        cross: Any = self.layer.attn2
        if module is cross:
            return 2 * TEXT_TOKENS * self.spec.mixers[0].num_heads * self.spec.mixers[0].head_dim, 0
        if module in (cross.to_k, cross.to_v, getattr(cross, "add_k_proj", None), getattr(cross, "add_v_proj", None)):
            return 0, 0
        return sum(param.numel() for param in module.parameters(recurse=False) if param.dim() == 2), 0

    def _inputs(self, num_tokens: int) -> tuple[Tensor, LayerInputs]:
        hidden = self.spec.mixers[0].num_heads * self.spec.mixers[0].head_dim
        # Few, so that both runs peak at the same point: the text's bytes do not grow with the tokens.
        num_text = 520 if getattr(self.layer.attn2, "add_k_proj", None) is not None else 8
        x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
        text, modulations = (torch.empty(1, *shape) for shape in ((num_text, hidden), (6 * hidden,)))
        coords = self.root.positions(**self.root.example_sizes((1, 1, num_tokens)))
        arguments = (text, None, modulations, Tokens(self.root.rotary, coords, None), PlaceholderMask())
        return x, LayerInputs.pack(arguments, {}, TOKEN_DIMS, num_tokens)


class _FusedNorm(torch.autograd.Function):
    """Allocates and moves what PyTorch's RMSNorm does on a GPU; on a CPU it is not fused and keeps fp32 copies."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return -x

    @staticmethod
    def backward(ctx, dout):
        return dout + ctx.saved_tensors[0]


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of new tensors while they exist, and the bytes that all operations but matmuls move."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.moved = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        new = [t for t in outputs if self._add(t.untyped_storage(), {id(i.untyped_storage()) for i in inputs})]
        if (new or function._schema.is_mutable) and function.overloadpacket.__name__ not in MATMULS:
            self.moved += sum(t.nbytes for t in (*inputs, *outputs))
        return result

    def _add(self, storage: Any, of_inputs: set[int]) -> bool:
        key = id(storage)
        if key in self.known or key in of_inputs:
            return False
        self.known.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, storage.nbytes())
        return True

    def _drop(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.now -= num_bytes
