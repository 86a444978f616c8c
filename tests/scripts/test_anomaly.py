from __future__ import annotations

import torch
from demo_run.anomaly import CorruptedSamples

SEQUENCE = 4096


class _Counting(torch.utils.data.Dataset):
    """Sample i counts up from i."""

    split = "train"

    def __len__(self):
        return 6

    def __getitem__(self, index):
        text = torch.arange(index, index + SEQUENCE + 1)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(SEQUENCE),
            "dataset_id": index,
        }


def test_only_the_samples_of_the_batch_are_corrupted():
    dataset = CorruptedSamples(_Counting(), range(2, 4))
    for index in range(len(dataset)):
        original, sample = _Counting()[index], dataset[index]
        assert torch.equal(sample["tokens"], original["tokens"]) == (index not in (2, 3))
        assert torch.equal(sample["loss_mask"], original["loss_mask"])
        assert sample["dataset_id"] == index


def test_the_corruption_is_random_bytes_shifted_by_one_and_repeatable():
    dataset = CorruptedSamples(_Counting(), range(2, 4))
    sample = dataset[2]
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["tokens"].dtype == _Counting()[2]["tokens"].dtype
    assert {*sample["tokens"].tolist()} == {*range(256)}
    assert torch.equal(dataset[2]["tokens"], sample["tokens"])
    assert not torch.equal(dataset[3]["tokens"], sample["tokens"])


def test_the_sampler_sees_the_dataset_it_would_see_without():
    dataset = CorruptedSamples(_Counting(), range(2, 4))
    assert len(dataset) == len(_Counting())
    assert dataset.split == "train"
