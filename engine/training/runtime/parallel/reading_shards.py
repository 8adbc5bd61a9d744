"""Reads the shards that torch and DeepSpeed write for full parameters, whose pickles could name any code, without running any.

Both formats are read by unpicklers that know what such a file holds, and refuse the rest with ``pickle.UnpicklingError``.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

METADATA = {
    "pathlib": {"PosixPath"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip
"""What the metadata of torch's distributed checkpoint is made of, by module; seen in files of torch 2.13."""


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name not in METADATA.get(module_name, ()):
            raise pickle.UnpicklingError(f"the metadata of a checkpoint names {module_name}.{global_name}, which it has no use for")
        return super().find_class(module_name, global_name)


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            found: Metadata = _MetadataReader(file).load()
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a setting, such as a rate, and hand it on as a file of our own: torch reads it with any class."""
        own = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), own)
        own.seek(0)
        super().load_bytes(read_item, own)


def distributed(directory: Path) -> tuple[FileSystemReader, LoadPlanner]:
    """Return what reads torch's distributed checkpoint in `directory`."""
    return _Reader(directory), _Planner()


def of_deepspeed(path: str, map_location: Any = None) -> Any:
    """Return the content of a file of DeepSpeed's, in the place of its checkpoint engine's ``load``.

    Beyond tensors it holds three classes of DeepSpeed's own; seen in files of the stages 1 to 3 of DeepSpeed 0.19.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)
