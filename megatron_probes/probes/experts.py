"""How evenly the router spreads valid tokens over experts and expert-parallel shards, and how it decides."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_probes import ops
from megatron_probes.catalog import Priority
from megatron_probes.formulas import experts as formulas
from megatron_probes.formulas.histogram import Histogram, of_bins, of_shares, of_values
from megatron_probes.formulas.ratio import ratio
from megatron_probes.ledger import Kind, Ledger, Slot
from megatron_probes.probes.base import Facts, Parts, Probe, Values
from megatron_probes.topology import Topology

logger = logging.getLogger("megatron_probes")

NAMED_EXPERTS = 4
"""The busiest experts that the record names beside the shares of all."""

_MARGIN_EDGES = (0.0, *ops.bin_edges(), math.inf)


@dataclass(frozen=True)
class MoELayer:
    """One router: its global name (``layer_003``, ``mtp_001``) and its number of experts."""

    name: str
    num_experts: int


@dataclass(frozen=True, kw_only=True)
class Forensics:
    """What P2 adds to the shares of the experts: the routing ``bias`` and the top-k ``margin``."""

    bias: bool
    margin: bool


class ExpertsProbe(Probe):
    """``moe/*`` (Specification, section 7).

    ``layers`` are the MoE layers of the whole model, in order and the same on every rank; ``drops_tokens``
    says whether the experts have a capacity; each token goes to ``topk`` experts.
    """

    family = "experts"

    def __init__(
        self,
        topology: Topology,
        layers: Sequence[MoELayer],
        *,
        drops_tokens: bool = False,
        topk: int = 1,
        forensics: Forensics | None = None,
    ) -> None:
        super().__init__()
        self.forensics = forensics
        self._topology = topology
        self._layers = tuple(layers)
        self._drops_tokens = drops_tokens
        self._counts: dict[str, Slot] = {}
        self._aux_losses: dict[str, Slot] = {}
        self._topk = topk
        self._margins: dict[str, Slot] = {}
        self._biases: dict[str, Slot] = {}
        self._bias_readers: dict[str, Callable[[], torch.Tensor]] = {}
        self._given_mask: bool | None = None
        self._padding_reported = False

    def declare(self, ledger: Ledger) -> None:
        # With sequence parallelism the router sees a slice of the tokens on every tp rank.
        axes = ("dp", "cp", "tp") if self._topology.sequence_parallel else ("dp", "cp")
        for layer in self._layers:
            self._counts[layer.name] = ledger.declare(
                f"moe/{layer.name}/tokens",
                family=self.family,
                kind=Kind.SUM,
                axes=axes,
                width=layer.num_experts,
            )
            self._aux_losses[layer.name] = ledger.declare(
                f"moe/{layer.name}/aux_loss",
                family=self.family,
                kind=Kind.SUM,
                axes=("dp", "cp", "tp"),
                width=2,
                priority=Priority.P1,
            )
            if self.forensics is not None and self.forensics.margin:
                self._margins[layer.name] = ledger.declare(
                    f"moe/{layer.name}/topk_margin",
                    family=self.family,
                    kind=Kind.SUM,
                    axes=axes,
                    width=ops.NUM_BINS,
                    priority=Priority.P1,
                )
            if self.forensics is not None and self.forensics.bias:
                self._biases[layer.name] = ledger.declare(
                    f"moe/{layer.name}/bias",
                    family=self.family,
                    kind=Kind.SUM,
                    axes=(),
                    width=layer.num_experts,
                    priority=Priority.P1,
                )
        if self._drops_tokens:
            self._dropped = ledger.declare(
                "moe/dropped",
                family=self.family,
                kind=Kind.SUM,
                axes=axes,
                width=2,
                priority=Priority.P1,
            )

    @torch.no_grad()
    def observe(self, layer: str, routing_map: torch.Tensor, padding_mask: torch.Tensor | None) -> None:
        """Adds one micro-batch of a layer's routing before capacity dropping.

        ``routing_map`` is bool [tokens, experts]; ``padding_mask`` is bool [tokens], True = padding.
        """
        self._given_mask = padding_mask is not None
        slot = self._counts[layer]
        if slot.owned:
            ops.routing_histogram(
                routing_map, slot.width, padding_mask=padding_mask, out=slot.cells, accumulate=True
            )

    @torch.no_grad()
    def observe_dropped(
        self, routed: torch.Tensor, kept: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> None:
        """Adds one layer's micro-batch of maps [tokens, experts] before and after capacity dropping."""
        if not self._dropped.owned:
            return
        valid = routed if padding_mask is None else routed & ~padding_mask[:, None]
        self._dropped.cells[0].add_((valid & ~kept).sum())
        self._dropped.cells[1].add_(valid.sum())

    @torch.no_grad()
    def observe_aux_loss(self, layer: str, partial: torch.Tensor) -> None:
        """Adds this rank's part of one micro-batch's load-balancing loss, without its coefficient.

        The parts of the tp x cp ranks that share the micro-batch add up to E * sum f_i P_i; the first of
        them counts the micro-batch.
        """
        cells = self._aux_losses[layer].cells
        cells[0:1].add_(partial)
        if self._topology.index("tp") == 0 and self._topology.index("cp") == 0:
            cells[1:2].add_(1.0)

    @torch.no_grad()
    def observe_margin(
        self, layer: str, scores: torch.Tensor, k: int, padding_mask: torch.Tensor | None
    ) -> None:
        """Adds one micro-batch of the scores [tokens, experts] whose ``k`` largest are a layer's choice."""
        slot = self._margins[layer]
        if slot.owned:
            ops.topk_margin_histogram(scores, k, padding_mask=padding_mask, out=slot.cells, accumulate=True)

    def watch_bias(self, layer: str, read: Callable[[], torch.Tensor]) -> None:
        """Has ``read``, a layer's routing bias [experts], called at the end of each sampled step."""
        self._bias_readers[layer] = read

    @torch.no_grad()
    def end_step(self, facts: Facts) -> None:
        if facts.priority >= Priority.P1:
            for layer, read in self._bias_readers.items():
                if self._biases[layer].owned:
                    self._biases[layer].cells.copy_(read())

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        shards = self._topology.size("ep")
        worst: float | None = None
        worst_shard: float | None = None
        for layer in self._layers:
            counts = parts[f"moe/{layer.name}/tokens"]
            violation = formulas.max_vio(counts)
            if violation is None:
                continue
            values[f"moe/{layer.name}/max_vio"] = violation
            worst = violation if worst is None else max(worst, violation)
            if facts.priority >= Priority.P1:
                self._finalize_diagnosis(layer, parts, values)
            shard_violation = formulas.shard_max_vio(counts, shards)
            if shard_violation is not None:
                worst_shard = shard_violation if worst_shard is None else max(worst_shard, shard_violation)
        self._report_padding(parts, facts)
        if worst is not None:
            values["moe/max_vio"] = worst
            values["moe/imbalance"] = worst + 1.0
        if worst_shard is not None:
            values["moe/shard_max_vio"] = worst_shard
        if "moe/dropped" in parts:
            dropped, routed = parts["moe/dropped"]
            fraction = ratio(float(dropped), float(routed))
            if fraction is not None:
                values["moe/dropped_fraction"] = fraction

    def _finalize_diagnosis(self, layer: MoELayer, parts: Parts, values: Values) -> None:
        counts = parts[f"moe/{layer.name}/tokens"]
        total, micro_batches = map(float, parts[f"moe/{layer.name}/aux_loss"])
        aux_loss = ratio(total, micro_batches)
        if aux_loss is not None:
            values[f"moe/{layer.name}/aux_loss"] = aux_loss
        entropy, normalized = formulas.entropy(counts), formulas.entropy_norm(counts)
        if entropy is not None:
            values[f"moe/{layer.name}/entropy"] = entropy
        if normalized is not None:
            values[f"moe/{layer.name}/entropy_norm"] = normalized

    def histograms(self, parts: Parts, facts: Facts) -> Mapping[str, Histogram]:
        if self.forensics is None or facts.priority < Priority.P1:
            return {}
        found: dict[str, Histogram | None] = {}
        for layer in self._layers:
            prefix = f"moe/{layer.name}"
            load = of_shares(parts[f"{prefix}/tokens"], name=NAMED_EXPERTS)
            if load is None:
                continue
            found[f"{prefix}/load"] = load
            if self.forensics.bias:
                found[f"{prefix}/bias"] = of_values(dict(enumerate(parts[f"{prefix}/bias"])))
            if self.forensics.margin:
                found[f"{prefix}/topk_margin"] = of_bins(_MARGIN_EDGES, parts[f"{prefix}/topk_margin"])
        return {tag: histogram for tag, histogram in found.items() if histogram is not None}

    def _report_padding(self, parts: Parts, facts: Facts) -> None:
        """Says once that routers may have counted padding: where layers counted different numbers of tokens,
        or where targets are masked and no router of this rank was given a padding mask."""
        tokens = {
            layer.name: round(parts[f"moe/{layer.name}/tokens"].sum() / self._topk)
            for layer in self._layers
            if not layer.name.startswith("mtp")  # one router may serve several prediction heads
        }
        if self._padding_reported or not tokens:
            return
        fewest, most = min(tokens.values()), max(tokens.values())
        if fewest < most:
            padded = ", ".join(name for name, count in tokens.items() if count > fewest)
            reason = f"{padded} counted up to {most} tokens where other layers counted {fewest}"
        elif self._given_mask is False and "loss/tokens" in parts and parts["loss/tokens"].sum() < most:
            masked = most - round(parts["loss/tokens"].sum())
            reason = f"{masked} of {most} tokens have a masked loss, and routers are given no padding mask"
        else:
            return
        self._padding_reported = True
        logger.warning(
            "step %d: %s. If they are padding, moe/* counts it: have the script give the model a "
            "padding_mask on every pipeline stage",
            facts.step,
            reason,
        )
