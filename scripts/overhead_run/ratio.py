"""The ratio of two step times, with the interval that the blocks of one run support."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import t


@dataclass(frozen=True)
class Ratio:
    """A ratio and the ends of its 95 % interval."""

    ratio: float
    low: float
    high: float


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Geometric mean of times[i] / baseline[i] with its 95 % interval (Student's t over the blocks).

    Blocks with the same index ran close together, so that what slows the machine for a while cancels.
    """
    logs = [math.log(a / b) for a, b in zip(times, baseline, strict=True)]
    centre = fmean(logs)
    margin = float(t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(centre), math.exp(centre - margin), math.exp(centre + margin))
