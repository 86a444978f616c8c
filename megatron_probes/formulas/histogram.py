"""Distributions as histograms: of a few named values, of shares, of bins that were summed over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

Named = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Histogram:
    """How a quantity is distributed: ``counts[i]`` lies between ``edges[i]`` and ``edges[i + 1]``.

    Edges ascend and bins are closed below, the last also above; an outer edge may be infinite. ``named``
    are single entries worth naming, by their number (an expert, a rank).

    Raises ValueError when there is not one edge more than counts.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    named: Named = ()

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} counts need as many edges and one, not {len(self.edges)}")


def largest(values: Mapping[int, float], number: int) -> Named:
    """Return the ``number`` largest of ``values`` as (key, value), the lower key first in a tie."""
    return _named(sorted(values.items(), key=lambda entry: (-entry[1], entry[0]))[:number])


def of_values(values: Mapping[int, float], *, bins: int = 30) -> Histogram | None:
    """Return the distribution of the values, each named by its key.

    ``bins`` equal bins lie between the smallest and the largest value; equal values share one bin of width
    0. A non-finite value is named and lies in no bin. ``None`` when no value is finite.
    """
    finite = np.array([value for value in values.values() if np.isfinite(value)], np.float64)
    if not finite.size:
        return None
    edges = np.linspace(finite.min(), finite.max(), bins + 1)
    if not np.all(np.diff(edges) > 0):  # closer together than float64 can divide
        edges = edges[[0, -1]]
    counts, _ = np.histogram(finite, bins=edges)
    return Histogram(_floats(edges), _floats(counts), _named(values.items()))


def of_shares(counts: ArrayLike, *, name: int) -> Histogram | None:
    """Return each entry's share of the sum of ``counts`` [n], over its index 0 .. n; the ``name`` largest
    are named. ``None`` when the sum is 0."""
    entries = np.asarray(counts, np.float64)
    total = entries.sum()
    if not total:
        return None
    shares = _floats(entries / total)
    edges = _floats(np.arange(len(shares) + 1))
    return Histogram(edges, shares, largest(dict(enumerate(shares)), name))


def of_bins(edges: Sequence[float], counts: ArrayLike) -> Histogram | None:
    """Return the histogram of ``counts`` [n] between ``edges`` [n + 1], without the empty bins at its ends.

    ``None`` when all bins are empty.
    """
    bins = np.asarray(counts, np.float64)
    (filled,) = np.nonzero(bins)
    if not filled.size:
        return None
    first, last = int(filled[0]), int(filled[-1])
    return Histogram(_floats(edges[first : last + 2]), _floats(bins[first : last + 1]))


def _floats(values: ArrayLike) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float64).tolist())


def _named(entries: Iterable[tuple[int, float]]) -> Named:
    return tuple((int(key), float(value)) for key, value in entries)
