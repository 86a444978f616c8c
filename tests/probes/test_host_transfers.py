"""The training thread reads no device value; what is due travels in one stacked copy (PC37)."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_probes.config import ProbeConfig
from megatron_probes.ledger import Outbox
from megatron_probes.probes import Facts, LossProbe, StabilityProbe, TensorsProbe
from megatron_probes.session import ProbeSession
from megatron_probes.sinks import RecordFileSink, read_records
from megatron_probes.topology import Topology
from tests.manifests import manifest

STEPS = 100


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def run(folder, write_every: int) -> Operators:
    """A hundred steps with a loss and logits; what the training thread dispatched."""
    config = ProbeConfig(strict=True, write_every=write_every)
    topology = Topology.single()
    loss, tensors = LossProbe(topology), TensorsProbe()
    probes = [loss, StabilityProbe(config.stability), tensors]
    session = ProbeSession(config, topology, torch.device("cpu"), probes)
    session.write_to([RecordFileSink(folder)], manifest())
    with Operators() as operators:
        for step in range(1, STEPS + 1):
            session.step_begin(step)
            session.pass_begin()
            loss.observe(torch.full((4,), 2.0 + step % 3), torch.ones(4))
            tensors.observe_logits(torch.full((1, 1, 4), float(step)))
            session.step_end(Facts(step=step, time=0.0, step_time_s=0.0))
    session.close()
    return operators


@pytest.mark.parametrize(("write_every", "transfers"), [(10, 10), (1, STEPS)])
def test_one_stacked_copy_for_each_written_row(tmp_path, monkeypatch, write_every, transfers):
    copies, send = [0], Outbox.send

    def counted(outbox):
        copies[0] += bool(outbox._rows)
        send(outbox)

    monkeypatch.setattr(Outbox, "send", counted)
    operators = run(tmp_path, write_every)
    assert operators.seen["aten.copy_"] > 0
    assert operators.seen["aten._local_scalar_dense"] == 0
    assert copies[0] == transfers
    records = read_records(tmp_path)
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert records[-1].values["act/logits/absmax"] == STEPS
