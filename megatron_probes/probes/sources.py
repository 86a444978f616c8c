"""Loss and share of each data source."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_probes.catalog import snake_case
from megatron_probes.config import OTHER_SOURCE
from megatron_probes.formulas.ratio import ratio
from megatron_probes.ledger import Kind, Ledger
from megatron_probes.probes.base import Facts, Parts, Probe, Values


class SourcesProbe(Probe):
    """``loss/source/*`` and ``data/share/*`` (Specification, section 1).

    ``names`` is the fixed list of the configuration, in the order of the blend; every other id counts as
    ``other``.
    """

    family = "sources"

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.num_named = len(names)
        self._tags = [*(snake_case(name) for name in names), OTHER_SOURCE]

    def declare(self, ledger: Ledger) -> None:
        axes, width = ("dp", "cp"), len(self._tags)
        self._sum = ledger.declare(
            "loss/source/sum", family=self.family, kind=Kind.SUM, axes=axes, width=width
        )
        self._tokens = ledger.declare(
            "loss/source/tokens", family=self.family, kind=Kind.SUM, axes=axes, width=width
        )

    def on_frozen(self, device: torch.device) -> None:
        self._sources = torch.arange(len(self._tags), device=device)

    @torch.no_grad()
    def observe(self, losses_BS: torch.Tensor, mask_BS: torch.Tensor, source_ids: torch.Tensor) -> None:
        """Adds one micro-batch: losses and valid-target mask [batch, sequence] and their sources' ids.

        ``source_ids`` is [batch], or [batch, sequence] where samples mix sources.
        """
        if not self._sum.owned:
            return
        batch = source_ids.size(0)
        losses_BS = losses_BS.detach().reshape(batch, -1).double()
        mask_BS = mask_BS.detach().reshape(batch, -1).double()
        masked_BS = torch.where(mask_BS != 0, losses_BS * mask_BS, 0.0)
        ids = source_ids.to(self._sources.device, non_blocking=True)
        if ids.dim() == 1:
            totals, counts = masked_BS.sum(dim=1), mask_BS.sum(dim=1)
        else:
            ids, totals, counts = ids.reshape(-1), masked_BS.reshape(-1), mask_BS.reshape(-1)
        known = (ids >= 0) & (ids < self.num_named)
        belongs_KN = self._sources[:, None] == torch.where(known, ids, self.num_named)
        # Selecting before adding keeps a NaN in the source that has it.
        self._sum.cells.add_(torch.where(belongs_KN, totals, 0.0).sum(dim=1))
        self._tokens.cells.add_(torch.where(belongs_KN, counts, 0.0).sum(dim=1))

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        sums, tokens = parts["loss/source/sum"], parts["loss/source/tokens"]
        for tag, total, count in zip(self._tags, sums, tokens, strict=True):
            mean, share = ratio(float(total), float(count)), ratio(float(count), float(tokens.sum()))
            if mean is not None:
                values[f"loss/source/{tag}"] = mean
            if share is not None and (count > 0 or tag != OTHER_SOURCE):
                values[f"data/share/{tag}"] = share
