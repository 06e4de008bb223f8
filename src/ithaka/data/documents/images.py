"""Images and videos in conversations: files, sizes, and placeholder tokens in the text."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ithaka.config import ConfigError
from ithaka.config.units import plural
from ithaka.data.documents.formats import BadRecord
from ithaka.exits import is_transient

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
PART_TYPES = {"image": ("image", "image_url", "input_image"), "video": ("video", "video_url", "input_video")}


class Medium(NamedTuple):
    """An image or a video."""

    kind: str
    source: str | list[str]  # a file, or the files of a video's frames
    num_tokens: int
    grid: Sequence[int]  # patches: time, height, width
    frames: Sequence[int] = ()  # indices of a video's sampled frames
    seconds: float | None = None  # per time step, for the positions of Qwen2.5-VL


class RecordImages:
    """The images and videos of one record, in the order of its messages. Paths are relative to the record's file.
    `reader`: an ImageReader (data/documents/pixels.py)."""

    def __init__(self, reader: Any, folder: Path, unnamed: Mapping[str, Any]) -> None:
        self.reader, self.folder = reader, folder
        self.unnamed = {kind: list(v) if isinstance(v, list) else [v] if v else [] for kind, v in unnamed.items()}
        self.found: list[Medium] = []

    def render(self, part: Mapping[str, Any], label: str) -> str:
        """Return the placeholder text of a part. Raise BadRecord if it is not an image or video that can be read."""
        kind = next((kind for kind, types in PART_TYPES.items() if part.get("type") in types), None)
        if kind is None:
            detail = f"{label} has a part of type {part.get('type')}, which is not read; remove it"
            raise BadRecord(f"with {part.get('type')}", detail)
        keys = kind, "path", f"{kind}_url", "url"
        value: Any = next((part[key] for key in keys if part.get(key)), None) or (self.unnamed[kind] or [None]).pop(0)
        value = value.get("url") or value.get("path") if isinstance(value, Mapping) else value
        names = value if isinstance(value, list) and kind == "video" else [value]
        for name in names or [value]:
            if not isinstance(name, str) or name.startswith(("http:", "https:", "data:")):
                shown = name[:60] if isinstance(name, str) else type(name).__name__
                raise BadRecord(f"with {kind}s that are not files", f"{label} has the {kind} {shown}; write a path")
        paths = [str((self.folder / name.removeprefix("file://")).absolute()) for name in names]
        try:
            text, medium = self._measure(kind, paths if isinstance(value, list) else paths[0], part.get("fps"))
        except Exception as error:  # decoders raise different exceptions
            if isinstance(error, ConfigError) or is_transient(error):
                raise
            problem = "missing" if isinstance(error, FileNotFoundError) else f"broken ({error})"
            detail = f"{label}: {paths[0]} is {problem}; repair it, or drop the record"
            raise BadRecord(f"with {kind}s that cannot be read", detail) from error
        self.found.append(medium)
        return text

    def _measure(self, kind: str, source: str | list[str], fps: float | None) -> tuple[str, Medium]:
        if isinstance(source, str) and Path(source).is_dir():
            source = sorted(str(path) for path in Path(source).iterdir() if not path.name.startswith("."))
        elif isinstance(source, str):
            Path(source).stat()
        return self.reader.measure_image(source) if kind == "image" else self.reader.measure_video(source, fps)

    def select(self, text: str) -> list[Medium]:
        """Select the images and videos of a sample, which may be a prefix of the conversation."""
        for kind, left in self.unnamed.items():
            if left:
                detail = f"lists {plural(len(left), f'unused {kind}')}; remove them"
                raise BadRecord(f"with {kind}s that no message has", detail)
        sums = list(accumulate((medium.num_tokens for medium in self.found), initial=0))
        if (num_tokens := sum(map(text.count, self.reader.tokens.values()))) not in sums:
            shown = " or ".join(self.reader.tokens.values())
            raise BadRecord("with image tokens in its text", f"has {shown} in its text; remove it")
        return self.found[: sums.index(num_tokens)]
