import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_probes.formulas import gradient
from megatron_probes.formulas.ratio import ratio, root_ratio


def sum_sq(*tensors):
    return math.fsum(x * x for tensor in tensors for x in tensor)


def test_pc29_experts_add_over_their_owners_and_dense_counts_once():
    assert gradient.norm(sum_sq([1, 2, 2], [2, 3, 6], [4])) == pytest.approx(8.6023253, rel=1e-7)


def test_pc30_c_zero_counts_keep_every_unit():
    zeros = np.array([2**24, 1, 1, 1], np.float64).sum()
    assert int(zeros) == 16777219
    assert ratio(zeros, zeros) == 1.0


def test_pc09_shards_add_squares():
    assert gradient.norm(sum_sq([1, 2]) + sum_sq([2, 4]) + sum_sq([])) == 5.0


def test_pc43_a_replicated_parameters_count_once():
    assert gradient.norm(sum_sq([3], [4], [12])) == 13.0


def test_any_nan_is_nan_else_any_inf_is_inf():
    assert math.isnan(gradient.norm(25.0, nonfinite=2, nan=1))
    assert gradient.norm(25.0, nonfinite=1) == math.inf
    assert gradient.norm(25.0) == 5.0


def test_element_statistics_of_no_element_are_absent():
    assert (ratio(0.0, 0), root_ratio(0.0, 0)) == (None, None)
    assert root_ratio(25.0 * 4, 4) == 5.0


@given(st.lists(st.floats(-1e100, 1e100), max_size=50), st.integers(1, 6), st.randoms())
def test_any_split_over_ranks_gives_the_same_norm(values, ranks, random):
    shards = [[] for _ in range(ranks)]
    for x in values:
        shards[random.randrange(ranks)].append(x)
    total = float(np.sum([sum_sq(shard) for shard in shards]))
    assert gradient.norm(total) == pytest.approx(float(np.linalg.norm(values)), rel=1e-12)


def test_clip_rate_is_of_the_last_steps_with_a_finite_norm():
    rate = gradient.ClipRate(window=4)
    assert rate.value is None
    rate.push(math.nan, 1.0)
    assert rate.value is None
    seen = []
    for norm in (2.0, 0.5, 1.0, 3.0, math.inf, 4.0, 5.0):
        rate.push(norm, 1.0)
        seen.append(rate.value)
    # A norm equal to the threshold isn't clipped; the infinite one isn't seen.
    assert seen == [1.0, 1 / 2, 1 / 3, 2 / 4, 2 / 4, 2 / 4, 3 / 4]


def test_clip_rate_survives_json_and_a_shorter_window():
    rate = gradient.ClipRate(window=10)
    for norm in (2.0, 2.0, 0.5, 0.5):
        rate.push(norm, 1.0)
    state = json.loads(json.dumps(rate.state_dict()))
    same, shorter = gradient.ClipRate(window=10), gradient.ClipRate(window=2)
    same.load_state_dict(state)
    shorter.load_state_dict(state)
    assert (same.value, shorter.value) == (0.5, 0.0)
    same.push(2.0, 1.0)
    assert same.value == 3 / 5
