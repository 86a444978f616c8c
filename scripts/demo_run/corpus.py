"""Real text that every machine with Python has, as Megatron's indexed datasets of bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
VOCAB_SIZE = END_OF_DOCUMENT + 1
"""A token is a byte, its id the byte's value; one more id ends a document."""


def python_sources() -> Iterator[str]:
    """The modules of Python's standard library, one document each."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8")


def python_manual() -> Iterator[str]:
    """The English topics of Python's own manual, one document each."""
    from pydoc_data.topics import topics

    for _, text in sorted(topics.items()):
        yield text


SOURCES = {"code": python_sources, "prose": python_manual}
"""Name of each data source -> its documents."""


def write_indexed_dataset(prefix: Path, documents: Iterable[str]) -> int:
    """Write `prefix`.bin and `prefix`.idx as Megatron reads them; return the number of tokens (uint16)."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    tokens = 0
    for text in documents:
        document = np.append(np.frombuffer(text.encode(), np.uint8), np.uint16(END_OF_DOCUMENT))
        builder.add_document(document, [len(document)])
        tokens += len(document)
    builder.finalize(f"{prefix}.idx")
    return tokens
