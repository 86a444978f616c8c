"""Statistics of the model's output: the earliest sign of overflow and corruption."""

from __future__ import annotations

import torch

from megatron_probes import ops
from megatron_probes.ledger import Kind, Ledger
from megatron_probes.probes.base import Facts, Parts, Probe, Values

_SUM_COLUMNS = tuple(name for name in ops.STATS_COLUMNS if name != "abs_max")


class TensorsProbe(Probe):
    """``act/logits/absmax`` and ``act/logits/nonfinite`` (Specification, section 5)."""

    family = "tensors"

    def declare(self, ledger: Ledger) -> None:
        axes = ("dp", "cp", "tp")
        self._sums = ledger.declare(
            "act/logits/sums", family=self.family, kind=Kind.SUM, axes=axes, width=len(_SUM_COLUMNS)
        )
        self._max = ledger.declare("act/logits/absmax", family=self.family, kind=Kind.MAX, axes=axes)
        self._row = torch.zeros(len(ops.STATS_COLUMNS), dtype=torch.float64, device=ledger.device)
        columns = [ops.STATS_COLUMNS.index(name) for name in _SUM_COLUMNS]
        self._columns = torch.tensor(columns, device=ledger.device)

    def begin_pass(self) -> None:
        self._row.zero_()

    @torch.no_grad()
    def observe_logits(self, logits: torch.Tensor) -> None:
        """Adds one micro-batch of logits [s, b, v], v the real (unpadded) vocabulary of this shard."""
        ops.tensor_stats(logits.detach(), out=self._row, accumulate=True)

    @torch.no_grad()
    def end_step(self, facts: Facts) -> None:
        torch.index_select(self._row, 0, self._columns, out=self._sums.cells)
        by_name = dict(zip(ops.STATS_COLUMNS, self._row, strict=True))
        finite = by_name["numel"] - by_name["nonfinite"]
        self._max.cells.copy_(torch.where(finite > 0, by_name["abs_max"], Kind.MAX.value))

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        total = dict(zip(_SUM_COLUMNS, parts["act/logits/sums"], strict=True))
        if total["numel"] == 0:
            return
        values["act/logits/nonfinite"] = round(total["nonfinite"])
        if total["numel"] > total["nonfinite"]:
            values["act/logits/absmax"] = float(parts["act/logits/absmax"][0])
