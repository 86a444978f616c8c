"""The held-out loss, summed over every valid target of an evaluation that the framework runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_probes.formulas.evaluation import bits_per_byte, perplexity
from megatron_probes.formulas.ratio import ratio
from megatron_probes.ledger import Kind, Ledger
from megatron_probes.probes.base import Parts, Probe, Values

_SUMS = ("nll", "targets", "covered_nll", "bytes")


class HeldOutProbe(Probe):
    """``eval/<set>/{nll,ppl,bpb}`` (Specification, section 10).

    ``token_bytes`` holds, for each id of the vocabulary, the original UTF-8 bytes that it covers, 0 for
    special tokens; without it there is no BPB. Targets that cover no bytes count in NLL and not in BPB.
    The probe has a ledger of its own: what training accumulates is never touched.
    """

    family = "evaluation"

    def __init__(self, token_bytes: Sequence[int] | None) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def declare(self, ledger: Ledger) -> None:
        self._sums = ledger.declare(
            "eval/sums", family=self.family, kind=Kind.SUM, axes=("dp", "cp"), width=len(_SUMS)
        )

    def on_frozen(self, device: torch.device) -> None:
        if self._token_bytes is not None:
            self._bytes_V = torch.tensor(self._token_bytes, dtype=torch.float64, device=device)

    @torch.no_grad()
    def observe(self, losses: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor | None) -> None:
        """Adds one micro-batch: per-token losses, valid-target mask and target ids, of equal numel."""
        if not self._sums.owned:
            return
        losses_T = losses.detach().reshape(-1).double()
        mask_T = mask.detach().reshape(-1).double()
        masked_T = torch.where(mask_T != 0, losses_T * mask_T, 0.0)
        self._sums.cells[0:1].add_(masked_T.sum())
        self._sums.cells[1:2].add_(mask_T.sum())
        if self._token_bytes is None or labels is None:
            return
        bytes_T = torch.where(mask_T != 0, self._bytes_V[labels.reshape(-1)], 0.0)
        self._sums.cells[2:3].add_(torch.where(bytes_T > 0, masked_T, 0.0).sum())
        self._sums.cells[3:4].add_(bytes_T.sum())

    def finalize_set(self, name: str, parts: Parts, values: Values) -> None:
        """Adds the values of the evaluation of one held-out set."""
        sums = dict(zip(_SUMS, map(float, parts["eval/sums"]), strict=True))
        nll = ratio(sums["nll"], sums["targets"])
        if nll is None:
            return
        values[f"eval/{name}/nll"] = nll
        values[f"eval/{name}/ppl"] = perplexity(nll).value
        bpb = bits_per_byte(sums["covered_nll"], round(sums["bytes"]))
        if bpb is not None:
            values[f"eval/{name}/bpb"] = bpb
