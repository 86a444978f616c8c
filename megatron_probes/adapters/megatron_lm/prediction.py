"""The losses of multi-token prediction, picked up where Megatron masks them."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from typing import Any

import torch

from megatron_probes.probes import LossProbe
from megatron_probes.session import ProbeSession

logger = logging.getLogger("megatron_probes")


def watch_prediction_losses(session: ProbeSession, probe: LossProbe, model: Any) -> None:
    """Shows each prediction head's per-token losses with the mask that Megatron multiplies them by.

    ``process_mtp_loss`` moves labels and mask by one position a head with ``roll_tensor``, the mask last,
    and then asks for the losses. Moving the mask ourselves would cost messages under context parallelism.
    """
    from megatron.core.transformer import multi_token_prediction

    module = _caller(model)
    if module is None:
        logger.warning("no loss/mtp_*: %s has a loss of its own for prediction heads", type(model).__name__)
        return
    process = module.process_mtp_loss
    signature = inspect.signature(process)
    gate, observe = probe.gate, session.guard(probe, probe.observe_mtp)

    @functools.wraps(process)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not (gate.sampled and torch.is_grad_enabled()):
            return process(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        roll, compute = multi_token_prediction.roll_tensor, call.arguments["compute_language_model_loss"]
        mask: Any = None
        head = 0

        def noted_roll(*roll_args: Any, **roll_kwargs: Any) -> Any:
            nonlocal mask
            rolled = roll(*roll_args, **roll_kwargs)
            mask = rolled[0]
            return rolled

        def shown_losses(*loss_args: Any, **loss_kwargs: Any) -> Any:
            nonlocal head
            losses = compute(*loss_args, **loss_kwargs)
            observe(head, losses, mask)
            head += 1
            return losses

        call.arguments["compute_language_model_loss"] = shown_losses
        multi_token_prediction.roll_tensor = noted_roll
        try:
            return process(*call.args, **call.kwargs)
        finally:
            multi_token_prediction.roll_tensor = roll

    module.process_mtp_loss = watched


def _caller(model: Any) -> Any:
    """The module whose name ``process_mtp_loss`` the model's class calls; None when none of them has it."""
    modules: list[Any] = [sys.modules[cls.__module__] for cls in type(model).__mro__]
    return next((module for module in modules if hasattr(module, "process_mtp_loss")), None)
