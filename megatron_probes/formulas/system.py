"""Throughput, FLOP rate, slow ranks and waiting (Specification, section 4).

tau_r is rank r's own step time in seconds, tau the largest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

EPS = 1e-12
STRAGGLER_RATIO = 1.2
"""A rank is flagged when it works this much longer than the median of the other ranks of its stage."""


def tokens_per_second(tokens: int, step_time_s: float) -> float:
    """Return the global valid targets of the step / tau."""
    return tokens / step_time_s


def flops_per_device(step_flops: float, devices: int, step_time_s: float) -> float:
    """Return F_step / (devices * tau) in FLOP/s; ``devices`` counts all of the job's."""
    return step_flops / (devices * step_time_s)


def model_flops_utilization(flops_per_device: float, peak_flops_per_device: float) -> float:
    """Return the share of the device's dense peak that the model's own FLOPs use."""
    return flops_per_device / peak_flops_per_device


@dataclass(frozen=True)
class Rates:
    """Valid targets per second over an interval; ``None`` where no time counts."""

    active: float | None
    """Over steps, without the run's first."""
    wall: float | None
    """Over all the time, with the first step, evaluation and checkpoints."""


class IntervalRates:
    """Active and wall throughput of the interval since the last ``take``.

    The first step after a start compiles and warms up: it counts in the wall rate only. Durations come from
    a monotonic clock.
    """

    def __init__(self) -> None:
        self._started = False
        self._clear()

    def _clear(self) -> None:
        self._active_tokens = self._wall_tokens = 0
        self._active_s = self._wall_s = 0.0

    def add_step(self, tokens: int, seconds: float) -> None:
        """Take in one step."""
        self._wall_tokens += tokens
        self._wall_s += seconds
        if self._started:
            self._active_tokens += tokens
            self._active_s += seconds
        self._started = True

    def add_pause(self, seconds: float) -> None:
        """Take in time between steps: evaluation, a checkpoint."""
        self._wall_s += seconds

    def take(self) -> Rates:
        """Return the rates of the interval and begin the next one."""
        rates = Rates(
            self._active_tokens / self._active_s if self._active_s else None,
            self._wall_tokens / self._wall_s if self._wall_s else None,
        )
        self._clear()
        return rates


@dataclass(frozen=True)
class Stragglers:
    """Which ranks work longer than the others of their pipeline stage."""

    score: float
    """max_r w_r / (median_r w_r + eps) of the stage where it is largest."""
    slowest: int
    """Position of the rank behind the score."""
    flagged: tuple[int, ...]
    """Ranks with w_r / median of the others' w above the limit."""


def stragglers(
    work_s: Sequence[float] | ArrayLike,
    stages: Sequence[int] | ArrayLike | None = None,
    *,
    ratio: float = STRAGGLER_RATIO,
) -> Stragglers:
    """Compare every rank's own work with that of the other ranks of its pipeline stage.

    ``work_s`` [ranks] is w_r, the step time less the waiting in collectives; ``stages`` [ranks] the pipeline
    stage of each, by default one for all. The flag compares with the *other* ranks: with n ranks a score in
    standard deviations never passes sqrt(n - 1), so one of two could not be flagged. A rank alone in its
    stage isn't.
    """
    w = np.asarray(work_s, np.float64)
    stage_of = np.zeros(len(w), np.int64) if stages is None else np.asarray(stages)
    best, slowest = -np.inf, 0
    flagged: list[int] = []
    for stage in np.unique(stage_of):
        ranks = np.flatnonzero(stage_of == stage)
        score = w[ranks].max() / (np.median(w[ranks]) + EPS)
        if score > best:
            best, slowest = score, int(ranks[np.argmax(w[ranks])])
        flagged += [
            int(r) for r in ranks if len(ranks) > 1 and w[r] > ratio * np.median(w[ranks[ranks != r]])
        ]
    return Stragglers(float(best), slowest, tuple(sorted(flagged)))


@dataclass(frozen=True)
class ExposedWait:
    """Time spent waiting in collectives that no computation hides."""

    fraction: float
    """sum_r wait_r / sum_r tau_r."""
    max_fraction: float
    """The largest rank's wait_r / tau_r."""


def exposed_wait(waits_s: ArrayLike, step_times_s: ArrayLike) -> ExposedWait:
    """Return the waiting share of the job and of the rank that waits most, from [ranks] arrays."""
    wait, tau = np.asarray(waits_s, np.float64), np.asarray(step_times_s, np.float64)
    return ExposedWait(float(wait.sum() / tau.sum()), float((wait / tau).max()))
