"""Where the routing of a Megatron step is picked up: maps, drops, balancing losses, scores and biases."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_probes.probes import ExpertsProbe, MoELayer
from megatron_probes.session import ProbeSession


def why_no_margin(args: argparse.Namespace) -> str:
    """What keeps the top-k margin from being what decides the routing, or from being seen; else empty."""
    balancing = args.moe_router_load_balancing_type
    kinds = [balancing] if isinstance(balancing, str) else balancing
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in kinds:
            return f"--moe-router-load-balancing-type {kind} does not take the largest scores"
    if args.moe_router_group_topk:
        return "--moe-router-group-topk: groups of experts are chosen first"
    if args.moe_enable_routing_replay:
        return "--moe-enable-routing-replay: earlier choices are repeated"
    if args.moe_router_fusion:
        return "--moe-router-fusion: the fused kernel shows no scores"
    if args.moe_router_dtype == "fp64":
        return "--moe-router-dtype fp64: margins are counted in single precision at most"
    if args.moe_router_topk >= args.num_experts:
        return "every token goes to every expert"
    return ""


def why_padding(args: argparse.Namespace) -> str:
    """What may put padding into training batches, as far as Megatron's arguments tell; else empty.

    Megatron's GPTDataset does not: it drops the last partial sequence of its training split, and an id that
    the tokenizer shares between padding and data is data.
    """
    if getattr(args, "sft", False):
        return "--sft pads its sequences"
    if getattr(args, "perform_rl_step", False):
        return "--perform-rl-step pads its sequences"
    if getattr(args, "fim_data", False):
        return "--fim-data pads samples that its permutation shortened"
    if args.dataloader_type == "external":
        return "--dataloader-type external may pad"
    return ""


def moe_routers(model: list[Any]) -> dict[MoELayer, Any]:
    """The routers of this rank by their global layer, in forward order."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.utils import unwrap_model

    routers: dict[MoELayer, Any] = {}
    for chunk in model:
        for module in unwrap_model(chunk).modules():
            if isinstance(module, TopKRouter):
                kind = "mtp" if getattr(module, "is_mtp_layer", False) else "layer"
                name = f"{kind}_{module.layer_number - 1:03d}"
                routers[MoELayer(name, module.config.num_moe_experts)] = module
    return routers


def watch_routers(session: ProbeSession, probe: ExpertsProbe, routers: Mapping[MoELayer, Any]) -> None:
    """Shows each router's map of valid tokens to experts, before any capacity dropping."""
    observe = session.guard(probe, probe.observe)
    observe_dropped = session.guard(probe, probe.observe_dropped)
    for layer, router in routers.items():
        if router.config.moe_expert_capacity_factor is None:
            _watch_router_output(probe, router, layer, observe)
        else:
            _watch_router_before_drop(probe, router, layer, observe, observe_dropped)
        _watch_aux_loss(session, probe, router, layer)
        if probe.forensics is not None and probe.forensics.margin:
            _watch_margin(session, probe, router, layer)
        if probe.forensics is not None and probe.forensics.bias:
            probe.watch_bias(layer.name, functools.partial(getattr, router, "expert_bias"))


def _watch_aux_loss(session: ProbeSession, probe: ExpertsProbe, router: Any, layer: MoELayer) -> None:
    """Megatron's own micro-batch load-balancing loss, where that is what balances the router.

    Its expert counts are already summed over the ranks that share a micro-batch, which the probe could
    not do without a collective of its own.
    """
    attach = router.attach_and_log_load_balancing_loss
    signature = inspect.signature(attach)
    gate, observe = probe.gate, session.guard(probe, probe.observe_aux_loss)

    @functools.wraps(attach)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if gate.sampled:
            call = signature.bind(*args, **kwargs).arguments
            if call["aux_loss_name"] == "load_balancing_loss":
                observe(layer.name, call["aux_loss"].detach() / call["aux_loss_coeff"])
        return attach(*args, **kwargs)

    router.attach_and_log_load_balancing_loss = watched


def _watch_router_output(
    probe: ExpertsProbe, router: Any, layer: MoELayer, observe: Callable[..., None]
) -> None:
    gate, name = probe.gate, layer.name

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # Recomputation runs the layer twice; its first pass has gradients disabled.
        if gate.open and torch.is_grad_enabled():
            observe(name, output[1], _padding_mask(args, kwargs))

    router.register_forward_hook(hook, with_kwargs=True)


def _padding_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The router's own mask, flattened in the order of its tokens; True = padding."""
    return _flat(args[1] if len(args) > 1 else kwargs.get("padding_mask"))


def _flat(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.reshape(-1)


def _watch_router_before_drop(
    probe: ExpertsProbe,
    router: Any,
    layer: MoELayer,
    observe: Callable[..., None],
    observe_dropped: Callable[..., None],
) -> None:
    """Capacity dropping happens inside ``routing``, by a module-level function: look at what it is given."""
    from megatron.core.transformer.moe import router as router_module

    gate, name, routing = probe.gate, layer.name, router.routing

    @functools.wraps(routing)
    def watched(logits: torch.Tensor, padding_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (gate.open and torch.is_grad_enabled()):
            return routing(logits, padding_mask, *args, **kwargs)
        drop = router_module.apply_router_token_dropping
        flat_mask = _flat(padding_mask)

        def show_then_drop(probs: torch.Tensor, routing_map: torch.Tensor, *rest: Any, **named: Any) -> Any:
            observe(name, routing_map, flat_mask)
            kept_probs, kept_map = drop(probs, routing_map, *rest, **named)
            if gate.sampled:
                observe_dropped(routing_map, kept_map, flat_mask)
            return kept_probs, kept_map

        router_module.apply_router_token_dropping = show_then_drop
        try:
            return routing(logits, padding_mask, *args, **kwargs)
        finally:
            router_module.apply_router_token_dropping = drop

    router.routing = watched


def _watch_margin(session: ProbeSession, probe: ExpertsProbe, router: Any, layer: MoELayer) -> None:
    """The scores that decide the routing, as Megatron hands them to its routing replay."""
    gate, name, routing = probe.gate, layer.name, router.routing
    observe = session.guard(probe, probe.observe_margin)

    @functools.wraps(routing)
    def watched(logits: torch.Tensor, padding_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (gate.sampled and torch.is_grad_enabled()):
            return routing(logits, padding_mask, *args, **kwargs)
        flat_mask = _flat(padding_mask)
        router.router_replay = _ScoreTap(lambda scores, k: observe(name, scores, k, flat_mask))
        try:
            return routing(logits, padding_mask, *args, **kwargs)
        finally:
            router.router_replay = None

    router.routing = watched


class _ScoreTap:
    """Stands where a routing replay would and chooses what Megatron would: only looks at the scores."""

    def __init__(self, show: Callable[[torch.Tensor, int], None]) -> None:
        self._show = show

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., Any],
    ) -> Any:
        self._show(scores, topk)
        return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
