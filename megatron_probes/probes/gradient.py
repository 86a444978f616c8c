"""The gradient as the optimizer sees it: accumulated, unscaled, token-normalised, before clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_probes import ops
from megatron_probes.catalog import Priority
from megatron_probes.catalog.spec import PARAMETER_CLASSES
from megatron_probes.config.model import GradientConfig
from megatron_probes.formulas import gradient as formulas
from megatron_probes.formulas.ratio import ratio, root_ratio
from megatron_probes.ledger import Kind, Ledger, Slot
from megatron_probes.probes.base import Facts, Parts, Probe, Values

_SUMS = tuple(name for name in ops.STATS_COLUMNS if name != "abs_max")
_WIDTH = len(_SUMS)
_ABS_MAX = ops.STATS_COLUMNS.index("abs_max")
_AXES = ("dp", "cp", "tp", "pp")


@dataclass(frozen=True)
class GradientGroup:
    """What one gradient tensor belongs to.

    ``part`` is ``layer_NNN/<part>`` or None outside the layers. ``padding`` marks rows that only pad the
    vocabulary: they count in norms and maxima, and in no mean or fraction.
    """

    parameter_class: str
    part: str | None
    padding: bool = False


class _GroupSums:
    """Sums and maxima of the statistics rows that belong to each of some groups.

    ``members`` gives each tensor's group index, -1 for none. Products with a 0/1 matrix add in a fixed
    order, which scattered atomic additions would not.
    """

    def __init__(self, members: Sequence[int], sums: Slot, maxima: Slot, device: torch.device) -> None:
        belongs_GN = torch.zeros(maxima.width, len(members), dtype=torch.float64)
        for tensor, group in enumerate(members):
            if group >= 0:
                belongs_GN[group, tensor] = 1.0
        self._belongs_GN = belongs_GN.to(device)
        self._member_GN = self._belongs_GN.bool()
        self._sums, self._maxima = sums, maxima

    def put(self, sums_NC: torch.Tensor, abs_max_N: torch.Tensor) -> None:
        torch.matmul(self._belongs_GN, sums_NC, out=self._sums.cells.view(-1, _WIDTH))
        if abs_max_N.numel() > 0:
            masked_GN = torch.where(self._member_GN, abs_max_N, Kind.MAX.value)
            torch.amax(masked_GN, dim=1, out=self._maxima.cells)


class GradientProbe(Probe):
    """``grad/*`` (Specification, section 2).

    Who holds the gradient decides which elements it counts: the probe is given only those, so that every
    element arrives once and the sums are distinct over all axes. ``parts`` are the layer parts of the whole
    model, the same on every rank; ``groups`` belong to this rank's gradient tensors, in the order in which
    ``observe`` gets them.
    """

    family = "gradient"

    def __init__(self, config: GradientConfig, parts: Sequence[str], groups: Sequence[GradientGroup]) -> None:
        super().__init__()
        self._clip_rate = formulas.ClipRate(window=config.clip_window)
        self._parts = tuple(parts)
        self._groups = tuple(groups)
        self._classes = (*PARAMETER_CLASSES, *(f"{name}_padding" for name in PARAMETER_CLASSES))

    def declare(self, ledger: Ledger) -> None:
        def slots(name: str, groups: int) -> tuple[Slot, Slot]:
            sums = ledger.declare(
                f"grad/{name}/sums",
                family=self.family,
                kind=Kind.SUM,
                axes=_AXES,
                width=groups * _WIDTH,
                priority=Priority.P1,
            )
            maxima = ledger.declare(
                f"grad/{name}/abs_max",
                family=self.family,
                kind=Kind.MAX,
                axes=_AXES,
                width=groups,
                priority=Priority.P1,
            )
            return sums, maxima

        self._total = ledger.declare("grad/sums", family=self.family, kind=Kind.SUM, axes=_AXES, width=_WIDTH)
        self._clipped = ledger.declare(
            "grad/clipped/sums",
            family=self.family,
            kind=Kind.SUM,
            axes=_AXES,
            width=_WIDTH,
            priority=Priority.P1,
        )
        self._class_slots = slots("class", len(self._classes))
        self._part_slots = slots("part", len(self._parts))
        device = ledger.device
        columns = [ops.STATS_COLUMNS.index(name) for name in _SUMS]
        self._columns = torch.tensor(columns, device=device)
        shape = (len(self._groups), len(ops.STATS_COLUMNS))
        self._rows_NC = torch.zeros(shape, dtype=torch.float64, device=device)

    def on_frozen(self, device: torch.device) -> None:
        part_index = {part: index for index, part in enumerate(self._parts)}
        classes = [
            self._classes.index(group.parameter_class + ("_padding" if group.padding else ""))
            for group in self._groups
        ]
        parts = [part_index[group.part] if group.part is not None else -1 for group in self._groups]
        self._by_class = _GroupSums(classes, *self._class_slots, device)
        self._by_part = _GroupSums(parts, *self._part_slots, device)

    @torch.no_grad()
    def observe(self, gradients: Sequence[torch.Tensor]) -> None:
        """Takes this rank's gradient elements before clipping, one tensor for each of ``groups``.

        Called once an optimizer step; a tensor without elements stands for a missing gradient.
        """
        sums_NC = self._measure(gradients)
        torch.sum(sums_NC, dim=0, out=self._total.cells)
        if self.gate.sampled:
            abs_max_N = self._rows_NC[:, _ABS_MAX]
            self._by_class.put(sums_NC, abs_max_N)
            self._by_part.put(sums_NC, abs_max_N)

    @torch.no_grad()
    def observe_clipped(self, gradients: Sequence[torch.Tensor]) -> None:
        """Takes the same elements as the optimizer consumes them, after clipping."""
        torch.sum(self._measure(gradients), dim=0, out=self._clipped.cells)

    def _measure(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        if gradients:
            ops.multi_tensor_stats(gradients, out=self._rows_NC)
        return self._rows_NC.index_select(1, self._columns)

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        total = dict(zip(_SUMS, parts["grad/sums"], strict=True))
        if total["numel"] == 0:
            return
        norm = formulas.norm(total["sum_sq"], nonfinite=total["nonfinite"], nan=total["nan"])
        values["grad/norm"] = norm
        values["grad/nonfinite"] = round(total["nonfinite"])
        if facts.clip_threshold is not None:
            self._clip_rate.push(norm, facts.clip_threshold)
            if self._clip_rate.value is not None:
                values["grad/clip_rate"] = self._clip_rate.value
        if "grad/class/sums" in parts:
            self._finalize_clipped(parts, values)
            self._finalize_classes(parts, values)
            self._finalize_parts(parts, values)

    def _finalize_clipped(self, parts: Parts, values: Values) -> None:
        clipped = dict(zip(_SUMS, parts["grad/clipped/sums"], strict=True))
        if clipped["numel"] > 0:
            values["grad/norm_after_clip"] = formulas.norm(
                clipped["sum_sq"], nonfinite=clipped["nonfinite"], nan=clipped["nan"]
            )

    def _finalize_classes(self, parts: Parts, values: Values) -> None:
        sums = parts["grad/class/sums"].reshape(-1, _WIDTH)
        maxima = parts["grad/class/abs_max"]
        n = len(PARAMETER_CLASSES)
        real, with_padding = sums[:n], sums[:n] + sums[n:]
        largest = np.maximum(maxima[:n], maxima[n:])
        _put_statistics(values, "grad", real.sum(axis=0), float(largest.max()))
        for index, name in enumerate(PARAMETER_CLASSES):
            if real[index, _SUMS.index("numel")] == 0:
                continue
            _put_statistics(values, f"grad/{name}", real[index], float(largest[index]))
            whole = dict(zip(_SUMS, with_padding[index], strict=True))
            values[f"grad/{name}/norm"] = formulas.norm(
                whole["sum_sq"], nonfinite=whole["nonfinite"], nan=whole["nan"]
            )

    def _finalize_parts(self, parts: Parts, values: Values) -> None:
        sums = parts["grad/part/sums"].reshape(-1, _WIDTH)
        for part, row, largest in zip(self._parts, sums, parts["grad/part/abs_max"], strict=True):
            named = dict(zip(_SUMS, row, strict=True))
            rms = root_ratio(named["sum_sq"], named["numel"])
            if rms is not None:
                values[f"grad/{part}/rms"] = rms
                _put_statistics(values, f"grad/{part}", row, float(largest))

    def state_dict(self) -> dict[str, Any]:
        return {"clip_rate": self._clip_rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clip_rate.load_state_dict(state["clip_rate"])


def _put_statistics(values: Values, prefix: str, sums: np.ndarray, largest: float) -> None:
    named = dict(zip(_SUMS, sums, strict=True))
    abs_mean = ratio(named["sum_abs"], named["numel"])
    zero_fraction = ratio(named["zeros"], named["numel"])
    if abs_mean is None or zero_fraction is None:
        return
    values[f"{prefix}/abs_mean"] = abs_mean
    values[f"{prefix}/zero_fraction"] = zero_fraction
    if named["numel"] > named["nonfinite"]:
        values[f"{prefix}/abs_max"] = largest
