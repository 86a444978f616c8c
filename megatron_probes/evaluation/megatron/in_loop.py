"""The same runner on the live model of a training run, which it leaves as it found it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_probes.evaluation.megatron.scorer import BatchLimits, MegatronScorer
from megatron_probes.evaluation.results import CheckpointIdentity, TaskResult, tags
from megatron_probes.evaluation.runner import Progress, no_progress, run_suite
from megatron_probes.evaluation.suite import Suite, SuiteError
from megatron_probes.evaluation.tasks import Context
from megatron_probes.evaluation.tokenization import Tokenizer, build_tokenizer


def evaluate_in_loop(
    model: Sequence[Any],
    suite: Suite,
    *,
    iteration: int,
    tokens: int,
    context_length: int,
    tokenizer: Tokenizer | None = None,
    limits: BatchLimits | None = None,
    run_code: bool = False,
    progress: Progress = no_progress,
) -> dict[str, float | int]:
    """Return the catalogue's evaluation metrics of the live ``model`` by tag.

    All ranks call it, between two steps.

    ``model`` is the list of this rank's chunks as Megatron's training holds them. They run in the arithmetic
    of training (bf16 as a rule), so a value differs a little from the float32 one of the saved checkpoint.
    Random states, modes, gradients and accumulators are as before when it returns, and no tensor is kept but
    entries of Megatron's own cache of rotary positions (32 at most, one a length).
    Parameters must be whole: with --overlap-param-gather call it where Megatron evaluates, after it has
    switched the gathering hooks off.

    Raises ``SuiteError`` for a suite that asks for averaged weights, which training doesn't hold.
    """
    if suite.averaging is not None:
        raise SuiteError(
            "averaging: the live model has only its raw weights; leave `averaging` out of this suite"
        )
    tokenizer = tokenizer or build_tokenizer(suite.tokenizer)
    identity = CheckpointIdentity(path="", iteration=iteration, tokens=tokens, digest="")
    with _undisturbed(model):
        scorer = MegatronScorer(
            model, context_length=context_length, vocab_size=tokenizer.vocab_size, limits=limits
        )
        context = Context(scorer, tokenizer, run_code=run_code)
        results: list[TaskResult] = run_suite(suite, context, identity, progress=progress)
    return tags(results, "raw")


@contextlib.contextmanager
def _undisturbed(model: Sequence[Any]) -> Iterator[None]:
    """Evaluation mode inside; outside every module's own mode and all random states as before."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    modes = [(module, module.training) for chunk in model for module in chunk.modules()]
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    for chunk in model:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        get_cuda_rng_tracker().set_states(tracked)
        torch.cuda.set_rng_state(cuda)
        torch.set_rng_state(cpu)
