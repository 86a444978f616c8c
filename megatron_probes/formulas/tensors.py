"""Moments of a tensor that is split over ranks (Specification, section 5).

rms, absmean and zero_fraction are ``root_ratio`` and ``ratio`` of the reduced sums; the fourth moment needs
the mean of the whole tensor, so central sums of the pieces are merged instead of added.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_probes.formulas.ratio import ratio


@dataclass(frozen=True)
class Moments:
    """Count, mean and sums of powers of the deviation from that mean: m_p = sum (x - mean)^p."""

    count: float
    mean: float
    m2: float
    m3: float
    m4: float

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both pieces together.

        Source: Pebay, Formulas for robust, one-pass parallel computation of covariances and arbitrary-order
        statistical moments, 2008. Central sums merge without the cancellation that raw powers suffer from.
        """
        n = self.count + other.count
        if not n:
            return self
        a, b = self.count / n, other.count / n
        delta = other.mean - self.mean
        between = n * a * b * delta**2
        m2 = self.m2 + other.m2 + between
        m3 = self.m3 + other.m3 + between * delta * (a - b) + 3 * delta * (a * other.m2 - b * self.m2)
        m4 = (
            self.m4
            + other.m4
            + between * delta**2 * (a * a - a * b + b * b)
            + 6 * delta**2 * (a * a * other.m2 + b * b * self.m2)
            + 4 * delta * (a * other.m3 - b * self.m3)
        )
        return Moments(n, self.mean + b * delta, m2, m3, m4)


def kurtosis(moments: Moments) -> float | None:
    """Return the excess kurtosis N m4 / m2^2 - 3; ``None`` where the variance is 0."""
    quotient = ratio(moments.count * moments.m4, moments.m2**2)
    return None if quotient is None else quotient - 3.0
