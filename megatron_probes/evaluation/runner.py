"""Runs a suite: item by item in the order of the file, and on from where it was interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_probes.evaluation.documents import Faults, ItemFault, read_items
from megatron_probes.evaluation.fingerprint import Parts, fingerprint, task_parts
from megatron_probes.evaluation.results import CheckpointIdentity, TaskResult, Weights
from megatron_probes.evaluation.series import MemoryStore, Store
from megatron_probes.evaluation.suite import HarnessTask, ItemTask, Suite, SuiteError
from megatron_probes.evaluation.tasks import Context, Outcome, Summary, Task, build_task

Progress = Callable[[str, int, int], None]
"""Called with (task, items done, items in all)."""

CHUNK_ITEMS = 128
"""Items that are scored, and kept, together: enough to fill buckets of equal length."""


def no_progress(task: str, done: int, total: int) -> None:
    """Shows nothing."""


def suite_parts(suite: Suite, context: Context) -> dict[str, Parts]:
    """Return what each task's fingerprint is made of, by the task's name."""
    length = context.scorer.context_length
    return {spec.name: task_parts(spec, suite, context.tokenizer, length) for spec in suite.tasks}


def run_suite(
    suite: Suite,
    context: Context,
    checkpoint: CheckpointIdentity,
    *,
    weights: Weights = "raw",
    store: Store | None = None,
    progress: Progress = no_progress,
    fingerprints: Mapping[str, str] | None = None,
) -> list[TaskResult]:
    """Return the results of all tasks on the weights that ``context.scorer`` holds.

    Every rank calls it with the same arguments; only the writer reads and writes ``store``. Raises
    ``SuiteError`` where a task can't be run at all; an item that can't be scored is counted and left out.
    """
    kept = MemoryStore() if store is None else store
    if fingerprints is None:
        fingerprints = {name: fingerprint(parts) for name, parts in suite_parts(suite, context).items()}
    # All are built first: what can't run is known before the first hour of scoring.
    tasks = [None if isinstance(spec, HarnessTask) else _build(spec, context) for spec in suite.tasks]
    results = []
    for spec, task in zip(suite.tasks, tasks, strict=True):
        known = context.scorer.share(kept.finished(spec.name) if context.scorer.is_writer else None)
        if known is not None:
            progress(spec.name, 1, 1)
            results.append(known)
            continue
        began = time.monotonic()
        if isinstance(spec, HarnessTask):
            summary, faults = _run_harness(spec, context, progress), Faults()
        else:
            assert task is not None
            outcomes, faults = _run_task(spec, task, context, kept, progress)
            summary = task.summarize(outcomes)
        result = TaskResult(
            task=spec.name,
            kind=spec.kind,
            weights=weights,
            fingerprint=fingerprints[spec.name],
            checkpoint=checkpoint,
            values=summary.values,
            counts=summary.counts,
            faults=faults.counts,
            fault_examples=faults.examples,
            seconds=time.monotonic() - began,
        )
        if context.scorer.is_writer:
            kept.finish(result)
        results.append(result)
    return results


def _build(spec: ItemTask, context: Context) -> Task[Any]:
    try:
        return build_task(spec, context)
    except SuiteError:
        raise
    except ValueError as error:
        raise SuiteError(f"tasks.{spec.name}: {error}") from None


def _run_harness(spec: HarnessTask, context: Context, progress: Progress) -> Summary:
    try:
        from megatron_probes.evaluation.lm_harness import run_harness
    except ImportError:
        raise SuiteError(
            f"tasks.{spec.name}: kind lm_eval needs the harness: pip install 'megatron-probes[eval]'"
        ) from None
    progress(spec.name, 0, 1)
    values = run_harness(spec, context.scorer, context.tokenizer)
    progress(spec.name, 1, 1)
    return Summary(dict(values))


def _run_task(
    spec: ItemTask, task: Task[Any], context: Context, store: Store, progress: Progress
) -> tuple[Sequence[Outcome], Faults]:
    scorer = context.scorer
    items, faults = read_items(spec.data, spec.limit)
    prepared = []
    for item in items:
        try:
            prepared.append(task.prepare(item))
        except ItemFault as fault:
            faults.add(item.line, fault)
    outcomes = list(scorer.share(store.partial(spec.name) if scorer.is_writer else []))
    progress(spec.name, len(outcomes), len(prepared))
    while len(outcomes) < len(prepared):
        found = task.score(prepared[len(outcomes) : len(outcomes) + CHUNK_ITEMS])
        if scorer.is_writer:
            store.append(spec.name, found)
        outcomes += found
        progress(spec.name, len(outcomes), len(prepared))
    return outcomes, faults
