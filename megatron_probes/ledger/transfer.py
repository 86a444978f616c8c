"""Takes the reduced cells to the host without making the training thread wait for the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from megatron_probes.catalog import Priority
from megatron_probes.ledger.ledger import Ledger
from megatron_probes.ledger.slot import Kind

T = TypeVar("T")


@dataclass(frozen=True)
class Payload(Generic[T]):
    """The reduced cells of one step on the host (kind -> float64 [cells sent]), under the caller's label."""

    label: T
    cells: dict[Kind, np.ndarray]


@dataclass
class _Copy(Generic[T]):
    """A pinned landing area and what is in flight to it."""

    landing: torch.Tensor
    view: np.ndarray
    event: torch.cuda.Event | None
    rows: list[tuple[T, Priority]]


class Outbox(Generic[T]):
    """Stages one row a step on the device and sends ``write_every`` rows at a time in one copy.

    ``put`` never waits. When all ``depth`` landing areas are still in flight the rows are given up and
    counted in ``lost_steps``.
    """

    def __init__(self, ledger: Ledger, *, write_every: int, depth: int = 4) -> None:
        self._ledger = ledger
        self._widths = {kind: ledger.cells_sent(kind, Priority.P1) for kind in Kind}
        shape = (write_every, sum(self._widths.values()))
        self._staged = torch.empty(shape, dtype=torch.float64, device=ledger.device)
        self._rows: list[tuple[T, Priority]] = []
        self._on_cuda = ledger.device.type == "cuda"
        self._free: list[_Copy[T]] = []
        for _ in range(depth if self._on_cuda else 1):
            landing = torch.empty(shape, dtype=torch.float64, pin_memory=self._on_cuda)
            event = torch.cuda.Event() if self._on_cuda else None
            self._free.append(_Copy(landing, landing.numpy(), event, []))
        self._in_flight: deque[_Copy[T]] = deque()
        self.lost_steps = 0

    def put(self, label: T, priority: Priority) -> None:
        """Stages the reduced cells under ``label``; starts a copy when ``write_every`` rows are staged."""
        row = self._staged[len(self._rows)]
        start = 0
        for kind, width in self._widths.items():
            due = self._ledger.due(kind, priority)
            row[start : start + due.numel()].copy_(due)
            start += width
        self._rows.append((label, priority))
        if len(self._rows) == len(self._staged):
            self.send()

    def send(self) -> None:
        """Starts the copy of what is staged."""
        if not self._rows:
            return
        if not self._free:
            self.lost_steps += len(self._rows)
            self._rows = []
            return
        copy = self._free.pop()
        copy.rows, self._rows = self._rows, []
        copy.landing[: len(copy.rows)].copy_(self._staged[: len(copy.rows)], non_blocking=True)
        if copy.event is not None:
            copy.event.record()
        self._in_flight.append(copy)

    def collect(self, *, wait: bool = False) -> list[Payload[T]]:
        """The payloads whose copy has arrived; with ``wait`` (never inside a step) all of them."""
        arrived: list[Payload[T]] = []
        while self._in_flight:
            copy = self._in_flight[0]
            if copy.event is not None and not copy.event.query():
                if not wait:
                    break
                copy.event.synchronize()
            self._in_flight.popleft()
            arrived.extend(self._unstack(copy))
            self._free.append(copy)
        return arrived

    def _unstack(self, copy: _Copy[T]) -> list[Payload[T]]:
        payloads = []
        for row, (label, priority) in zip(copy.view, copy.rows, strict=False):
            cells, start = {}, 0
            for kind, width in self._widths.items():
                sent = self._ledger.cells_sent(kind, priority)
                cells[kind] = row[start : start + sent].copy()
                start += width
            payloads.append(Payload(label, cells))
        return payloads
