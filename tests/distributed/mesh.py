"""A mesh of gloo ranks without Megatron, and a session on it: tp varies fastest, then cp, dp, pp."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_probes.config import ProbeConfig
from megatron_probes.probes import Facts, Probe
from megatron_probes.session import ProbeSession
from megatron_probes.sinks import RecordFileSink
from megatron_probes.topology import AXES, Axis, Topology, gather_coordinates
from tests.manifests import manifest

ORDER = ("pp", "dp", "cp", "tp")


def make_topology(**sizes: int) -> Topology:
    """The topology of this rank on a mesh of the given axis sizes; every rank of the world calls it."""
    lengths = [sizes.get(axis, 1) for axis in ORDER]
    places = list(itertools.product(*(range(length) for length in lengths)))
    place = places[dist.get_rank()]
    stages, pipelines = {}, {}
    for rank, (pp, *inside) in enumerate(places):
        stages.setdefault(pp, []).append(rank)
        pipelines.setdefault(tuple(inside), []).append(rank)
    stage_groups = {key: dist.new_group(ranks) for key, ranks in stages.items()}
    pipeline_groups = {key: dist.new_group(ranks) for key, ranks in pipelines.items()}
    axes = dict.fromkeys(AXES, Axis(0, 1)) | {
        axis: Axis(index, length) for axis, index, length in zip(ORDER, place, lengths, strict=True)
    }
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        axes=axes,
        stage_group=stage_groups[place[0]] if len(stages[place[0]]) > 1 else None,
        pipeline_group=pipeline_groups[place[1:]] if lengths[0] > 1 else None,
        coordinates=gather_coordinates(axes, torch.device("cpu")),
    )


def start_session(
    topology: Topology, probes: Sequence[Probe], folder: Path, config: ProbeConfig | None = None
) -> ProbeSession:
    """A session on this rank; the last rank writes the record into `folder`."""
    config = config or ProbeConfig(strict=True, sample_every=1)
    session = ProbeSession(config, topology, torch.device("cpu"), probes)
    if topology.rank == topology.world_size - 1:
        session.write_to([RecordFileSink(folder)], manifest())
    return session


def run_step(session: ProbeSession, step: int, body: Callable[[], None], **facts: object) -> None:
    """One training step in which `body` is the forward-backward pass."""
    session.step_begin(step)
    session.pass_begin()
    body()
    session.step_end(Facts(step=step, time=time.time(), step_time_s=0.0, **facts))
