"""Megatron's process groups as a ``Topology``."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from megatron_probes.topology import Axis, Topology, gather_coordinates


def process_groups(model: list[Any]) -> Any:
    """The model's own ``ProcessGroupCollection``, or the one of Megatron's global state."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_attr_wrapped_model

    try:
        groups = get_attr_wrapped_model(model[0], "pg_collection")
    except RuntimeError:
        groups = None
    return groups if groups is not None else ProcessGroupCollection.use_mpu_process_groups()


def build_topology(model: list[Any], args: argparse.Namespace, device: torch.device) -> Topology:
    """The topology of a Megatron job: dp spans ``gtp_remat`` where that axis exists."""
    groups = process_groups(model)

    def axis(*names: str) -> Axis:
        for name in names:
            group = getattr(groups, name, None)
            if group is not None:
                return Axis(group.rank(), group.size())
        return Axis(0, 1)

    axes = {
        "dp": axis("dp"),
        "cp": axis("cp"),
        "tp": axis("tp"),
        "pp": axis("pp"),
        "ep": axis("ep"),
        "expert_tp": axis("expt_tp"),
        "expert_dp": axis("expt_dp_gtp_remat", "expt_dp"),
    }
    instances = getattr(args, "num_distributed_optimizer_instances", 1) or 1
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        axes=axes,
        stage_group=_several(getattr(groups, "tp_dp_cp", None)),
        pipeline_group=_several(groups.pp),
        coordinates=gather_coordinates(axes, device),
        sequence_parallel=bool(args.sequence_parallel),
        optimizer_instance=axis("inter_dist_opt") if instances > 1 else Axis(0, 1),
    )


def _several(group: Any) -> Any:
    """The group, or None where it has one rank and a collective would only cost."""
    return group if group is not None and group.size() > 1 else None
