"""The exact record: JSON lines, one a step, float64 and integers without loss.

Files are `<output_dir>/records/record-00000.jsonl`, `record-00001.jsonl`, ... A file is never appended to
by a later start of the job: a crash may have cut off its last line. Each file begins with a header line,
`{"header": {manifest}, "attempt": n, "start_step": s}`; every other line is one step::

    {"step": 7, "attempt": 0, "time": 1.7e9, "tokens": 7168, "values": {...}, "context": {...}}

A step with distributions also has `"histograms"`, by tag: `{"edges": [n + 1 numbers], "counts": [n numbers],
"named": [[number of an expert or rank, its value], ...]}`, the last where there is something to name.

What became known of a step after its line was written follows in a line of its own with `"late": true`
and joins the step when the record is read.

It is strict JSON: NaN and the infinities are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_probes.formulas.histogram import Histogram
from megatron_probes.sinks.anomaly import AnomalyWatch
from megatron_probes.sinks.durable import DurableAppender
from megatron_probes.sinks.record import Manifest, StepRecord

FOLDER = "records"
_NAME = re.compile(r"record-(\d{5,})\.jsonl")


class RecordFileSink:
    """Writes the exact record; an outage of the storage keeps lines in memory (`DurableAppender`).

    Lines are handed to the operating system when the oldest has waited `flush_seconds`, at an anomaly and
    at the end, so that a killed process loses at most the last `flush_seconds`.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        rotate_bytes: int = 64 << 20,
        flush_seconds: float = 1.0,
        memory_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = Path(output_dir) / FOLDER
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._header = b""
        self._start_step = 1
        self._waiting_since: float | None = None
        self._watch = AnomalyWatch(start_step=1)
        self._lines = DurableAppender(
            f"record in {self._folder}",
            self._open_next,
            memory_bytes=memory_bytes,
            rotate_bytes=rotate_bytes,
            clock=clock,
        )

    @property
    def dropped_records(self) -> int:
        """Records that an outage outlasted: given up because memory was full."""
        return self._lines.dropped

    def open(self, manifest: Manifest) -> None:
        """Begin a new file with the attempt's header."""
        header = {
            "header": manifest.as_json(),
            "attempt": manifest.attempt,
            "start_step": manifest.start_step,
        }
        self._header = encode_line(header)
        self._watch = AnomalyWatch(manifest.start_step)
        self._start_step = manifest.start_step
        self._lines.flush()

    def write(self, record: StepRecord) -> None:
        """Take one line; it is written at the latest `flush_seconds` after.

        Late values of a step before the attempt's first one are left out: that step is an older attempt's.
        """
        if record.late and record.step < self._start_step:
            return
        line: dict[str, Any] = {
            "step": record.step,
            "attempt": record.attempt,
            "time": record.time,
            "tokens": record.tokens,
            "values": record.values,
            "context": record.context,
        }
        if record.histograms:
            line["histograms"] = {tag: _as_json(found) for tag, found in record.histograms.items()}
        if record.parts is not None:
            line["parts"] = record.parts
        if record.late:
            line["late"] = True
        self._lines.append(encode_line(line))
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        if self._watch.observe(record) or now - self._waiting_since >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Write what waits in memory."""
        if self._lines.flush():
            self._waiting_since = None

    def close(self) -> None:
        """Write what waits in memory and close the file."""
        self._lines.close()

    def _open_next(self) -> tuple[io.FileIO, bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((_number(path) for path in record_files(self._folder.parent)), default=-1)
        return io.FileIO(self._folder / f"record-{number:05d}.jsonl", "xb"), self._header


def _as_json(histogram: Histogram) -> dict[str, Any]:
    line: dict[str, Any] = {"edges": histogram.edges, "counts": histogram.counts}
    if histogram.named:
        line["named"] = histogram.named
    return line


def record_files(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the record files of an output folder in the order in which they were written."""
    try:
        names = os.listdir(Path(output_dir) / FOLDER)
    except OSError:
        return []
    paths = [Path(output_dir) / FOLDER / name for name in names if _NAME.fullmatch(name)]
    return sorted(paths, key=_number)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def encode_line(line: Mapping[str, Any]) -> bytes:
    """Return one line of strict JSON; floats with as many digits as read back to the same float64."""
    return json.dumps(_strict(line), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds, or None when it is damaged."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else _NON_FINITE_NAMES[str(value)]
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


_NON_FINITE_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def plain_number(value: int | float | str) -> int | float:
    """Return a number of a record line; the name of a non-finite value becomes the float again."""
    return float(value) if isinstance(value, str) else value
