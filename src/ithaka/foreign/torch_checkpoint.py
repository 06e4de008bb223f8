"""Private parts of torch.distributed.checkpoint: what its index (`.metadata`) is made of.

Read in torch 2.13. The public API reads an index only with an unrestricted unpickler, and only all
of it.
"""

from typing import Any

from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

# A nested dict -> a flat one and the path of each key; and its inverse, for one value.
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

# The chunks of a tensor that this rank holds.
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as chunks_of
from torch.serialization import _get_layout

__all__ = [
    "MEMORY_FORMATS",
    "PICKLED",
    "StoragePlace",
    "chunks_of",
    "flatten_state_dict",
    "metadata_path",
    "set_element",
]

StoragePlace: Any = filesystem._StorageInfo  # where a chunk is: file, offset, length
MEMORY_FORMATS: Any = metadata._MEM_FORMAT_ENCODING  # the one enum in an index
# The private classes and functions that an index refers to.
PICKLED = {
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): MEMORY_FORMATS,
    (filesystem.__name__, "_StorageInfo"): StoragePlace,
    ("torch.serialization", "_get_layout"): _get_layout,
}


def metadata_path(reader: FileSystemReader, rank: int | None) -> Any:
    """The index's file, of all ranks or of one. The reader has no public name for it."""
    return reader._get_metadata_path(rank)
