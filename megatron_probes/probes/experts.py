"""How evenly the router spreads valid tokens over experts and over expert-parallel shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_probes import ops
from megatron_probes.catalog import Priority
from megatron_probes.formulas import experts as formulas
from megatron_probes.formulas.ratio import ratio
from megatron_probes.ledger import Kind, Ledger, Slot
from megatron_probes.probes.base import Facts, Parts, Probe, Values
from megatron_probes.topology import Topology


@dataclass(frozen=True)
class MoELayer:
    """One router: its global name (``layer_003``, ``mtp_001``) and its number of experts."""

    name: str
    num_experts: int


class ExpertsProbe(Probe):
    """``moe/*`` loads (Specification, section 7).

    ``layers`` are the MoE layers of the whole model, in order and the same on every rank; ``drops_tokens``
    says whether the experts have a capacity.
    """

    family = "experts"

    def __init__(self, topology: Topology, layers: Sequence[MoELayer], *, drops_tokens: bool = False) -> None:
        super().__init__()
        self._topology = topology
        self._layers = tuple(layers)
        self._drops_tokens = drops_tokens
        self._counts: dict[str, Slot] = {}
        self._aux_losses: dict[str, Slot] = {}

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
        cells[0:1].add_(partial.detach())
        if self._topology.index("tp") == 0 and self._topology.index("cp") == 0:
            cells[1:2].add_(1.0)

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
