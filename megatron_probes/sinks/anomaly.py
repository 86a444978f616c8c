"""Which steps are anomalous: what raises an alarm and has everything flushed at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_probes.sinks.record import StepRecord

JOINT_SPIKES = "stability/joint_spike"
DISABLED = "probe/disabled"
DROPPED = "probe/dropped_points"
COUNTERS = (JOINT_SPIKES, DISABLED, DROPPED)
"""Cumulative tags whose rise is an anomaly."""
NON_FINITE = ("loss/global", "grad/norm")
"""Tags whose NaN or infinity is an anomaly."""


@dataclass(frozen=True)
class Anomaly:
    """One event at one step."""

    kind: str
    """`rise`, `non_finite` or `finite_again`."""
    tag: str
    value: int | float
    change: int
    """How far a counter rose; how many recorded steps a non-finite stretch has lasted."""


class AnomalyWatch:
    """Turns cumulative counters and non-finite stretches into events, each once.

    `probe/*` counts from 0 at every start of the job. `stability/joint_spike` continues from the
    checkpoint, so after a resume its first value is the baseline: the spikes in it were reported when
    they happened.
    """

    def __init__(self, start_step: int) -> None:
        self._counters: dict[str, int | float] = {DISABLED: 0, DROPPED: 0}
        if start_step <= 1:
            self._counters[JOINT_SPIKES] = 0
        self._stretch: dict[str, int] = {}

    def observe(self, record: StepRecord) -> list[Anomaly]:
        """Return the events of this step; steps come in order."""
        events = []
        for tag in COUNTERS:
            value = record.values.get(tag)
            if value is None:
                continue
            rise = int(value - self._counters.get(tag, value))
            self._counters[tag] = value
            if rise > 0:
                events.append(Anomaly("rise", tag, value, rise))
        for tag in NON_FINITE:
            value = record.values.get(tag)
            if value is None:
                continue
            lasted = self._stretch.pop(tag, 0)
            if not math.isfinite(value):
                self._stretch[tag] = lasted + 1
                if lasted == 0:
                    events.append(Anomaly("non_finite", tag, value, 1))
            elif lasted:
                events.append(Anomaly("finite_again", tag, value, lasted))
        return events
