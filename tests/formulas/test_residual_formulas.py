import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_probes.formulas import residual

sizes = st.lists(st.floats(1e-12, 1e6, exclude_max=True), min_size=1, max_size=40).map(np.array)


def test_edges_reach_the_range_of_the_specification():
    assert residual.BIN_EDGES[0] == 1e-12
    assert residual.BIN_EDGES[-2] < 1e6 <= residual.BIN_EDGES[-1]
    assert residual.BIN_EDGES[1:] / residual.BIN_EDGES[:-1] == pytest.approx(1.04, rel=1e-12)


def test_edges_are_those_of_the_kernels():
    bins = pytest.importorskip("megatron_probes.ops.bins")
    assert tuple(residual.BIN_EDGES) == bins.bin_edges()
    assert len(residual.histogram([])) == bins.NUM_BINS


def test_underflow_reads_zero_and_overflow_its_edge():
    counts = residual.histogram([0.0, 1e-13, np.inf])
    assert (counts[0], counts[-1], counts.sum()) == (2, 1, 3)
    assert residual.quantile(counts, 0.5) == 0.0
    assert residual.quantile(counts, 1.0) == residual.BIN_EDGES[-1]


def test_no_value_has_no_quantile():
    assert residual.quantile(residual.histogram([]), 0.5) is None
    with pytest.raises(ValueError, match="NaN"):
        residual.histogram([1.0, np.nan])


@given(sizes, st.integers(1, 5), st.randoms())
def test_quantiles_of_summed_histograms_are_right_within_two_percent(x, ranks, random):
    owner = np.array([random.randrange(ranks) for _ in x])
    summed = np.sum([residual.histogram(x[owner == rank]) for rank in range(ranks)], axis=0)
    for q in (0.0, 0.5, 0.95, 0.99, 1.0):
        assert residual.quantile(summed, q) == pytest.approx(
            np.quantile(x, q, method="inverted_cdf"), rel=0.02
        )


def exact_importance(s: np.ndarray, b: np.ndarray) -> float:
    """1 - cos(s, s + b) in 80-bit arithmetic, from the unit vectors' distance."""
    s, a = s.astype(np.longdouble), (s.astype(np.longdouble) + b)
    unit = s / np.sqrt((s * s).sum()) - a / np.sqrt((a * a).sum())
    return float((unit * unit).sum() / 2)


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3, 1.0, 1e3])
def test_angles_are_right_where_stream_and_sum_are_nearly_parallel(size):
    rng = np.random.default_rng(1)
    s = 1e3 * rng.normal(size=256)
    b = size * 1e3 * rng.normal(size=256)
    importance = residual.block_importance(s @ s, b @ b, s @ b)
    exact = exact_importance(s, b)
    norms = np.linalg.norm(s) * np.linalg.norm(s + b)
    assert importance == pytest.approx(exact, rel=1e-6, abs=2 * residual.EPS / norms)
    angle = residual.angular_distance(importance)
    assert angle == pytest.approx(2 / np.pi * np.arcsin(np.sqrt(exact / 2)), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("s", "b", "importance", "distance"),
    [
        ([1.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([1.0, 0.0], [1.0, 0.0], 0.0, 0.0),
        ([1.0, 0.0], [-1.0, 1.0], 1.0, 0.5),
        ([1.0, 0.0], [-3.0, 0.0], 2.0, 1.0),
        ([1.0, 0.0], [0.0, 1.0], 1 - 0.5**0.5, 0.25),
    ],
)
def test_angles_by_hand(s, b, importance, distance):
    s, b = np.array(s), np.array(b)
    found = residual.block_importance(s @ s, b @ b, s @ b)
    assert found == pytest.approx(importance, abs=1e-11)
    assert residual.angular_distance(found) == pytest.approx(distance, abs=1e-6)


def test_a_vanishing_stream_has_no_direction():
    assert residual.block_importance(0.0, 1.0, 0.0) == 1.0
    assert residual.branch_scale(0.0, 1.0) == 1.0 / residual.EPS
    assert residual.branch_scale([4.0], [1.0]) == pytest.approx([0.25])
