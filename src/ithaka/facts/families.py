"""Families of models: their positions, which of them read images or videos, and what differs for
video transformers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ithaka.config.fields import ConfigError

POSITIONS = 32768  # of a config.json without max_position_embeddings
# Vision-language models: an encoder whose frames are independent, and a language model with 3-D
# positions.
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Arguments for images and for videos: pixels, and patches in time, height and width.
MEDIA = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
WITHOUT_ROPE = ("nemotron_h",)  # so max_position_embeddings is no limit


def unscaled_positions(positions: int, rope: Mapping[str, Any]) -> int:
    """Return the positions before any scaling. `rope`: for all layers, or by type of layer."""
    rope = rope.get("full_attention", rope)
    factor = rope.get("factor") or 1
    return rope.get("original_max_position_embeddings") or int(positions / factor)


def yarn_factor(positions: int, rope: Mapping[str, Any], context: int) -> int:
    """Return YaRN's factor for `context` tokens, relative to the positions before any scaling."""
    return math.ceil(context / unscaled_positions(positions, rope))


# ---- what surrounds the layers: language models and video transformers


@dataclass(frozen=True)
class RootKind:
    is_video: bool = False
    data: str = "one document per sequence; packed shorter documents need less attention"
    # To try if a plan does not fit.
    adapter_settings: tuple[Mapping[str, Any], ...] = ({}, {"base": "nf4"})
    positions: int | None = None  # None: as in config.json
    # Settings without effect -> "video transformers ...".
    refuses: Mapping[str, str] = field(default_factory=dict)


DECODER = RootKind()
VIDEO = RootKind(
    is_video=True,
    data="one clip per sequence",
    adapter_settings=({},),
    positions=sys.maxsize,  # the clip's sides have limits, not the number of its patches
    refuses={
        "adapter.base": "are not quantized",
        "adapter.dropout": "have adapters without dropout",
        "adapter.modules_to_save": "have no lm_head and embed_tokens",
        "adapter.unquantized": "are not quantized",
        "loss.type": "are trained in your own loop, with its own loss",
        "--branches": "have no shared prefixes",
    },
)
# Video transformers -> frames and pixels per latent of their autoencoders.
VIDEO_SCALES = {"WanTransformer3DModel": (4, 8), "LTXVideoTransformer3DModel": (8, 32)}
ROOTS = dict.fromkeys(VIDEO_SCALES, VIDEO)  # ModelShape.family -> root; of all others: DECODER


def count_patches(values: Mapping[str, Any], video: str) -> int:
    """Count the tokens of a `video`, frames x height x width in pixels."""
    kind = values.get("_class_name")
    patch = values.get("patch_size", 1)
    sizes = [int(size) for size in video.split("x") if size.isdecimal()]
    if kind not in VIDEO_SCALES:
        rule = f"applies to {' and '.join(VIDEO_SCALES)} only"
        raise ConfigError(f"--video {video} {rule}; use --context for this model")
    if len(sizes) != 3 or len(sizes) != video.count("x") + 1 or not all(sizes):
        fix = "use frames x height x width in pixels, as in 81x720x1280"
        raise ConfigError(f"--video {video}: {fix}")
    frames_scale, scale = VIDEO_SCALES[kind]
    scale *= 2 if values.get("in_channels") == 48 else 1  # the autoencoder of Wan 2.2 5B
    if not isinstance(patch, list | tuple):
        patch = (values.get("patch_size_t", 1), patch, patch)
    latents = ((sizes[0] - 1) // frames_scale + 1, sizes[1] // scale, sizes[2] // scale)
    return math.prod(max(1, size // p) for size, p in zip(latents, patch, strict=True))
