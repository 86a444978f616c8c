"""The one object that an adapter talks to: a step begins, probes look, a step ends.

On every rank the session opens the gates, reduces the ledger and closes the gates. On the rank that
writes it also hands the reduced cells to a background thread, which turns them into values, feeds the
detectors and writes. Nothing here waits for the device, for a disk or for another thread.
"""

from __future__ import annotations

import enum
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec

import numpy as np
import torch

from megatron_probes.catalog import Priority
from megatron_probes.config import ProbeConfig
from megatron_probes.ledger import Kind, Ledger, Outbox, Payload, Slot, Source
from megatron_probes.probes import Facts, HeldOutProbe, LossProbe, Probe
from megatron_probes.schedule import Schedule
from megatron_probes.sinks import Manifest, Pipeline, Sink, StepRecord
from megatron_probes.topology import Topology

logger = logging.getLogger("megatron_probes")

P = ParamSpec("P")

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
    payload: Payload
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


class ProbeSession:
    """Runs the probes of one training job.

    ``start_step`` is the last iteration that was done before this process started.
    """

    def __init__(
        self,
        config: ProbeConfig,
        topology: Topology,
        device: torch.device,
        probes: Sequence[Probe],
        *,
        held_out: HeldOutProbe | None = None,
        start_step: int = 0,
    ) -> None:
        self.config = config
        self.topology = topology
        self.probes = {probe.family: probe for probe in probes}
        self.ledger = Ledger(topology, device)
        self._schedule = Schedule(config.sample_every)
        self._failed: set[str] = set()
        self._failure_slots = _declare(self.ledger, probes)
        self.held_out = held_out
        self.evaluation_ledger = Ledger(topology, device)
        held_out_probes = [] if held_out is None else [held_out]
        self._evaluation_failure_slots = _declare(self.evaluation_ledger, held_out_probes)
        self._step = start_step
        self._priority = Priority.P0
        self._step_started_s = 0.0
        self._p0_cells = {kind: self.ledger.cells_sent(kind, Priority.P0) for kind in Kind}
        self._writer: _Writer | None = None

    def write_to(self, sinks: Sequence[Sink], manifest: Manifest) -> None:
        """Makes this the rank that writes; after ``load_state_dict``, before the first step."""
        self._writer = _Writer(self, sinks, manifest)

    # ------------------------------------------------------------ on every rank

    def step_begin(self, step: int) -> None:
        """Opens the gates for training step ``step`` (1-based)."""
        self._step = step
        self._priority = self._schedule.due(step)
        if self._writer is not None:
            self._writer.forward_arrived()
        for probe in self.probes.values():
            probe.gate.set(None if probe.family in self._failed else self._priority)
            self.guard(probe, probe.begin_step)()
        self._step_started_s = time.perf_counter()

    def pass_begin(self) -> None:
        """A forward-backward pass of the step begins: what an earlier pass of this step added is void."""
        self.ledger.reset()
        for probe in self.probes.values():
            self.guard(probe, probe.begin_pass)()

    def step_end(self, facts: Facts) -> None:
        """Closes the gates, reduces everything that is due and sends it on its way.

        Every rank calls this for every step, whatever failed on it: the collectives stay matched.
        """
        step_time_s = time.perf_counter() - self._step_started_s
        facts = replace(facts, step_time_s=step_time_s, priority=self._priority)
        for probe in self.probes.values():
            probe.gate.set(None)
            self.guard(probe, probe.end_step)(facts)
        for family, slot in self._failure_slots.items():
            self.ledger.set_host(slot, float(family in self._failed))
        self.ledger.reduce(self._priority)
        if self._writer is not None:
            self._writer.put(facts, self._priority)

    def evaluation_begin(self) -> None:
        """A held-out set is about to be run; never inside a training step."""
        if self.held_out is not None:
            self.evaluation_ledger.reset()
            self.held_out.gate.set(None if self.held_out.family in self._failed else Priority.P0)

    def evaluation_end(self, name: str | None) -> None:
        """The held-out set ``name`` was run; None gives up what was added. Collective over all ranks."""
        if self.held_out is None:
            return
        self.held_out.gate.set(None)
        for family, slot in self._evaluation_failure_slots.items():
            self.evaluation_ledger.set_host(slot, float(family in self._failed))
        self.evaluation_ledger.reduce(Priority.P0)
        if self._writer is not None and name is not None:
            self._writer.put_evaluation(name, self.held_out)

    def guard(self, probe: Probe, call: Callable[P, None]) -> Callable[P, None]:
        """``call`` with its exceptions kept from training: the first one switches the probe off."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            if probe.family in self._failed:
                return
            try:
                call(*args, **kwargs)
            except Exception as error:
                self._fail(probe, error)

        return guarded

    def _fail(self, probe: Probe, error: Exception) -> None:
        probe.gate.set(None)
        self._failed.add(probe.family)
        if self.config.strict:
            raise error
        logger.warning(
            "the %s probe raised %s: %s at step %d on rank %d and is off from here on; training goes on, "
            "and none of its metrics are written any more",
            probe.family,
            type(error).__name__,
            error,
            self._step,
            self.topology.rank,
            exc_info=error,
        )

    @property
    def last_step(self) -> int:
        """The step that runs or ran last; at first the one that the job starts after."""
        return self._step

    @property
    def payload_bytes(self) -> dict[Priority, int]:
        """Bytes that a rank contributes to the collectives of a step, by what is due at it."""
        return {p: self.ledger.payload_bytes(p) for p in (Priority.P0, Priority.P1)}

    @property
    def collectives(self) -> int:
        """Collectives that a P0-only step adds."""
        return self.ledger.collectives(Priority.P0)

    @property
    def tokens_total(self) -> int:
        """Valid targets of the run up to the last processed step; 0 without the loss probe."""
        loss = self.probes.get("loss")
        return loss.tokens_total if isinstance(loss, LossProbe) else 0

    # ------------------------------------------------ on the rank that writes

    def enter(self, state: JobState) -> None:
        """Notes that the job is now evaluating, saving, training, ..."""
        if self._writer is not None:
            self._writer.enter(state, self._step)

    def call_after_steps(self, call: Callable[[dict[str, Any]], None]) -> None:
        """Runs ``call(state)`` on the background thread after all steps so far were processed.

        ``state`` is what a checkpoint keeps (``state_dict``). Not to be called inside a step.
        """
        if self._writer is not None:
            self._writer.call_after_steps(call)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores detectors, windows and counters of a checkpoint; before the first step only."""
        for family, probe_state in state["probes"].items():
            if family in self.probes:
                self.probes[family].load_state_dict(probe_state)

    def state_dict(self) -> dict[str, Any]:
        """Detectors, windows and counters as of the last processed step: JSON-able."""
        return {"probes": {family: probe.state_dict() for family, probe in self.probes.items()}}

    def finish(self, state: JobState) -> None:
        """Training is over: notes how, and has everything on its way written."""
        if self._writer is not None:
            self._writer.enter(state, self._step)
            self._writer.flush()

    def close(self) -> None:
        """Writes everything that is on its way and stops the background thread."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _declare(ledger: Ledger, probes: Sequence[Probe]) -> dict[str, Slot]:
    """Declares the probes' slots and each family's failure count, and freezes the ledger."""
    failure_slots = {}
    for probe in probes:
        probe.declare(ledger)
        failure_slots[probe.family] = ledger.declare(
            f"probe/failed/{probe.family}",
            family="probe",
            kind=Kind.SUM,
            axes=("dp", "cp", "tp", "pp"),
            source=Source.HOST,
        )
    ledger.freeze()
    for probe in probes:
        probe.on_frozen(ledger.device)
    return failure_slots


class _Writer:
    """The writing rank's half: the outbox, and the background thread's work on each step."""

    def __init__(self, session: ProbeSession, sinks: Sequence[Sink], manifest: Manifest) -> None:
        self._session = session
        self._sinks = sinks
        self._attempt = manifest.attempt
        self._outbox = Outbox(session.ledger, write_every=session.config.write_every)
        self._evaluations = Outbox(session.evaluation_ledger, write_every=1)
        self._facts: dict[int, Facts] = {}
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
        self.enter(JobState.STARTING, session.last_step)

    def put(self, facts: Facts, priority: Priority) -> None:
        self._state, self._moved_s = JobState.TRAINING, time.monotonic()
        self._step_times_s.append(facts.step_time_s)
        self._facts[facts.step] = facts
        self._outbox.put(facts.step, priority)
        self.forward_arrived()

    def forward_arrived(self, *, wait: bool = False) -> None:
        for payload in self._outbox.collect(wait=wait):
            item = StepItem(self._facts.pop(payload.step), payload, self._session._p0_cells)
            self._pipeline.submit(item)

    def call_after_steps(self, call: Callable[[dict[str, Any]], None]) -> None:
        self._flush_outbox()
        self._pipeline.submit_call(lambda: call(self._session.state_dict()))

    def enter(self, state: JobState, step: int) -> None:
        self._state, self._moved_s = state, time.monotonic()
        self.add_late(step, {"job/state": int(state)})

    def put_evaluation(self, name: str, probe: HeldOutProbe) -> None:
        """Hands the reduced sums of a held-out set to the step after which it was run."""
        step = self._session.last_step
        self._evaluations.put(step, Priority.P0)
        for payload in self._evaluations.collect(wait=True):
            parts = self._session.evaluation_ledger.unpack(payload.cells)
            values: dict[str, int | float] = {}
            if parts[f"probe/failed/{probe.family}"][0] == 0:
                probe.finalize_set(name, parts, values)
            if values:
                self.add_late(step, values)

    def add_late(self, step: int, values: Mapping[str, int | float]) -> None:
        now = time.time()
        self._pipeline.submit_record(
            lambda: StepRecord(
                step=step,
                attempt=self._attempt,
                time=now,
                tokens=self._session.tokens_total,
                values=values,
                context={},
                late=True,
            )
        )

    def _watch_for_stall(self) -> None:
        """On the background thread while nothing comes: says when a training step does not end."""
        waited_s = time.monotonic() - self._moved_s
        step_times_s = tuple(self._step_times_s)
        usual_s = statistics.median(step_times_s) if step_times_s else math.inf
        if self._state is JobState.TRAINING and waited_s > max(STALL_SECONDS, STALL_STEPS * usual_s):
            self.enter(JobState.STALLED, self._session.last_step)

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
        for family, probe in self._session.probes.items():
            if parts[f"probe/failed/{family}"][0] > 0:
                self._disabled.add(family)
            if family not in self._disabled:
                self._finalize(probe, parts, item.facts, values)
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
            parts=_as_lists(parts) if self._session.config.record.parts else None,
        )

    def _finalize(
        self, probe: Probe, parts: Mapping[str, np.ndarray], facts: Facts, values: dict[str, int | float]
    ) -> None:
        found: dict[str, int | float] = dict(values)
        try:
            probe.finalize(parts, facts, found)
        except Exception as error:
            self._disabled.add(probe.family)
            if self._session.config.strict:
                raise
            logger.warning("the %s metrics are off from step %d on", probe.family, facts.step, exc_info=error)
            return
        values.update(found)


def _as_lists(parts: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: cells.tolist() for name, cells in parts.items()}
