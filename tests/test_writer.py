"""A step on its way to the background thread, when the queue gives its P1 part up."""

import time

import torch

from megatron_probes.catalog import Priority
from megatron_probes.ledger import Kind, Payload
from megatron_probes.probes import ExpertsProbe, Facts, Forensics, LossProbe, MoELayer
from megatron_probes.writer import StepItem
from tests.meshes import LocalLedger, ranks_of


def test_a_step_without_its_p1_part_counts_as_a_p0_step():
    """Its probes must not look for sums that were given up."""
    (topology,) = ranks_of()
    experts = ExpertsProbe(
        topology, [MoELayer("layer_000", 2)], forensics=Forensics(bias=True, margin=True), drops_tokens=True
    )
    loss = LossProbe(topology, per_rank=True, mtp_heads=1)
    ledger = LocalLedger(topology, torch.device("cpu"))
    for probe in (loss, experts):
        probe.declare(ledger)
    ledger.freeze()
    ledger.reset()
    loss.observe(torch.tensor([2.0]), None)
    experts.observe("layer_000", torch.tensor([[True, False]]), None)
    facts = Facts(step=1, priority=Priority.P1, time=time.time(), step_time_s=1.0)
    cells = {kind: ledger.due(kind, Priority.P1).numpy().copy() for kind in Kind}
    item = StepItem(
        facts, Payload(facts, cells), {kind: ledger.cells_sent(kind, Priority.P0) for kind in Kind}
    )
    assert item.p1_points > 0
    item.drop_p1()
    assert (item.p1_points, item.facts.priority) == (0, Priority.P0)
    parts, values = ledger.unpack(item.payload.cells), {}
    for probe in (loss, experts):
        probe.finalize(parts, item.facts, values)
        assert probe.histograms(parts, item.facts) == {}
    assert values["loss/global"] == 2.0
    assert values["moe/layer_000/max_vio"] == 1.0
    assert "moe/layer_000/entropy" not in values
