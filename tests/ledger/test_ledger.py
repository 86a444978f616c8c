"""Slots on one rank: layout, prefixes, host cells, and the way to the host."""

import numpy as np
import pytest
import torch

from megatron_probes.catalog import Priority
from megatron_probes.ledger import Kind, Ledger, Outbox, Source
from megatron_probes.topology import Topology

EVERYWHERE = ("dp", "cp", "tp", "pp")


def ledger_with_slots() -> Ledger:
    ledger = Ledger(Topology.single(), torch.device("cpu"))
    ledger.declare("p1", family="f", kind=Kind.SUM, axes=("dp",), width=3, priority=Priority.P1)
    ledger.declare("p0", family="f", kind=Kind.SUM, axes=("dp",), width=2)
    ledger.declare("host", family="f", kind=Kind.SUM, axes=EVERYWHERE, source=Source.HOST)
    ledger.declare("peak", family="f", kind=Kind.MAX, axes=EVERYWHERE)
    ledger.declare("host_peak", family="f", kind=Kind.MAX, axes=EVERYWHERE, source=Source.HOST, width=2)
    ledger.freeze()
    return ledger


def test_a_p0_step_sends_a_prefix_without_p1_cells():
    ledger = ledger_with_slots()
    assert ledger.cells_sent(Kind.SUM, Priority.P0) == 3
    assert ledger.cells_sent(Kind.SUM, Priority.P1) == 6
    assert ledger.payload_bytes(Priority.P0) == 8 * (3 + 3)
    outbox: Outbox[int] = Outbox(ledger, write_every=1)
    ledger.reset()
    ledger.reduce(Priority.P0)
    outbox.put(1, Priority.P0)
    (payload,) = outbox.collect()
    assert set(ledger.unpack(payload.cells)) == {"p0", "host", "peak", "host_peak"}


def test_host_numbers_are_of_their_own_step_only():
    ledger = ledger_with_slots()
    slots = {slot.name: slot for slots in ledger._buffers.values() for slot in slots.slots}
    ledger.reset()
    ledger.set_host(slots["host"], 7.0)
    ledger.set_host(slots["host_peak"], 2.0, index=1)
    ledger.reduce(Priority.P0)
    assert slots["host"].cells.tolist() == [7.0]
    assert slots["host_peak"].cells.tolist() == [float("-inf"), 2.0]
    ledger.reset()
    ledger.reduce(Priority.P0)
    assert slots["host"].cells.tolist() == [0.0]
    assert slots["host_peak"].cells.tolist() == [float("-inf")] * 2


def test_counts_stay_exact_to_two_to_the_53():
    ledger = ledger_with_slots()
    slot = next(s for b in ledger._buffers.values() for s in b.slots if s.name == "p0")
    ledger.reset()
    for count in (2**24, 1, 1, 1):  # PC30 (c)
        slot.cells[0] += count
    slot.cells[1] = 2**53 - 1
    outbox: Outbox[int] = Outbox(ledger, write_every=1)
    ledger.reduce(Priority.P0)
    outbox.put(1, Priority.P0)
    cells = ledger.unpack(outbox.collect()[0].cells)["p0"]
    assert [int(cell) for cell in cells] == [16777219, 2**53 - 1]


def test_rows_wait_on_the_device_until_write_every_are_there():
    ledger = ledger_with_slots()
    slot = next(s for b in ledger._buffers.values() for s in b.slots if s.name == "p0")
    outbox: Outbox[int] = Outbox(ledger, write_every=3)
    arrived = []
    for step in range(1, 8):
        ledger.reset()
        slot.cells[0] = step
        ledger.reduce(Priority.P0)
        outbox.put(step, Priority.P0)
        arrived.append([payload.label for payload in outbox.collect()])
    assert arrived == [[], [], [1, 2, 3], [], [], [4, 5, 6], []]
    outbox.send()
    (last,) = outbox.collect(wait=True)
    assert last.label == 7
    assert ledger.unpack(last.cells)["p0"][0] == 7


def test_payloads_keep_their_numbers_when_the_buffers_are_used_again():
    ledger = ledger_with_slots()
    slot = next(s for b in ledger._buffers.values() for s in b.slots if s.name == "p0")
    outbox: Outbox[int] = Outbox(ledger, write_every=1)
    payloads = []
    for step in (1, 2):
        ledger.reset()
        slot.cells[0] = 10.0 * step
        ledger.reduce(Priority.P0)
        outbox.put(step, Priority.P0)
        payloads += outbox.collect()
    assert np.array_equal([ledger.unpack(p.cells)["p0"][0] for p in payloads], [10.0, 20.0])


def test_a_name_is_declared_once():
    ledger = Ledger(Topology.single(), torch.device("cpu"))
    ledger.declare("twice", family="f", kind=Kind.SUM, axes=())
    with pytest.raises(ValueError, match="'twice' is declared twice"):
        ledger.declare("twice", family="f", kind=Kind.MAX, axes=())
