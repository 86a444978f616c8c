import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from scipy import stats

from megatron_probes.formulas.tensors import Moments, kurtosis


def moments(x: np.ndarray) -> Moments:
    x = np.asarray(x, np.float64)
    if not x.size:
        return Moments(0, 0.0, 0.0, 0.0, 0.0)
    d = x - x.mean()
    return Moments(x.size, x.mean(), (d**2).sum(), (d**3).sum(), (d**4).sum())


def test_kurtosis_by_hand():
    # Deviations -2, 0, 0, 2: m2 = 8, m4 = 32, N m4 / m2^2 = 2.
    assert kurtosis(moments(np.array([1.0, 3.0, 3.0, 5.0]))) == -1.0


def test_kurtosis_without_variance_is_undefined():
    assert kurtosis(moments(np.full(5, 3.0))) is None
    assert kurtosis(moments(np.array([]))) is None


def test_merging_does_not_cancel_far_from_zero():
    x = np.random.default_rng(0).normal(1e3, 1.0, 100_000)
    parts = [moments(part) for part in np.split(x, [10, 30_000, 30_001])]
    merged = functools.reduce(Moments.merge, parts)
    assert kurtosis(merged) == pytest.approx(stats.kurtosis(x), abs=1e-9)


values = npst.arrays(np.float64, st.integers(1, 40), elements=st.floats(-100, 100))


@given(values, st.integers(1, 6), st.randoms())
def test_any_split_over_ranks_gives_the_same_moments(x, ranks, random):
    owner = np.array([random.randrange(ranks) for _ in x])
    merged = functools.reduce(Moments.merge, (moments(x[owner == rank]) for rank in range(ranks)))
    whole = moments(x)
    assert merged.count == whole.count
    assert merged.mean == pytest.approx(whole.mean, rel=1e-9, abs=1e-9)
    scale = float(np.abs(x).max()) or 1.0
    for power, name in ((2, "m2"), (3, "m3"), (4, "m4")):
        tolerance = 1e-11 * x.size * (2 * scale) ** power
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=tolerance)
