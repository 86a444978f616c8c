"""Averaged weights of several checkpoints, in the memory of one model and one average."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_probes.evaluation.megatron.checkpoint import Checkpoint
from megatron_probes.evaluation.megatron.model import LoadedModel, load_weights
from megatron_probes.evaluation.suite import Averaging


def averaged_over(averaging: Averaging, saved: Sequence[Checkpoint], up_to: Checkpoint) -> list[Checkpoint]:
    """Return the checkpoints whose weights are averaged for ``up_to``: it and those before it."""
    before = sorted((c for c in saved if c.iteration <= up_to.iteration), key=lambda c: c.iteration)
    return before[-averaging.last :] if averaging.last else before


@torch.no_grad()
def load_average(
    model: LoadedModel,
    checkpoints: Sequence[Checkpoint],
    averaging: Averaging,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Overwrite the weights of ``model`` by the average over ``checkpoints``, oldest first.

    Uniform: the mean. EMA: a_1 = w_1, a_i = decay * a_{i-1} + (1 - decay) * w_i. Both in float32; what isn't
    a floating-point tensor comes from the last checkpoint.
    """
    average: dict[str, torch.Tensor] = {}
    for n, checkpoint in enumerate(checkpoints, start=1):
        load_weights(model, checkpoint)
        weight = 1.0 / n if averaging.method == "uniform" or n == 1 else 1.0 - averaging.decay
        for name, tensor in model.named_tensors():
            if not tensor.is_floating_point():
                continue
            if name in average:
                average[name].lerp_(tensor, weight)
            else:
                average[name] = tensor.clone()
        progress(n, len(checkpoints))
    for name, tensor in model.named_tensors():
        if name in average:
            tensor.copy_(average[name])
