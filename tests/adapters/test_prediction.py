"""loss/mtp_NNN on Megatron's own runs, against float64 sums over the losses that its heads made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from capturing_run import Captured, Run, train, train_older

from megatron_probes.sinks import StepRecord
from tests.patches.megatron_releases import copy_release

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

HEADS = 2
PREDICTION = [f"--mtp-num-layers={HEADS}"]
LAYOUTS = {
    "1 rank": (1, []),
    "tp2 sp": (2, ["--tensor-model-parallel-size=2", "--sequence-parallel"]),
    "dp2": (2, []),
    "cp2": (2, ["--context-parallel-size=2"]),
    "pp2": (2, ["--pipeline-model-parallel-size=2"]),
    "full recompute": (
        1,
        ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"],
    ),
}
COUNTS = [50.0, 46.0]
"""Targets of the heads at step 1, the same in all layouts."""


def expected_sums(ranks: list[Captured]) -> tuple[torch.Tensor, torch.Tensor]:
    """sum(m * l) and sum(m) of each head over ranks that saw whole sequences of different data.

    Head d predicts d + 1 tokens further than the main head: its mask is the main one moved to the left.
    """
    sums, counts = torch.zeros(HEADS, dtype=torch.float64), torch.zeros(HEADS, dtype=torch.float64)
    for seen in ranks:
        for mask, losses in zip(seen.masks, seen.losses, strict=True):
            assert len(losses) == HEADS + 1
            for head in range(HEADS):
                moved = torch.zeros_like(mask, dtype=torch.float64)
                moved[:, : -head - 1] = mask[:, head + 1 :]
                sums[head] += (moved * losses[head].double()).sum()
                counts[head] += moved.sum()
    return sums, counts


def check(record: StepRecord, data_ranks: list[Captured]) -> None:
    sums, counts = expected_sums(data_ranks)
    assert counts.tolist() == COUNTS
    assert record.parts["loss/mtp/tokens"] == COUNTS
    assert record.parts["loss/mtp/sum"] == pytest.approx(sums.tolist(), rel=1e-9)
    for head in range(HEADS):
        mean = float(sums[head] / counts[head])
        assert record.values[f"loss/mtp_{head:03d}"] == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_head_has_the_mean_over_its_own_targets(tmp_path: Path, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    records, seen = train(Run(str(tmp_path), [*PREDICTION, *flags]), ranks)
    assert [record.step for record in records] == [1, 2]
    if layout == "cp2":  # a rank sees two pieces of each sequence: what moved between them is Megatron's
        assert records[0].parts["loss/mtp/tokens"] == COUNTS
        assert 0 < records[0].values["loss/mtp_000"] < 10
    elif layout == "dp2":
        check(records[0], seen)
    else:
        check(records[0], [rank for rank in seen if rank.masks][:1])


def test_the_main_loss_holds_nothing_of_the_heads(tmp_path: Path) -> None:
    records, (seen,) = train(Run(str(tmp_path), PREDICTION), 1)
    main = sum(
        float((mask * losses[HEADS].double()).sum())
        for mask, losses in zip(seen.masks, seen.losses, strict=True)
    )
    assert records[0].parts["loss/sum"] == pytest.approx([main], rel=1e-9)
    assert records[0].values["data/valid_tokens"] == sum(int(mask.sum()) for mask in seen.masks)


def test_heads_are_measured_at_sampled_steps_only(tmp_path: Path) -> None:
    records, _ = train(Run(str(tmp_path), PREDICTION, {"sample_every": 2}), 1)
    assert ["loss/mtp_000" in record.values for record in records] == [False, True]


def test_older_releases_keep_them_in_the_same_place(tmp_path: Path) -> None:
    records, seen = train_older(Run(str(tmp_path), PREDICTION), copy_release("0.17.1", tmp_path))
    check(records[0], seen)
