"""Images and videos in conversations: files, sizes, and placeholder tokens in the text."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ithaka.config import ConfigError
from ithaka.config.units import plural
from ithaka.data.documents.dialects import BadRecord
from ithaka.exits import is_transient

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
PART_TYPES = {
    "image": ("image", "image_url", "input_image"),
    "video": ("video", "video_url", "input_video"),
}


class Medium(NamedTuple):
    """An image or a video."""

    kind: str
    source: str | list[str]  # a file, or the files of a video's frames
    num_tokens: int
    grid: Sequence[int]  # patches: time, height, width
    frames: Sequence[int] = ()  # indices of a video's sampled frames
    seconds: float | None = None  # per time step, for the positions of Qwen2.5-VL


class MediumReader(Protocol):
    """Measures images and videos, as ImageReader does (data/documents/pixels.py)."""

    tokens: dict[str, str]  # by kind

    def measure_image(self, path: str | list[str]) -> tuple[str, Medium]: ...

    def measure_video(self, source: str | list[str], fps: float | None) -> tuple[str, Medium]: ...


class RecordImages:
    """The images and videos of one record, in order. Paths are relative to the record's file."""

    def __init__(self, reader: MediumReader, folder: Path, unnamed: Mapping[str, object]) -> None:
        """`unnamed`: what the record lists outside its messages, by kind."""
        self.reader = reader
        self.folder = folder
        self.unnamed: dict[str, list[object]] = {}
        for kind, listed in unnamed.items():
            values = listed if isinstance(listed, list) else [listed]
            self.unnamed[kind] = list(values) if listed else []
        self.found: list[Medium] = []

    def render(self, part: Mapping[str, Any], label: str) -> str:
        """Return the placeholder text of a part. Raise BadRecord if it is not an image or video
        that can be read."""
        kind = next((kind for kind, types in PART_TYPES.items() if part.get("type") in types), None)
        if kind is None:
            detail = f"{label} has a part of type {part.get('type')}, which is not read; remove it"
            raise BadRecord(f"with {part.get('type')}", detail)
        keys = (kind, "path", f"{kind}_url", "url")
        value = next((part[key] for key in keys if part.get(key)), None)
        if not value and self.unnamed[kind]:
            value = self.unnamed[kind].pop(0)
        if isinstance(value, Mapping):
            value = value.get("url") or value.get("path")
        names: list[Any] = [value]
        if isinstance(value, list) and kind == "video":
            names = value
        for name in names or [value]:
            if not isinstance(name, str) or name.startswith(("http:", "https:", "data:")):
                shown = name[:60] if isinstance(name, str) else type(name).__name__
                raise BadRecord(
                    f"with {kind}s that are not files",
                    f"{label} has the {kind} {shown}; write a path",
                )
        paths = [str((self.folder / name.removeprefix("file://")).absolute()) for name in names]
        try:
            source = paths if isinstance(value, list) else paths[0]
            text, medium = self._measure(kind, source, part.get("fps"))
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
            names = (path for path in Path(source).iterdir() if not path.name.startswith("."))
            source = sorted(map(str, names))
        elif isinstance(source, str):
            Path(source).stat()  # raises FileNotFoundError
        if kind == "image":
            return self.reader.measure_image(source)
        return self.reader.measure_video(source, fps)

    def select(self, text: str) -> list[Medium]:
        """Select the images and videos of a sample, which may be a prefix of the conversation."""
        for kind, left in self.unnamed.items():
            if left:
                detail = f"lists {plural(len(left), f'unused {kind}')}; remove them"
                raise BadRecord(f"with {kind}s that no message has", detail)
        sums = list(accumulate((medium.num_tokens for medium in self.found), initial=0))
        num_tokens = sum(map(text.count, self.reader.tokens.values()))
        if num_tokens not in sums:
            shown = " or ".join(self.reader.tokens.values())
            raise BadRecord("with image tokens in its text", f"has {shown} in its text; remove it")
        return self.found[: sums.index(num_tokens)]
