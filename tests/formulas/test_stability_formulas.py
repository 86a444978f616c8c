import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from megatron_probes.formulas.stability import EPS, JointSpike, Score, SpikeDetector

FLAT = [2.00, 2.01, 1.99] * 20


def spikes_at(detector: SpikeDetector, values: list[float]) -> list[int]:
    return [t for t, x in enumerate(values) if detector.push(x).spike]


def detector(**changes) -> SpikeDetector:
    return SpikeDetector(**{"window": 32, "min_history": 16, "threshold": 8.0, "d_floor": 1e-3} | changes)


def test_pc32_a_falling_loss_is_no_spike():
    assert spikes_at(detector(), [2 + 9 * math.exp(-t / 20) for t in range(60)]) == []


def test_pc32_b_flat_history_flags_the_jump_and_not_the_rounding():
    assert spikes_at(detector(), [2.0] * 50 + [2.0000001, 4.0]) == [51]


def test_pc32_c_one_nan_is_one_event_and_leaves_no_trace():
    values = list(FLAT)
    values[20] = math.nan
    d = detector()
    scores = [d.push(x) for x in values]
    assert [t for t, s in enumerate(scores) if s.nonfinite] == [20]
    assert not any(s.spike for s in scores)
    assert math.isfinite(scores[21].z)
    assert d.nonfinite_steps == 1
    state = d.state_dict()["window"]
    assert all(map(math.isfinite, state))
    assert math.exp(np.mean(state)) == pytest.approx(2.0, rel=1e-3)


def test_pc32_d_a_fall_is_no_spike_unless_both_directions_count():
    values = [2.0 + 0.01 * (-1) ** t for t in range(50)] + [1.0]
    assert spikes_at(detector(), values) == []
    assert spikes_at(detector(direction="both"), values) == [50]


def test_pc32_e_jitter_is_no_spike():
    assert spikes_at(detector(), FLAT) == []


def test_pc44_b_nonfinite_steps_are_counted_on_each_side():
    loss, norm, joint = detector(), detector(), JointSpike()
    for x, g in zip([2, 2, math.nan, math.nan], [1, math.nan, math.nan, math.nan], strict=True):
        joint.push(loss.push(x), norm.push(g))
    assert (loss.nonfinite_steps, norm.nonfinite_steps) == (2, 3)
    assert (joint.count, joint.magnitude) == (2, 0.0)


def test_score_is_that_of_the_specification():
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(0.0, 0.05, 200))
    d = detector(threshold=math.inf)
    for t, x in enumerate(values):
        score = d.push(float(x))
        if t < 16:
            assert (score.median, score.mad, score.z) == (None, None, None)
            continue
        u = np.log(values[max(0, t - 32) : t] + EPS)
        mad = stats.median_abs_deviation(u)
        z = 0.6745 * abs(np.log(x + EPS) - np.median(u)) / (max(mad, 1e-3) + EPS)
        assert score.median == pytest.approx(np.median(u), rel=1e-12, abs=1e-15)
        assert score.mad == pytest.approx(mad, rel=1e-9)
        assert score.z == pytest.approx(z, rel=1e-9)


def test_floor_divides_where_the_spread_is_smaller():
    d = detector(d_floor=1e-2)
    for _ in range(16):
        d.push(1.0)
    score = d.push(math.e**0.1)
    assert score.mad == 0.0
    assert score.z == pytest.approx(6.745, rel=1e-9)


def test_spikes_and_nonfinite_values_stay_out_of_the_window():
    d = detector()
    for x in [2.0] * 16:
        d.push(x)
    before = d.state_dict()["window"]
    for x in (9.0, math.inf, -math.inf, math.nan):
        d.push(x)
    assert d.state_dict()["window"] == before
    assert (d.spikes, d.nonfinite_steps) == (1, 3)


def test_first_score_comes_with_min_history_values():
    d = detector(min_history=3)
    assert [d.push(2.0).z is None for _ in range(5)] == [True, True, True, False, False]


def test_a_loss_below_zero_by_rounding_counts_as_zero():
    assert detector().push(-1e-8).u == math.log(EPS)


@pytest.mark.parametrize("cut", [0, 5, 16, 40, 59])
def test_state_survives_json(cut):
    values = [2.0 + 0.3 * math.sin(7 * t) for t in range(60)]
    values[30], values[45] = math.nan, 50.0
    whole, first, second = detector(), detector(), detector()
    expected = [whole.push(x) for x in values]
    for x in values[:cut]:
        first.push(x)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert [second.push(x) for x in values[cut:]] == expected[cut:]
    assert second.state_dict() == whole.state_dict()


def test_a_shorter_window_keeps_the_newest_values():
    long, short = detector(), detector(window=4, min_history=2)
    for x in range(1, 30):
        long.push(float(x))
    short.load_state_dict(long.state_dict())
    assert short.state_dict()["window"] == long.state_dict()["window"][-4:]


def scored(z: float | None, *, spike: bool = False, nonfinite: bool = False) -> Score:
    return Score(None if nonfinite else 0.0, 0.0, 0.0, z, spike=spike, nonfinite=nonfinite)


def test_joint_spike_needs_both_sides_and_adds_the_smaller_score():
    joint = JointSpike()
    assert not joint.push(scored(20.0, spike=True), scored(1.0))
    assert not joint.push(scored(1.0), scored(20.0, spike=True))
    assert joint.push(scored(20.0, spike=True), scored(12.0, spike=True))
    assert joint.push(scored(None, nonfinite=True), scored(12.0, spike=True))
    assert not joint.push(scored(None, nonfinite=True), scored(1.0))
    assert (joint.count, joint.magnitude) == (2, 12.0)
    restored = JointSpike()
    restored.load_state_dict(json.loads(json.dumps(joint.state_dict())))
    assert (restored.count, restored.magnitude) == (2, 12.0)


@given(st.lists(st.floats(1e-6, 1e6), min_size=20, max_size=60), st.integers(1, 20))
def test_the_sorted_window_is_the_window(values, window):
    d = SpikeDetector(window=window, min_history=1, threshold=math.inf, d_floor=1e-3)
    for t, x in enumerate(values):
        score = d.push(x)
        if t:
            recent = np.log(np.array(values[max(0, t - window) : t]) + EPS)
            assert score.median == pytest.approx(float(np.median(recent)), rel=1e-12, abs=1e-12)
