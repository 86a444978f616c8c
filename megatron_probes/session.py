"""The one object that an adapter talks to: a step begins, probes look, a step ends.

On every rank the session opens the gates, reduces the ledger and closes the gates. On the rank that
writes it also hands the reduced cells to the ``Writer``. Nothing here waits for the device, for a disk or
for another thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import torch

from megatron_probes.catalog import Priority
from megatron_probes.config import ProbeConfig
from megatron_probes.ledger import Kind, Ledger, Slot, Source
from megatron_probes.probes import Facts, HeldOutProbe, LossProbe, Probe
from megatron_probes.schedule import Schedule
from megatron_probes.sinks import Manifest, Sink
from megatron_probes.topology import Topology
from megatron_probes.writer import JobState, Writer

__all__ = ["JobState", "ProbeSession"]

logger = logging.getLogger("megatron_probes")

P = ParamSpec("P")


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
        self._writer: Writer | None = None

    def write_to(self, sinks: Sequence[Sink], manifest: Manifest) -> None:
        """Makes this the rank that writes; after ``load_state_dict``, before the first step."""
        self._writer = Writer(self, sinks, manifest)

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
