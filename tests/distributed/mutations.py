"""Faults that are known from public training code, planted into the package inside a rank.

Each is a function of the rank for `run_layout(before=...)`, with the layouts that can show it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from layouts import CP2, DP2, EP2, ONE, PP2, TP2_SP, Layout
from matrix import Row
from toy_gpt import DENSE_TIED, MOE_UNTIED, ToyGPT


def sum_over_tp_what_is_the_same_there(rank: int) -> None:
    from megatron_probes.probes import LossProbe

    declare = LossProbe.declare

    def declared(probe: Any, ledger: Any) -> None:
        declare(probe, ledger)
        probe._sum.owned = probe._tokens.owned = True

    LossProbe.declare = declared


def average_per_rank_means(rank: int) -> None:
    """Each rank adds its mean with weight 1."""
    from megatron_probes.probes import LossProbe

    def end_step(probe: Any, facts: Any) -> None:
        cell = probe._topology.data_index
        if probe._sum.owned:
            probe._sum.cells[cell] /= probe._tokens.cells[cell]
            probe._tokens.cells[cell] = 1.0

    LossProbe.end_step = end_step


def count_tied_embeddings_twice(rank: int) -> None:
    from megatron_probes.adapters.megatron_lm import gradients

    counts_here = gradients.counts_here

    def counted(held: Any, *args: Any) -> bool:
        parameter = held.parameter
        shared, parameter.shared = getattr(parameter, "shared", False), False
        try:
            return counts_here(held, *args)
        finally:
            parameter.shared = shared

    gradients.counts_here = counted
    _skip_element_check()


def forget_cp(rank: int) -> None:
    """Only the first context-parallel rank's tokens count."""
    from megatron_probes.topology import Topology

    owns = Topology.owns

    def owned(topology: Topology, distinct: Any) -> bool:
        return owns(topology, [axis for axis in distinct if axis != "cp"])

    Topology.owns = owned


def count_recompute_twice(rank: int) -> None:
    """The hooks take both passes of a checkpointed layer for one each."""
    from megatron_probes.adapters.megatron_lm import routers

    class AlwaysGrad:
        def __getattr__(self, name: str) -> Any:
            return (lambda: True) if name == "is_grad_enabled" else getattr(torch, name)

    routers.torch = AlwaysGrad()


def take_the_norm_after_clipping(rank: int) -> None:
    from megatron_probes.probes import GradientProbe

    observe, observe_clipped = GradientProbe.observe, GradientProbe.observe_clipped

    def late(probe: Any, gradients: Any) -> None:
        observe(probe, gradients)
        observe_clipped(probe, gradients)

    GradientProbe.observe = lambda probe, gradients: None
    GradientProbe.observe_clipped = late


def reduce_experts_over_the_dense_group(rank: int) -> None:
    from megatron_probes.adapters.megatron_lm import gradients

    counts_here = gradients.counts_here

    def counted(held: Any, *args: Any) -> bool:
        parameter = held.parameter
        allreduce, parameter.allreduce = getattr(parameter, "allreduce", True), True
        try:
            return counts_here(held, *args)
        finally:
            parameter.allreduce = allreduce

    gradients.counts_here = counted
    _skip_element_check()


def use_local_layer_ids(rank: int) -> None:
    from megatron_probes.adapters.megatron_lm import observed, parameters

    prefixes = parameters._layer_prefixes

    def local(chunk: Any) -> dict[str, str]:
        return {name: f"layer_{int(name.split('.')[-2]):03d}." for name in prefixes(chunk)}

    parameters._layer_prefixes = local
    routers = observed.moe_routers

    def local_routers(model: Any) -> dict[Any, Any]:
        return {
            dataclasses.replace(layer, name=f"layer_{index:03d}"): router
            for index, (layer, router) in enumerate(routers(model).items())
        }

    observed.moe_routers = local_routers


def count_vocabulary_padding(rank: int) -> None:
    attach = importlib.import_module("megatron_probes.adapters.megatron_lm.attach")
    attach._vocab_size = lambda args: args.padded_vocab_size


def count_masked_targets(rank: int) -> None:
    from megatron_probes.probes import LossProbe

    observe = LossProbe.observe
    LossProbe.observe = lambda probe, losses, mask: observe(probe, losses, None)


def divide_before_the_maximum(rank: int) -> None:
    """Each rank's sum is divided by the global number of targets."""
    from megatron_probes.probes import loss

    worst_rank = loss.formulas.worst_rank
    loss.formulas.worst_rank = lambda sums, tokens: worst_rank(sums, tokens * 0 + tokens.sum())


def _skip_element_check() -> None:
    """The check at start would switch the family off before it shows a number: the second line of defence."""
    from megatron_probes.adapters.megatron_lm import observed

    observed.element_totals = lambda *args: (1, 1)


@dataclass(frozen=True)
class Mutation:
    """A fault, a row that shows it, and a word of the numbers that it must spoil."""

    plant: Callable[[int], None]
    row: Row
    spoils: str


def _row(layout: Layout, model: ToyGPT, *flags: str) -> Row:
    row = Row(layout=layout, model=model)
    return dataclasses.replace(row, flags=(*row.flags, *flags))


FULL_RECOMPUTE = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")

MUTATIONS = (
    Mutation(sum_over_tp_what_is_the_same_there, _row(TP2_SP, DENSE_TIED), "loss/sum"),
    Mutation(average_per_rank_means, _row(DP2, DENSE_TIED), "loss/sum"),
    Mutation(count_tied_embeddings_twice, _row(PP2, DENSE_TIED), "grad/sum_sq"),
    Mutation(forget_cp, _row(CP2, DENSE_TIED), "loss/tokens"),
    Mutation(count_recompute_twice, _row(ONE, MOE_UNTIED, *FULL_RECOMPUTE), "moe/layer_000/tokens"),
    Mutation(take_the_norm_after_clipping, _row(ONE, DENSE_TIED), "grad/sum_sq"),
    Mutation(reduce_experts_over_the_dense_group, _row(EP2, MOE_UNTIED), "grad/expert"),
    Mutation(use_local_layer_ids, _row(PP2, MOE_UNTIED), "shorter"),
    Mutation(count_vocabulary_padding, _row(ONE, DENSE_TIED), "act/logits/numel"),
    Mutation(count_masked_targets, _row(ONE, DENSE_TIED), "loss/tokens"),
    Mutation(divide_before_the_maximum, _row(DP2, DENSE_TIED), "loss/worst_rank"),
)
