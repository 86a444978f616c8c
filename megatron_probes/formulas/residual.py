"""How much a branch changes the residual stream (Specification, section 8).

s is the stream before, b the branch added, a = s + b, all per valid token. Quantities over tokens are
histograms of fixed bins, summed over ranks before a percentile is read.
"""

from __future__ import annotations

import itertools
import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

EPS = 1e-12
LOWEST_EDGE = 1e-12
BIN_RATIO = 1.04
NUM_RATIO_BINS = 1057
"""The fewest bins of that ratio that reach 1e6."""

BIN_EDGES: NDArray[np.float64] = np.array(
    list(itertools.accumulate([BIN_RATIO] * NUM_RATIO_BINS, operator.mul, initial=LOWEST_EDGE))
)
"""Bin 0 lies below the first edge, bin i from edge i - 1 to below edge i, the last from the last edge up."""

_MIDDLES = np.concatenate([[0.0], np.sqrt(BIN_EDGES[:-1] * BIN_EDGES[1:]), [BIN_EDGES[-1]]])


def histogram(values: ArrayLike) -> NDArray[np.float64]:
    """Return the counts [bins] of non-negative ``values``, infinity included; NaN is refused.

    Raises ``ValueError`` for NaN, which lies in no bin.
    """
    data = np.asarray(values, np.float64).ravel()
    if np.isnan(data).any():
        raise ValueError("histogram: NaN lies in no bin; leave it out and count it")
    bins = np.searchsorted(BIN_EDGES, data, side="right")
    return np.bincount(bins, minlength=len(_MIDDLES)).astype(np.float64)


def quantile(counts: ArrayLike, q: float) -> float | None:
    """Return the q-quantile of the values behind a summed histogram, right within 2 %.

    It is the bin that holds the smallest value with at least q of all values at or below it, read at its
    geometric middle; the underflow bin reads 0, the overflow bin its lower edge. ``None`` without values.
    """
    cumulative = np.cumsum(np.asarray(counts, np.float64))
    total = cumulative[-1]
    if not total:
        return None
    rank = max(np.ceil(q * total), 1.0)
    return float(_MIDDLES[np.searchsorted(cumulative, rank, side="left")])


def branch_scale(stream_norm: ArrayLike, branch_norm: ArrayLike) -> NDArray[np.float64]:
    """Return ||b|| / (||s|| + eps) per token."""
    return np.asarray(branch_norm, np.float64) / (np.asarray(stream_norm, np.float64) + EPS)


def block_importance(stream_sq: ArrayLike, branch_sq: ArrayLike, dot: ArrayLike) -> NDArray[np.float64]:
    """Return B = 1 - cos(s, a) per token from s.s, b.b and s.b; cos(u, v) = u.v / (||u|| ||v|| + eps).

    With p = ||s|| ||a|| and x = s.a, 1 - cos = (p - x + eps) / (p + eps), and p - x comes from the Gram
    determinant, p^2 - x^2 = s.s b.b - (s.b)^2: right also where s and a are nearly parallel.
    """
    ss, bb, sb = (np.asarray(x, np.float64) for x in (stream_sq, branch_sq, dot))
    x = ss + sb
    p = np.sqrt(ss * np.maximum(ss + 2 * sb + bb, 0.0))
    gram = np.maximum(ss * bb - sb * sb, 0.0)
    opposite = x <= 0
    gap = np.where(opposite, p - x, gram / np.where(opposite, 1.0, p + x))
    return np.clip((gap + EPS) / (p + EPS), 0.0, 2.0)


def angular_distance(importance: ArrayLike) -> NDArray[np.float64]:
    """Return arccos(1 - B) / pi per token, in [0, 1], as 2 arcsin(sqrt(B / 2)) / pi, which doesn't cancel."""
    return 2.0 / np.pi * np.arcsin(np.sqrt(np.asarray(importance, np.float64) / 2.0))
