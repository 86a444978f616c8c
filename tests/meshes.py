"""All ranks of a small mesh in one process, for tests that need many layouts and no process group."""

import numpy as np
import torch

from megatron_probes.catalog import Priority
from megatron_probes.ledger import Kind, Ledger
from megatron_probes.topology import AXES, Axis, Topology


def ranks_of(
    *,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    expert_tp: int = 1,
    sequence_parallel: bool = False,
) -> list[Topology]:
    """The topology of every rank, numbered as Megatron does: tp fastest, then cp, dp, pp."""
    stage = dp * cp * tp
    expert_dp = stage // (ep * expert_tp)
    places = []
    for rank in range(stage * pp):
        inside = rank % stage
        places.append(
            {
                "tp": inside % tp,
                "cp": inside // tp % cp,
                "dp": inside // (tp * cp),
                "expert_tp": inside % expert_tp,
                "ep": inside // expert_tp % ep,
                "expert_dp": inside // (expert_tp * ep),
                "pp": rank // stage,
            }
        )
    length = {"dp": dp, "cp": cp, "tp": tp, "pp": pp}
    length |= {"ep": ep, "expert_tp": expert_tp, "expert_dp": expert_dp}
    coordinates = tuple(tuple(place[axis] for axis in AXES) for place in places)
    return [
        Topology(
            rank=rank,
            world_size=len(places),
            axes={axis: Axis(place[axis], length[axis]) for axis in AXES},
            stage_group=None,
            pipeline_group=None,
            coordinates=coordinates,
            sequence_parallel=sequence_parallel,
        )
        for rank, place in enumerate(places)
    ]


class LocalLedger(Ledger):
    """A rank's ledger without its groups: fingerprints are compared by ``reduce_together``."""

    def _verify(self) -> None:
        pass


def reduce_together(ledgers: list[LocalLedger], priority: Priority) -> dict[str, np.ndarray]:
    """What the collectives would leave on every rank: slot name -> reduced cells."""
    assert len({ledger.fingerprint() for ledger in ledgers}) == 1
    cells = {
        Kind.SUM: torch.stack([ledger.due(Kind.SUM, priority) for ledger in ledgers]).sum(dim=0),
        Kind.MAX: torch.stack([ledger.due(Kind.MAX, priority) for ledger in ledgers]).amax(dim=0),
    }
    return ledgers[0].unpack({kind: tensor.numpy() for kind, tensor in cells.items()})
