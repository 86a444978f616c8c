"""Where the logits and gradients of a Megatron step are picked up. Every hook returns after one attribute
test when its probe does not look at this step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from megatron_probes.adapters.megatron_lm.gradients import GradientSlice, ReplicationCheck
from megatron_probes.probes import GradientProbe, TensorsProbe
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
