"""The packed buffers of all slots, and the plan of collectives that reduces them.

Everything travels as one SUM and one MAX over the stage group (tp x dp x cp), then one SUM and one MAX
over the pipeline group: at most four collectives a step, whatever is due. A slot whose data lies on
fewer ranks is lifted: ranks without distinct data hold the identity (0 for a sum, -inf for a maximum).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from megatron_probes.catalog import Priority
from megatron_probes.ledger.slot import Kind, Slot, Source
from megatron_probes.topology import Topology

# Order inside one buffer: what a P0-only step sends is a prefix, and the host's cells are one run.
_ORDER = (
    (Priority.P0, Source.DEVICE),
    (Priority.P0, Source.HOST),
    (Priority.P1, Source.HOST),
    (Priority.P1, Source.DEVICE),
)
_OPERATION = {Kind.SUM: dist.ReduceOp.SUM, Kind.MAX: dist.ReduceOp.MAX}


class LedgerMismatch(RuntimeError):
    """Ranks declared different slots: their collectives would not fit together."""


class _Buffer:
    """All cells of one reduction kind on the device, and the host's own cells before they are sent."""

    def __init__(self, kind: Kind, slots: list[Slot], device: torch.device) -> None:
        self.kind = kind
        self.slots = [slot for key in _ORDER for slot in slots if (slot.priority, slot.source) == key]
        offset = 0
        for slot in self.slots:
            slot.offset = offset
            offset += slot.width
        self.cells = torch.full((offset,), kind.value, dtype=torch.float64, device=device)
        for slot in self.slots:
            slot.cells = self.cells[slot.offset : slot.offset + slot.width]
        self.prefix = {
            Priority.P0: sum(slot.width for slot in self.slots if slot.priority == Priority.P0),
            Priority.P1: offset,
        }
        hosted = [slot for slot in self.slots if slot.source is Source.HOST]
        self.host_start = hosted[0].offset if hosted else 0
        self.host_stop = hosted[-1].offset + hosted[-1].width if hosted else 0
        # Two, taken in turn: the copy of the previous step may still be reading the other one.
        self._staging = [
            torch.full(
                (self.host_stop - self.host_start,),
                kind.value,
                dtype=torch.float64,
                pin_memory=device.type == "cuda",
            )
            for _ in range(2)
        ]
        self._staging_views = [staging.numpy() for staging in self._staging]
        self._turn = 0

    def reset(self) -> None:
        self.cells.fill_(self.kind.value)

    def set_host(self, slot: Slot, value: float, index: int) -> None:
        self._staging_views[self._turn][slot.offset - self.host_start + index] = value

    def send_host_cells(self) -> None:
        if self.host_stop > self.host_start:
            self.cells[self.host_start : self.host_stop].copy_(self._staging[self._turn], non_blocking=True)
            self._turn ^= 1
            self._staging_views[self._turn].fill(self.kind.value)


class Ledger:
    """Declares slots, holds their cells, reduces them over the mesh.

    Slots are declared while the model is built and frozen once; afterwards nothing about the shape of
    the buffers or the number of collectives changes.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        self.device = device
        self._slots: dict[str, Slot] = {}
        self._buffers: dict[Kind, _Buffer] = {}

    def declare(
        self,
        name: str,
        *,
        family: str,
        kind: Kind,
        axes: tuple[str, ...],
        width: int = 1,
        priority: Priority = Priority.P0,
        source: Source = Source.DEVICE,
    ) -> Slot:
        """Adds a slot of ``width`` float64 cells whose data is distinct over the mesh ``axes``.

        Raises ValueError for a name that is taken.
        """
        if name in self._slots:
            raise ValueError(f"slot {name!r} is declared twice")
        slot = Slot(
            name=name,
            family=family,
            kind=kind,
            axes=axes,
            width=width,
            priority=priority,
            source=source,
            owned=self.topology.owns(axes),
        )
        self._slots[name] = slot
        return slot

    def freeze(self) -> None:
        """Lays the slots out, allocates the buffers and compares the layout over all ranks.

        Raises LedgerMismatch where ranks differ.
        """
        slots = list(self._slots.values())
        self._buffers = {
            kind: _Buffer(kind, [slot for slot in slots if slot.kind is kind], self.device) for kind in Kind
        }
        self._verify()

    def _verify(self) -> None:
        """Every rank's fingerprint must be the same: one MAX of (f, -f) tells."""
        if self.topology.world_size == 1:
            return
        mine = float(self.fingerprint())
        extremes = torch.tensor([mine, -mine], dtype=torch.float64, device=self.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        highest, lowest = extremes.tolist()
        if highest != -lowest:
            raise LedgerMismatch(
                f"rank {self.topology.rank} declared {len(self._slots)} slots (fingerprint {mine:.0f}) that "
                "differ from another rank's: the probe config or the model differs between ranks"
            )

    def fingerprint(self) -> int:
        """CRC-32 of all slots in their order in the buffers."""
        text = "\n".join(slot.signature for buffer in self._buffers.values() for slot in buffer.slots)
        return zlib.crc32(text.encode())

    def reset(self) -> None:
        """Sets every cell to the identity of its reduction."""
        for buffer in self._buffers.values():
            buffer.reset()

    def set_host(self, slot: Slot, value: float, index: int = 0) -> None:
        """Puts a number that the host knows into a HOST slot; it travels with the next ``reduce``."""
        self._buffers[slot.kind].set_host(slot, value, index)

    def reduce(self, priority: Priority) -> None:
        """Reduces in place everything up to ``priority`` over the stage and the pipeline group."""
        for buffer in self._buffers.values():
            buffer.send_host_cells()
        for group in (self.topology.stage_group, self.topology.pipeline_group):
            if group is None:
                continue
            works = [
                dist.all_reduce(due, op=_OPERATION[kind], group=group, async_op=True)
                for kind, due in ((kind, self.due(kind, priority)) for kind in Kind)
                if due.numel() > 0
            ]
            for work in works:
                work.wait()

    def due(self, kind: Kind, priority: Priority) -> torch.Tensor:
        """The cells of one kind that a step of this priority sends, float64 [n]."""
        buffer = self._buffers[kind]
        return buffer.cells[: buffer.prefix[priority]]

    def cells_sent(self, kind: Kind, priority: Priority) -> int:
        return self._buffers[kind].prefix[priority]

    def payload_bytes(self, priority: Priority) -> int:
        """Bytes that one rank contributes to the collectives of one stage at a step of this priority."""
        return 8 * sum(buffer.prefix[priority] for buffer in self._buffers.values())

    def collectives(self, priority: Priority) -> int:
        """Collectives a step: those of a group of one rank and of an empty buffer are not issued."""
        groups = sum(g is not None for g in (self.topology.stage_group, self.topology.pipeline_group))
        return groups * sum(self._buffers[kind].prefix[priority] > 0 for kind in Kind)

    def unpack(self, payload: Mapping[Kind, np.ndarray]) -> dict[str, np.ndarray]:
        """Slot name -> its reduced cells, float64 [width], for the slots that the payload holds."""
        return {
            slot.name: payload[kind][slot.offset : slot.offset + slot.width]
            for kind, buffer in self._buffers.items()
            for slot in buffer.slots
            if slot.offset + slot.width <= len(payload[kind])
        }
