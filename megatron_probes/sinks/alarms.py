"""Alarms: one line in `alarms.jsonl` for each event, and a warning in the log."""

from __future__ import annotations

import io
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from megatron_probes.sinks.anomaly import DISABLED, DROPPED, JOINT_SPIKES, Anomaly, AnomalyWatch
from megatron_probes.sinks.durable import DurableAppender
from megatron_probes.sinks.record import Manifest, StepRecord
from megatron_probes.sinks.record_file import encode_line

logger = logging.getLogger("megatron_probes")

FILE = "alarms.jsonl"
PAUSE_SECONDS = 60.0
"""Between two log lines about the same thing, in the time of the records."""
_MEMORY_BYTES = 1 << 20


class AlarmSink:
    """Reports joint spikes, non-finite losses and gradient norms, disabled probes and dropped points.

    Each event is one line of the file: a rise of a counter when it rises, a stretch of non-finite steps
    when it begins and when it ends. The log speaks of one thing at most once in `PAUSE_SECONDS` and then
    says how many events it left to the file. Dropped points rise step after step while storage is slow,
    so they have that pause in the file as well; their value is the total.
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = Path(output_dir) / FILE
        self._watch = AnomalyWatch(start_step=1)
        self._logged_at: dict[tuple[str, str], float] = {}
        self._unlogged: Counter[tuple[str, str]] = Counter()
        self._lines = DurableAppender(
            f"alarms in {self._path}", self._open, memory_bytes=_MEMORY_BYTES, clock=clock
        )

    def open(self, manifest: Manifest) -> None:
        """Begin an attempt; the file goes on."""
        self._watch = AnomalyWatch(manifest.start_step)
        self._lines.flush()

    def write(self, record: StepRecord) -> None:
        """Report what is anomalous at this step, at once."""
        for event in self._watch.observe(record):
            pausing = record.time - self._logged_at.get(_topic(event), -math.inf) < PAUSE_SECONDS
            if event.tag == DROPPED and pausing:
                continue
            self._lines.append(
                encode_line(
                    {
                        "step": record.step,
                        "attempt": record.attempt,
                        "time": record.time,
                        "kind": event.kind,
                        "tag": event.tag,
                        "value": event.value,
                    }
                )
            )
            if pausing:
                self._unlogged[_topic(event)] += 1
            else:
                self._log(event, record)
        self._lines.flush()

    def flush(self) -> None:
        """Write what an outage held back."""
        self._lines.flush()

    def close(self) -> None:
        """Write what can be written and close the file."""
        self._lines.close()

    def _log(self, event: Anomaly, record: StepRecord) -> None:
        self._logged_at[_topic(event)] = record.time
        unlogged = self._unlogged.pop(_topic(event), 0)
        more = f" ({unlogged} more since the last such message: see {self._path})" if unlogged else ""
        logger.warning("step %d: %s%s", record.step, _sentence(event, record), more)

    def _open(self) -> tuple[io.FileIO, bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = io.FileIO(self._path, "ab+")
        return file, b"" if _ends_whole(file) else b"\n"


def _ends_whole(file: io.FileIO) -> bool:
    """Whether the file is empty or ends with a whole line; a crash may have cut off the last one."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return True
    file.seek(size - 1)
    return file.read(1) == b"\n"


def _topic(event: Anomaly) -> tuple[str, str]:
    return event.tag, event.kind


def _sentence(event: Anomaly, record: StepRecord) -> str:
    if event.kind == "finite_again":
        return f"{event.tag} is finite again after {event.change} steps: {event.value:.6g}"
    if event.kind == "non_finite":
        return f"{event.tag} is {event.value}"
    if event.tag == JOINT_SPIKES:
        loss, norm = (record.values.get(tag, math.nan) for tag in ("loss/global", "grad/norm"))
        return f"loss and gradient norm spike together: loss/global {loss:.6g}, grad/norm {norm:.6g}"
    if event.tag == DISABLED:
        return f"the metrics of {event.value} families are off because their probe failed"
    assert event.tag == DROPPED
    return f"storage is too slow: {event.value} points were given up so far"
