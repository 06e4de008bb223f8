"""The blocks of diffusers' video transformers, Wan and LTX-Video, as general layers: what each family computes, and a
check that it does.

A block is token-wise work around one self-attention over all patches of a clip, without a causal mask. Its
cross-attention reads keys that every rank has (text, image), so it is token-wise, too: it runs with the rest of the
block, tile by tile.

Shapes: S patches of a clip, s on this rank, t in a tile, C values per patch, D hidden size, H heads, K head dim, L text
tokens, U distinct timesteps, M = 6 * D modulations.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from ithaka.config import ConfigError
from ithaka.inputs.calls import (
    check_modules,
)
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import LayerPasses
from ithaka.mixers.attention_call import AttentionCall, PlaceholderMask, ReplayingMask
from ithaka.mixers.softmax import SoftmaxSpec
from ithaka.roots.families import find_layers
from ithaka.roots.probe import TOLERANCE
from ithaka.roots.recorder import randomize
from ithaka.weights.adapters import check_adapters

PROBE_TOKENS, PROBE_CUT, PROBE_TEXT = 24, 9, 5
# Token dim of each layer argument: text, attention bias, modulations, tokens, mask.
TOKEN_DIMS = (None, None, None, 0, None)
JOINT_ATTENTION = ("HunyuanVideo", "CogVideoX", "ConsisID", "Mochi", "EasyAnimate")  # beginnings of class names


class Tokens:
    """What a block needs to know about each of its tokens: coordinates in the clip, and which timestep applies."""

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
    """A processor of diffusers for self-attention. A block's rotary embedding carries the tokens and a
    `PlaceholderMask`, which ends the pass or returns the output of attention (layer/passes.py)."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any, attention_mask: Any, rotary_emb: Any
    ) -> Tensor:
        tokens, mask = rotary_emb
        call: Any = None if isinstance(mask, ReplayingMask) else self._project(attn, hidden_states, tokens)
        out_tHK = mask.attend(call)
        return attn.to_out[1](attn.to_out[0](out_tHK.flatten(1)[None]))

    @staticmethod
    def _project(attn: Any, h_1tD: Tensor, tokens: Tokens) -> AttentionCall:
        cos, sin = tokens.rotary(tokens.coords_s3)
        q, k, v = attn.norm_q(attn.to_q(h_1tD)), attn.norm_k(attn.to_k(h_1tD)), attn.to_v(h_1tD)
        q, k, v = (t.unflatten(-1, (attn.heads, -1)) for t in (q, k, v))
        q_HtK, k_HtK, v_HtK = (t.squeeze(0).transpose(0, 1) for t in (_rotate(q, cos, sin), _rotate(k, cos, sin), v))
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
        rotary = (tokens, mask) if isinstance(mask, PlaceholderMask) else mask
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
            image_rotary_emb=(tokens, mask) if isinstance(mask, PlaceholderMask) else mask,
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
    check_adapters(model, lora_dropout=0)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise ConfigError(f"{name} is dropout with p={module.p}, which is not supported; set it to 0")
        if getattr(module, "fused_projections", False):
            raise ConfigError(f"{name} has fused projections, which are not supported; call unfuse_qkv_projections()")
    return FAMILIES[kind](model)


def read_spec(family: Wan | Ltx) -> LayerSpec:
    config = family.model.config
    heads, head_dim = config.num_attention_heads, config.attention_head_dim
    sizes = heads, heads, head_dim, head_dim, head_dim**-0.5
    return LayerSpec((SoftmaxSpec(*sizes, causal=False),), token_dims=TOKEN_DIMS, forward=family.run_block)


def probe_block(family: Wan | Ltx, spec: LayerSpec, device: torch.device) -> None:
    """Compare a block with random weights, run as the layers run it, on tokens cut in two, with diffusers' own."""
    model = family.model
    block = copy.deepcopy(find_layers(model)[0], {id(param): param for param in model.parameters()})
    randomize(block, device, seed=1)
    generator = torch.Generator().manual_seed(2)
    grid, num_text = (2, 3, 4), PROBE_TEXT + 512 * (getattr(block.attn2, "add_k_proj", None) is not None)
    D, sizes = spec.mixers[0].num_heads * spec.mixers[0].head_dim, family.example_sizes(grid)
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
            arguments = LayerInputs.pack((text, None, mods, tokens, PlaceholderMask()), {}, TOKEN_DIMS, len(x))
            ours = _run_in_parts(block, spec, x, arguments)
            results = [(y, *torch.autograd.grad(y, list(inputs.values()), dy)) for y in (theirs, ours)]
        for name, expected, got in zip(("the output", *inputs), *results, strict=True):
            error = float((got - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-20))
            if not error < TOLERANCE:
                what = name if name == "the output" else f"the gradient of {name}"
                raise ConfigError(
                    f"a block of {type(model).__name__} does not match ithaka's layer ({what} differs by "
                    f"{error:.1e}); use diffusers 0.42, with which it was tested"
                )


def _run_in_parts(block: Any, spec: LayerSpec, x: Tensor, arguments: LayerInputs) -> Tensor:
    own, block.attn1.processor = block.attn1.processor, SelfAttention()
    passes, sizes = LayerPasses("block", block, spec), (PROBE_CUT, len(x) - PROBE_CUT)
    tiles = [arguments.tile(rows) for rows in (slice(0, PROBE_CUT), slice(PROBE_CUT, len(x)))]
    captured = [passes.capture(*tile) for tile in zip(x.split(sizes), tiles, strict=True)]
    outs = spec.mixers[0].run_reference(captured).split(sizes)
    ys = [passes.resume(x_tD, [out], inputs) for x_tD, out, inputs in zip(x.split(sizes), outs, tiles, strict=True)]
    block.attn1.processor = own
    return torch.cat(ys)
