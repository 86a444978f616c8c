"""Spike detection on loss and gradient norm (Specification, section 3).

For a positive scalar x of step t:

    u_t = ln(x_t + eps)
    q_t = median(W_t)                      W_t: the previous n values of u, t not included
    D_t = median |u - q_t| over W_t
    z_t = 0.6745 |u_t - q_t| / (max(D_t, d_floor) + eps)

A spike is z_t over its threshold and, unless both directions count, u_t > q_t. Spikes and non-finite values
stay out of the window, so an incident doesn't become its own baseline.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

EPS = 1e-12
NORMAL_CONSISTENCY = 0.6745
"""The median absolute deviation of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class Score:
    """What the detector says of one step."""

    u: float | None
    """ln(x + eps); ``None`` for a non-finite x."""
    median: float | None
    """q, the baseline; ``None`` before the window holds enough values."""
    mad: float | None
    """D, the raw spread of the baseline before the floor; ``None`` with the median."""
    z: float | None
    """Two-sided robust score; ``None`` without a baseline and for a non-finite x."""
    spike: bool
    nonfinite: bool


def median_of_sorted(values: Sequence[float]) -> float:
    """Return the median of ascending values: the middle one, or the mean of the two in the middle."""
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else 0.5 * (values[middle - 1] + values[middle])


def robust_score(u: float, median: float, mad: float, d_floor: float) -> float:
    """Return z = 0.6745 |u - q| / (max(D, d_floor) + eps) (Specification, section 3)."""
    return NORMAL_CONSISTENCY * abs(u - median) / (max(mad, d_floor) + EPS)


class SpikeDetector:
    """The detector of one scalar: pushes values one step at a time, in order.

    ``window`` and ``min_history`` are numbers of values, ``threshold`` is in units of z and ``d_floor`` in
    units of ln(x). The state is a plain structure that survives JSON.
    """

    def __init__(
        self,
        *,
        window: int = 128,
        min_history: int = 32,
        threshold: float = 8.0,
        d_floor: float = 1e-3,
        direction: Literal["up", "both"] = "up",
    ) -> None:
        self.window = window
        self.min_history = min_history
        self.threshold = threshold
        self.d_floor = d_floor
        self.direction = direction
        self.spikes = 0
        self.nonfinite_steps = 0
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def push(self, x: float) -> Score:
        """Score ``x`` against the window before it, then take it into the window unless it is a spike.

        A loss near 0 can come out below 0 by rounding; it counts as 0.
        """
        median, mad = self._baseline()
        if not math.isfinite(x):
            self.nonfinite_steps += 1
            return Score(None, median, mad, None, spike=False, nonfinite=True)
        u = math.log(max(x, 0.0) + EPS)
        if median is None or mad is None:
            self._remember(u)
            return Score(u, None, None, None, spike=False, nonfinite=False)
        z = robust_score(u, median, mad, self.d_floor)
        spike = z > self.threshold and (self.direction == "both" or u > median)
        if spike:
            self.spikes += 1
        else:
            self._remember(u)
        return Score(u, median, mad, z, spike=spike, nonfinite=False)

    def _baseline(self) -> tuple[float, float] | tuple[None, None]:
        """Return the window's median and raw spread once it holds ``min_history`` values."""
        if len(self._sorted) < self.min_history:
            return None, None
        median = median_of_sorted(self._sorted)
        return median, median_of_sorted(sorted(abs(value - median) for value in self._sorted))

    def _remember(self, u: float) -> None:
        self._in_order.append(u)
        bisect.insort(self._sorted, u)
        while len(self._in_order) > self.window:
            oldest = self._in_order.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]

    def state_dict(self) -> dict[str, Any]:
        """Return the window and the counters as JSON-able data."""
        return {
            "window": list(self._in_order),
            "spikes": self.spikes,
            "nonfinite_steps": self.nonfinite_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; of a longer window the newest values are kept."""
        self._in_order = deque(state["window"][-self.window :])
        self._sorted = sorted(self._in_order)
        self.spikes = state["spikes"]
        self.nonfinite_steps = state["nonfinite_steps"]


class JointSpike:
    """Counts the steps on which loss and gradient norm went wrong together.

    A non-finite value satisfies the rule for its side and adds 0 to the magnitude.
    """

    def __init__(self) -> None:
        self.count = 0
        self.magnitude = 0.0

    def push(self, loss: Score, grad_norm: Score) -> bool:
        """Return whether both sides of the step spiked or were non-finite, and add it to the totals.

        The magnitude grows by min(z_loss, z_grad).
        """
        joint = all(side.spike or side.nonfinite for side in (loss, grad_norm))
        if joint:
            self.count += 1
            self.magnitude += min(side.z or 0.0 for side in (loss, grad_norm))
        return joint

    def state_dict(self) -> dict[str, Any]:
        """Return the totals as JSON-able data."""
        return {"count": self.count, "magnitude": self.magnitude}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self.count = state["count"]
        self.magnitude = state["magnitude"]
