"""Division of reduced parts: sums and counts are reduced first and divided once, at the end.

No data is not zero: where the denominator is 0 the result is ``None`` and no point is written
(Specification, rules 2 and 3).
"""

from __future__ import annotations

import math


def ratio(numerator: float, denominator: float) -> float | None:
    """Return numerator / denominator; ``None`` where the denominator is 0.

    With sum(m * l) and sum(m) it is the mean loss; with counts it is a share.
    """
    return numerator / denominator if denominator else None


def root_ratio(sum_sq: float, count: float) -> float | None:
    """Return the root mean square sqrt(sum x^2 / N) of N elements; ``None`` where there are none."""
    return math.sqrt(sum_sq / count) if count else None
