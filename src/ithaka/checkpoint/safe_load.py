"""Load torch.distributed.checkpoint files without running code from them.

torch unpickles a checkpoint's index (`.metadata`) and all non-tensor values without restrictions,
so an untrusted checkpoint could run arbitrary code. Here the index may refer only to classes that
torch writes there, and values go through `torch.load(weights_only=True)`.

The index describes each rank's part of each tensor. With a thousand ranks it is 125 MB and takes
20 s to unpickle, so one rank reads it and sends it to the others as arrays (`CompactIndex`), in
which each finds its own parts.
"""

import collections
import io
import pathlib
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from ithaka.foreign.torch_checkpoint import (
    MEMORY_FORMATS,
    PICKLED,
    StoragePlace,
    chunks_of,
    flatten_state_dict,
    metadata_path,
    set_element,
)

PATH_MODULES = ("pathlib", "pathlib._local")  # the second in Python 3.13
ALLOWED_GLOBALS: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in metadata.__all__},
    **PICKLED,
    **{(module, "PosixPath"): pathlib.PosixPath for module in PATH_MODULES},
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(class, name); there is one enum.
    ("builtins", "getattr"): lambda _, name: MEMORY_FORMATS[name],
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(
                f".metadata refers to {module}.{name}, which is not allowed; do not trust it"
            )
        return ALLOWED_GLOBALS[module, name]


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


class SafeReader(dcp.FileSystemReader):
    """FileSystemReader that unpickles `.metadata` safely, or uses `part` instead."""

    def __init__(self, path: Path, part: Metadata | None = None) -> None:
        super().__init__(path)
        self.part = part

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.part is not None:
            return self.part
        with self.fs.create_stream(metadata_path(self, kwargs.get("rank")), "rb") as file:
            index = _Unpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(
                f".metadata contains a {type(index).__name__}, not a checkpoint's index"
            )
        # as in torch's reader
        index.storage_meta = getattr(index, "storage_meta", None) or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint, and where its chunks are."""

    metadata: TensorStorageMetadata  # without its chunks
    offsets: np.ndarray  # [chunks, dims]
    sizes: np.ndarray  # [chunks, dims]
    places: np.ndarray  # [chunks, 3]: the number of the file, and offset and length in it

    def overlapping(self, wanted: Sequence[ChunkStorageMetadata]) -> np.ndarray:
        """Numbers of the stored chunks that have elements of the wanted ones."""
        found = np.zeros(len(self.places), bool)
        for chunk in wanted:
            start = np.array(chunk.offsets, np.int64)
            stop = start + np.array(chunk.sizes, np.int64)
            found |= ((self.offsets < stop) & (start < self.offsets + self.sizes)).all(1)
        return np.flatnonzero(found)


@dataclass(frozen=True)
class CompactIndex:
    """The index of a checkpoint, in a form that is quick to send and to search."""

    files: list[str]
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]  # where values that are not tensors are stored; ithaka writes none

    @classmethod
    def from_index(cls, index: Metadata) -> "CompactIndex":
        files = dict[str, int]()
        tensors = dict[str, StoredTensor]()
        values = dict[str, Any]()
        for name, entry in index.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                values[name] = index.storage_data[MetadataIndex(name)]
                continue
            places = []
            for chunk in entry.chunks:
                stored = index.storage_data[MetadataIndex(name, chunk.offsets)]
                number = files.setdefault(stored.relative_path, len(files))
                places.append((number, stored.offset, stored.length))
            shape = (len(entry.chunks), len(entry.size))
            tensors[name] = StoredTensor(
                replace(entry, chunks=[]),
                np.array([chunk.offsets for chunk in entry.chunks], np.int64).reshape(shape),
                np.array([chunk.sizes for chunk in entry.chunks], np.int64).reshape(shape),
                np.array(places, np.int64).reshape(-1, 3),
            )
        return cls(list(files), tensors, values)

    def part_for(self, state: dict[str, Any]) -> Metadata:
        """torch's index, of only what this process needs to fill `state`."""
        entries = dict[str, Any]()
        stored = dict[MetadataIndex, Any]()
        for name, value in flatten_state_dict(state)[0].items():
            if name in self.values:
                entries[name] = BytesStorageMetadata()
                stored[MetadataIndex(name)] = self.values[name]
            elif name in self.tensors:
                tensor = self.tensors[name]
                chunks = list[ChunkStorageMetadata]()
                for number in tensor.overlapping(chunks_of(value)):
                    offsets = torch.Size(tensor.offsets[number].tolist())
                    sizes = torch.Size(tensor.sizes[number].tolist())
                    chunks.append(ChunkStorageMetadata(offsets, sizes))
                    file, offset, length = tensor.places[number].tolist()
                    place = StoragePlace(self.files[file], offset, length)
                    stored[MetadataIndex(name, offsets)] = place
                entries[name] = replace(tensor.metadata, chunks=chunks)
        return Metadata(entries, storage_data=stored, storage_meta=StorageMeta())


def read_index(path: Path) -> CompactIndex:
    return CompactIndex.from_index(SafeReader(path).read_metadata())


def load_into(state: dict[str, Any], path: Path, index: CompactIndex) -> None:
    """Fill `state` from the checkpoint at `path`, without communication."""
    reader = SafeReader(path, index.part_for(state))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=True)
    except dcp.CheckpointException as wrapper:  # which is not an Exception
        raise wrapper.failures[0][0] from None
