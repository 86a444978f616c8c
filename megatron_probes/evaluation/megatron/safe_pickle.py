"""What a checkpoint holds in pickles, read without running anything that it names.

Megatron's torch_dist format keeps an index (`.metadata`) and objects in pickles. torch reads both with
everything allowed, so they are read here first, with only the types allowed that such files consist of: bytes
that pass can be read again by anyone.
"""

from __future__ import annotations

import collections
import io
import pickle
from pathlib import Path
from typing import Any

import torch

from megatron_probes.evaluation.suite import SuiteError

_INDEX_TYPES = frozenset(
    {
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *(
            ("torch.distributed.checkpoint.planner", name)
            for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType", "BytesIOWriteData")
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.distributed.checkpoint._extension", "StreamTransformExtension"),
    }
)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _INDEX_TYPES and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs")
        return super().find_class(module, name)


def check_index(path: Path) -> None:
    """Read the index of a torch_dist checkpoint; raises ``SuiteError`` where it holds anything else."""
    try:
        with path.open("rb") as file:
            _IndexUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise SuiteError(
            f"--checkpoint: {path} is refused: {error}. Load it where you trust it, and save it anew"
        ) from None


def load_safely(source: Path | io.BytesIO, name: str) -> Any:
    """Return what ``torch.save`` wrote, allowing tensors, plain data and the types of Megatron's arguments.

    Raises ``SuiteError`` where it holds anything else.
    """
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    # Older checkpoints: what argparse and the rerun machine left in the arguments.
    torch.serialization.add_safe_globals([collections.defaultdict, collections.OrderedDict])
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise SuiteError(
            f"--checkpoint: {name} is refused, because reading it could run code: {reason} "
            "Load it where you trust it, and save it anew as torch_dist"
        ) from None
