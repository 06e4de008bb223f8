"""What plans know about the kinds of models around the layers: language models and video transformers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ithaka.config import ConfigError


@dataclass(frozen=True)
class RootKind:
    is_video: bool = False
    data: str = "one document per sequence; packed shorter documents need less attention"
    adapter_settings: tuple[Mapping[str, Any], ...] = ({}, {"base": "nf4"})  # to try if a plan does not fit
    positions: int | None = None  # None: as in config.json
    refuses: Mapping[str, str] = field(default_factory=dict)  # settings without effect -> "video transformers ..."


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
