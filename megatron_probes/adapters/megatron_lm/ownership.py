"""Which gradient elements this rank counts, decided by us from Megatron's marks and the layout."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_probes.topology import Topology

Placement = Literal["tp_sharded", "replicated"]


class UnknownLayout(RuntimeError):
    """An optimizer whose shards this adapter cannot attribute; its gradient metrics stay off."""


@dataclass(frozen=True)
class OptimizerTensor:
    """A tensor that the optimizer updates: a whole parameter or this rank's flat shard of it."""

    name: str
    parameter: torch.nn.Parameter
    tensor: torch.Tensor
    gradient_attribute: str
    data_sharded: bool

    @property
    def gradient(self) -> torch.Tensor | None:
        return getattr(self.tensor, self.gradient_attribute, None)


def parameter_names(model: list[Any]) -> dict[int, str]:
    """id(parameter) -> qualified name, virtual stages told apart by a ``chunk`` prefix."""
    from megatron.core.utils import unwrap_model

    names: dict[int, str] = {}
    for index, chunk in enumerate(model):
        prefix = f"chunk{index}." if len(model) > 1 else ""
        for name, parameter in unwrap_model(chunk).named_parameters():
            names.setdefault(id(parameter), prefix + name)
    return names


def optimizer_tensors(optimizer: Any, names: Mapping[int, str]) -> list[OptimizerTensor]:
    """Every tensor that the optimizer of this rank updates, with where its gradient stands.

    Raises UnknownLayout for optimizers whose shards are not plain slices of a parameter.
    """
    found: list[OptimizerTensor] = []
    for leaf in _leaves(optimizer):
        found.extend(_tensors_of(leaf, names))
    return found


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


def _tensors_of(optimizer: Any, names: Mapping[int, str]) -> Iterator[OptimizerTensor]:
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    kind = type(optimizer).__name__
    config = optimizer.config
    decoupled = bool(getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))
    attribute = "decoupled_grad" if decoupled else "grad"
    if kind == "DistributedOptimizer":
        halves = optimizer.shard_float16_groups if decoupled else optimizer.shard_fp32_from_float16_groups
        pairs: list[tuple[Any, Any]] = [
            (optimizer.model_float16_groups, halves),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
        sharded = True
    elif kind == "Float16OptimizerWithFloat16Params":
        pairs = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
        sharded = False
    elif kind == "FP32Optimizer":
        groups = [group["params"] for group in optimizer.param_groups]
        pairs = [(groups, groups)]
        sharded = False
    else:
        raise UnknownLayout(f"{kind} is not an optimizer whose shards the probes know")
    for parameter_groups, tensor_groups in pairs:
        for parameters, tensors in zip(parameter_groups, tensor_groups, strict=True):
            for parameter, tensor in zip(parameters, tensors, strict=True):
                yield OptimizerTensor(names[id(parameter)], parameter, tensor, attribute, sharded)


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert (shared experts are dense)."""
    return ".experts." in name


def counts_here(held: OptimizerTensor, topology: Topology, overrides: Mapping[str, Placement]) -> bool:
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
    if not _tensor_sharded(held, overrides) and topology.index(tensor_axis) != 0:
        return False
    if held.data_sharded:
        return topology.optimizer_instance.index == 0
    return all(topology.index(axis) == 0 for axis in data_axes)


def _tensor_sharded(held: OptimizerTensor, overrides: Mapping[str, Placement]) -> bool:
    for pattern, placement in overrides.items():
        if fnmatch.fnmatchcase(held.name, pattern):
            return placement == "tp_sharded"
    if is_expert(held.name):
        # Grouped expert weights carry no mark in some versions: the row-parallel bias alone repeats.
        return not held.name.endswith("linear_fc2.bias")
    return bool(getattr(held.parameter, "tensor_model_parallel", False))
