"""What every probe is: slots declared once, observations during the step, values from reduced sums."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_probes.catalog import Priority
from megatron_probes.formulas.histogram import Histogram
from megatron_probes.ledger import Ledger

Parts = Mapping[str, np.ndarray]
"""Slot name -> reduced cells, float64 [width]."""

Values = MutableMapping[str, int | float]
"""Tag -> value of one step."""


class Gate:
    """Whether a probe looks at this step; the one attribute that a registered hook tests first.

    ``open`` serves the P0 hooks, ``sampled`` those that only a P1 step needs.
    """

    __slots__ = ("open", "sampled")

    def __init__(self) -> None:
        self.set(None)

    def set(self, priority: Priority | None) -> None:
        """Opens for a step of this priority; None closes."""
        self.open = priority is not None
        self.sampled = priority is not None and priority >= Priority.P1


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the host knows about a step when it ends; the same on every rank except ``step_time_s``.

    ``priority`` is the lowest one that was measured at this step. ``skipped`` names why the optimizer made
    no update: "overflow" (non-finite gradient) or "threshold" (Megatron's grad_norm_skip_threshold), None
    when it made one. ``clip_threshold`` is None when clipping is off. ``flops`` counts the step over all
    devices, None where no convention covers the model. ``context`` is shown beside the metrics (learning
    rate, loss scale, consumed samples).
    """

    step: int
    priority: Priority = Priority.P0
    time: float
    step_time_s: float
    skipped: str | None = None
    clip_threshold: float | None = None
    flops: float | None = None
    context: Mapping[str, int | float] = field(default_factory=dict)


class Probe:
    """A family of metrics.

    Device side, on every rank: ``declare`` once, ``begin_step`` / observations / ``end_step`` each step.
    Host side, on the rank that writes: ``finalize`` turns reduced sums into values, and may read what
    earlier probes of the same step put into ``values``.
    """

    family: str

    def __init__(self) -> None:
        self.gate = Gate()

    def declare(self, ledger: Ledger) -> None:
        """Declares this probe's slots."""

    def on_frozen(self, device: torch.device) -> None:
        """The slots have cells now; builds on the device what the observations need."""

    def begin_step(self) -> None:
        """A training step begins."""

    def begin_pass(self) -> None:
        """A forward-backward pass begins; a re-run of the step replaces what the first run added."""

    def end_step(self, facts: Facts) -> None:
        """Puts what is only known at the end of the step into the slots."""

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        """Adds this family's values to ``values``; a metric without data adds nothing."""

    def histograms(self, parts: Parts, facts: Facts) -> Mapping[str, Histogram]:
        """The family's metrics that are distributions, by tag; after ``finalize`` of the same step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Host-side state that a checkpoint keeps: JSON-able."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
