"""The collectives of the ledger on real gloo ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_probes.catalog import Priority
from megatron_probes.cpu.fork import RankError, fork_ranks, gloo_process_group
from megatron_probes.ledger import Kind, Ledger, Source
from megatron_probes.topology import AXES, Axis, Topology, gather_coordinates

pytestmark = pytest.mark.slow


def stage_and_pipeline(rank: int) -> Topology:
    """Four ranks as TP2 x PP2: stages {0, 1} and {2, 3}, pipelines {0, 2} and {1, 3}."""
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    axes = dict.fromkeys(AXES, Axis(0, 1)) | {"tp": Axis(rank % 2, 2), "pp": Axis(rank // 2, 2)}
    return Topology(
        rank=rank,
        world_size=4,
        axes=axes,
        stage_group=stages[rank // 2],
        pipeline_group=pipelines[rank % 2],
        coordinates=gather_coordinates(axes, torch.device("cpu")),
    )


def reduce_on_rank(rank: int) -> dict[str, list[float]]:
    with gloo_process_group():
        ledger = Ledger(stage_and_pipeline(rank), torch.device("cpu"))
        sharded = ledger.declare("sharded", family="f", kind=Kind.SUM, axes=("tp",))
        same_on_tp = ledger.declare("same", family="f", kind=Kind.SUM, axes=("dp", "cp"))
        peak = ledger.declare("peak", family="f", kind=Kind.MAX, axes=("tp", "pp"), source=Source.HOST)
        p1 = ledger.declare("p1", family="f", kind=Kind.SUM, axes=("tp",), priority=Priority.P1)
        ledger.freeze()
        ledger.reset()
        for slot in (sharded, same_on_tp, p1):
            if slot.owned:
                slot.cells.fill_(float(rank + 1))
        ledger.set_host(peak, 10.0 - rank)
        ledger.reduce(Priority.P0)
        return {slot.name: slot.cells.tolist() for slot in (sharded, same_on_tp, peak, p1)}


def test_every_rank_ends_with_the_reduced_values():
    results = fork_ranks(reduce_on_rank, 4, timeout_s=120)
    for rank, result in enumerate(results):
        assert result["sharded"] == [10.0]  # 1 + 2 + 3 + 4
        assert result["same"] == [4.0]  # ranks 0 and 2 own it: 1 + 3
        assert result["peak"] == [10.0]
        assert result["p1"] == [rank + 1.0]  # not due: untouched


def nonfinite_on_rank(rank: int) -> list[float]:
    with gloo_process_group():
        ledger = Ledger(stage_and_pipeline(rank), torch.device("cpu"))
        total = ledger.declare("total", family="f", kind=Kind.SUM, axes=("tp",), width=2)
        ledger.freeze()
        ledger.reset()
        total.cells.copy_(torch.tensor([math.nan if rank == 1 else 1.0, math.inf if rank == 2 else 1.0]))
        ledger.reduce(Priority.P0)
        return total.cells.tolist()


def test_a_non_finite_part_makes_the_sum_non_finite_everywhere():
    for nan, inf in fork_ranks(nonfinite_on_rank, 4, timeout_s=120):
        assert math.isnan(nan)
        assert inf == math.inf


def declare_differently(rank: int) -> None:
    with gloo_process_group():
        ledger = Ledger(stage_and_pipeline(rank), torch.device("cpu"))
        ledger.declare("moe/layer_000/tokens", family="experts", kind=Kind.SUM, axes=("dp",), width=4 + rank)
        ledger.freeze()


def test_ranks_that_declare_other_slots_are_refused_before_training():
    with pytest.raises(RankError, match=r"LedgerMismatch.*differ from another rank's"):
        fork_ranks(declare_differently, 4, timeout_s=120)
