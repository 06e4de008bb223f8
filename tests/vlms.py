"""Small random vision-language models, and inputs with images and videos."""

from typing import Any

import numpy
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
)

from ithaka.checks.verify import InFloat64
from models import CONSTRUCTING

IMAGE = 57
VIDEO = 58
START = 59
END = 60
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
VISION = {
    "depth": 2,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 28,
    "patch_size": 2,
    "in_channels": 3,
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            }
        },
        "vision": {
            "out_hidden_size": 32,
            "window_size": 8,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    },
    "qwen3_vl": {
        "text": {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            },
        },
        "vision": {
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 16,
        },
    },
    "qwen2_vl": {
        "text": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            }
        },
        "vision": {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
    },
    "qwen3_vl_moe": {
        "text": {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            },
        },
        "vision": {
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
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
    with CONSTRUCTING, InFloat64():
        model = AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.data = param.data.to(dtype)
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((1.0 + 0.3 * noise) if param.dim() == 1 else 0.2 * noise)
    return model.train()


def media_inputs(
    family: str,
    images: list[tuple[int, int]],
    videos: list[tuple[int, int, int]] = (),
    before: int = 3,
    seed: int = 5,
) -> dict[str, Tensor]:
    """Return a row with text, images and videos; sizes are in patches."""
    generator = torch.Generator().manual_seed(seed)

    def text(n: int) -> list[int]:
        return torch.randint(50, (n,), generator=generator).tolist()

    ids = text(before)
    for height, width in images[:1]:
        ids += [START, *[IMAGE] * (height * width // 4), END, *text(4)]
    for frames, height, width in videos:
        parts = [frames] if "qwen2" in family else [1] * frames  # Qwen3-VL has text between frames
        for part in parts:
            ids += [START, *[VIDEO] * (part * height * width // 4), END, *text(2)]
    # after the videos, so that features and tokens have different orders
    for height, width in images[1:]:
        ids += [START, *[IMAGE] * (height * width // 4), END, *text(4)]
    ids += text(5)
    inputs: dict[str, Tensor] = {"input_ids": torch.tensor([ids])}
    grids = {
        "image": torch.tensor([(1, *size) for size in images]),
        "video": torch.tensor(list(videos)),
    }
    for (pixels, grid), kind in zip(
        (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")),
        grids,
        strict=True,
    ):
        if len(grids[kind]):
            num_patches = int(grids[kind].prod(1).sum())
            inputs[grid] = grids[kind]
            inputs[pixels] = torch.randn(num_patches, 24, generator=generator, dtype=torch.float64)
    types = torch.zeros_like(inputs["input_ids"])
    types[inputs["input_ids"] == IMAGE] = 1
    types[inputs["input_ids"] == VIDEO] = 2
    if images or len(videos):
        inputs["mm_token_type_ids"] = types
    if len(videos) and family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([1.5] * len(videos))
    return inputs


NAMES = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad", "pad")
SPECIAL = tuple(f"<|{name}|>" for name in NAMES)
TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


class TinyProcessor(Qwen3VLProcessor):
    """Qwen3-VL's processor without its video processor, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token = "<|image_pad|>"
        self.video_token = "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def tiny_processor() -> TinyProcessor:
    """Return a processor with one token per byte and patches of 4 x 4 pixels."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessorPil(**sizes, size={"shortest_edge": 64, "longest_edge": 4096})
    return TinyProcessor(images, tokenizer, chat_template=TEMPLATE)


def model_for(processor: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a small Qwen3-VL with the processor's vocabulary and patches."""
    ids = dict(zip(SPECIAL, processor.tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    config = vlm_config(
        "qwen3_vl",
        vocab_size=len(processor.tokenizer),
        num_hidden_layers=1,
        max_position_embeddings=4096,
    )
    config.vision_config.patch_size = 4
    config.vision_config.num_position_embeddings = 64
    config.image_token_id = ids["<|image_pad|>"]
    config.video_token_id = ids["<|video_pad|>"]
    config.vision_start_token_id = ids["<|vision_start|>"]
    config.vision_end_token_id = ids["<|vision_end|>"]
    torch.manual_seed(0)
    with CONSTRUCTING:
        return AutoModelForImageTextToText.from_config(config, dtype=dtype)


def picture(seed: int) -> Image.Image:
    """Return a gradient of random colors; the size depends on the seed."""
    generator = numpy.random.default_rng(seed)
    height = 16 + 8 * (seed % 3)
    width = 24 + 8 * (seed % 2)
    ramp = (
        numpy.linspace(0, 1, width)[None, :, None] * numpy.linspace(0.5, 1, height)[:, None, None]
    )
    return Image.fromarray((255 * ramp * generator.random(3)).astype("uint8"))
