"""What differs between diffusers' video transformers; shapes as in roots/video.py."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ithaka.config import ConfigError
from ithaka.mixers.attention_call import PlaceholderMask
from ithaka.roots.video import Condition, Tokens, VideoTransformer

JOINT_ATTENTION = ("HunyuanVideo", "CogVideoX", "ConsisID", "Mochi", "EasyAnimate")  # beginnings of class names


class Wan(VideoTransformer):
    """WanTransformer3DModel: text to video and image to video of Wan 2.1 and 2.2."""

    layers_name = "blocks"

    def check_clip(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **others: Any) -> None:
        sizes, patch = hidden_states.shape, self.model.config.patch_size
        if hidden_states.dim() != 5 or any(size % p for size, p in zip(sizes[2:], patch, strict=True)):
            raise ValueError(
                f"hidden_states has shape {tuple(sizes)}; pass [clips, channels, frames, height, width], with frames, "
                f"height and width in multiples of the patch size {tuple(patch)}"
            )
        most, grid = self.model.rope.max_seq_len, self.grid(hidden_states=hidden_states)
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
        """Cut [1, channels, frames, height, width] into patches [S, M]."""
        p_f, p_h, p_w = self.model.config.patch_size
        parts = hidden_states[0].unflatten(3, (-1, p_w)).unflatten(2, (-1, p_h)).unflatten(1, (-1, p_f))
        return parts.permute(1, 3, 5, 0, 2, 4, 6).flatten(3).flatten(0, 2)

    def join(self, out_1SM: Tensor, hidden_states: Tensor, **others: Any) -> Tensor:
        parts = out_1SM[0].unflatten(-1, (*self.model.config.patch_size, -1))
        parts = parts.unflatten(0, self.grid(hidden_states=hidden_states)).permute(6, 0, 3, 1, 4, 2, 5)
        return parts.flatten(5).flatten(3, 4).flatten(1, 2)[None]

    def embed(self, patches_sM: Tensor) -> Tensor:
        conv = self.model.patch_embedding
        return F.linear(patches_sM, conv.weight.flatten(1), conv.bias)

    def condition(self, steps_U: Tensor, encoder_hidden_states: Tensor, **others: Any) -> Condition:
        image = others.get("encoder_hidden_states_image")
        embedded_UD, modulations_UM, text, image = self.model.condition_embedder(steps_U, encoder_hidden_states, image)
        return Condition(text if image is None else torch.cat([image, text], dim=1), None, modulations_UM, embedded_UD)

    def positions(self, **inputs: Any) -> Tensor:
        """The coordinates of each patch, [S, 3]."""
        return torch.cartesian_prod(*map(torch.arange, self.grid(**inputs)))

    def rotary(self, coords_t3: Tensor) -> tuple[Tensor, Tensor]:
        sizes = [size // 2 for size in (self.model.rope.t_dim, self.model.rope.h_dim, self.model.rope.w_dim)]
        tables = (
            t.to(coords_t3.device) for t in (self.model.rope.freqs_cos[:, 0::2], self.model.rope.freqs_sin[:, 1::2])
        )
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


class Ltx(VideoTransformer):
    """LTXVideoTransformer3DModel."""

    layers_name = "transformer_blocks"

    def check_clip(self, hidden_states: Tensor, **others: Any) -> None:
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

    def join(self, out_1SM: Tensor, **others: Any) -> Tensor:
        return out_1SM

    def embed(self, patches_sM: Tensor) -> Tensor:
        return self.model.proj_in(patches_sM)

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
        rope, bases = (
            self.model.rope,
            (self.model.rope.base_num_frames, self.model.rope.base_height, self.model.rope.base_width),
        )
        if video_coords is not None:
            return torch.stack([column / base for column, base in zip(video_coords[0], bases, strict=True)], dim=1)
        coords = torch.cartesian_prod(*map(torch.arange, self.grid(**others))).to(torch.float32)
        if rope_interpolation_scale is None:
            return coords
        patch = rope.patch_size_t, rope.patch_size, rope.patch_size
        scales = zip(coords.unbind(1), rope_interpolation_scale, patch, bases, strict=True)
        return torch.stack([column * scale * p / base for column, scale, p, base in scales], dim=1)

    def rotary(self, coords_t3: Tensor) -> tuple[Tensor, Tensor]:
        rope = self.model.rope
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
        rotary, temb = (tokens, mask) if isinstance(mask, PlaceholderMask) else mask, tokens.select(mods_UM)[None]
        inputs = dict(hidden_states=x_1tD, encoder_hidden_states=text, temb=temb, image_rotary_emb=rotary)
        return type(block).forward(block, **inputs, encoder_attention_mask=bias)


FAMILIES: dict[str, type[VideoTransformer]] = {"WanTransformer3DModel": Wan, "LTXVideoTransformer3DModel": Ltx}


def find_family(model_class: type) -> type[VideoTransformer] | None:
    """The root of a class of diffusers; None for classes of other libraries. Raises ConfigError for other models."""
    classes = model_class.__mro__
    if not any(cls.__module__.startswith("diffusers.") for cls in classes):
        return None
    if family := next((FAMILIES[cls.__name__] for cls in classes if cls.__name__ in FAMILIES), None):
        return family
    name, reason = model_class.__name__, "is not supported"
    if name.startswith(JOINT_ATTENTION):
        reason = "attends jointly to text and video, so text tokens would have to be sharded with the patches"
    fix = f"of diffusers' models, use {' or '.join(FAMILIES)}"
    raise ConfigError(f"parallelize got a {name}, which {reason}; {fix}")
