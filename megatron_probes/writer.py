"""The writing rank's half of a session: from reduced cells to values, records and alarms.

The training thread stages reduced cells and goes on. When they have arrived on the host, a background
thread turns them into values, feeds the detectors and writes.
"""

from __future__ import annotations

import enum
import functools
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_probes.catalog import Priority
from megatron_probes.formulas.histogram import Histogram
from megatron_probes.ledger import Kind, Outbox, Payload
from megatron_probes.probes import Facts, HeldOutProbe, Probe
from megatron_probes.sinks import Manifest, Pipeline, Sink, StepRecord

if TYPE_CHECKING:
    from megatron_probes.session import ProbeSession

logger = logging.getLogger("megatron_probes")

STALL_SECONDS = 60.0
STALL_STEPS = 10
"""A job is stalled when a step has taken more than a minute and ten times the usual step."""

_DRAIN_TIMEOUT_S = 30.0


class JobState(enum.IntEnum):
    """The values of ``job/state`` (Specification, section 0)."""

    STARTING = 0
    TRAINING = 1
    EVALUATING = 2
    SAVING = 3
    STALLED = 4
    FINISHED = 5
    FAILED = 6


@dataclass
class StepItem:
    """One step on its way to the background thread."""

    facts: Facts
    payload: Payload[Facts]
    p0_cells: Mapping[Kind, int]

    @property
    def p0_bytes(self) -> int:
        return 8 * sum(self.p0_cells.values())

    @property
    def p1_bytes(self) -> int:
        return sum(cells.nbytes for cells in self.payload.cells.values()) - self.p0_bytes

    @property
    def p0_points(self) -> int:
        return sum(self.p0_cells.values())

    @property
    def p1_points(self) -> int:
        return self.p1_bytes // 8

    def drop_p1(self) -> None:
        p0 = {kind: cells[: self.p0_cells[kind]] for kind, cells in self.payload.cells.items()}
        self.payload = replace(self.payload, cells=p0)
        self.facts = replace(self.facts, priority=Priority.P0)


class Writer:
    """The writing rank's half: the outbox, and the background thread's work on each step."""

    def __init__(self, session: ProbeSession, sinks: Sequence[Sink], manifest: Manifest) -> None:
        self._session = session
        self._attempt = manifest.attempt
        self._outbox: Outbox[Facts] = Outbox(session.ledger, write_every=session.config.write_every)
        self._evaluations: Outbox[int] = Outbox(session.evaluation_ledger, write_every=1)
        self._p0_cells = {kind: session.ledger.cells_sent(kind, Priority.P0) for kind in Kind}
        self._disabled: set[str] = set()
        self._state = JobState.STARTING
        self._moved_s = time.monotonic()
        self._step_times_s: deque[float] = deque(maxlen=101)
        queue = session.config.queue
        self._pipeline: Pipeline[StepItem] = Pipeline(
            self._process,
            sinks,
            max_items=queue.max_items,
            spill_bytes=queue.spill_bytes,
            on_idle=self._watch_for_stall,
        )
        self._pipeline.open(manifest)
        self._note(JobState.STARTING, session.last_step)

    def put(self, facts: Facts, priority: Priority) -> None:
        self._state, self._moved_s = JobState.TRAINING, time.monotonic()
        self._step_times_s.append(facts.step_time_s)
        self._outbox.put(facts, priority)
        self.forward_arrived()

    def forward_arrived(self, *, wait: bool = False) -> None:
        for payload in self._outbox.collect(wait=wait):
            self._pipeline.submit(StepItem(payload.label, payload, self._p0_cells))

    def call_after_steps(self, call: Callable[[dict[str, Any]], None]) -> None:
        self._flush_outbox()
        self._pipeline.submit_call(lambda: call(self._session.state_dict()))

    def enter(self, state: JobState, step: int) -> None:
        """Notes outside a step what the job does now."""
        self._flush_outbox()
        self._note(state, step)

    def _note(self, state: JobState, step: int) -> None:
        self._state, self._moved_s = state, time.monotonic()
        self._add_late(step, lambda: {"job/state": int(state)})

    def put_evaluation(self, name: str, probe: HeldOutProbe) -> None:
        """Hands the reduced sums of a held-out set to the step after which it was run."""
        self._flush_outbox()
        self._evaluations.put(self._session.last_step, Priority.P0)
        for payload in self._evaluations.collect(wait=True):
            self._add_late(payload.label, functools.partial(self._evaluated, name, probe, payload))

    def _evaluated(self, name: str, probe: HeldOutProbe, payload: Payload[int]) -> dict[str, int | float]:
        """The values of a held-out set: on the background thread."""
        parts = self._session.evaluation_ledger.unpack(payload.cells)
        if parts[f"probe/failed/{probe.family}"][0] > 0:
            self._disabled.add(probe.family)
        values: dict[str, int | float] = {}
        if probe.family not in self._disabled:
            probe.finalize_set(name, parts, values)
        return values

    def _add_late(self, step: int, find: Callable[[], Mapping[str, int | float]]) -> None:
        """Has what ``find`` returns join the record of ``step``; called on the background thread."""
        now = time.time()

        def late_record() -> StepRecord | None:
            values = find()
            if not values:
                return None
            return StepRecord(
                step=step,
                attempt=self._attempt,
                time=now,
                tokens=self._session.tokens_total,
                values=values,
                context={},
                late=True,
            )

        self._pipeline.submit_record(late_record)

    def _watch_for_stall(self) -> None:
        """On the background thread while nothing comes: says when a training step does not end."""
        waited_s = time.monotonic() - self._moved_s
        step_times_s = tuple(self._step_times_s)
        usual_s = statistics.median(step_times_s) if step_times_s else math.inf
        if self._state is JobState.TRAINING and waited_s > max(STALL_SECONDS, STALL_STEPS * usual_s):
            self._note(JobState.STALLED, self._session.last_step)

    def flush(self) -> None:
        self._flush_outbox()
        self._pipeline.flush(_DRAIN_TIMEOUT_S)

    def close(self) -> None:
        self._flush_outbox()
        self._pipeline.close(_DRAIN_TIMEOUT_S)

    def _flush_outbox(self) -> None:
        self._outbox.send()
        self.forward_arrived(wait=True)

    def _process(self, item: StepItem) -> StepRecord:
        """Reduced cells to values: on the background thread, in step order."""
        parts = self._session.ledger.unpack(item.payload.cells)
        values: dict[str, int | float] = {
            "job/state": int(JobState.TRAINING),
            "job/last_step": item.facts.step,
            "job/restarts": self._attempt,
        }
        histograms: dict[str, Histogram] = {}
        for family, probe in self._session.probes.items():
            if parts[f"probe/failed/{family}"][0] > 0:
                self._disabled.add(family)
            if family not in self._disabled:
                self._finalize(probe, parts, item.facts, values, histograms)
        values["probe/disabled"] = len(self._disabled)
        lost = self._outbox.lost_steps * item.p0_points
        values["probe/dropped_points"] = self._pipeline.dropped_points + lost
        return StepRecord(
            step=item.facts.step,
            attempt=self._attempt,
            time=item.facts.time,
            tokens=self._session.tokens_total,
            values=values,
            context=item.facts.context,
            histograms=histograms,
            parts=_as_lists(parts) if self._session.config.record.parts else None,
        )

    def _finalize(
        self,
        probe: Probe,
        parts: Mapping[str, np.ndarray],
        facts: Facts,
        values: dict[str, int | float],
        histograms: dict[str, Histogram],
    ) -> None:
        found: dict[str, int | float] = dict(values)
        try:
            probe.finalize(parts, facts, found)
            distributions = probe.histograms(parts, facts)
        except Exception as error:
            self._disabled.add(probe.family)
            if self._session.config.strict:
                raise
            logger.warning("the %s metrics are off from step %d on", probe.family, facts.step, exc_info=error)
            return
        values.update(found)
        histograms.update(distributions)


def _as_lists(parts: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: cells.tolist() for name, cells in parts.items()}
