"""A suite on checkpoints, one after another, into a series."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megatron_probes.evaluation.megatron.averaging import averaged_over, load_average
from megatron_probes.evaluation.megatron.checkpoint import Checkpoint, find_checkpoints
from megatron_probes.evaluation.megatron.layout import Layout
from megatron_probes.evaluation.megatron.model import LoadedModel, build_model, initialize, load_weights
from megatron_probes.evaluation.megatron.scorer import BatchLimits, MegatronScorer
from megatron_probes.evaluation.results import CheckpointIdentity, TaskResult, Weights
from megatron_probes.evaluation.runner import Progress, no_progress, run_suite, suite_parts
from megatron_probes.evaluation.series import Series
from megatron_probes.evaluation.suite import Suite, SuiteError
from megatron_probes.evaluation.tasks import Context
from megatron_probes.evaluation.tokenization import build_tokenizer

T = TypeVar("T")

Announce = Callable[[str], Progress]
"""Called with what is evaluated next; returns what is told of its progress."""


def evaluate_checkpoints(
    checkpoints: Sequence[Checkpoint],
    suite: Suite,
    out: Path,
    *,
    layout: Layout,
    limits: BatchLimits | None = None,
    new_series: bool = False,
    keep_items: bool = False,
    run_code: bool = False,
    announce: Announce = lambda _: no_progress,
) -> tuple[list[TaskResult], Path | None]:
    """Return the results of ``suite`` on ``checkpoints``, and on the writer the series' folder in ``out``.

    All ranks of ``layout`` call it, with the default process group made. All checkpoints have the model's
    shape of the first. Raises ``SuiteError`` on every rank where one can't go on.
    """
    initialize(layout, checkpoints[0])
    tokenizer = build_tokenizer(suite.tokenizer)
    model = build_model(checkpoints[0], layout)
    if tokenizer.vocab_size > model.args.padded_vocab_size:
        raise SuiteError(
            f"tokenizer: its {tokenizer.vocab_size} ids are more than the model's vocabulary of "
            f"{model.args.padded_vocab_size}; give the tokenizer of the training"
        )
    scorer = MegatronScorer(
        model.chunks,
        context_length=model.args.seq_length,
        vocab_size=tokenizer.vocab_size,
        limits=limits,
    )
    context = Context(scorer, tokenizer, run_code=run_code)
    parts = suite_parts(suite, context)
    series = together(
        lambda: Series(out, parts, new=new_series, keep_items=keep_items) if scorer.is_writer else None
    )
    results: list[TaskResult] = []
    for identity, weights, load in _plan(checkpoints, suite, model):
        store = None if series is None else series.store(identity, weights)
        known = [store.finished(spec.name) for spec in suite.tasks] if store is not None else []
        if not scorer.share(bool(known) and all(known)):
            together(load)
        progress = announce(f"step {identity.iteration}, {weights} weights")
        results += run_suite(suite, context, identity, weights=weights, store=store, progress=progress)
    if series is None:
        return results, None
    series.write_tensorboard(suite.decision_weights)
    return results, series.folder


def _plan(
    checkpoints: Sequence[Checkpoint], suite: Suite, model: LoadedModel
) -> Iterator[tuple[CheckpointIdentity, Weights, Callable[[], None]]]:
    """What is evaluated, in turn, and how its weights are loaded."""
    for checkpoint in checkpoints:
        identity = checkpoint.identity()
        yield identity, "raw", partial(load_weights, model, checkpoint)
        if suite.averaging is not None:
            saved = find_checkpoints(checkpoint.folder.parent, "all")
            used = averaged_over(suite.averaging, saved, checkpoint)
            digest = hashlib.sha256("".join(one.digest for one in used).encode()).hexdigest()
            yield (
                dataclasses.replace(identity, digest=digest),
                "averaged",
                partial(load_average, model, used, suite.averaging),
            )


def together(step: Callable[[], T]) -> T:
    """Run ``step`` on every rank; where any raises ``SuiteError``, all raise the first one's."""
    result, fault = None, None
    try:
        result = step()
    except SuiteError as error:
        fault = str(error)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for fault in faults:
        if fault is not None:
            raise SuiteError(fault)
    return result  # type: ignore[return-value]
