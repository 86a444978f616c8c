"""Values that depend on the layout by definition, from the captured tensors of that same layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from captured_sums import routed_tokens
from comparison import Difference, compare
from layout_run import LayoutRun
from quantities import Quantity

VALUES: Mapping[str, Callable[[LayoutRun, int], float | None]] = {}
"""Tag of a layout-dependent value -> what the captured tensors of that layout give."""


def _value(tag: str) -> Callable:
    def register(compute: Callable[[LayoutRun, int], float | None]) -> Callable:
        VALUES[tag] = compute  # type: ignore[index]
        return compute

    return register


def _rank_means(run: LayoutRun, step: int) -> list[float]:
    """Mean loss of each data rank that has valid targets."""
    means = []
    for rank in run.ranks:
        if not (rank.is_last_stage and rank.place.tp[0] == 0):
            continue
        micro_batches = rank.steps[step].micro_batches
        tokens = sum(mb.mask.sum(dtype=np.float64) for mb in micro_batches)
        if tokens:
            means.append(sum((mb.losses.astype(np.float64) * mb.mask).sum() for mb in micro_batches) / tokens)
    return means


@_value("loss/worst_rank")
def _worst_rank(run: LayoutRun, step: int) -> float:
    return max(_rank_means(run, step))


@_value("loss/worst_rank_index")
def _worst_rank_index(run: LayoutRun, step: int) -> float:
    """The lowest rank of the last stage that holds the worst data."""
    worst = []
    for index, rank in enumerate(run.ranks):
        if rank.is_last_stage and rank.place.tp[0] == 0:
            micro_batches = rank.steps[step].micro_batches
            total = sum((mb.losses.astype(np.float64) * mb.mask).sum() for mb in micro_batches)
            worst.append((-total / sum(mb.mask.sum(dtype=np.float64) for mb in micro_batches), index))
    return float(min(worst)[1])


@_value("loss/rank_mean/min")
def _lowest_mean(run: LayoutRun, step: int) -> float:
    return min(_rank_means(run, step))


@_value("loss/rank_mean/median")
def _median_mean(run: LayoutRun, step: int) -> float:
    return float(np.median(_rank_means(run, step)))


@_value("loss/rank_mean/max")
def _highest_mean(run: LayoutRun, step: int) -> float:
    return max(_rank_means(run, step))


def _held_out_mean(run: LayoutRun, step: int) -> float | None:
    """Over all targets of the evaluation after a step; None where there was none."""
    seen = [
        micro_batch
        for rank in run.ranks
        if rank.is_last_stage and rank.place.tp[0] == 0
        for micro_batch in rank.steps[step].held_out
    ]
    if not seen:
        return None
    total = sum((mb.losses.astype(np.float64) * mb.mask).sum() for mb in seen)
    return float(total / sum(mb.mask.sum(dtype=np.float64) for mb in seen))


@_value("eval/validation/nll")
def _held_out_nll(run: LayoutRun, step: int) -> float | None:
    return _held_out_mean(run, step)


@_value("eval/validation/ppl")
def _held_out_ppl(run: LayoutRun, step: int) -> float | None:
    mean = _held_out_mean(run, step)
    return None if mean is None else float(np.exp(mean))


@_value("eval/validation/bpb")
def _held_out_bpb(run: LayoutRun, step: int) -> float | None:
    """Every id of the toy vocabulary is one byte."""
    mean = _held_out_mean(run, step)
    return None if mean is None else float(mean / np.log(2))


@_value("moe/shard_max_vio")
def _shard_max_vio(run: LayoutRun, step: int) -> float | None:
    """Over the expert-parallel shards, which hold runs of neighbouring experts."""
    shards = run.layout.ep
    if shards == 1:
        return None
    loads = [c.reshape(shards, -1).sum(axis=1) for c in routed_tokens(run.ranks, run.model, step).values()]
    return float(max(load.max() / load.mean() - 1.0 for load in loads))


def compare_values(run: LayoutRun, step: int) -> list[Difference]:
    """The layout-dependent values that have a reference, with what the tensors of that layout give."""
    values = run.records[step].values
    found = {tag: Quantity(float(values[tag])) for tag in VALUES if tag in values}
    right = {tag: Quantity(value) for tag in VALUES if (value := VALUES[tag](run, step)) is not None}
    if not run.model.experts:
        right.pop("moe/shard_max_vio", None)
    return compare(found, right)
