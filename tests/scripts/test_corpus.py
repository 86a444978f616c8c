from __future__ import annotations

import argparse
import inspect

import numpy as np
import pytest
from demo_run.corpus import END_OF_DOCUMENT, SOURCES, VOCAB_SIZE, python_sources, write_indexed_dataset


@pytest.mark.megatron
def test_megatron_reads_the_bytes_of_each_document(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = ["first", "", "\u4e2d\u6587 and \u00e9"]
    tokens = write_indexed_dataset(tmp_path / "new" / "text", documents)

    dataset = IndexedDataset(str(tmp_path / "new" / "text"))
    assert [*dataset.document_indices] == [0, 1, 2, 3]
    for text, sequence in zip(documents, dataset, strict=True):
        assert [*sequence] == [*text.encode(), END_OF_DOCUMENT]
    assert tokens == dataset.sequence_lengths.sum() == sum(len(text.encode()) + 1 for text in documents)
    assert dataset[0].dtype == np.uint16


def test_every_token_has_a_place_in_the_vocabulary():
    assert VOCAB_SIZE == 256 + 1
    assert END_OF_DOCUMENT == VOCAB_SIZE - 1


def test_the_code_is_the_standard_library():
    assert inspect.getsource(argparse) in set(python_sources())


@pytest.mark.parametrize(("source", "bytes_needed"), [("code", 300_000), ("prose", 300_000)])
def test_the_text_lasts_for_the_demo(source, bytes_needed):
    assert sum(len(text.encode()) for text in SOURCES[source]()) > bytes_needed
