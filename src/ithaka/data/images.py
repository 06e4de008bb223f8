"""Images in conversations: placeholder tokens in the text, and pixels, which are read with their batch."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoImageProcessor

from ithaka.config import ConfigError
from ithaka.data.formats import BadRecord
from ithaka.plan.shape import read_json

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
IMAGE_PARTS = ("image", "image_url", "input_image")
KEYS = ("image", "path", "image_url", "url")


class ImageReader:
    """Reads images as a model's own processor does."""

    def __init__(self, model_path: Path, hf: Any) -> None:
        config = read_json(model_path / "config.json")
        keys = "vision_start_token_id", "image_token_id", "vision_end_token_id"
        missing = [key for key in keys if key not in config]
        if missing or not any((model_path / file).is_file() for file in PROCESSOR_FILES):
            rule = f"has no {missing[0]} in its config.json" if missing else f"has no {PROCESSOR_FILES[0]}"
            way_out = "use a vision-language model with its processor, or set data.images to drop"
            raise ConfigError(f"data.images=read: model.path={model_path} {rule}; {way_out}")
        self.processor: Any = AutoImageProcessor.from_pretrained(str(model_path), local_files_only=True)
        self.image_id: int = config["image_token_id"]
        self.start, self.token, self.end = hf.convert_ids_to_tokens([config[key] for key in keys])

    def load(self, paths: Sequence[str]) -> dict[str, Any]:
        """Keyword arguments of the model."""
        images = [Image.open(path).convert("RGB") for path in paths]
        return dict(self.processor(images=images, return_tensors="pt")) if images else {}


class RecordImages:
    """The images of one record, in the order of its messages. Paths are relative to the file of the record."""

    def __init__(self, reader: ImageReader, folder: Path, unnamed: Any) -> None:
        self.reader, self.folder = reader, folder
        self.unnamed = list(unnamed) if isinstance(unnamed, list) else [unnamed] if unnamed else []
        self.found: list[tuple[str, int]] = []  # path, and number of tokens

    def render(self, part: Mapping[str, Any], label: str) -> str:
        """Return the placeholder text of an image part. Raise BadRecord if it is not an image that can be read."""
        kind = part.get("type")
        if kind not in IMAGE_PARTS:
            fix = "write frames as images, or remove it"
            raise BadRecord(f"with {kind}", f"{label} has a part of type {kind}, which is not read; {fix}")
        value: Any = next((part[key] for key in KEYS if part.get(key)), None) or (self.unnamed or [None]).pop(0)
        value = value.get("url") or value.get("path") if isinstance(value, Mapping) else value
        if not isinstance(value, str) or value.startswith(("http:", "https:", "data:")):
            shown = type(value).__name__ if not isinstance(value, str) else value[:60]
            raise BadRecord("with images that are no files", f"{label} has the image {shown}; write a path")
        path = self.folder / value.removeprefix("file://")
        try:
            with Image.open(path) as image:
                image.load()  # so that a truncated file is found here
                width, height = image.size
            num_patches = self.reader.processor.get_number_of_image_patches(height, width, {})
        except (OSError, ValueError, SyntaxError) as error:
            problem = "missing" if isinstance(error, FileNotFoundError) else f"broken ({error})"
            detail = f"{label}: {path} is {problem}; repair it, or drop the record"
            raise BadRecord("with images that cannot be read", detail) from error
        num_tokens = num_patches // self.reader.processor.merge_size**2
        self.found.append((str(path.absolute()), num_tokens))
        return self.reader.start + self.reader.token * num_tokens + self.reader.end

    def select(self, text: str) -> list[tuple[str, int]]:
        """Select the images of a sample, which may be a prefix of the conversation."""
        if self.unnamed:
            raise BadRecord("with images that no message has", f"has {len(self.unnamed)} images too many; remove them")
        sums = list(accumulate((num_tokens for _, num_tokens in self.found), initial=0))
        if (num_tokens := text.count(self.reader.token)) not in sums:
            raise BadRecord("with image tokens in its text", f"has {self.reader.token} in its text; remove it")
        return self.found[: sums.index(num_tokens)]
