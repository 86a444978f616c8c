"""What of a built model the probes look at: this rank's share, and the names that all ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_probes.adapters.megatron_lm.bindings import Binding
from megatron_probes.adapters.megatron_lm.gradients import (
    GradientSlice,
    ReplicationCheck,
    counted_slices,
    element_totals,
)
from megatron_probes.adapters.megatron_lm.layout import process_groups
from megatron_probes.adapters.megatron_lm.ownership import UnknownLayout, held_tensors
from megatron_probes.adapters.megatron_lm.parameters import layer_part, parameter_names, unused_parameters
from megatron_probes.adapters.megatron_lm.routers import moe_routers
from megatron_probes.config.model import GradientConfig
from megatron_probes.probes import MoELayer
from megatron_probes.topology import Topology

T = TypeVar("T")


@dataclass(kw_only=True)
class ObservedModel:
    """This rank's routers and gradient slices, and the layers and parts of the whole model.

    ``elements`` are the gradient elements that all ranks count together and those that the model has; None
    without the gradient probe.
    """

    routers: dict[MoELayer, Any] = field(default_factory=dict)
    moe_layers: list[MoELayer] = field(default_factory=list)
    gradient_slices: list[GradientSlice] = field(default_factory=list)
    layer_parts: list[str] = field(default_factory=list)
    elements: tuple[int, int] | None = None
    replication_check: ReplicationCheck | None = None


def observe_model(
    model: list[Any],
    optimizer: Any,
    topology: Topology,
    bindings: dict[str, Binding],
    config: GradientConfig,
    vocab_size: int,
) -> ObservedModel:
    """Finds what the probes that are on will look at; switches a family off where its layout is not known.

    Collective: every rank calls it, and comes to the same decisions, since all ranks of a job have the
    same arguments and kinds of optimizers.
    """
    observed = ObservedModel()
    if bindings["experts"].status != "off":
        observed.routers = moe_routers(model)
        by_name = {layer.name: layer for layer in _of_all_stages(list(observed.routers), topology)}
        observed.moe_layers = [by_name[name] for name in sorted(by_name)]
    if bindings["gradient"].status != "off":
        try:
            _observe_gradients(observed, model, optimizer, topology, bindings, config, vocab_size)
        except UnknownLayout as reason:
            bindings["gradient"] = Binding("gradient", "off", str(reason))
    return observed


def _observe_gradients(
    observed: ObservedModel,
    model: list[Any],
    optimizer: Any,
    topology: Topology,
    bindings: dict[str, Binding],
    config: GradientConfig,
    vocab_size: int,
) -> None:
    names = parameter_names(model)
    unused = unused_parameters(model)
    held = [tensor for tensor in held_tensors(optimizer, names) if id(tensor.parameter) not in unused]
    named = (p for chunk in model for p in chunk.parameters() if id(p) in names and id(p) not in unused)
    parameters = {names[id(p)]: p for p in named}
    parts = {part for part in map(layer_part, names.values()) if part is not None}
    observed.layer_parts = sorted(set(_of_all_stages(sorted(parts), topology)))
    observed.gradient_slices = counted_slices(held, topology, config.placement, vocab_size=vocab_size)
    device = next(iter(parameters.values())).device
    observed.elements = element_totals(held, parameters, topology, config.placement, device)
    counted, expected = observed.elements
    if counted != expected:
        bindings["gradient"] = Binding(
            "gradient",
            "off",
            f"the ranks together would count {counted:,} gradient elements, but the model has {expected:,}: "
            "a parameter's placement is not understood; gradient.placement in the probe config overrides it",
        )
        return
    if topology.size("tp") > 1:
        group = process_groups(model).tp
        observed.replication_check = ReplicationCheck(held, config.placement, group, device)


def _of_all_stages(mine: Sequence[T], topology: Topology) -> list[T]:
    """What all pipeline stages know together: each stage sees only its own layers."""
    if topology.pipeline_group is None:
        return list(mine)
    stages: list[Sequence[T]] = [[] for _ in range(topology.size("pp"))]
    dist.all_gather_object(stages, mine, group=topology.pipeline_group)
    return [entry for stage in stages for entry in stage]
