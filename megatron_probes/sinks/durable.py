"""Bytes on their way to a file that may be unwritable for a while: kept, bounded, written later."""

from __future__ import annotations

import io
import logging
import os
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("megatron_probes")

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0

OpenFile = Callable[[], tuple[io.FileIO, bytes]]
"""Opens the next file, unbuffered, and returns it with the bytes that stand before its first chunk."""


class DurableAppender:
    """Appends whole chunks to files; an outage of the storage never reaches the caller.

    A chunk is what a reader takes as one: a line, an event. Chunks wait in memory until `flush`. When they
    can't be written they stay there, at most `memory_bytes` of them (the oldest are dropped and counted),
    and are tried again with growing pauses. A chunk that was written in part is cut off again, so files
    hold whole chunks and each chunk once.

    Each outage is reported once when it begins and once when it is over.
    """

    def __init__(
        self,
        name: str,
        open_file: OpenFile,
        *,
        memory_bytes: int,
        rotate_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        """Chunks that were given up, in all."""
        self._name = name
        self._open_file = open_file
        self._memory_bytes = memory_bytes
        self._rotate_bytes = rotate_bytes
        self._clock = clock
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._file: io.FileIO | None = None
        self._size = 0
        self._chunks_in_file = 0
        self._outage_began: float | None = None
        self._dropped_before_outage = 0
        self._retry_at = 0.0
        self._retry_pause = FIRST_RETRY_SECONDS

    def append(self, chunk: bytes) -> None:
        """Take one chunk."""
        self._pending.append(chunk)
        self._pending_bytes += len(chunk)
        while self._pending_bytes > self._memory_bytes:
            self._pending_bytes -= len(self._pending.popleft())
            self.dropped += 1

    def flush(self, *, force: bool = False) -> bool:
        """Write what waits and return whether all of it is in the file.

        During an outage nothing is tried before the pause is over, unless `force` is true.
        """
        if self._outage_began is not None and not force and self._clock() < self._retry_at:
            return False
        try:
            if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
                logger.warning("%s: the file was deleted while it was written; a new one begins", self._name)
                self._close_file()
            if self._file is None:
                self._open()
            while self._pending:
                self._write_chunk(self._pending[0])
                self._pending_bytes -= len(self._pending.popleft())
        except OSError as error:
            self._note_failure(error)
            return False
        if self._outage_began is not None:
            self._note_recovery(self._outage_began)
        return True

    def close(self) -> None:
        """Write what can be written and close the file."""
        if not self.flush(force=True) and self._pending:
            logger.warning("%s: closed with %d entries unwritten", self._name, len(self._pending))
        self._close_file()

    def _write_chunk(self, chunk: bytes) -> None:
        rotate = self._rotate_bytes
        if rotate is not None and self._chunks_in_file > 0 and self._size + len(chunk) > rotate:
            self._close_file()
        file = self._file or self._open()
        self._write_whole(file, chunk)
        self._chunks_in_file += 1

    def _open(self) -> io.FileIO:
        file, preamble = self._open_file()
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._chunks_in_file = 0
        try:
            self._write_whole(file, preamble)
        except OSError:
            was_new = self._size == 0
            self._close_file()
            if was_new:
                os.unlink(file.name)  # each try would leave an empty file behind
            raise
        return file

    def _write_whole(self, file: io.FileIO, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            self._cut_torn_tail(file)
            raise
        self._size += len(data)

    def _cut_torn_tail(self, file: io.FileIO) -> None:
        try:
            file.truncate(self._size)
            file.seek(self._size)
        except OSError:
            self._close_file()  # the next try begins a new file; readers skip this one's last chunk

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:  # network file systems report a failed write here
                logger.warning("%s: %s while closing", self._name, error)

    def _note_failure(self, error: OSError) -> None:
        now = self._clock()
        if self._outage_began is None:
            self._outage_began = now
            self._dropped_before_outage = self.dropped
            self._retry_pause = FIRST_RETRY_SECONDS
            logger.warning(
                "%s can't be written (%s). Training goes on; the newest entries, at most %d bytes, are kept "
                "in memory and written when it works again",
                self._name,
                error,
                self._memory_bytes,
            )
        self._retry_at = now + self._retry_pause
        self._retry_pause = min(2 * self._retry_pause, LONGEST_RETRY_SECONDS)

    def _note_recovery(self, began: float) -> None:
        self._outage_began = None
        logger.warning(
            "%s can be written again after %.0f s; %d entries were lost",
            self._name,
            self._clock() - began,
            self.dropped - self._dropped_before_outage,
        )
