"""What differs between diffusers' video transformers; shapes as in roots/video.py."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ithaka.config import ConfigError
from ithaka.mixers.attention_call import PlaceholderMask
from ithaka.roots.video import Condition, Tokens, VideoTransformer

# beginnings of class names
JOINT_ATTENTION = ("HunyuanVideo", "CogVideoX", "ConsisID", "Mochi", "EasyAnimate")
# A block's argument: it ends or resumes a pass, or it is diffusers' cos and sin.
Rotary = PlaceholderMask | tuple[Tensor, Tensor]


class Wan(VideoTransformer):
    """WanTransformer3DModel: text to video and image to video of Wan 2.1 and 2.2."""

    layers_name = "blocks"

    def check_clip(
        self,
        hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        **others: object,
    ) -> None:
        sizes = hidden_states.shape
        patch = self.model.config.patch_size
        if hidden_states.dim() != 5 or any(
            size % p for size, p in zip(sizes[2:], patch, strict=True)
        ):
            raise ValueError(
                f"hidden_states has shape {tuple(sizes)}; pass [clips, channels, frames, height, "
                "width], with frames, height and width in multiples of the patch size "
                f"{tuple(patch)}"
            )
        most = self.model.rope.max_seq_len
        grid = self.grid(hidden_states)
        if max(grid) > most:
            rule = f"the clip has {grid} patches, more than rope_max_seq_len={most}"
            raise ValueError(f"{rule}; pass a smaller clip")
        has_image = encoder_hidden_states_image is not None
        if has_image != (self.model.condition_embedder.image_embedder is not None):
            problem = "missing, but the model has an image_dim"
            if has_image:
                problem = "passed, but the model has no image_dim"
            fix = "pass it to image-to-video models only"
            raise ValueError(f"encoder_hidden_states_image is {problem}; {fix}")

    def grid(self, hidden_states: Tensor, **others: object) -> tuple[int, ...]:
        sizes = zip(hidden_states.shape[2:], self.model.config.patch_size, strict=True)
        return tuple(size // p for size, p in sizes)

    def count_patches(self, hidden_states: Tensor, **others: object) -> int:
        return math.prod(self.grid(hidden_states))

    def example_sizes(self, grid: tuple[int, ...]) -> dict[str, Any]:
        sizes = zip(grid, self.model.config.patch_size, strict=True)
        return {"hidden_states": torch.empty(1, 1, *(n * p for n, p in sizes))}

    def cut(self, hidden_states: Tensor, **others: object) -> Tensor:
        """Cut [1, channels, frames, height, width] into patches [S, M]."""
        p_f, p_h, p_w = self.model.config.patch_size
        parts = hidden_states[0].unflatten(3, (-1, p_w)).unflatten(2, (-1, p_h))
        parts = parts.unflatten(1, (-1, p_f))
        return parts.permute(1, 3, 5, 0, 2, 4, 6).flatten(3).flatten(0, 2)

    def join(self, out_1SM: Tensor, hidden_states: Tensor, **others: object) -> Tensor:
        parts = out_1SM[0].unflatten(-1, (*self.model.config.patch_size, -1))
        parts = parts.unflatten(0, self.grid(hidden_states)).permute(6, 0, 3, 1, 4, 2, 5)
        return parts.flatten(5).flatten(3, 4).flatten(1, 2)[None]

    def embed(self, patches_sM: Tensor) -> Tensor:
        conv = self.model.patch_embedding
        return F.linear(patches_sM, conv.weight.flatten(1), conv.bias)

    def condition(
        self,
        steps_U: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        **others: object,
    ) -> Condition:
        embedded_UD, modulations_UM, text, image = self.model.condition_embedder(
            steps_U, encoder_hidden_states, encoder_hidden_states_image
        )
        if image is not None:
            text = torch.cat([image, text], dim=1)
        return Condition(text, None, modulations_UM, embedded_UD)

    def positions(self, hidden_states: Tensor, **others: object) -> Tensor:
        return torch.cartesian_prod(*map(torch.arange, self.grid(hidden_states)))

    def rotary(self, coords_t3: Tensor) -> tuple[Tensor, Tensor]:
        rope = self.model.rope
        sizes = [rope.t_dim // 2, rope.h_dim // 2, rope.w_dim // 2]
        angles = []
        for table in (rope.freqs_cos[:, 0::2], rope.freqs_sin[:, 1::2]):
            columns = zip(
                table.to(coords_t3.device).split(sizes, dim=1), coords_t3.unbind(1), strict=True
            )
            angles.append(torch.cat([part[i] for part, i in columns], dim=1))
        cos, sin = angles
        return cos[None, :, None], sin[None, :, None]

    @staticmethod
    def run_block(
        block: nn.Module,
        x_1tD: Tensor,
        text: Tensor,
        bias: None,
        mods_UM: Tensor,
        tokens: Tokens,
        mask: Rotary,
    ) -> Tensor:
        rotary = (tokens, mask) if isinstance(mask, PlaceholderMask) else mask
        temb = tokens.select(mods_UM.unflatten(-1, (6, -1)))
        temb = temb if tokens.steps_s is None else temb[None]
        return type(block).forward(block, x_1tD, text, temb, rotary)


class Ltx(VideoTransformer):
    """LTXVideoTransformer3DModel."""

    layers_name = "transformer_blocks"

    def check_clip(
        self, hidden_states: Tensor, video_coords: Tensor | None = None, **sizes: Any
    ) -> None:
        shape = tuple(hidden_states.shape)
        if hidden_states.dim() != 3:
            raise ValueError(f"hidden_states has shape {shape}; pass [clips, patches, channels]")
        grid = self.grid(**sizes)
        if video_coords is None and math.prod(grid) != shape[1]:
            rule = f"is not its {shape[1]} patches; pass the size of the latents"
            raise ValueError(f"num_frames x height x width = {grid} {rule}")

    def grid(
        self,
        num_frames: int | None = 1,
        height: int | None = 1,
        width: int | None = 1,
        **others: object,
    ) -> tuple[int, ...]:
        return num_frames or 1, height or 1, width or 1

    def count_patches(self, hidden_states: Tensor, **others: object) -> int:
        return hidden_states.shape[1]

    def example_sizes(self, grid: tuple[int, ...]) -> dict[str, Any]:
        return dict(zip(("num_frames", "height", "width"), grid, strict=True))

    def cut(self, hidden_states: Tensor, **others: object) -> Tensor:
        return hidden_states[0]  # diffusers' pipelines pass patches

    def join(self, out_1SM: Tensor, **others: object) -> Tensor:
        return out_1SM

    def embed(self, patches_sM: Tensor) -> Tensor:
        return self.model.proj_in(patches_sM)

    def condition(
        self,
        steps_U: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        **others: object,
    ) -> Condition:
        text = self.model.caption_projection(encoder_hidden_states)
        bias = encoder_attention_mask
        if bias is not None and bias.dim() == 2:
            bias = ((1 - bias.to(text.dtype)) * -10000.0)[:, None]
        mods_UM, embedded_UD = self.model.time_embed(
            steps_U, batch_size=len(steps_U), hidden_dtype=text.dtype
        )
        return Condition(text, bias, mods_UM, embedded_UD)

    def positions(
        self,
        video_coords: Tensor | None = None,
        rope_interpolation_scale: Sequence[float] | Tensor | None = None,
        **sizes: Any,
    ) -> Tensor:
        """The coordinates of each patch, [S, 3], relative to the frequencies' size of clip."""
        rope = self.model.rope
        bases = (rope.base_num_frames, rope.base_height, rope.base_width)
        if video_coords is not None:
            columns = zip(video_coords[0], bases, strict=True)
            return torch.stack([column / base for column, base in columns], dim=1)
        coords = torch.cartesian_prod(*map(torch.arange, self.grid(**sizes))).to(torch.float32)
        if rope_interpolation_scale is None:
            return coords
        patch = (rope.patch_size_t, rope.patch_size, rope.patch_size)
        scales = zip(coords.unbind(1), rope_interpolation_scale, patch, bases, strict=True)
        return torch.stack([column * scale * p / base for column, scale, p, base in scales], dim=1)

    def rotary(self, coords_t3: Tensor) -> tuple[Tensor, Tensor]:
        rope = self.model.rope
        device = coords_t3.device
        steps = torch.linspace(0.0, 1.0, rope.dim // 6, device=device, dtype=torch.float32)
        freqs = rope.theta**steps * math.pi / 2.0
        angles = (freqs * (coords_t3[..., None] * 2 - 1)).transpose(1, 2).flatten(1)
        angles = F.pad(angles, (rope.dim % 6 // 2, 0))  # the first values are not rotated
        heads = self.model.config.num_attention_heads
        cos, sin = (t.unflatten(1, (heads, -1))[None] for t in (angles.cos(), angles.sin()))
        return cos, sin

    @staticmethod
    def run_block(
        block: nn.Module,
        x_1tD: Tensor,
        text: Tensor,
        bias: Tensor | None,
        mods_UM: Tensor,
        tokens: Tokens,
        mask: Rotary,
    ) -> Tensor:
        rotary = (tokens, mask) if isinstance(mask, PlaceholderMask) else mask
        temb = tokens.select(mods_UM)[None]
        return type(block).forward(
            block,
            hidden_states=x_1tD,
            encoder_hidden_states=text,
            temb=temb,
            image_rotary_emb=rotary,
            encoder_attention_mask=bias,
        )


FAMILIES: dict[str, type[VideoTransformer]] = {
    "WanTransformer3DModel": Wan,
    "LTXVideoTransformer3DModel": Ltx,
}


def find_family(model_class: type) -> type[VideoTransformer] | None:
    """The root of a class of diffusers, which must be supported; None for other libraries."""
    classes = model_class.__mro__
    if not any(cls.__module__.startswith("diffusers.") for cls in classes):
        return None
    for cls in classes:
        if cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__]
    name = model_class.__name__
    reason = "is not supported"
    if name.startswith(JOINT_ATTENTION):
        reason = (
            "attends jointly to text and video, so text tokens would have to be sharded with "
            "the patches"
        )
    fix = f"of diffusers' models, use {' or '.join(FAMILIES)}"
    raise ConfigError(f"parallelize got a {name}, which {reason}; {fix}")
