"""Means of the loss, and steps on which it is not finite (Specification, section 1).

l is the negative log-likelihood of a target in nats, m its valid-target mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_probes.formulas.ratio import ratio


def mean(total: float, count: float) -> float | None:
    """Return sum(m * l) / sum(m) of reduced parts; ``None`` where no target is valid."""
    return ratio(total, count)


def rank_means(sums: ArrayLike, counts: ArrayLike) -> dict[int, float]:
    """Return the mean loss of each data rank that holds a valid target, by the rank's position."""
    means, positions = _rank_means(sums, counts)
    return dict(zip(positions.tolist(), means.tolist(), strict=True))


def _rank_means(sums: ArrayLike, counts: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean losses of the ranks that hold a valid target, and those ranks' positions."""
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    holds_data = np.flatnonzero(counts)
    return sums[holds_data] / counts[holds_data], holds_data


def worst_rank(sums: ArrayLike, counts: ArrayLike) -> tuple[float, int] | None:
    """Return the largest mean loss of a data rank and that rank's position.

    ``sums`` and ``counts`` [data ranks] hold each rank's own sum(m * l) and sum(m) over the whole step. A
    mean that isn't finite counts as +inf, so that it can't hide in a maximum; of equal ranks the first is
    named. ``None`` where no rank holds a valid target. Up to rounding never below the mean over all ranks.
    """
    means, positions = _rank_means(sums, counts)
    if not len(means):
        return None
    means = np.where(np.isfinite(means), means, np.inf)
    worst = int(np.argmax(means))
    return float(means[worst]), int(positions[worst])


@dataclass(frozen=True)
class Spread:
    """Smallest, middle and largest of a set of values."""

    min: float
    median: float
    max: float


def rank_mean_spread(sums: ArrayLike, counts: ArrayLike) -> Spread | None:
    """Return minimum, median and maximum of the data ranks' mean losses.

    Ranks without valid targets are left out; a mean that isn't finite counts as +inf. ``None`` where no rank
    holds a valid target.
    """
    means, _ = _rank_means(sums, counts)
    if not len(means):
        return None
    ordered = np.sort(np.where(np.isfinite(means), means, np.inf))
    return Spread(float(ordered[0]), float(np.median(ordered)), float(ordered[-1]))


class NonFiniteSteps:
    """Cumulative counts of steps with a NaN and with an infinite loss."""

    def __init__(self) -> None:
        self.nan = 0
        self.inf = 0

    def push(self, loss: float) -> None:
        """Count one step."""
        self.nan += math.isnan(loss)
        self.inf += math.isinf(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON-able data."""
        return {"nan": self.nan, "inf": self.inf}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self.nan = state["nan"]
        self.inf = state["inf"]
