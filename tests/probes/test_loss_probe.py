"""The loss of prediction heads and of data ranks, by hand."""

import math

import pytest
import torch

from megatron_probes.catalog import Priority
from megatron_probes.formulas.histogram import Histogram
from megatron_probes.probes import Facts, LossProbe
from megatron_probes.probes.loss import PER_RANK_LIMIT
from tests.meshes import LocalLedger, ranks_of, reduce_together

P0 = Facts(step=1, priority=Priority.P0, time=0.0, step_time_s=1.0)
P1 = Facts(step=1, priority=Priority.P1, time=0.0, step_time_s=1.0)


def started(topology, **options) -> tuple[LossProbe, LocalLedger]:
    probe, ledger = LossProbe(topology, **options), LocalLedger(topology, torch.device("cpu"))
    probe.declare(ledger)
    ledger.freeze()
    ledger.reset()
    return probe, ledger


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_heads_are_weighted_by_targets_over_ranks_and_micro_batches():
    ranks = [started(topology, mtp_heads=2) for topology in ranks_of(dp=2, tp=2, sequence_parallel=True)]
    for (probe, _), topology in zip(ranks, ranks_of(dp=2, tp=2, sequence_parallel=True), strict=True):
        if topology.index("dp") == 0:
            probe.observe_mtp(0, tensor(2.0, 4.0, math.nan), tensor(1.0, 1.0, 0.0))
            probe.observe_mtp(1, tensor(7.0, 0.0, 0.0), tensor(1.0, 0.0, 0.0))
            probe.observe_mtp(0, tensor(9.0, 1.0, 1.0), tensor(1.0, 0.0, 0.0))
        else:
            probe.observe_mtp(0, tensor(1.0, 5.0, 5.0), tensor(1.0, 0.0, 0.0))
        probe.observe(tensor(3.0), None)
    parts = reduce_together([ledger for _, ledger in ranks], Priority.P1)
    values = {}
    ranks[0][0].finalize(parts, P1, values)
    assert values["loss/mtp_000"] == (2 + 4 + 9 + 1) / 4  # a mean of the ranks' means would be 3
    assert values["loss/mtp_001"] == 7.0
    assert values["loss/global"] == 3.0
    assert values["data/valid_tokens"] == 2


def test_a_head_without_a_target_has_no_loss():
    (topology,) = ranks_of()
    probe, ledger = started(topology, mtp_heads=2)
    probe.observe_mtp(0, tensor(2.0), tensor(1.0))
    probe.observe_mtp(1, tensor(2.0), tensor(0.0))
    values = {}
    probe.finalize(reduce_together([ledger], Priority.P1), P1, values)
    assert values["loss/mtp_000"] == 2.0
    assert "loss/mtp_001" not in values


def per_rank(losses: list[list[float]], **options) -> tuple[LossProbe, dict]:
    """The probe of the last rank and the reduced parts, with ``losses`` on the data ranks of a TP2 mesh."""
    topologies = ranks_of(dp=len(losses), tp=2)
    ranks = [started(topology, per_rank=True, **options) for topology in topologies]
    for (probe, _), topology in zip(ranks, topologies, strict=True):
        mine = tensor(*losses[topology.data_index])
        probe.observe(mine, torch.ones_like(mine) if len(losses[topology.data_index]) else mine)
    return ranks[-1][0], reduce_together([ledger for _, ledger in ranks], Priority.P1)


def test_the_means_of_the_data_ranks_are_distributed_and_named_by_rank():
    probe, parts = per_rank([[1.0, 3.0], [4.0], [], [4.0, 4.0]])
    found = probe.histograms(parts, P1)
    assert found.keys() == {"loss/rank_mean"}
    histogram = found["loss/rank_mean"]
    assert histogram.named == ((0, 2.0), (2, 4.0), (6, 4.0))  # the lowest global rank that holds the data
    assert (histogram.edges[0], histogram.edges[-1], sum(histogram.counts)) == (2.0, 4.0, 3.0)
    assert (histogram.counts[0], histogram.counts[-1]) == (1.0, 2.0)


def test_ranks_are_distributed_at_sampled_steps_and_when_asked_for():
    probe, parts = per_rank([[1.0], [2.0]])
    assert probe.histograms(parts, P0) == {}
    (topology,) = ranks_of()
    silent, ledger = started(topology)
    silent.observe(tensor(1.0), None)
    assert silent.histograms(reduce_together([ledger], Priority.P1), P1) == {}


def test_a_broken_rank_is_named_and_lies_in_no_bin():
    probe, parts = per_rank([[1.0], [math.nan]])
    histogram = probe.histograms(parts, P1)["loss/rank_mean"]
    assert (histogram.edges, histogram.counts) == ((1.0, 1.0), (1.0,))
    assert str(histogram.named) == "((0, 1.0), (2, nan))"


@pytest.mark.parametrize(("data_ranks", "shown"), [(PER_RANK_LIMIT, True), (PER_RANK_LIMIT + 1, False)])
def test_up_to_64_data_ranks_are_distributed(data_ranks, shown):
    topologies = ranks_of(dp=data_ranks)
    ranks = [started(topology, per_rank=True) for topology in topologies]
    for probe, _ in ranks:
        probe.observe(tensor(2.0), None)
    found = ranks[0][0].histograms(reduce_together([ledger for _, ledger in ranks], Priority.P1), P1)
    named = tuple((rank, 2.0) for rank in range(data_ranks))
    assert found == ({"loss/rank_mean": Histogram((2.0, 2.0), (data_ranks,), named)} if shown else {})
