"""Which gradient elements this rank counts, decided by us from Megatron's marks and the layout."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_probes.adapters.megatron_lm.parameters import is_routed_expert
from megatron_probes.topology import Topology

Placement = Literal["tp_sharded", "replicated"]


class UnknownLayout(RuntimeError):
    """An optimizer whose shards this adapter cannot attribute; its gradient metrics stay off."""


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that the optimizer updates: a whole parameter, or this rank's flat shard of one.

    ``start`` is the flat index, in this rank's parameter, of the tensor's first element.
    """

    name: str
    parameter: torch.nn.Parameter
    tensor: torch.Tensor
    start: int
    data_sharded: bool
    gradient_attribute: str

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient as the optimizer holds it; None where it has none."""
        return getattr(self.tensor, self.gradient_attribute, None)


def held_tensors(optimizer: Any, names: Mapping[int, str]) -> list[HeldTensor]:
    """Every tensor that the optimizer of this rank updates.

    Raises UnknownLayout for optimizers whose shards are not plain slices of a parameter.
    """
    return [held for leaf in _leaves(optimizer) for held in _tensors_of(leaf, names)]


def _leaves(optimizer: Any) -> Iterator[Any]:
    kind = type(optimizer).__name__
    if kind == "LayerWiseDistributedOptimizer":
        raise UnknownLayout(f"{kind} assigns whole matrices to ranks, which the probes do not follow yet")
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
        return
    for inner in chained:
        yield from _leaves(inner)


def _tensors_of(optimizer: Any, names: Mapping[int, str]) -> Iterator[HeldTensor]:
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    kind = type(optimizer).__name__
    decoupled = bool(getattr(optimizer.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))
    attribute = "decoupled_grad" if decoupled else "grad"
    sharded = kind == "DistributedOptimizer"
    if sharded:
        halves = optimizer.shard_float16_groups if decoupled else optimizer.shard_fp32_from_float16_groups
        pairs: list[tuple[Any, Any]] = [
            (optimizer.model_float16_groups, halves),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
    elif kind == "Float16OptimizerWithFloat16Params":
        pairs = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
    elif kind == "FP32Optimizer":
        groups = [group["params"] for group in optimizer.param_groups]
        pairs = [(groups, groups)]
    else:
        raise UnknownLayout(f"{kind} is not an optimizer whose shards the probes know")
    for parameter_groups, tensor_groups in pairs:
        for parameters, tensors in zip(parameter_groups, tensor_groups, strict=True):
            for parameter, tensor in zip(parameters, tensors, strict=True):
                start = optimizer._get_model_param_range_map(parameter)["param"].start if sharded else 0
                yield HeldTensor(names[id(parameter)], parameter, tensor, start, sharded, attribute)


def counts_here(held: HeldTensor, topology: Topology, overrides: Mapping[str, Placement]) -> bool:
    """Whether this rank counts the elements of a tensor that its optimizer holds.

    Copies of the same element are counted where the index on the axis they repeat over is 0; the tied
    embedding of a later stage is never counted (Specification, "Which axes hold distinct data").
    """
    parameter = held.parameter
    if getattr(parameter, "shared", False):
        return False
    # Megatron marks expert parameters that are split over ep by allreduce=False.
    on_expert_axes = not getattr(parameter, "allreduce", True)
    tensor_axis, data_axes = ("expert_tp", ("expert_dp",)) if on_expert_axes else ("tp", ("dp", "cp"))
    if topology.index(tensor_axis) != 0 and not is_tensor_sharded(held.name, parameter, overrides):
        return False
    if held.data_sharded:
        return topology.optimizer_instance.index == 0
    return all(topology.index(axis) == 0 for axis in data_axes)


def is_tensor_sharded(name: str, parameter: torch.nn.Parameter, overrides: Mapping[str, Placement]) -> bool:
    """Whether tensor-parallel ranks hold different elements of a parameter; an override decides first."""
    for pattern, placement in overrides.items():
        if fnmatch.fnmatchcase(name, pattern):
            return placement == "tp_sharded"
    if is_routed_expert(name):
        # Grouped expert weights carry no mark in some versions; only the row-parallel bias repeats.
        return not name.endswith("linear_fc2.bias")
    return bool(getattr(parameter, "tensor_model_parallel", False))
