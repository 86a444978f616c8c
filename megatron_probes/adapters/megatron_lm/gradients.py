"""The gradient tensors that this rank counts, and the checks that each element is counted once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_probes import ops
from megatron_probes.adapters.megatron_lm.ownership import (
    HeldTensor,
    Placement,
    counts_here,
    is_tensor_sharded,
)
from megatron_probes.adapters.megatron_lm.parameters import layer_part, pads_vocabulary, parameter_class
from megatron_probes.probes import GradientGroup
from megatron_probes.topology import Topology

logger = logging.getLogger("megatron_probes")


@dataclass(frozen=True)
class GradientSlice:
    """A run of a held tensor's flat elements that belongs to one group; the whole tensor without bounds."""

    held: HeldTensor
    group: GradientGroup
    bounds: tuple[int, int] | None = None

    def read(self, empty: torch.Tensor) -> torch.Tensor:
        """The gradient's elements; ``empty`` where the optimizer has none at this step."""
        gradient = self.held.gradient
        if gradient is None:
            return empty
        return gradient if self.bounds is None else gradient.reshape(-1)[slice(*self.bounds)]


def counted_slices(
    held: Sequence[HeldTensor],
    topology: Topology,
    overrides: Mapping[str, Placement],
    *,
    vocab_size: int,
) -> list[GradientSlice]:
    """What this rank counts of the gradient; rows that only pad the vocabulary stand apart."""
    slices = []
    for tensor in held:
        if not counts_here(tensor, topology, overrides):
            continue
        name = tensor.name
        group = GradientGroup(parameter_class(name), layer_part(name))
        real = _real_elements(tensor, topology, vocab_size) if pads_vocabulary(name) else None
        numel = tensor.tensor.numel()
        if real is None or real >= numel:
            slices.append(GradientSlice(tensor, group))
            continue
        padding = GradientGroup(group.parameter_class, group.part, padding=True)
        slices.append(GradientSlice(tensor, group, (0, real)))
        slices.append(GradientSlice(tensor, padding, (real, numel)))
    return slices


def _real_elements(held: HeldTensor, topology: Topology, vocab_size: int) -> int:
    """How many leading elements of a held vocabulary tensor are rows of real tokens."""
    rows, *row_shape = held.parameter.shape
    real_rows = min(max(vocab_size - topology.index("tp") * rows, 0), rows)
    row_numel = held.parameter[0].numel() if row_shape else 1
    return min(max(real_rows * row_numel - held.start, 0), held.tensor.numel())


def element_totals(
    held: Sequence[HeldTensor],
    parameters: Mapping[str, torch.nn.Parameter],
    topology: Topology,
    overrides: Mapping[str, Placement],
    device: torch.device,
) -> tuple[int, int]:
    """Gradient elements that all ranks count together, and the trainable elements that the model has.

    The second is summed from the parameters' shapes and the number of copies of each, without looking at
    optimizer shards. The two must be equal. One all-reduce over the world, at start.
    """
    counted = sum(t.tensor.numel() for t in held if counts_here(t, topology, overrides))
    distinct = sum(
        parameter.numel() / _copies(name, parameter, topology, overrides)
        for name, parameter in parameters.items()
        if parameter.requires_grad and not getattr(parameter, "shared", False)
    )
    totals = torch.tensor([float(counted), distinct], dtype=torch.float64, device=device)
    if topology.world_size > 1:
        dist.all_reduce(totals)
    counted_everywhere, model = totals.tolist()
    return round(counted_everywhere), round(model)


def _copies(
    name: str, parameter: torch.nn.Parameter, topology: Topology, overrides: Mapping[str, Placement]
) -> int:
    """Ranks that hold the same elements of a parameter."""
    if getattr(parameter, "allreduce", True):
        copies, tensor_copies = topology.size("dp") * topology.size("cp"), topology.size("tp")
    else:
        copies, tensor_copies = topology.size("expert_dp"), topology.size("expert_tp")
    return copies if is_tensor_sharded(name, parameter, overrides) else copies * tensor_copies


class ReplicationCheck:
    """Warns of parameters that Megatron does not mark as split over tp although their gradients differ.

    The first step's gradients of all unmarked tensors are compared over the tensor-parallel group: one
    collective of the run, read when the next step begins. A difference beyond ``TOLERANCE`` (relative, of
    sum g^2) cannot come from the order of additions.
    """

    TOLERANCE = 1e-3

    def __init__(
        self,
        held: Sequence[HeldTensor],
        overrides: Mapping[str, Placement],
        group: Any,
        device: torch.device,
    ) -> None:
        self._group = group
        self._device = device
        self._unmarked = [
            tensor
            for tensor in held
            if getattr(tensor.parameter, "allreduce", True)
            and not is_tensor_sharded(tensor.name, tensor.parameter, overrides)
        ]
        pinned = device.type == "cuda"
        self._landing = torch.zeros(2, len(self._unmarked), dtype=torch.float64, pin_memory=pinned)
        self._extremes = self._landing.numpy()
        self._pending = bool(self._unmarked)
        self._sent = False

    @torch.no_grad()
    def compare(self) -> None:
        """Starts the comparison, at the first call only; every rank of the group calls it."""
        if not self._pending or self._sent:
            return
        self._sent = True
        empty = torch.empty(0, device=self._device)
        gradients = [empty if t.gradient is None else t.gradient for t in self._unmarked]
        squares = ops.multi_tensor_stats(gradients)[:, ops.STATS_COLUMNS.index("sum_sq")]
        extremes = torch.stack([squares, -squares])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        self._landing.copy_(extremes, non_blocking=True)

    def report(self) -> None:
        """Names what differed, once, after the step that compared has ended."""
        if not (self._pending and self._sent):
            return
        self._pending = False
        largest, smallest = self._extremes[0], -self._extremes[1]
        for tensor, high, low in zip(self._unmarked, largest, smallest, strict=True):
            if high - low > self.TOLERANCE * high:
                logger.warning(
                    "the gradient of %s differs between tensor-parallel ranks (sum of squares %.6g to %.6g), "
                    "yet the parameter carries no tensor_model_parallel flag: its gradient is counted on "
                    "the first rank only. If it is split, write gradient.placement: {%r: tp_sharded} in the "
                    "probe config",
                    tensor.name,
                    low,
                    high,
                    tensor.name,
                )
