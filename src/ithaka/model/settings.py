"""How a model is laid out: the configuration as model/ needs it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ithaka.config import Config
from ithaka.model.layer import LayerOptions
from ithaka.plan.layout import Layout


@dataclass(frozen=True)
class Settings:
    """How a model is laid out, beside cp. The defaults are the plain ones: every technique is off."""

    dtype: torch.dtype | None = None  # of the computation; None: the parameters' own
    heads_per_stage: int | None = None  # None: all heads at once, which is plain Ulysses
    layer: LayerOptions = LayerOptions()
    keep_attention_layers: int | None = None  # layers for which layer.keep_attention holds; None: all
    offload_optimizer: bool = False
    host_bytes: int | None = None  # what the store may keep in host memory; None: what there is
    disk_path: Path | None = None  # directory of the store's file; None: the system's temporary directory

    def of_layer(self, index: int) -> LayerOptions:
        if self.keep_attention_layers is None or index < self.keep_attention_layers:
            return self.layer
        return replace(self.layer, keep_attention=None)


PLAIN = Settings()


def settings_for(layout: Layout, dtype: torch.dtype, **more: Any) -> Settings:
    """What a plan decided. `more`: fields of Settings that a plan leaves open."""
    layer = LayerOptions(
        tile_tokens=layout.tile_tokens,
        checkpoint=layout.checkpoint,
        keep_input=layout.input_tier,
        keep_attention=layout.attention_tier if layout.keep_attention else None,
        overlap=layout.overlap,
    )
    return Settings(
        dtype=dtype,
        heads_per_stage=layout.heads_per_stage,
        layer=layer,
        keep_attention_layers=layout.keep_attention,
        offload_optimizer=layout.offload_optimizer,
        **more,
    )


def settings_of(config: Config, device: torch.device) -> Settings:
    memory, attention = config.memory, config.attention
    kept = memory.keep_attention
    return Settings(
        dtype=_dtype(config.model.dtype, device),
        heads_per_stage=None if config.parallel.heads_per_stage == "all" else config.parallel.heads_per_stage,
        layer=LayerOptions(
            tile_tokens=None if memory.tile_tokens == "all" else memory.tile_tokens,
            checkpoint=memory.checkpoint == "full",
            keep_input=_tier(memory.offload),
            keep_attention=None if kept == "none" else _tier(memory.attention_offload or memory.offload),
            overlap=memory.overlap,
            kernel=attention.kernel,
            blocks=(attention.block_q, attention.block_kv) if attention.block_q and attention.block_kv else None,
            compile=config.train.compile,
        ),
        keep_attention_layers=kept if isinstance(kept, int) else None,
        offload_optimizer=memory.offload_optimizer,
        disk_path=memory.disk_path,
    )


def _tier(offload: str) -> str:
    return "device" if offload == "none" else offload


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)
