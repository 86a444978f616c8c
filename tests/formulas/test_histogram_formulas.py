"""Histograms of few values, of shares and of summed bins."""

import math

import pytest

from megatron_probes.formulas.histogram import Histogram, largest, of_bins, of_shares, of_values


def test_edges_and_counts_must_fit():
    with pytest.raises(ValueError, match="2 counts need as many edges and one, not 2"):
        Histogram((0.0, 1.0), (1.0, 1.0))


def test_values_fall_into_equal_bins_and_are_named():
    found = of_values({0: 1.0, 4: 2.0, 8: 2.0, 12: 5.0}, bins=4)
    assert found == Histogram(
        (1.0, 2.0, 3.0, 4.0, 5.0), (1.0, 2.0, 0.0, 1.0), ((0, 1.0), (4, 2.0), (8, 2.0), (12, 5.0))
    )


def test_equal_values_share_one_bin_without_width():
    assert of_values({0: 2.5, 1: 2.5}) == Histogram((2.5, 2.5), (2.0,), ((0, 2.5), (1, 2.5)))


def test_values_closer_than_float64_can_divide_share_one_bin():
    above = math.nextafter(2.5, 3.0)
    assert of_values({0: 2.5, 1: above}) == Histogram((2.5, above), (2.0,), ((0, 2.5), (1, above)))


def test_a_value_that_is_not_finite_is_named_only():
    found = of_values({0: 1.0, 1: math.nan, 2: math.inf})
    assert (found.edges, found.counts) == ((1.0, 1.0), (1.0,))
    assert str(found.named) == "((0, 1.0), (1, nan), (2, inf))"
    assert of_values({0: math.nan}) is None
    assert of_values({}) is None


def test_shares_stand_over_their_index():
    found = of_shares([6, 0, 3, 3], name=2)
    assert found == Histogram((0.0, 1.0, 2.0, 3.0, 4.0), (0.5, 0.0, 0.25, 0.25), ((0, 0.5), (2, 0.25)))
    assert of_shares([0, 0], name=2) is None


def test_the_lower_number_goes_first_in_a_tie():
    assert largest({7: 1.0, 3: 1.0, 5: 2.0}, 2) == ((5, 2.0), (3, 1.0))


def test_empty_bins_at_the_ends_are_left_out():
    edges = (0.0, 1.0, 2.0, 3.0, 4.0, math.inf)
    assert of_bins(edges, [0, 2, 0, 1, 0]) == Histogram((1.0, 2.0, 3.0, 4.0), (2.0, 0.0, 1.0))
    assert of_bins(edges, [0, 0, 0, 0, 1]) == Histogram((4.0, math.inf), (1.0,))
    assert of_bins(edges, [0] * 5) is None
