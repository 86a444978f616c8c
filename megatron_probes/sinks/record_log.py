"""Reading the exact record: one history of a run from all starts of its job."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from megatron_probes.formulas.histogram import Histogram
from megatron_probes.sinks.record import StepRecord
from megatron_probes.sinks.record_file import decode_line, plain_number, record_files

T = TypeVar("T")


class RecordLog(Generic[T]):
    """What a run's record files hold, with `T` kept of each step's line.

    The history is the one that the newest attempt stands on. It started at some step s from a checkpoint
    of an earlier attempt, its parent: the one whose records come nearest to s - 1, the newest of them if
    several do. Of the parent only steps below s count (the rest was rolled back), and so on back to the
    first start. An attempt that nothing later stands on, such as a start with a wrong `--load` that was
    stopped at once, is thus left out whole instead of erasing what came before it.

    A step that was run twice in one attempt counts as it was run last. A late line joins its step by
    `merge(step's, late line's)`.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        keep: Callable[[dict[str, Any]], T],
        merge: Callable[[T, T], T],
    ) -> None:
        self.headers: dict[int, dict[str, Any]] = {}
        """Manifest by attempt."""
        self.start_steps: dict[int, int] = {}
        self.by_attempt: dict[int, dict[int, T]] = {}
        """Every whole record, by attempt and step."""
        self.damaged_lines = 0
        """Lines that were cut off or aren't JSON; they are skipped."""
        for path in record_files(output_dir):
            with open(path, "rb") as file:
                for text in file:
                    line = decode_line(text)
                    if line is None:
                        self.damaged_lines += 1
                    else:
                        self._take(line, keep, merge)

    def _take(
        self, line: dict[str, Any], keep: Callable[[dict[str, Any]], T], merge: Callable[[T, T], T]
    ) -> None:
        attempt = line["attempt"]
        steps = self.by_attempt.setdefault(attempt, {})
        if "header" in line:
            self.headers[attempt] = line["header"]
            self.start_steps[attempt] = line["start_step"]
        else:
            self.start_steps.setdefault(attempt, line["step"])
            step, kept = line["step"], keep(line)
            steps[step] = merge(steps[step], kept) if line.get("late") and step in steps else kept

    def history(self) -> list[tuple[int, T]]:
        """Return (step, what was kept of it) of the steps that count, in order."""
        found: list[tuple[int, T]] = []
        for attempt, end in self._lineage():
            steps = self.by_attempt[attempt]
            kept = sorted((step for step in steps if end is None or step < end), reverse=True)
            found.extend((step, steps[step]) for step in kept)
        return found[::-1]

    def _lineage(self) -> Iterator[tuple[int, int | None]]:
        """The attempts of the history, newest first, each with the first step that no longer counts."""
        older = sorted(self.by_attempt)
        end: int | None = None
        while older:
            attempt = older[-1] if end is None else self._parent(older, end)
            yield attempt, end
            start = self.start_steps[attempt]
            end = start if end is None else min(end, start)
            older = [other for other in older if other < attempt]

    def _parent(self, older: list[int], end: int) -> int:
        def reach(attempt: int) -> tuple[int, int]:
            return max((step for step in self.by_attempt[attempt] if step < end), default=-1), attempt

        return max(older, key=reach)


def read_records(output_dir: str | os.PathLike[str]) -> list[StepRecord]:
    """Return the run's history: one record a step, in the order of steps (`RecordLog`)."""
    return [record for _, record in RecordLog(output_dir, as_record, join_records).history()]


def read_series(output_dir: str | os.PathLike[str], tag: str) -> tuple[list[int], list[int | float]]:
    """Return (steps, values) of one tag, metric or context; steps without data are left out."""

    def value_of(line: dict[str, Any]) -> int | float | None:
        value = line["values"].get(tag, line["context"].get(tag))
        return None if value is None else plain_number(value)

    def merge(value: int | float | None, late: int | float | None) -> int | float | None:
        return value if late is None else late

    history = RecordLog(output_dir, value_of, merge).history()
    points = [(step, value) for step, value in history if value is not None]
    return [step for step, _ in points], [value for _, value in points]


def next_attempt(output_dir: str | os.PathLike[str]) -> int:
    """Return the number of the start that begins now: one above the newest in the folder, else 0."""
    for path in reversed(record_files(output_dir)):
        with open(path, "rb") as file:
            for text in file:
                line = decode_line(text)
                if line is not None:
                    return int(line["attempt"]) + 1
    return 0


def join_records(record: StepRecord, late: StepRecord) -> StepRecord:
    """Return a step's record with what became known later."""
    return dataclasses.replace(
        record,
        values={**record.values, **late.values},
        histograms={**record.histograms, **late.histograms},
    )


def as_record(line: dict[str, Any]) -> StepRecord:
    """Return the record that a step's line was written from."""
    parts = line.get("parts")
    return StepRecord(
        step=line["step"],
        attempt=line["attempt"],
        time=line["time"],
        tokens=line["tokens"],
        values={tag: plain_number(value) for tag, value in line["values"].items()},
        context={tag: plain_number(value) for tag, value in line["context"].items()},
        histograms={tag: _as_histogram(found) for tag, found in line.get("histograms", {}).items()},
        parts=None if parts is None else {name: [*map(float, cells)] for name, cells in parts.items()},
    )


def _as_histogram(found: dict[str, Any]) -> Histogram:
    return Histogram(
        edges=tuple(float(plain_number(edge)) for edge in found["edges"]),
        counts=tuple(float(plain_number(count)) for count in found["counts"]),
        named=tuple((key, float(plain_number(value))) for key, value in found.get("named", ())),
    )
