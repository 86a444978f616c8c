"""A slot: a few cells of the packed buffer that one quantity is summed or maximised into."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from megatron_probes.catalog import Priority


class Kind(enum.Enum):
    """How a slot combines over micro-batches and ranks; the value is the identity of the operation."""

    SUM = 0.0
    MAX = float("-inf")


class Source(enum.Enum):
    """Where the numbers of a slot come from: a device tensor, or a number that the host already knows."""

    DEVICE = "device"
    HOST = "host"


@dataclass(kw_only=True, eq=False)
class Slot:
    """One quantity of the ledger.

    ``axes`` are the mesh axes over which its data is distinct; ``owned`` says whether this rank counts
    it. A rank that does not own a slot leaves its cells at the identity of the reduction.
    ``cells`` (float64 [width], on the ledger's device) exists once the ledger is frozen.
    """

    name: str
    family: str
    kind: Kind
    axes: tuple[str, ...]
    width: int
    priority: Priority
    source: Source
    owned: bool
    offset: int = -1
    cells: torch.Tensor = field(init=False, repr=False)

    @property
    def signature(self) -> str:
        """What must be the same on every rank."""
        return f"{self.name}:{self.kind.name}:{self.width}:{int(self.priority)}:{self.source.value}"
