"""Where each tensor of a Megatron step is picked up. Every hook returns after one attribute test when
its probe does not look at this step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_probes.adapters.megatron_lm.gradients import GradientSlice, ReplicationCheck
from megatron_probes.probes import ExpertsProbe, GradientProbe, MoELayer, TensorsProbe
from megatron_probes.session import ProbeSession


def watch_logits(session: ProbeSession, probe: TensorsProbe, model: Any, vocab_size: int) -> None:
    """Shows the logits of the main head, before cross-entropy overwrites them in place.

    ``compute_language_model_loss`` is called once for each multi-token-prediction depth first, then for
    the main head. Columns that only pad the vocabulary are cut off.
    """
    compute = model.compute_language_model_loss
    gate, observe = probe.gate, session.guard(probe, probe.observe_logits)
    depths = (model.config.mtp_num_layers or 0) if getattr(model, "mtp_process", False) else 0
    tp = session.topology.axes["tp"]
    call_index = 0

    @functools.wraps(compute)
    def watched(labels: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal call_index
        is_main_head = call_index == depths
        call_index = 0 if is_main_head else call_index + 1
        if gate.open and is_main_head and torch.is_grad_enabled():
            shard = logits.size(-1)
            valid = min(max(vocab_size - tp.index * shard, 0), shard)
            if valid > 0:
                observe(logits[..., :valid])
        return compute(labels, logits, *args, **kwargs)

    model.compute_language_model_loss = watched


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
                observe(layer.name, call["aux_loss"] / call["aux_loss_coeff"])
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
    mask = args[1] if len(args) > 1 else kwargs.get("padding_mask")
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
        flat_mask = None if padding_mask is None else padding_mask.reshape(-1)

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


def watch_gradients(
    session: ProbeSession,
    probe: GradientProbe,
    optimizer: Any,
    counted: Sequence[GradientSlice],
    check: ReplicationCheck | None,
) -> None:
    """Shows the gradients when the optimizer has unscaled them, and on sampled steps again after clipping."""
    prepare, consume = optimizer.prepare_grads, optimizer.step_with_ready_grads
    gate = probe.gate
    observe = session.guard(probe, probe.observe)
    observe_clipped = session.guard(probe, probe.observe_clipped)
    empty = torch.empty(0, device=session.ledger.device)

    @functools.wraps(prepare)
    def watched_prepare(*args: Any, **kwargs: Any) -> Any:
        found_inf = prepare(*args, **kwargs)
        if check is not None:
            check.compare()
        if gate.open:
            observe([part.read(empty) for part in counted])
        return found_inf

    @functools.wraps(consume)
    def watched_consume(*args: Any, **kwargs: Any) -> Any:
        if gate.sampled:
            observe_clipped([part.read(empty) for part in counted])
        return consume(*args, **kwargs)

    optimizer.prepare_grads = watched_prepare
    optimizer.step_with_ready_grads = watched_consume
