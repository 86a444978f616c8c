"""Where this rank stands on the mesh, and which rank counts a quantity that several ranks hold.

The same ranks are factored twice: dense layers see dp x cp x tp x pp, expert layers see
expert_dp x ep x expert_tp x pp. A quantity names the axes over which its data is distinct; on every
other axis of its factoring the ranks hold copies, and only index 0 of those axes counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

DENSE_AXES = ("dp", "cp", "tp")
EXPERT_AXES = ("expert_dp", "ep", "expert_tp")
AXES = (*DENSE_AXES, *EXPERT_AXES, "pp")


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it: its index on the axis and the axis' length."""

    index: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The layout of the run, this rank's place in it, and the two groups that all numbers travel on.

    ``stage_group`` spans the ranks of one pipeline stage (tp x dp x cp), ``pipeline_group`` the stages.
    A group of one rank is None. ``coordinates`` holds every rank's index on each axis of ``AXES``
    (shape [world_size, len(AXES)]); ``optimizer_instance`` is the distributed optimizer's replica.
    """

    rank: int
    world_size: int
    axes: Mapping[str, Axis]
    stage_group: dist.ProcessGroup | None
    pipeline_group: dist.ProcessGroup | None
    coordinates: tuple[tuple[int, ...], ...]
    sequence_parallel: bool = False
    optimizer_instance: Axis = Axis(0, 1)

    @classmethod
    def single(cls) -> Topology:
        """The layout of one process without process groups."""
        axes = {name: Axis(0, 1) for name in AXES}
        return cls(
            rank=0,
            world_size=1,
            axes=axes,
            stage_group=None,
            pipeline_group=None,
            coordinates=((0,) * len(AXES),),
        )

    def index(self, axis: str) -> int:
        return self.axes[axis].index

    def size(self, axis: str) -> int:
        return self.axes[axis].size

    def owns(self, distinct: Collection[str]) -> bool:
        """Whether this rank counts a quantity that is distinct over the axes ``distinct``.

        Raises ValueError when the axes mix the dense and the expert factoring (Specification,
        "Which axes hold distinct data": a slot uses the axes of one).
        """
        factoring = factoring_of(distinct)
        return all(self.axes[axis].index == 0 for axis in factoring if axis not in distinct)

    @property
    def data_index(self) -> int:
        """This rank's index among the ranks that hold different tokens (dp x cp), dp outermost."""
        return self.index("dp") * self.size("cp") + self.index("cp")

    @property
    def data_size(self) -> int:
        return self.size("dp") * self.size("cp")

    @property
    def last_stage(self) -> int:
        return self.size("pp") - 1

    def data_holders(self) -> tuple[int, ...]:
        """For each data index, the lowest global rank of the last stage that holds that data."""
        dp, cp, pp = (AXES.index(axis) for axis in ("dp", "cp", "pp"))
        holders = [self.world_size] * self.data_size
        for rank, place in enumerate(self.coordinates):
            if place[pp] == self.last_stage:
                data = place[dp] * self.size("cp") + place[cp]
                holders[data] = min(holders[data], rank)
        return tuple(holders)

    def describe(self) -> dict[str, int | bool]:
        """Axis sizes and modes, for the manifest and the self-check."""
        sizes = {axis: self.size(axis) for axis in AXES if self.size(axis) > 1}
        return {
            "world_size": self.world_size,
            **sizes,
            "sequence_parallel": self.sequence_parallel,
            "optimizer_instances": self.optimizer_instance.size,
        }


def factoring_of(distinct: Collection[str]) -> tuple[str, ...]:
    """The factoring, dense or expert, that the axes ``distinct`` belong to."""
    unknown = set(distinct) - set(AXES)
    if unknown:
        raise ValueError(f"unknown mesh axes {sorted(unknown)}: known are {', '.join(AXES)}")
    expert = set(distinct) & set(EXPERT_AXES)
    dense = set(distinct) & set(DENSE_AXES)
    if expert and dense:
        raise ValueError(f"axes {sorted(distinct)} mix the dense and the expert factoring of the ranks")
    return EXPERT_AXES if expert else DENSE_AXES


def gather_coordinates(axes: Mapping[str, Axis], device: torch.device) -> tuple[tuple[int, ...], ...]:
    """Every rank's index on each axis of ``AXES``: one all-gather over the world, at start only."""
    mine = torch.tensor([axes[name].index for name in AXES], dtype=torch.int64, device=device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return (tuple(mine.tolist()),)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return tuple(tuple(row) for row in torch.stack(everyone).tolist())
