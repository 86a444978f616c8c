"""Loss over all valid targets, of each prediction head and of the data ranks, and the counts of targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_probes.catalog import Priority
from megatron_probes.formulas import loss as formulas
from megatron_probes.formulas.histogram import Histogram, of_values
from megatron_probes.ledger import Kind, Ledger, Slot
from megatron_probes.probes.base import Facts, Parts, Probe, Values
from megatron_probes.topology import Topology

PER_RANK_LIMIT = 64
"""Most data ranks whose means are written one by one (Specification, section 1)."""


class LossProbe(Probe):
    """``loss/*`` and ``data/valid_tokens*`` (Specification, section 1).

    Each data rank adds its sum of masked losses and its count of valid targets to a cell of its own:
    the cells' sum is the global loss, the largest quotient the worst rank. The ``mtp_heads`` prediction
    heads have sums of their own. ``per_rank`` asks for the distribution of the ranks' means.
    """

    family = "loss"

    def __init__(self, topology: Topology, *, per_rank: bool = False, mtp_heads: int = 0) -> None:
        super().__init__()
        self._topology = topology
        self._per_rank = per_rank and topology.data_size <= PER_RANK_LIMIT
        self._mtp_heads = mtp_heads
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
        if self._mtp_heads:
            self._mtp_sum, self._mtp_tokens = (
                ledger.declare(
                    f"loss/mtp/{name}",
                    family=self.family,
                    kind=Kind.SUM,
                    axes=axes,
                    width=self._mtp_heads,
                    priority=Priority.P1,
                )
                for name in ("sum", "tokens")
            )

    @torch.no_grad()
    def observe(self, losses: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Adds one micro-batch: per-token losses and their mask (1 = valid target), of equal numel."""
        _add(self._sum, self._tokens, self._topology.data_index, losses, mask)

    @torch.no_grad()
    def observe_mtp(self, head: int, losses: torch.Tensor, mask: torch.Tensor) -> None:
        """Adds one micro-batch of a prediction head: its losses and its own mask, as ``observe`` does."""
        _add(self._mtp_sum, self._mtp_tokens, head, losses, mask)

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
        sampled = facts.priority >= Priority.P1
        if sampled and (spread := formulas.rank_mean_spread(sums, tokens)) is not None:
            values["loss/rank_mean/min"] = spread.min
            values["loss/rank_mean/median"] = spread.median
            values["loss/rank_mean/max"] = spread.max
        if "loss/mtp/sum" in parts:
            heads = zip(parts["loss/mtp/sum"], parts["loss/mtp/tokens"], strict=True)
            for head, (total, count) in enumerate(heads):
                head_mean = formulas.mean(float(total), float(count))
                if head_mean is not None:
                    values[f"loss/mtp_{head:03d}"] = head_mean
        values["loss/nan_steps"] = self._nonfinite.nan
        values["loss/inf_steps"] = self._nonfinite.inf

    def histograms(self, parts: Parts, facts: Facts) -> Mapping[str, Histogram]:
        if not self._per_rank or facts.priority < Priority.P1:
            return {}
        means = formulas.rank_means(parts["loss/sum"], parts["loss/tokens"])
        found = of_values({self._holders[position]: mean for position, mean in means.items()})
        return {} if found is None else {"loss/rank_mean": found}

    @property
    def tokens_total(self) -> int:
        """Valid targets of the run so far."""
        return self._tokens_total

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_total": self._tokens_total, "nonfinite": self._nonfinite.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tokens_total = int(state["tokens_total"])
        self._nonfinite.load_state_dict(state["nonfinite"])


def _add(sums: Slot, counts: Slot, index: int, losses: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Adds sum(m * l) and sum(m) to cell ``index`` of the two slots."""
    if not sums.owned:
        return
    cell = slice(index, index + 1)
    losses_T = losses.detach().reshape(-1).double()
    if mask is None:
        sums.cells[cell].add_(losses_T.sum())
        counts.cells[cell].add_(losses_T.numel())
        return
    mask_T = mask.detach().reshape(-1).double()
    # A masked target's loss may be NaN and must not count: NaN * 0 would.
    masked_T = torch.where(mask_T != 0, losses_T * mask_T, 0.0)
    sums.cells[cell].add_(masked_T.sum())
    counts.cells[cell].add_(mask_T.sum())
