"""Read images and videos with a model's processor. Imported only for them: transformers' processors
take seconds.

Every rank of a cp group knows all sizes, and reads only the frames that it encodes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoImageProcessor,
    BaseImageProcessor,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata, load_video

from ithaka.config import ConfigError
from ithaka.data.documents.images import PROCESSOR_FILES, Medium
from ithaka.facts.families import MEDIA
from ithaka.facts.model_files import read_json
from ithaka.inputs.media import OwnPixels, divide_frames

DECODERS = {"torchcodec": "torchcodec", "av": "pyav", "decord": "decord"}  # -> in transformers
DEFAULT_FPS = 2.0  # if the video processor sets none


class _TorchTransforms(BaseVideoProcessor):
    """Replaces the torchvision transforms of transformers' video processors with PyTorch ones."""

    def resize(self, image: Tensor, size: SizeDict, *_: object, **__: object) -> Tensor:
        frames = F.interpolate(
            image.flatten(0, 1), (size.height, size.width), mode="bicubic", antialias=True
        )
        return frames.unflatten(0, image.shape[:2])

    def normalize(
        self, image: Tensor, mean: Sequence[float], std: Sequence[float], **_: object
    ) -> Tensor:
        means = torch.as_tensor(mean, device=image.device)[:, None, None]
        stds = torch.as_tensor(std, device=image.device)[:, None, None]
        return (image - means) / stds


class ImageReader:
    """Reads images and videos as a model's own processor does."""

    def __init__(self, model_path: Path, hf: PreTrainedTokenizerBase) -> None:
        config = read_json(model_path / "config.json")
        self.model_path = model_path
        self.hf = hf
        keys = "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"
        missing = [key for key in keys if key not in config]
        if missing or not any((model_path / file).is_file() for file in PROCESSOR_FILES):
            rule = f"has no {PROCESSOR_FILES[0]}"
            if missing:
                rule = f"has no {missing[0]} in its config.json"
            fix = "use a vision-language model with its processor, or set data.images to drop"
            raise ConfigError(f"data.images=read: model.path={model_path} {rule}; {fix}")
        self.model_type: str = config["model_type"].removesuffix("_moe")
        self.ids: dict[str, int] = {kind: config[f"{kind}_token_id"] for kind in MEDIA}
        self.start, self.end, *tokens = hf.convert_ids_to_tokens([config[key] for key in keys])
        self.tokens: dict[str, str] = dict(zip(MEDIA, tokens, strict=True))
        try:
            self.images: BaseImageProcessor = AutoImageProcessor.from_pretrained(
                str(model_path), trust_remote_code=False, local_files_only=True
            )
        except ImportError as error:
            rule = "this version of transformers cannot read images without torchvision"
            raise ConfigError(
                f"data.images=read: {rule}; pip install torchvision, or a newer transformers"
            ) from error

    @cached_property
    def processor(self) -> ProcessorMixin:
        """The model's processor; its video processor does without torchvision."""
        try:
            video_class = _find_class("video_processing", self.model_type.replace("2_5", "2"))
        except ImportError as error:
            rule = f"videos for model_type={self.model_type} need torchvision"
            raise ConfigError(f"data.images=read: {rule}; pip install torchvision") from error
        combined: Any = type(video_class.__name__, (video_class, _TorchTransforms), {})
        videos = combined.from_pretrained(str(self.model_path), local_files_only=True)
        # Without torchvision, transformers has no class to check a video processor against.
        checks = {"check_argument_for_proper_class": lambda *_: None}
        processor_class = _find_class("processing", self.model_type)
        return type("Processor", (processor_class,), checks)(self.images, self.hf, videos)

    # ---- sizes, and the text of placeholders

    def measure_image(self, path: Any) -> tuple[str, Medium]:
        """Return the placeholder text and the medium."""
        with Image.open(path) as image:
            image.load()  # raises if the file is truncated
            width, height = image.size
        images = self.images
        resize = import_module(type(images).__module__).smart_resize
        edges = resize(
            height,
            width,
            factor=images.patch_size * images.merge_size,
            min_pixels=images.size["shortest_edge"],
            max_pixels=images.size["longest_edge"],
        )
        grid = [1, *(edge // images.patch_size for edge in edges)]
        medium = Medium("image", path, math.prod(grid) // images.merge_size**2, grid)
        return self.start + self.tokens["image"] * medium.num_tokens + self.end, medium

    def measure_video(self, source: str | list[str], fps: float | None) -> tuple[str, Medium]:
        """Return the placeholder text and the medium. `fps`: sampling rate of a file, or the rate
        of the frames."""
        videos = self.processor.video_processor
        fps = fps or videos.fps or DEFAULT_FPS
        if isinstance(source, list):
            shapes = {read_frames([path], [0]).shape for path in source}
            if len(shapes) != 1:
                raise ValueError(f"has frames of {len(shapes)} sizes")
            metadata = VideoMetadata(len(source), fps, frames_indices=list(range(len(source))))
        else:
            sampled: list[VideoMetadata] = []

            def sample_last(metadata: VideoMetadata, **_: object) -> list[int]:
                indices = videos.sample_frames(metadata=metadata, fps=fps)
                metadata.frames_indices = np.asarray(indices).tolist()
                sampled.append(replace(metadata))
                return metadata.frames_indices[-1:]

            shapes = {_decode(source, sample_last).shape}
            (metadata,) = sampled
        size = (len(metadata.frames_indices), *shapes.pop()[1:])
        text = [self.start + self.tokens["video"] + self.end]
        options = {"video_metadata": [metadata], "do_sample_frames": False, "do_convert_rgb": False}
        frames = torch.empty(size, dtype=torch.uint8, device="meta")
        found = self.processor(text=text, videos=[frames], **options, return_tensors="pt")
        ids = found["input_ids"][0].tolist()
        grid = found["video_grid_thw"][0].tolist()
        seconds = [float(each) for each in found.get("second_per_grid_ts", ())]
        medium = Medium(
            "video", source, ids.count(self.ids["video"]), grid, metadata.frames_indices, *seconds
        )
        return self.hf.decode(ids, clean_up_tokenization_spaces=False), medium

    # ---- pixels

    def load(self, media: Sequence[Medium], cp_rank: int = 0, cp_size: int = 1) -> dict[str, Any]:
        """Return arguments for the model, with the pixels of the frames that this rank encodes."""
        ordered = [medium for kind in MEDIA for medium in media if medium.kind == kind]
        frames = [(i, step) for i, medium in enumerate(ordered) for step in range(medium.grid[0])]
        patches_f = torch.tensor([math.prod(ordered[i].grid[1:]) for i, _ in frames])
        first, last = divide_frames(patches_f, cp_size)[cp_rank : cp_rank + 2].tolist()
        own: dict[int, list[int]] = {}  # time steps of this rank, by medium
        for i, step in frames[first:last]:
            own.setdefault(i, []).append(step)
        num_values = 3 * self.images.temporal_patch_size * self.images.patch_size**2
        inputs: dict[str, Any] = {}
        for kind, (pixels, grids) in MEDIA.items():
            found = [medium for medium in ordered if medium.kind == kind]
            if not found:
                continue
            inputs[grids] = torch.tensor([medium.grid for medium in found])
            parts = [
                self._read(ordered[i], steps) for i, steps in own.items() if ordered[i].kind == kind
            ]
            part_PM = torch.cat(parts) if parts else torch.zeros(0, num_values)
            name = repr([medium.source for medium in found])
            inputs[pixels] = OwnPixels(part_PM, int(inputs[grids].prod(1).sum()), name)
            if found[0].seconds is not None:
                inputs["second_per_grid_ts"] = torch.tensor([medium.seconds for medium in found])
        return inputs

    def _read(self, medium: Medium, steps: Sequence[int]) -> Tensor:
        """Read the pixels of these time steps."""
        if medium.kind == "image":
            images = [_open_image(medium.source)]
            return self.images(images=images, return_tensors="pt")["pixel_values"]
        videos = self.processor.video_processor
        per_step = videos.temporal_patch_size
        indices = medium.frames[steps[0] * per_step : (steps[-1] + 1) * per_step]
        frames = read_frames(medium.source, indices)
        # Resized here: the processor's size depends on the number of frames.
        height, width = (videos.patch_size * n for n in medium.grid[1:])
        size = SizeDict(height=height, width=width)
        resized = _TorchTransforms.resize(videos, frames[None], size)[0]
        options = {"do_resize": False, "do_sample_frames": False, "do_convert_rgb": False}
        return videos(videos=[resized], **options, return_tensors="pt")["pixel_values_videos"]


def _find_class(part: str, model_type: str) -> type:
    module = import_module(f"transformers.models.{model_type}.{part}_{model_type}")
    return getattr(module, module.__all__[0])


def _open_image(path: Any) -> Image.Image:
    return Image.open(path).convert("RGB")


def read_frames(source: str | list[str], indices: Sequence[int]) -> Tensor:
    """Read frames of a video: uint8 [frames, 3, height, width]."""
    if isinstance(source, str):
        return _decode(source, lambda **_: np.asarray(indices))
    frames = np.stack([np.asarray(_open_image(source[i])) for i in indices])
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


def _decode(path: str, sample: Callable[..., Sequence[int] | np.ndarray]) -> Tensor:
    decoder = next((name for package, name in DECODERS.items() if find_spec(package)), None)
    if decoder is None:
        fix = f"pip install {' or '.join(DECODERS)}, or write its frames as images to a folder"
        raise ConfigError(f"data.images=read: {path} is a video file, which needs a decoder; {fix}")
    frames = torch.as_tensor(load_video(path, backend=decoder, sample_indices_fn=sample)[0])
    return frames if frames.shape[1] == 3 else frames.permute(0, 3, 1, 2)
