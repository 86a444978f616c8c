"""One bounded queue and one thread between training and storage: the training thread never waits."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from megatron_probes.sinks.record import Manifest, Sink, StepRecord

logger = logging.getLogger("megatron_probes")

IDLE_SECONDS = 1.0
"""Sinks are flushed once when nothing has come for so long: slow steps are on disk before the next one."""
EXIT_TIMEOUT_SECONDS = 10.0


class Item(Protocol):
    """One step on its way: sizes in bytes and points (values that would be written)."""

    @property
    def p0_bytes(self) -> int:
        """Memory of the P0 part."""

    @property
    def p1_bytes(self) -> int:
        """Memory of the P1 part; 0 after `drop_p1`."""

    @property
    def p0_points(self) -> int:
        """Points of the P0 part; every item has some."""

    @property
    def p1_points(self) -> int:
        """Points of the P1 part; 0 after `drop_p1`."""

    def drop_p1(self) -> None:
        """Forget the P1 part."""


ItemT = TypeVar("ItemT", bound=Item)
Call = Callable[[], None]


class Pipeline(Generic[ItemT]):
    """Takes items from the training thread, turns each into a record and gives it to every sink, in order.

    At most `max_items` whole items wait. An item that finds the queue full loses its P1 part and waits in
    a spill of at most `spill_bytes`; when that is full, the oldest items of the spill are given up. All
    points that are lost are counted in `dropped_points`.

    `on_idle` runs on the background thread about once in `IDLE_SECONDS` while nothing comes.

    A sink that raises is switched off after one warning; the others go on. Sinks survive an outage of
    their storage by themselves.
    """

    def __init__(
        self,
        process: Callable[[ItemT], StepRecord | None],
        sinks: Sequence[Sink],
        *,
        max_items: int,
        spill_bytes: int = 64 << 20,
        on_idle: Call | None = None,
    ) -> None:
        self._process = process
        self._sinks = list(sinks)
        self._max_items = max_items
        self._spill_bytes = spill_bytes
        self._on_idle = on_idle
        self._changed = threading.Condition()
        self._queue: deque[ItemT | Call] = deque()
        self._spill: deque[ItemT | Call] = deque()
        self._spilled_bytes = 0
        self._dropped_points = 0
        self._closed = False
        self._process_failed = False
        self._unflushed = False
        self._thread = threading.Thread(target=self._run, name="megatron-probes-sinks", daemon=True)
        self._thread.start()
        atexit.register(self.close, EXIT_TIMEOUT_SECONDS)

    @property
    def dropped_points(self) -> int:
        """Points given up so far: by the full queue, by the full spill, and by items that didn't process."""
        return self._dropped_points

    def open(self, manifest: Manifest) -> None:
        """Open every sink, on the background thread, before anything that is submitted later."""
        self.submit_call(lambda: self._each_sink(lambda sink: sink.open(manifest)))

    def submit(self, item: ItemT) -> None:
        """Take one step. Never blocks and never raises; what doesn't fit is counted."""
        with self._changed:
            if self._closed:
                self._dropped_points += item.p0_points + item.p1_points
            elif not self._spill and len(self._queue) < self._max_items:
                self._queue.append(item)
            else:
                self._dropped_points += item.p1_points
                item.drop_p1()
                self._spill.append(item)
                self._spilled_bytes += item.p0_bytes
                while self._spilled_bytes > self._spill_bytes:
                    self._drop_oldest_spilled()
            self._changed.notify()

    def submit_call(self, call: Call) -> None:
        """Have `call` run on the background thread after every item submitted so far; never dropped."""
        with self._changed:
            (self._spill if self._spill else self._queue).append(call)
            self._changed.notify()

    def submit_record(self, make: Callable[[], StepRecord | None]) -> None:
        """Have the record that `make` returns written after every item submitted so far; never dropped."""

        def deliver() -> None:
            record = make()
            if record is not None:
                self._deliver(record)

        self.submit_call(deliver)

    def flush(self, timeout_s: float = 0.0) -> bool:
        """Have everything submitted so far written; waits at most `timeout_s` and returns whether it is."""
        done = threading.Event()
        self.submit_call(self._flush_sinks)
        self.submit_call(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Write what waits, close the sinks and stop; returns False if that took more than `timeout_s`.

        Nothing is taken afterwards: items are counted as dropped.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        atexit.unregister(self.close)
        if self._thread.is_alive():
            with self._changed:
                waiting = len(self._queue) + len(self._spill)
            logger.warning(
                "storage didn't finish within %g s; %d steps that wait for it are given up",
                timeout_s,
                waiting,
            )
            return False
        return True

    def _drop_oldest_spilled(self) -> None:
        for place, entry in enumerate(self._spill):
            if not callable(entry):
                del self._spill[place]
                self._spilled_bytes -= entry.p0_bytes
                self._dropped_points += entry.p0_points
                return

    def _next(self) -> ItemT | Call | None:
        """The next entry; None when the pipeline was closed and all is done. Flushes when nothing comes."""
        with self._changed:
            while not self._queue:
                if self._closed:
                    return None
                idles = self._unflushed or self._on_idle is not None
                if not self._changed.wait(IDLE_SECONDS if idles else None):
                    return self._idle
            entry = self._queue.popleft()
            if self._spill:
                promoted = self._spill.popleft()
                if not callable(promoted):
                    self._spilled_bytes -= promoted.p0_bytes
                self._queue.append(promoted)
            return entry

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            if callable(entry):
                self._call(entry)
            else:
                self._write(entry)
        self._each_sink(lambda sink: sink.close())

    def _call(self, call: Call) -> None:
        try:
            call()
        except Exception as error:
            logger.warning("a task of the background thread failed: %s: %s", type(error).__name__, error)

    def _write(self, item: ItemT) -> None:
        try:
            record = self._process(item)
        except Exception as error:
            with self._changed:
                self._dropped_points += item.p0_points + item.p1_points
            if not self._process_failed:
                self._process_failed = True
                logger.warning(
                    "a step couldn't be turned into a record (%s: %s) and is left out; further ones are only "
                    "counted in probe/dropped_points",
                    type(error).__name__,
                    error,
                    exc_info=error,
                )
            return
        if record is not None:
            self._deliver(record)

    def _deliver(self, record: StepRecord) -> None:
        self._unflushed = True
        self._each_sink(lambda sink: sink.write(record))

    def _idle(self) -> None:
        if self._unflushed:
            self._flush_sinks()
        if self._on_idle is not None:
            self._on_idle()

    def _flush_sinks(self) -> None:
        self._unflushed = False
        self._each_sink(lambda sink: sink.flush())

    def _each_sink(self, action: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                action(sink)
            except Exception as error:
                self._sinks.remove(sink)
                logger.warning(
                    "%s is switched off: %s: %s. Training and the other outputs go on",
                    type(sink).__name__,
                    type(error).__name__,
                    error,
                )
