"""Loss over all valid targets, the worst data rank, and the counts of valid targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_probes.catalog import Priority
from megatron_probes.formulas import loss as formulas
from megatron_probes.ledger import Kind, Ledger
from megatron_probes.probes.base import Facts, Parts, Probe, Values
from megatron_probes.topology import Topology


class LossProbe(Probe):
    """``loss/*`` and ``data/valid_tokens*`` (Specification, section 1).

    Each data rank adds its sum of masked losses and its count of valid targets to a cell of its own:
    the cells' sum is the global loss, the largest quotient the worst rank.
    """

    family = "loss"

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self._topology = topology
        self._holders = topology.data_holders()
        self._tokens_total = 0
        self._nonfinite = formulas.NonFiniteSteps()

    def declare(self, ledger: Ledger) -> None:
        width = self._topology.data_size
        axes = ("dp", "cp")
        self._sum = ledger.declare("loss/sum", family=self.family, kind=Kind.SUM, axes=axes, width=width)
        self._tokens = ledger.declare(
            "loss/tokens", family=self.family, kind=Kind.SUM, axes=axes, width=width
        )

    @torch.no_grad()
    def observe(self, losses: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Adds one micro-batch: per-token losses and their mask (1 = valid target), of equal numel."""
        if not self._sum.owned:
            return
        losses_T = losses.detach().reshape(-1).double()
        cell = slice(self._topology.data_index, self._topology.data_index + 1)
        if mask is None:
            self._sum.cells[cell].add_(losses_T.sum())
            self._tokens.cells[cell].add_(losses_T.numel())
            return
        mask_T = mask.detach().reshape(-1).double()
        # A masked target's loss may be NaN and must not count: NaN * 0 would.
        masked_T = torch.where(mask_T != 0, losses_T * mask_T, 0.0)
        self._sum.cells[cell].add_(masked_T.sum())
        self._tokens.cells[cell].add_(mask_T.sum())

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        sums, tokens = parts["loss/sum"], parts["loss/tokens"]
        valid_tokens = round(tokens.sum())
        self._tokens_total += valid_tokens
        values["data/valid_tokens"] = valid_tokens
        values["data/valid_tokens_total"] = self._tokens_total
        mean = formulas.mean(float(sums.sum()), valid_tokens)
        if mean is not None:
            values["loss/global"] = mean
            self._nonfinite.push(mean)
        worst = formulas.worst_rank(sums, tokens)
        if worst is not None:
            values["loss/worst_rank"], index = worst
            values["loss/worst_rank_index"] = self._holders[index]
        spread = formulas.rank_mean_spread(sums, tokens)
        if spread is not None and facts.priority >= Priority.P1:
            values["loss/rank_mean/min"] = spread.min
            values["loss/rank_mean/median"] = spread.median
            values["loss/rank_mean/max"] = spread.max
        values["loss/nan_steps"] = self._nonfinite.nan
        values["loss/inf_steps"] = self._nonfinite.inf

    @property
    def tokens_total(self) -> int:
        """Valid targets of the run so far."""
        return self._tokens_total

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_total": self._tokens_total, "nonfinite": self._nonfinite.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tokens_total = int(state["tokens_total"])
        self._nonfinite.load_state_dict(state["nonfinite"])
