"""TensorBoard: the same tags over steps in `by_step/` and over tokens in `by_tokens/`.

Distributions are written as the summaries of its histogram plugin: float64 [k, 3], each row a bin's left
edge, right edge and count.

A value is written as float32, which every loader of TensorBoard reads, unless that would show another
number: a count that float32 would round and a value outside its range are written as float64.
TensorBoard's Python loader (`--load_fast=false`) shows those exactly; its default loader leaves such a
point out, and never shows a wrong one. Counts are exact to 2^53 here and without limit in the record.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.util import tensor_util

from megatron_probes.catalog import MetricSpec, Priority, first_screen_charts, lookup
from megatron_probes.formulas.histogram import Histogram
from megatron_probes.sinks.anomaly import AnomalyWatch
from megatron_probes.sinks.dashboard import layout_summary, manifest_summary
from megatron_probes.sinks.event_file import EventRun
from megatron_probes.sinks.record import Manifest, StepRecord

logger = logging.getLogger("megatron_probes")

SHOW_EVERY_POINT = "--samples_per_plugin scalars=1000000000"
"""TensorBoard's option against thinning out curves; since 2.8 it takes 0 for "show nothing"."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


class TensorBoardSink:
    """Writes scalars, histograms, the first screen's layout and the manifest.

    At most `max_series` tags are written. P0 and context tags are always among them, even beyond the cap:
    an alarm is never given up for a diagnosis. The others come in the order in which they first appear;
    `left_out` says how many were refused.

    A chart of the first screen appears with the first value of one of its tags in this attempt.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        by_tokens: bool = True,
        max_series: int = 2000,
        flush_seconds: float = 5.0,
        memory_bytes: int = 32 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output_dir = Path(output_dir)
        self._with_tokens = by_tokens
        self._max_series = max_series
        self._flush_seconds = flush_seconds
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._by_step: EventRun | None = None
        self._by_tokens: EventRun | None = None
        self._written: set[str] = set()
        self._left_out: set[str] = set()
        self._reported = 0
        self._charts: set[int] = set()
        self._waiting_since: float | None = None
        self._watch = AnomalyWatch(start_step=1)

    @property
    def left_out(self) -> int:
        """Tags that were refused because of `max_series`."""
        return len(self._left_out)

    def open(self, manifest: Manifest) -> None:
        """Begin new event files; older points from the attempt's first step on are hidden."""
        self._watch = AnomalyWatch(manifest.start_step)
        self._by_step = self._run("by_step", manifest.start_step)
        if self._with_tokens:
            self._by_tokens = self._run("by_tokens", manifest.tokens_at_start + 1)
        # At the attempt's first step, so that a later start from an earlier step hides it.
        self._by_step.add(manifest_summary(manifest), x=manifest.start_step, wall_time=manifest.started)
        self.flush()

    def write(self, record: StepRecord) -> None:
        """Take one step's values; they are written at the latest `flush_seconds` after."""
        numbers = {**record.values, **record.context}
        tags = (*numbers, *record.histograms)
        new = dict.fromkeys(t for t in tags if t not in self._written and t not in self._left_out)
        self._admit(new)
        self._add_charts(new, record.time)
        points = [_point(tag, value, tag in new) for tag, value in numbers.items() if tag in self._written]
        points += [
            _distribution(tag, histogram, tag in new)
            for tag, histogram in record.histograms.items()
            if tag in self._written
        ]
        self._add(summary_pb2.Summary(value=points), record.step, record.tokens, record.time)
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        if self._watch.observe(record) or now - self._waiting_since >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Write what waits in memory."""
        flushed = [run.flush() for run in self._runs()]
        if all(flushed):
            self._waiting_since = None

    def close(self) -> None:
        """Write what waits in memory and close the files."""
        self._report_left_out()
        for run in self._runs():
            run.close()

    def _run(self, name: str, start: int) -> EventRun:
        folder = self._output_dir / name
        return EventRun(folder, start=start, memory_bytes=self._memory_bytes, clock=self._clock)

    def _runs(self) -> list[EventRun]:
        return [run for run in (self._by_step, self._by_tokens) if run is not None]

    def _add(self, summary: summary_pb2.Summary, step: int, tokens: int, wall_time: float) -> None:
        for run, x in ((self._by_step, step), (self._by_tokens, tokens)):
            if run is not None:
                run.add(summary, x=x, wall_time=wall_time)

    def _admit(self, tags: Iterable[str]) -> None:
        for tag in sorted(tags, key=_priority):
            if _priority(tag) == Priority.P0 or len(self._written) < self._max_series:
                self._written.add(tag)
            else:
                self._left_out.add(tag)
        if self._left_out and not self._reported:
            self._report_left_out()

    def _report_left_out(self) -> None:
        if self.left_out > self._reported:
            self._reported = self.left_out
            logger.warning(
                "TensorBoard: %d series are left out because of tensorboard.max_series = %d (P0 is never "
                "left out). They stand in the record; raise tensorboard.max_series to see them here",
                self.left_out,
                self._max_series,
            )

    def _add_charts(self, new_tags: Iterable[str], wall_time: float) -> None:
        specs = (_spec(tag) for tag in new_tags)
        found = {spec.first_screen for spec in specs if spec is not None and spec.first_screen is not None}
        if not found <= self._charts:
            self._charts |= found
            charts = [c for c in first_screen_charts(planned=True) if c.order in self._charts]
            # At 0, below every start: no restart hides it, and the newest of a run is the one that is shown.
            self._add(layout_summary(charts), 0, 0, wall_time)


def _spec(tag: str) -> MetricSpec | None:
    """The catalogue's entry; None for context, and for a tag that the catalogue doesn't hold."""
    try:
        return lookup(tag)
    except KeyError:
        return None


def _priority(tag: str) -> Priority:
    if tag.startswith("context/"):
        return Priority.P0
    spec = _spec(tag)
    return Priority.P2 if spec is None else spec.priority


def _point(tag: str, value: int | float, described: bool) -> summary_pb2.Summary.Value:
    """A scalar summary; TensorBoard keeps the description of a series' first point."""
    spec = _spec(tag)
    exact = isinstance(value, int) or (spec is not None and spec.integer)
    return summary_pb2.Summary.Value(
        tag=tag,
        metadata=_scalar_metadata(spec.meaning if described and spec is not None else ""),
        tensor=_scalar_tensor(value, exact),
    )


def _distribution(tag: str, histogram: Histogram, described: bool) -> summary_pb2.Summary.Value:
    """A histogram summary; the plugin draws no infinite edge, so such a bin shrinks to its finite one."""
    spec = _spec(tag)
    edges = np.array(histogram.edges)
    left, right = edges[:-1].copy(), edges[1:].copy()
    left[0] = left[0] if np.isfinite(left[0]) else right[0]
    right[-1] = right[-1] if np.isfinite(right[-1]) else left[-1]
    bins = np.stack([left, right, np.array(histogram.counts)], axis=1)
    return summary_pb2.Summary.Value(
        tag=tag,
        metadata=_histogram_metadata(spec.meaning if described and spec is not None else ""),
        tensor=tensor_util.make_tensor_proto(bins),
    )


@functools.lru_cache
def _histogram_metadata(description: str) -> summary_pb2.SummaryMetadata:
    metadata = histogram_metadata.create_summary_metadata(display_name="", description=description)
    metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
    return metadata


@functools.lru_cache
def _scalar_metadata(description: str) -> summary_pb2.SummaryMetadata:
    metadata = scalar_metadata.create_summary_metadata(display_name="", description=description)
    metadata.data_class = summary_pb2.DATA_CLASS_SCALAR
    return metadata


def _scalar_tensor(value: int | float, exact: bool) -> tensor_pb2.TensorProto:
    if _float32_shows(value, exact):
        return tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[value])
    return tensor_pb2.TensorProto(dtype=types_pb2.DT_DOUBLE, double_val=[value])


def _float32_shows(value: int | float, exact: bool) -> bool:
    """Whether float32 holds the value: exactly, or else to its own precision."""
    if value == 0 or not math.isfinite(value):
        return True
    if not _FLOAT32_SMALLEST_NORMAL <= abs(value) <= _FLOAT32_MAX:
        return False
    return not exact or float(np.float32(value)) == value
