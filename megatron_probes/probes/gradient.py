"""The gradient as the optimizer sees it: accumulated, unscaled, token-normalised, before clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_probes import ops
from megatron_probes.config.model import GradientConfig
from megatron_probes.formulas import gradient as formulas
from megatron_probes.ledger import Kind, Ledger
from megatron_probes.probes.base import Facts, Parts, Probe, Values

_SUM_COLUMNS = tuple(name for name in ops.STATS_COLUMNS if name != "abs_max")


class GradientProbe(Probe):
    """``grad/norm``, ``grad/clip_rate``, ``grad/nonfinite`` (Specification, section 2).

    Who holds the gradient decides which elements it counts; the probe is given only those, so every
    element arrives once and the sums are distinct over all axes.
    """

    family = "gradient"

    def __init__(self, config: GradientConfig) -> None:
        super().__init__()
        self._clip_rate = formulas.ClipRate(window=config.clip_window)

    def declare(self, ledger: Ledger) -> None:
        self._sums = ledger.declare(
            "grad/sums",
            family=self.family,
            kind=Kind.SUM,
            axes=("dp", "cp", "tp", "pp"),
            width=len(_SUM_COLUMNS),
        )
        columns = [ops.STATS_COLUMNS.index(name) for name in _SUM_COLUMNS]
        self._columns = torch.tensor(columns, device=ledger.device)
        self._rows = torch.empty(0, len(ops.STATS_COLUMNS), dtype=torch.float64, device=ledger.device)

    @torch.no_grad()
    def observe(self, gradients: Sequence[torch.Tensor]) -> None:
        """Takes this rank's own gradient elements, once an optimizer step; replaces an earlier call."""
        if not gradients:
            self._sums.cells.zero_()
            return
        if len(self._rows) < len(gradients):
            self._rows = self._rows.new_empty(len(gradients), self._rows.size(1))
        rows = self._rows[: len(gradients)]
        ops.multi_tensor_stats(gradients, out=rows)
        torch.sum(rows.index_select(1, self._columns), dim=0, out=self._sums.cells)

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        total = dict(zip(_SUM_COLUMNS, parts["grad/sums"], strict=True))
        if total["numel"] == 0:
            return
        norm = formulas.norm(total["sum_sq"], nonfinite=total["nonfinite"], nan=total["nan"])
        values["grad/norm"] = norm
        values["grad/nonfinite"] = round(total["nonfinite"])
        if facts.clip_threshold is not None:
            self._clip_rate.push(norm, facts.clip_threshold)
            if self._clip_rate.value is not None:
                values["grad/clip_rate"] = self._clip_rate.value

    def state_dict(self) -> dict[str, Any]:
        return {"clip_rate": self._clip_rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clip_rate.load_state_dict(state["clip_rate"])
