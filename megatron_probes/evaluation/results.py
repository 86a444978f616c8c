"""Results of tasks: exact JSON, a table for people, and what TensorBoard is given."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from megatron_probes import __version__
from megatron_probes.catalog import CATALOG, lookup
from megatron_probes.sinks import Manifest, StepRecord, TensorBoardSink
from megatron_probes.sinks.record_file import plain_number

Weights = Literal["raw", "averaged"]


@dataclass(frozen=True, kw_only=True)
class CheckpointIdentity:
    """Which weights were evaluated."""

    path: str
    iteration: int
    tokens: int
    """Valid targets that training had seen."""
    digest: str
    """Tells the files of one checkpoint from another's."""


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Everything that is known of one task on one set of weights."""

    task: str
    kind: str
    weights: Weights
    fingerprint: str
    checkpoint: CheckpointIdentity
    values: Mapping[str, float | int | None]
    """By the last part of the tag; None is no data."""
    counts: Mapping[str, int]
    faults: Mapping[str, int]
    """Lines that were left out, by kind."""
    fault_examples: Sequence[str]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TaskResult:
        """The result that ``as_json`` gave, read back."""
        values = {name: None if v is None else plain_number(v) for name, v in data["values"].items()}
        checkpoint = CheckpointIdentity(**data["checkpoint"])
        return TaskResult(**{**data, "values": values, "checkpoint": checkpoint})


def tags(results: Iterable[TaskResult], decision_weights: Weights) -> dict[str, float | int]:
    """Return the catalogue's metrics of one checkpoint by their tags.

    The weights that decide stand under the plain tag; where both were evaluated each also stands under its
    own, as a pair.
    """
    results = list(results)
    paired = len({result.weights for result in results}) > 1
    values: dict[str, float | int] = {}
    for result in results:
        for name, value in result.values.items():
            tag = f"eval/{result.task}/{name}"
            if value is None or not _is_catalogued(tag):
                continue
            if result.weights == decision_weights:
                values[tag] = value
            if paired:
                values[f"{tag}/{result.weights}"] = value
    return values


def _is_catalogued(tag: str) -> bool:
    try:
        lookup(tag)
    except KeyError:
        return False
    return True


def table(results: Sequence[TaskResult]) -> Table:
    """Return the results for a terminal: a row a value, a column a checkpoint and kind of weights."""
    columns = dict.fromkeys((result.checkpoint.iteration, result.weights) for result in results)
    out = Table(title="Evaluation", title_justify="left")
    out.add_column("task")
    out.add_column("value")
    for iteration, weights in columns:
        out.add_column(f"step {iteration}\n{weights}", justify="right")
    cells: dict[tuple[str, str], dict[tuple[int, str], str]] = {}
    for result in results:
        column = (result.checkpoint.iteration, result.weights)
        shown = {name: _number(value) for name, value in result.values.items() if value is not None}
        left_out = sum(result.faults.values())
        if left_out:
            shown["lines left out"] = str(left_out)
        for name, text in shown.items():
            cells.setdefault((result.task, name), {})[column] = text
    previous = None
    for (task, name), row in cells.items():
        out.add_row(task if task != previous else "", name, *(row.get(column, "") for column in columns))
        previous = task
    return out


def _number(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def write_tensorboard(
    folder: Path, series: Sequence[TaskResult], decision_weights: Weights, definition: Mapping[str, Any]
) -> None:
    """Write all checkpoints of a series at their steps and tokens, in place of what ``folder`` held.

    The results' files are what lasts. Event files are made from them anew, because a checkpoint may be
    evaluated after a later one and TensorBoard hides what goes back.
    """
    for run in ("by_step", "by_tokens"):
        for old in (folder / run).glob("events.out.tfevents.*"):
            old.unlink()
    by_step: dict[int, list[TaskResult]] = {}
    for result in series:
        by_step.setdefault(result.checkpoint.iteration, []).append(result)
    if not by_step:
        return
    records = [
        StepRecord(
            step=step,
            attempt=0,
            time=time.time(),
            tokens=results[0].checkpoint.tokens,
            values=tags(results, decision_weights),
            context={},
        )
        for step, results in sorted(by_step.items())
    ]
    sink = TensorBoardSink(folder)
    sink.open(_manifest(records, definition))
    for record in records:
        sink.write(record)
    sink.close()


def _manifest(records: Sequence[StepRecord], definition: Mapping[str, Any]) -> Manifest:
    measured = {lookup(tag).tag for record in records for tag in record.values}
    return Manifest(
        run_id=definition["fingerprint"][:12],
        started=time.time(),
        attempt=0,
        start_step=records[0].step,
        tokens_at_start=max(records[0].tokens - 1, 0),
        config=definition,
        config_fingerprint=definition["fingerprint"],
        layout={},
        versions={"megatron_probes": __version__},
        flop_convention="none",
        metrics=tuple(spec for spec in CATALOG if spec.tag in measured),
    )
