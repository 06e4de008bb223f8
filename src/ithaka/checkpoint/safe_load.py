"""Load torch.distributed.checkpoint files without running code from them.

torch unpickles a checkpoint's index (`.metadata`) and all non-tensor values without restrictions, so an untrusted
checkpoint could run arbitrary code. Here the index may refer only to classes that torch writes there, and values go
through `torch.load(weights_only=True)`.
"""

import collections
import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import _get_layout

PATH_MODULES = ("pathlib", "pathlib._local")  # the second in Python 3.13
ALLOWED_GLOBALS: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{(module, "PosixPath"): pathlib.PosixPath for module in PATH_MODULES},
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(class, name); there is one enum.
    ("builtins", "getattr"): lambda _, name: metadata._MEM_FORMAT_ENCODING[name],
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        allowed = dtype if isinstance(dtype, torch.dtype) else ALLOWED_GLOBALS.get((module, name))
        if allowed is None:
            raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, which is not allowed; do not trust it")
        return allowed


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


class SafeReader(dcp.FileSystemReader):
    """FileSystemReader with a restricted unpickler for `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            index = _Unpickler(file).load()
        if not isinstance(index, metadata.Metadata):
            raise pickle.UnpicklingError(f".metadata contains a {type(index).__name__}, not a checkpoint's index")
        index.storage_meta = getattr(index, "storage_meta", None) or metadata.StorageMeta()  # as in torch's reader
        index.storage_meta.load_id = self.load_id
        return index


def load_into(state: dict[str, Any], path: Path, **options: Any) -> None:
    """`dcp.load`: fill `state` from the checkpoint at `path`. Every rank calls it, unless `no_dist=True`."""
    dcp.load(state, storage_reader=SafeReader(path), planner=_Planner(), **options)
