"""Megatron's training with evaluations between its steps: run in forked ranks."""

from __future__ import annotations

import functools
import gc
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import evaluation_ranks as ranks

from megatron_probes.evaluation import load_suite

EVALUATED = (6, 12)


def train_and_evaluate(rank: int, *, flags: Sequence[str], suite: Path, out: Path) -> None:
    """Train as `ranks.train` does and call the runner after the steps in EVALUATED."""
    from megatron.training import training

    from megatron_probes.evaluation.megatron import evaluate_in_loop
    from megatron_probes.evaluation.megatron.scorer import BatchLimits

    found: dict[int, Any] = {}
    train_step, signature = training.train_step, inspect.signature(training.train_step)

    @functools.wraps(train_step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        outcome = train_step(*args, **kwargs)
        call = signature.bind(*args, **kwargs).arguments
        model, step = call["model"], call["iteration"] + 1
        if step in EVALUATED:
            before = _states(model)
            tensors, rotary = _live_tensors(), _rotary_cache()
            values = evaluate_in_loop(
                model,
                load_suite(suite),
                iteration=step,
                tokens=step * 8 * ranks.SEQ_LENGTH,
                context_length=ranks.SEQ_LENGTH,
                limits=BatchLimits(rows=4),
            )
            added = _live_tensors() - tensors
            cached = _rotary_cache() - rotary
            same = _same(before, _states(model))
            found[step] = {"values": values, "added": added, "cached": cached, "same": same}
        return outcome

    training.train_step = watched
    ranks.train(rank, flags=flags, logs=out / "logs")
    (out / f"rank{rank}.json").write_text(json.dumps(found))


def _states(model: Sequence[Any]) -> dict[str, Any]:
    """Everything of training that an evaluation could disturb, copied."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "rng": torch.get_rng_state(),
        "tracked rng": get_cuda_rng_tracker().get_states(),
        "modes": [module.training for chunk in model for module in chunk.modules()],
        "buffers": [buffer.clone() for chunk in model for buffer in chunk.module.buffers()],
        "gradients": [p.main_grad.clone() for chunk in model for p in chunk.parameters()],
        "weights": [p.detach().clone() for chunk in model for p in chunk.parameters()],
    }


def _live_tensors() -> int:
    import torch

    gc.collect()
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())


def _rotary_cache() -> int:
    """Entries of Megatron's own bounded cache: one tensor a length of sequence."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    return RotaryEmbedding.forward.cache_info().currsize


def _same(a: Any, b: Any) -> dict[str, bool]:
    import torch

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return torch.equal(x, y)
        if isinstance(x, dict):
            return x.keys() == y.keys() and all(equal(x[key], y[key]) for key in x)
        if isinstance(x, list):
            return len(x) == len(y) and all(map(equal, x, y))
        return bool(x == y)

    return {name: equal(a[name], b[name]) for name in a}
