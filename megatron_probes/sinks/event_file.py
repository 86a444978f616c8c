"""TensorBoard's event files: one run folder, written so that no reader shows a point twice or loses one.

What readers make of a folder (TensorBoard 2.21, its Python loader and its data server 0.7): files are read
in the order of their names; a cut-off last event is skipped; a START event hides older points from its step
on, but the Python loader takes the first START of a run as its beginning and ignores it.
"""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2

from megatron_probes.sinks.durable import DurableAppender
from megatron_probes.sinks.tfrecord import frame

_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\..*")


class EventRun:
    """One TensorBoard run folder, written by one attempt of a job.

    `start` is the first x value that this attempt writes: points of older attempts from there on were
    rolled back and are hidden. Each attempt writes files of its own, whose names follow all older ones
    whatever the clocks of the nodes say.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        start: int,
        memory_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = Path(folder)
        self._start = start
        self._own_files: list[Path] = []
        self._events = DurableAppender(
            f"TensorBoard run {self._folder}", self._open_next, memory_bytes=memory_bytes, clock=clock
        )

    def add(self, summary: summary_pb2.Summary, *, x: int, wall_time: float) -> None:
        """Take a summary at the x value `x`, in memory until `flush`."""
        event = event_pb2.Event(wall_time=wall_time, step=x, summary=summary)
        self._events.append(frame(event.SerializeToString()))

    def flush(self) -> bool:
        """Write what waits in memory; False while the storage can't."""
        return self._events.flush()

    def close(self) -> None:
        """Write what waits in memory and close the file."""
        self._events.close()

    def _open_next(self) -> tuple[io.FileIO, bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        stamps = [int(match.group(1)) for name in os.listdir(self._folder) if (match := _NAME.match(name))]
        stamp = max(int(time.time()), max(stamps, default=0) + 1)
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        opening = [event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")]
        # A second START would hide what this attempt has already written.
        if not any(path.exists() for path in self._own_files):
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            opening.append(event_pb2.Event(wall_time=time.time(), step=self._start, session_log=start))
        self._own_files.append(self._folder / name)
        return io.FileIO(self._own_files[-1], "xb"), b"".join(frame(e.SerializeToString()) for e in opening)
