"""Small random vision-language models, and inputs with two images and a video."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from decoders import Wide
from models import CONSTRUCTING

IMAGE, VIDEO, START, END = 57, 58, 59, 60
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {"depth": 2, "hidden_size": 24, "num_heads": 2, "intermediate_size": 28, "patch_size": 2, "in_channels": 3}
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "vision": {"out_hidden_size": 32, "window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    },
    "qwen3_vl": {
        "text": {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        "vision": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
    },
    "qwen2_vl": {
        "text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "vision": {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
    },
    "qwen3_vl_moe": {
        "text": {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        "vision": {"out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
}


def vlm_config(family: str, **text: Any) -> Any:
    sizes = SIZES[family]
    return AutoConfig.for_model(
        family,
        text_config={**TEXT, **sizes["text"], **text},
        vision_config={**VISION, **sizes["vision"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )


def tiny_vlm(family: str, dtype: torch.dtype = torch.float64, **text: Any) -> PreTrainedModel:
    config = vlm_config(family, **text)
    config.text_config._experts_implementation = "eager"
    with CONSTRUCTING, Wide():
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.data = param.data.to(dtype)
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((1.0 + 0.3 * noise) if param.dim() == 1 else 0.2 * noise)
    return model.train()


def media_inputs(
    family: str, images: list[tuple[int, int]], videos: list[tuple[int, int, int]] = (), before: int = 3, seed: int = 5
) -> dict[str, Tensor]:
    """A row with text, images and videos, of which sizes are in patches."""
    generator = torch.Generator().manual_seed(seed)

    def text(n: int) -> list[int]:
        return torch.randint(50, (n,), generator=generator).tolist()

    ids = text(before)
    for height, width in images:
        ids += [START, *[IMAGE] * (height * width // 4), END, *text(4)]
    for frames, height, width in videos:
        parts = [frames] if "qwen2" in family else [1] * frames  # Qwen3-VL has text between frames
        for part in parts:
            ids += [START, *[VIDEO] * (part * height * width // 4), END, *text(2)]
    ids += text(5)
    inputs: dict[str, Tensor] = {"input_ids": torch.tensor([ids])}
    grids = {"image": torch.tensor([(1, *size) for size in images]), "video": torch.tensor(list(videos))}
    for (pixels, grid), kind in zip(
        (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")), grids, strict=True
    ):
        if len(grids[kind]):
            num_patches = int(grids[kind].prod(1).sum())
            inputs[grid] = grids[kind]
            inputs[pixels] = torch.randn(num_patches, 24, generator=generator, dtype=torch.float64)
    types = torch.zeros_like(inputs["input_ids"])
    types[inputs["input_ids"] == IMAGE], types[inputs["input_ids"] == VIDEO] = 1, 2
    if images or len(videos):
        inputs["mm_token_type_ids"] = types
    if len(videos) and family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([1.5] * len(videos))
    return inputs
