import json
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_probes.formulas import loss
from megatron_probes.formulas.ratio import ratio


def reduced(parts):
    """Add (sum, count) pairs over ranks or micro-batches."""
    sums, counts = zip(*parts, strict=True)
    return sum(sums), sum(counts)


def test_pc16_an_empty_window_has_no_mean():
    windows = [[(0, 0), (6, 3), (0, 0)], [(0, 0), (0, 0)], [(4, 2)]]
    assert [(loss.mean(*reduced(w)), reduced(w)[1]) for w in windows] == [(2.0, 3), (None, 0), (2.0, 2)]


def test_pc18_context_parallel_shards_weigh_by_their_tokens():
    assert loss.mean(*reduced([(12, 4), (1, 1)])) == pytest.approx(2.6, rel=1e-12)
    for shards in (1, 2, 4):
        assert loss.mean(*reduced([(3.0, 1)] + [(0.0, 0)] * (shards - 1))) == 3.0


def test_pc26_worst_rank_divides_by_its_own_tokens():
    sums, counts = [30.0, 8.0], [10, 2]
    assert loss.mean(*reduced(zip(sums, counts, strict=True))) == pytest.approx(3.1666667, rel=1e-7)
    assert loss.worst_rank(sums, counts) == (4.0, 1)


def test_pc42_micro_batches_weigh_by_their_tokens():
    assert loss.mean(*reduced([(20, 10), (90, 90)])) == pytest.approx(1.10, rel=1e-12)
    assert loss.mean(*reduced([(0, 0)] * 6 + [(24, 12), (12, 4)])) == 2.25


def test_pc44_a_nan_and_inf_are_counted_apart():
    steps = loss.NonFiniteSteps()
    for x in [2, math.nan, 4, math.inf, 3]:
        steps.push(x)
    assert (steps.nan, steps.inf) == (1, 1)
    restored = loss.NonFiniteSteps()
    restored.load_state_dict(json.loads(json.dumps(steps.state_dict())))
    restored.push(-math.inf)
    assert (restored.nan, restored.inf) == (1, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_mean_that_is_not_finite_is_the_worst(bad):
    assert loss.worst_rank([1.0, bad, 3.0], [1, 1, 1]) == (math.inf, 1)
    assert loss.rank_mean_spread([1.0, bad, 3.0], [1, 1, 1]) == loss.Spread(1.0, 3.0, math.inf)


def test_ranks_without_tokens_are_left_out():
    assert loss.worst_rank([0.0, 4.0, 0.0], [0, 2, 0]) == (2.0, 1)
    assert loss.rank_mean_spread([0.0, 4.0, 0.0, 1.0], [0, 2, 0, 1]) == loss.Spread(1.0, 1.5, 2.0)
    assert loss.worst_rank([0.0, 0.0], [0, 0]) is None
    assert loss.rank_mean_spread([0.0], [0]) is None


def test_of_equal_ranks_the_first_is_named():
    assert loss.worst_rank([1.0, 6.0, 3.0], [1, 2, 1]) == (3.0, 1)


tokens = st.lists(st.tuples(st.floats(0, 50), st.booleans()), min_size=1, max_size=40)


@given(tokens, st.integers(1, 8), st.randoms())
def test_any_split_over_ranks_gives_the_same_mean(tokens, ranks, random):
    owner = [random.randrange(ranks) for _ in tokens]
    sums, counts = np.zeros(ranks), np.zeros(ranks)
    for (nll, valid), rank in zip(tokens, owner, strict=True):
        sums[rank] += nll * valid
        counts[rank] += valid
    valid_nll = [nll for nll, valid in tokens if valid]
    mean = loss.mean(float(sums.sum()), float(counts.sum()))
    if not valid_nll:
        assert mean is None
        return
    assert mean == pytest.approx(math.fsum(valid_nll) / len(valid_nll), rel=1e-12, abs=1e-12)
    worst, index = loss.worst_rank(sums, counts)
    assert worst >= mean * (1 - 1e-12)
    assert worst == sums[index] / counts[index]
    spread = loss.rank_mean_spread(sums, counts)
    assert spread.min <= spread.median <= spread.max == worst


@given(st.integers(0, 2**53), st.integers(0, 2**53))
def test_a_share_is_a_ratio_of_counts(part, rest):
    assume(part + rest)
    assert 0.0 <= ratio(part, part + rest) <= 1.0
    assert ratio(part, 0) is None
