"""Video diffusion transformers of diffusers (Wan, LTX-Video) on general layers.

A block is token-wise work around one self-attention over all patches of a clip, without a causal mask. Its
cross-attention reads keys that every rank has (text, image), so it is token-wise, too: it runs with the rest of the
block, tile by tile. Inputs shared by all tokens (text, timestep modulation) get gradients that are summed over tiles in
fp32, and over ranks by FSDP2 or, for the user's own tensors, by `_SumGradients`. Modules around the blocks compute in
fp32.

Shapes: S patches of a clip, s on this rank, t in a tile, C values per patch, D hidden size, H heads, K head dim, L text
tokens, U distinct timesteps, M = 6 * D modulations.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ithaka.attention.blocks import Docs
from ithaka.attention.kernels import agree_on_kernel
from ithaka.config import AdapterConfig, ConfigError
from ithaka.dist.mesh import Mesh, default_device, make_mesh
from ithaka.layer.general import Answer, Arguments, AttentionCall, Batch, CallFacts, GeneralLayer, LayerRuns, Mask
from ithaka.layer.store import Store
from ithaka.layer.tiles import sum_dtype
from ithaka.layout import Layout, check_parallelism
from ithaka.model.adapters import check_adapters
from ithaka.model.batch import GatherTokens, take_own_tokens
from ithaka.model.build import apply_fsdp, resolve_layout
from ithaka.model.calls import (
    MODES,
    CallChecker,
    check_modules,
    check_torch_modes,
    count_changes,
    guard_backward,
    refuse_wrappers,
)
from ithaka.model.families import find_layers
from ithaka.model.probe import TOLERANCE, randomize
from ithaka.model.save import save_pretrained
from ithaka.phases import mark_backward, phase
from ithaka.plan.heads import head_table
from ithaka.plan.ring import contiguous_deal

PROBE_TOKENS, PROBE_CUT, PROBE_TEXT = 24, 9, 5
# Of a layer's arguments: text, its attention bias, modulations, tokens, mask.
TOKEN_DIMS = (None, None, None, 0, None)
JOINT_ATTENTION = ("HunyuanVideo", "CogVideoX", "ConsisID", "Mochi", "EasyAnimate")  # beginnings of class names


class Tokens:
    """What a block needs to know about each of its tokens: coordinates in the clip, and which timestep applies.

    Not a dataclass: FSDP2 would cast its tensors.
    """

    def __init__(self, rotary: Callable[[Tensor], tuple[Tensor, Tensor]], coords_s3: Tensor, steps_s: Tensor | None):
        self.rotary, self.coords_s3 = rotary, coords_s3
        self.steps_s = steps_s  # index of each token's timestep; None: all tokens have the same

    def narrow(self, dim: int, start: int, length: int) -> "Tokens":
        steps_s = None if self.steps_s is None else self.steps_s[start : start + length]
        return Tokens(self.rotary, self.coords_s3[start : start + length], steps_s)

    def select(self, values_U: Tensor) -> Tensor:
        """[t, ...]: the value of each token's timestep; [1, ...] if all have the same."""
        return values_U if self.steps_s is None else values_U[self.steps_s]


class SelfAttention:
    """A processor of diffusers for self-attention. A block's rotary embedding carries the tokens and a `Mask`, which
    ends the run or returns the output of attention (layer/general.py)."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any, attention_mask: Any, rotary_emb: Any
    ) -> Tensor:
        tokens, mask = rotary_emb
        call: Any = None if isinstance(mask, Answer) else self._project(attn, hidden_states, tokens)
        out_tHK = mask.attend(call)
        return attn.to_out[1](attn.to_out[0](out_tHK.flatten(1)[None]))

    @staticmethod
    def _project(attn: Any, h_1tD: Tensor, tokens: Tokens) -> AttentionCall:
        cos, sin = tokens.rotary(tokens.coords_s3)
        q, k, v = attn.norm_q(attn.to_q(h_1tD)), attn.norm_k(attn.to_k(h_1tD)), attn.to_v(h_1tD)
        q, k, v = (t.unflatten(-1, (attn.heads, -1)) for t in (q, k, v))
        q_HtK, k_HtK, v_HtK = (t[0].transpose(0, 1) for t in (_rotate(q, cos, sin), _rotate(k, cos, sin), v))
        return AttentionCall(attn, q_HtK, k_HtK, v_HtK, {})


def _rotate(x_1tHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighboring values; cos and sin are [1, t, 1 or H, K / 2]."""
    a, b = x_1tHK.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


@dataclass(frozen=True)
class Condition:
    """The inputs of the blocks and of the head that all tokens share."""

    text_1LD: Tensor
    bias: Tensor | None  # added to the scores of cross-attention
    modulations_UM: Tensor
    embedded_UD: Tensor


class Wan:
    """WanTransformer3DModel: text to video and image to video of Wan 2.1 and 2.2."""

    def __init__(self, model: Any) -> None:
        self.model, self.rope = model, model.rope

    def check(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **others: Any) -> None:
        sizes, patch = hidden_states.shape, self.model.config.patch_size
        if hidden_states.dim() != 5 or any(size % p for size, p in zip(sizes[2:], patch, strict=True)):
            raise ValueError(
                f"hidden_states has shape {tuple(sizes)}; pass [clips, channels, frames, height, width], with frames, "
                f"height and width in multiples of the patch size {tuple(patch)}"
            )
        most, grid = self.rope.max_seq_len, self.grid(hidden_states=hidden_states)
        if max(grid) > most:
            raise ValueError(f"the clip has {grid} patches, more than rope_max_seq_len={most}; pass a smaller clip")
        has_image = others.get("encoder_hidden_states_image") is not None
        if has_image != (self.model.condition_embedder.image_embedder is not None):
            problem = (
                "passed, but the model has no image_dim" if has_image else "missing, but the model has an image_dim"
            )
            raise ValueError(f"encoder_hidden_states_image is {problem}; pass it to image-to-video models only")

    def grid(self, hidden_states: Tensor, **others: Any) -> tuple[int, ...]:
        sizes = zip(hidden_states.shape[2:], self.model.config.patch_size, strict=True)
        return tuple(size // p for size, p in sizes)

    def count_patches(self, **inputs: Any) -> int:
        return math.prod(self.grid(**inputs))

    def example_sizes(self, grid: tuple[int, ...]) -> dict[str, Any]:
        """Arguments of a call with this grid of patches."""
        sizes = zip(grid, self.model.config.patch_size, strict=True)
        return {"hidden_states": torch.empty(1, 1, *(n * p for n, p in sizes))}

    def cut(self, hidden_states: Tensor, **others: Any) -> Tensor:
        """Cut [1, channels, frames, height, width] into patches [S, C]."""
        p_f, p_h, p_w = self.model.config.patch_size
        parts = hidden_states[0].unflatten(3, (-1, p_w)).unflatten(2, (-1, p_h)).unflatten(1, (-1, p_f))
        return parts.permute(1, 3, 5, 0, 2, 4, 6).flatten(3).flatten(0, 2)

    def join(self, out_1SC: Tensor, hidden_states: Tensor, **others: Any) -> Tensor:
        parts = out_1SC[0].unflatten(-1, (*self.model.config.patch_size, -1))
        parts = parts.unflatten(0, self.grid(hidden_states=hidden_states)).permute(6, 0, 3, 1, 4, 2, 5)
        return parts.flatten(5).flatten(3, 4).flatten(1, 2)[None]

    def embed(self, patches_sC: Tensor) -> Tensor:
        conv = self.model.patch_embedding
        return F.linear(patches_sC, conv.weight.flatten(1), conv.bias)

    def condition(self, steps_U: Tensor, encoder_hidden_states: Tensor, **others: Any) -> Condition:
        image = others.get("encoder_hidden_states_image")
        embedded_UD, modulations_UM, text, image = self.model.condition_embedder(steps_U, encoder_hidden_states, image)
        return Condition(text if image is None else torch.cat([image, text], dim=1), None, modulations_UM, embedded_UD)

    def positions(self, **inputs: Any) -> Tensor:
        """The coordinates of each patch, [S, 3]."""
        return torch.cartesian_prod(*map(torch.arange, self.grid(**inputs)))

    def rotary(self, coords_t3: Tensor) -> tuple[Tensor, Tensor]:
        sizes = [size // 2 for size in (self.rope.t_dim, self.rope.h_dim, self.rope.w_dim)]
        tables = (t.to(coords_t3.device) for t in (self.rope.freqs_cos[:, 0::2], self.rope.freqs_sin[:, 1::2]))
        cos, sin = (
            torch.cat([part[i] for part, i in zip(table.split(sizes, dim=1), coords_t3.unbind(1), strict=True)], dim=1)
            for table in tables
        )
        return cos[None, :, None], sin[None, :, None]

    @staticmethod
    def run_block(
        block: nn.Module, x_1tD: Tensor, text: Tensor, bias: None, mods_UM: Tensor, tokens: Tokens, mask: Any
    ) -> Tensor:
        rotary = (tokens, mask) if isinstance(mask, Mask) else mask
        temb = tokens.select(mods_UM.unflatten(-1, (6, -1)))
        return type(block).forward(block, x_1tD, text, temb if tokens.steps_s is None else temb[None], rotary)


class Ltx:
    """LTXVideoTransformer3DModel."""

    def __init__(self, model: Any) -> None:
        self.model, self.rope = model, model.rope

    def check(self, hidden_states: Tensor, **others: Any) -> None:
        sizes = hidden_states.shape
        if hidden_states.dim() != 3:
            raise ValueError(f"hidden_states has shape {tuple(sizes)}; pass [clips, patches, channels]")
        if others.get("video_coords") is None and math.prod(self.grid(**others)) != sizes[1]:
            rule = f"is not its {sizes[1]} patches; pass the size of the latents"
            raise ValueError(f"num_frames x height x width = {self.grid(**others)} {rule}")

    def grid(self, num_frames: Any = 1, height: Any = 1, width: Any = 1, **others: Any) -> tuple[int, ...]:
        return num_frames or 1, height or 1, width or 1

    def count_patches(self, hidden_states: Tensor, **others: Any) -> int:
        return hidden_states.shape[1]

    def example_sizes(self, grid: tuple[int, ...]) -> dict[str, Any]:
        return dict(zip(("num_frames", "height", "width"), grid, strict=True))

    def cut(self, hidden_states: Tensor, **others: Any) -> Tensor:
        return hidden_states[0]  # diffusers' pipelines pass patches

    def join(self, out_1SC: Tensor, **others: Any) -> Tensor:
        return out_1SC

    def embed(self, patches_sC: Tensor) -> Tensor:
        return self.model.proj_in(patches_sC)

    def condition(
        self, steps_U: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Any = None, **others: Any
    ) -> Condition:
        text = self.model.caption_projection(encoder_hidden_states)
        bias = encoder_attention_mask
        if bias is not None and bias.dim() == 2:
            bias = ((1 - bias.to(text.dtype)) * -10000.0)[:, None]
        mods_UM, embedded_UD = self.model.time_embed(steps_U, batch_size=len(steps_U), hidden_dtype=text.dtype)
        return Condition(text, bias, mods_UM, embedded_UD)

    def positions(self, video_coords: Any = None, rope_interpolation_scale: Any = None, **others: Any) -> Tensor:
        """The coordinates of each patch, [S, 3], relative to the size of clip that the frequencies are made for."""
        rope, bases = self.rope, (self.rope.base_num_frames, self.rope.base_height, self.rope.base_width)
        if video_coords is not None:
            return torch.stack([column / base for column, base in zip(video_coords[0], bases, strict=True)], dim=1)
        coords = torch.cartesian_prod(*map(torch.arange, self.grid(**others))).to(torch.float32)
        if rope_interpolation_scale is None:
            return coords
        patch = rope.patch_size_t, rope.patch_size, rope.patch_size
        scales = zip(coords.unbind(1), rope_interpolation_scale, patch, bases, strict=True)
        return torch.stack([column * scale * p / base for column, scale, p, base in scales], dim=1)

    def rotary(self, coords_t3: Tensor) -> tuple[Tensor, Tensor]:
        rope = self.rope
        steps = torch.linspace(0.0, 1.0, rope.dim // 6, device=coords_t3.device, dtype=torch.float32)
        freqs = rope.theta**steps * math.pi / 2.0
        angles = (freqs * (coords_t3[..., None] * 2 - 1)).transpose(1, 2).flatten(1)
        angles = F.pad(angles, (rope.dim % 6 // 2, 0))  # the first values are not rotated
        heads = self.model.config.num_attention_heads
        cos, sin = (t.unflatten(1, (heads, -1))[None] for t in (angles.cos(), angles.sin()))
        return cos, sin

    @staticmethod
    def run_block(
        block: nn.Module, x_1tD: Tensor, text: Tensor, bias: Any, mods_UM: Tensor, tokens: Tokens, mask: Any
    ) -> Tensor:
        return type(block).forward(
            block,
            hidden_states=x_1tD,
            encoder_hidden_states=text,
            temb=tokens.select(mods_UM)[None],
            image_rotary_emb=(tokens, mask) if isinstance(mask, Mask) else mask,
            encoder_attention_mask=bias,
        )


FAMILIES: dict[str, type[Wan] | type[Ltx]] = {"WanTransformer3DModel": Wan, "LTXVideoTransformer3DModel": Ltx}


def is_diffusers_model(model: Any) -> bool:
    """Whether it is a model of diffusers, which need not be installed."""
    return any(cls.__module__.startswith("diffusers.") for cls in type(model).__mro__)


# ---- check


def find_family(model: Any) -> Wan | Ltx:
    """Raises ConfigError for models that the layers would not compute."""
    kind = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in FAMILIES), None)
    if kind is None:
        name = type(model).__name__
        reason = "is not supported"
        if name.startswith(JOINT_ATTENTION):
            reason = "attends jointly to text and video, so text tokens would have to be sharded with the patches"
        raise ConfigError(
            f"parallelize got a {name}, which {reason}; of diffusers' models, use {' or '.join(FAMILIES)}"
        )
    if isinstance(model, FSDPModule):
        raise ConfigError("the model is already sharded; call parallelize once, on the model as diffusers loads it")
    check_modules(model)
    check_adapters(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise ConfigError(f"{name} is dropout with p={module.p}, which is not supported; set it to 0")
        if getattr(module, "fused_projections", False):
            raise ConfigError(f"{name} has fused projections, which are not supported; call unfuse_qkv_projections()")
    return FAMILIES[kind](model)


def read_facts(family: Wan | Ltx) -> CallFacts:
    config = family.model.config
    heads, head_dim = config.num_attention_heads, config.attention_head_dim
    sizes = heads, heads, head_dim, head_dim, head_dim**-0.5
    return CallFacts(*sizes, causal=False, token_dims=TOKEN_DIMS, forward=family.run_block)


def _probe_block(family: Wan | Ltx, facts: CallFacts, device: torch.device) -> None:
    """Compare a block with random weights, run as the layers run it, on tokens cut in two, with diffusers' own."""
    model = family.model
    block = copy.deepcopy(find_layers(model)[0], {id(param): param for param in model.parameters()})
    randomize(block, device, seed=1)
    generator = torch.Generator().manual_seed(2)
    grid, num_text = (2, 3, 4), PROBE_TEXT + 512 * (getattr(block.attn2, "add_k_proj", None) is not None)
    D, sizes = facts.num_heads * facts.head_dim, family.example_sizes(grid)
    rotary = tuple(t.to(device) for t in model.rope(**{"hidden_states": torch.empty(1, 1), **sizes}))
    coords = family.positions(**sizes).to(device)
    for steps in (None, torch.arange(PROBE_TOKENS, device=device) % 2):
        shapes = (PROBE_TOKENS, D), (1, num_text, D), (1 if steps is None else 2, 6 * D), (PROBE_TOKENS, D)
        x, text, mods, dy = (torch.randn(n, generator=generator).to(device) for n in shapes)
        inputs = {"the input": x, "the text": text, "the modulations": mods, **dict(block.named_parameters())}
        inputs = {name: t.requires_grad_() for name, t in inputs.items()}
        tokens = Tokens(family.rotary, coords, steps)
        with torch.enable_grad():
            theirs = family.run_block(block, x[None], text, None, mods, tokens, rotary)[0]
            ours = _run_in_parts(block, facts, x, Arguments((text, None, mods, tokens, Mask()), {}, TOKEN_DIMS, len(x)))
            results = [(y, *torch.autograd.grad(y, list(inputs.values()), dy)) for y in (theirs, ours)]
        for name, expected, got in zip(("the output", *inputs), *results, strict=True):
            error = float((got - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-20))
            if not error < TOLERANCE:
                what = name if name == "the output" else f"the gradient of {name}"
                raise ConfigError(
                    f"a block of {type(model).__name__} computes something else than ithaka's layer ({what} differs by "
                    f"{error:.1e}); use diffusers 0.42, with which it was tested"
                )


def _run_in_parts(block: Any, facts: CallFacts, x: Tensor, arguments: Arguments) -> Tensor:
    own, block.attn1.processor = block.attn1.processor, SelfAttention()
    runs, sizes = LayerRuns("block", block, facts), (PROBE_CUT, len(x) - PROBE_CUT)
    tiles = [arguments.tile(rows) for rows in (slice(0, PROBE_CUT), slice(PROBE_CUT, len(x)))]
    captured = [runs.capture(*tile) for tile in zip(x.split(sizes), tiles, strict=True)]
    q, k, v = (torch.cat(tensors).transpose(0, 1) for tensors in zip(*captured, strict=True))
    outs = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).split(sizes)
    ys = [runs.finish(*tile) for tile in zip(x.split(sizes), outs, tiles, strict=True)]
    block.attn1.processor = own
    return torch.cat(ys)


# ---- parallelize


def parallelize_transformer(
    model: Any,
    cp: int | None = None,
    *,
    ring: int | None = None,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    store: Store | None = None,
) -> Any:
    """Replace the forwards of a video transformer's blocks and apply FSDP2, in place. Parameter names do not change.

    The model is then called as before, with the same full clips on all ranks of a cp group, and returns full samples.
    All ranks of a cp group must compute the same loss from them. Backward sums gradients over all ranks: losses of
    data-parallel groups add up, so divide each by the number of groups. The clips of a batch run one after another.
    """
    if hasattr(model, "get_base_model"):
        check_adapters(model)
        base = parallelize_transformer(model.get_base_model(), cp, ring=ring, mesh=mesh, layout=layout, store=store)
        model.forward, model.save_pretrained = base.__call__, base.save_pretrained
        refuse_wrappers(model)
        return model
    family, layout = find_family(model), resolve_layout(cp, ring, mesh, layout)
    facts, blocks = read_facts(family), list(find_layers(model))
    device = mesh.device if mesh else default_device()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        _probe_block(family, facts, device)
    sizes = {name: getattr(layout, name) for name in ("cp", "ring", "replicas", "heads_per_stage")}
    check_parallelism(num_heads=facts.num_heads, **sizes)
    mesh = mesh or make_mesh(layout.cp, ring=layout.ring, replicas=layout.replicas)
    dtype = getattr(torch, layout.dtype) if layout.dtype else model.dtype
    layout = replace(layout, kernel=agree_on_kernel(layout.kernel, mesh.device, dtype, facts.head_dim))
    apply_fsdp(model, blocks, mesh, layout, dtype, root_dtype=sum_dtype(dtype))
    transformer = VideoTransformer(family, mesh, layout, dtype, Batch())
    table = head_table(facts.num_heads, facts.num_heads, layout.ulysses, layout.heads_per_stage)
    store = store or Store(mesh.device)
    for index, (block, keeps) in enumerate(zip(blocks, layout.layer_policies(len(blocks)), strict=True)):
        others = mesh.ulysses_group, mesh.ring_group, table, store, layout, keeps, partial(count_changes, block)
        block.attn1.processor = SelfAttention()
        block.forward = GeneralLayer(f"layer {index}", block, facts, *others, batch=transformer.batch)
    model.forward = MethodType(transformer.forward, model)
    _ClipChecker(model, mesh, transformer)
    model.gradient_checkpointing = False
    model.ithaka_mesh, model.save_pretrained = mesh, MethodType(save_pretrained, model)
    refuse_wrappers(model)
    return model


def build_transformer(
    config: dict[str, Any], mesh: Mesh, layout: Layout, *, adapter: AdapterConfig | None = None, trains: bool = True
) -> Any:
    """Build a parallel video transformer from a config.json, with random weights."""
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
        model.add_adapter(LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets))
    return parallelize_transformer(model, mesh=mesh, layout=layout)


def make_clip(model: Any, num_patches: int) -> dict[str, Any]:
    """Random arguments of a call with this many patches."""
    grid, family = [1, 1, num_patches], FAMILIES[type(model).__name__.removeprefix("FSDP")](model)
    most = getattr(model.rope, "max_seq_len", num_patches)
    for i in (1, 0):
        side = next(n for n in range(min(most, grid[i + 1]), 0, -1) if grid[i + 1] % n == 0)
        grid[i], grid[i + 1] = grid[i + 1] // side, side
    if max(grid) > most:
        raise ConfigError(f"{num_patches} patches have no frames x height x width up to {most} each; use a power of 2")
    config, generator = model.config, torch.Generator().manual_seed(1)
    sizes = family.example_sizes(tuple(grid))
    shape = (1, num_patches, config.in_channels)
    if "hidden_states" in sizes:
        shape = (1, config.in_channels, *sizes["hidden_states"].shape[2:])
    text_dim = getattr(config, "text_dim", None) or config.caption_channels
    given = sizes | {"hidden_states": torch.randn(shape, generator=generator), "timestep": torch.tensor([500.0])}
    return given | {"encoder_hidden_states": torch.randn(1, 512, text_dim, generator=generator)}


class _Clips:
    """The arguments of a checked call. Not a dataclass: FSDP2 would cast its tensors."""

    def __init__(self, clips: list[dict[str, Any]], return_dict: bool) -> None:
        self.clips, self.return_dict = clips, return_dict


class _ClipChecker(CallChecker):
    """Turns the user's arguments into `_Clips`."""

    def __init__(self, model: Any, mesh: Mesh, transformer: "VideoTransformer") -> None:
        super().__init__(model, mesh)
        self.transformer = transformer

    def _read_call(self, model: Any, named: dict[str, Any]) -> tuple[Any, tuple[int, int], dict[str, Any]]:
        given = {name: value for name, value in named.items() if value is not None and name != "return_dict"}
        if unknown := sorted(given.keys() - set(self.names)) or given.get("attention_kwargs"):
            raise TypeError(f"{unknown} is not supported by a parallel model; leave it out")
        given.pop("attention_kwargs", None)
        for name in ("hidden_states", "timestep", "encoder_hidden_states"):
            if not isinstance(given.get(name), Tensor):
                raise TypeError(f"{name} is {type(given.get(name)).__name__}; pass a tensor")
        self.transformer.family.check(**given)
        num_clips = len(given["hidden_states"])
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        rows = {name: t for name, t in tensors.items() if name != "rope_interpolation_scale"}
        for name, tensor in rows.items():
            if tensor.dim() == 0 or len(tensor) != num_clips:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; use the {num_clips} clips of hidden_states")
        num_steps, num_patches = tensors["timestep"][0].numel(), self.transformer.family.count_patches(**given)
        if num_steps not in (1, num_patches):
            rule = f"has {num_steps} values for {num_patches} patches; pass one, or one for each"
            raise ValueError(f"timestep {rule}")
        clips = [given | {name: t[i : i + 1] for name, t in rows.items()} for i in range(num_clips)]
        fingerprint: dict[str, Any] = {name: "not passed" for name in self.names} | dict.fromkeys(MODES, None)
        if self.mesh.world_size > 1:
            sums = {name: float(t.detach().sum(dtype=torch.float64)) for name, t in tensors.items()}
            fingerprint |= {name: f"shape {tuple(tensors[name].shape)} with sum {sums[name]}" for name in sums}
            fingerprint |= {name: str(value) for name, value in given.items() if name not in tensors}
            fingerprint[MODES[1]] = torch.is_grad_enabled()
        return clips, (num_clips, num_clips), fingerprint

    def _make_call(self, named: dict[str, Any], inputs: Any, num_clips: int, most: int) -> _Clips:
        if num_clips != most * self.mesh.dp_size:
            raise ConfigError(f"data-parallel ranks have different numbers of clips, up to {most}; pass as many on all")
        return _Clips(inputs, named.get("return_dict", True) is not False)


@dataclass(frozen=True)
class VideoTransformer:
    """Runs a parallel video transformer."""

    family: Wan | Ltx
    mesh: Mesh
    layout: Layout
    dtype: torch.dtype
    batch: Batch

    def forward(self, model: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(call, _Clips):
            raise TypeError("model.forward(...) bypasses the checks and FSDP2; call model(...)")
        check_torch_modes(self.mesh.device)
        sample = torch.cat([self._run_clip(clip) for clip in call.clips])
        guard_backward(model, [sample])
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=sample) if call.return_dict else (sample,)

    def _run_clip(self, clip: dict[str, Any]) -> Tensor:
        mesh, family = self.mesh, self.family
        clip = {name: self._share_input(value) for name, value in clip.items()}
        patches_SC, steps = family.cut(**clip), clip["timestep"].flatten()
        num_patches, c = len(patches_SC), mesh.cp_size
        deal = contiguous_deal(-(-num_patches // c) * c, mesh.ring_group.size())
        take_own = partial(take_own_tokens, mesh=mesh, deal=deal, fill=0)
        steps_U, steps_s = _find_distinct(steps if len(steps) == 1 else take_own(steps))
        tokens = Tokens(family.rotary, take_own(family.positions(**clip)).to(mesh.device), steps_s)
        starts = (0, *dict.fromkeys((num_patches, deal.num_tokens)))  # padding is a document
        self.batch.docs = Docs(starts, deal, mesh.ring_group.rank())
        with phase("embedding"):
            condition = family.condition(steps_U, **{k: v for k, v in clip.items() if k != "timestep"})
            x_sD = mark_backward(family.embed(take_own(patches_SC)).to(self.dtype), "embedding backward")
        x_1sD, shared = x_sD[None], (condition.text_1LD, condition.bias, condition.modulations_UM)
        try:
            for block in find_layers(family.model):
                x_1sD = block(x_1sD, *shared, tokens, Mask())
        finally:
            self.batch.docs = None
        with phase("loss"):
            out_sC = self._run_head(x_1sD[0], condition.embedded_UD, tokens)
            return family.join(GatherTokens.apply(out_sC, mesh, deal, (1, num_patches)), **clip)

    def _share_input(self, value: Any) -> Any:
        """An argument on this rank's device. Floats are as wide as the modules around the blocks."""
        if not isinstance(value, Tensor):
            return value
        value = value.to(self.mesh.device, sum_dtype(self.dtype) if value.is_floating_point() else value.dtype)
        return _SumGradients.apply(value, self.mesh.cp_group) if value.requires_grad else value

    def _run_head(self, x_sD: Tensor, embedded_UD: Tensor, tokens: Tokens) -> Tensor:
        """Last norm and output projection, in tiles that backward recomputes."""
        size, outs, first = self.layout.tile_tokens or len(x_sD), [], 0
        for x_tD in x_sD.split(size):
            tile = x_tD, embedded_UD, tokens.narrow(0, first, len(x_tD))
            outs.append(checkpoint(self._run_head_tile, *tile, use_reentrant=False))
            first += len(x_tD)
        return torch.cat(outs)

    def _run_head_tile(self, x_tD: Tensor, embedded_UD: Tensor, tokens: Tokens) -> Tensor:
        model = self.family.model
        shift, scale = tokens.select(model.scale_shift_table.view(2, -1) + embedded_UD[:, None]).unbind(1)
        return model.proj_out(model.norm_out(x_tD.to(embedded_UD.dtype)) * (1 + scale) + shift)


def _find_distinct(steps_s: Tensor) -> tuple[Tensor, Tensor | None]:
    """(distinct timesteps, index of each token's). If they need gradients, every token has its own."""
    if len(steps_s) == 1:
        return steps_s, None
    if steps_s.requires_grad:
        return steps_s, torch.arange(len(steps_s), device=steps_s.device)
    return torch.unique(steps_s, return_inverse=True)


class _SumGradients(torch.autograd.Function):
    """Identity; backward sums the gradient over the ranks of a cp group, each of which has that of its own tokens."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
