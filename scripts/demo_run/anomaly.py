"""The demo's one labelled anomaly: a batch whose text is replaced by random bytes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import Dataset


class CorruptedSamples(Dataset[dict[str, Any]]):
    """`dataset` with random bytes for text in the samples of the range `corrupted`.

    Tokens and labels (int64 [sequence]) stay shifted by one against each other; loss mask, positions and
    source stay as they are. The bytes depend on the sample's index alone. Other attributes are the dataset's.
    """

    def __init__(self, dataset: Any, corrupted: range) -> None:
        self._dataset = dataset
        self._corrupted = corrupted

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = dict(self._dataset[index])
        if index in self._corrupted:
            generator = torch.Generator().manual_seed(index)
            text = torch.randint(256, (len(sample["tokens"]) + 1,), generator=generator)
            sample |= {"tokens": text[:-1].clone(), "labels": text[1:].clone()}
        return sample


def corrupt_batch(step: int, batch_size: int) -> None:
    """Have Megatron train on random bytes at `step` (1-based); before it builds its datasets.

    Its sampler takes the samples in order, `batch_size` of them a step, whatever the layout.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    corrupted = range((step - 1) * batch_size, step * batch_size)
    build = BlendedMegatronDatasetBuilder.build

    @functools.wraps(build)
    def build_with_corruption(self: Any) -> list[Any]:
        train, *held_out = build(self)
        return [None if train is None else CorruptedSamples(train, corrupted), *held_out]

    BlendedMegatronDatasetBuilder.build = build_with_corruption
