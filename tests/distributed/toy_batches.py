"""The batches that every layout trains on: sample i is the same tokens, mask and source everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SEQUENCE = 32
VOCABULARY = 120
GLOBAL_BATCH = 8
SOURCES = ("code", "prose")
"""What the configuration lists; samples of a third source count as `other`."""
NUM_SOURCES = 3


def valid_length(sample: int) -> int:
    """Targets before the padding: from 9 to 32, so that ranks and micro-batches are unequal."""
    return 9 + (sample * 11 + 5) % (SEQUENCE - 8)


def source_of(sample: int) -> int:
    return (sample * sample + sample // 3) % NUM_SOURCES


def token_row(sample: int) -> np.ndarray:
    """Inputs and the last target, int64 [SEQUENCE + 1]; small ids are frequent, as in text."""
    generator = np.random.default_rng([sample, 20])
    skewed = generator.integers(0, VOCABULARY, SEQUENCE + 1) * generator.random(SEQUENCE + 1) ** 1.5
    row = skewed.astype(np.int64)
    row[valid_length(sample) + 1 :] = 0
    return row


class Batches(torch.utils.data.Dataset):
    """`size` samples in fixed order, with the keys of Megatron's blended dataset."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, sample: int) -> dict[str, Any]:
        row = torch.from_numpy(token_row(sample))
        mask = torch.zeros(SEQUENCE)
        mask[: valid_length(sample)] = 1.0
        future = torch.ones(SEQUENCE, SEQUENCE).tril() < 0.5
        return {
            "tokens": row[:-1].clone(),
            "labels": row[1:].clone(),
            "loss_mask": mask,
            "position_ids": torch.arange(SEQUENCE),
            "attention_mask": future[None],
            "dataset_id": source_of(sample),
        }


def datasets_provider(
    num_samples: list[int], vp_stage: int | None = None
) -> tuple[Batches, Batches | None, None]:
    """The training set, with a batch to spare, and the held-out set where one is asked for: the script's
    `train_valid_test_datasets_provider`.
    """
    training, held_out, _ = num_samples
    return Batches(training + GLOBAL_BATCH), Batches(held_out) if held_out else None, None


def positions(cp_rank: int, cp_size: int) -> np.ndarray:
    """Positions of the sequence that a context-parallel rank holds: of 2c chunks, r and 2c-1-r."""
    chunks = np.arange(SEQUENCE).reshape(2 * cp_size, -1)
    return np.concatenate([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def find_samples(labels: np.ndarray, cp_rank: int, cp_size: int, samples: range) -> list[int]:
    """Which of `samples` the rows of `labels` [batch, sequence / cp] are."""
    held = positions(cp_rank, cp_size)
    known = {token_row(sample)[1:][held].tobytes(): sample for sample in samples}
    return [known[row.tobytes()] for row in labels]
