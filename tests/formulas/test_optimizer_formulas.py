import math

import pytest

from megatron_probes.formulas.optimizer import bf16_update_noop, update_ratio


def test_pc31_b_shards_add_squares_before_the_ratio():
    assert update_ratio(0.3**2 + 0.0**2, 3.0**2 + 4.0**2, 2) == pytest.approx(0.06, rel=1e-9)


def test_pc31_c_zero_weights_have_no_ratio():
    assert update_ratio(0.25, 0.0, 2) is None


def test_pc31_d_first_step_of_adamw():
    # The first update of Adam is lr * g / (|g| + eps): 0.1 in each element.
    update = [0.1 * g / (abs(g) + 1e-8) for g in (0.5, -2.0)]
    assert update_ratio(math.fsum(u * u for u in update), 25.0, 2) == pytest.approx(0.0282843, rel=1e-4)


def test_noop_share_is_of_the_weights_that_moved():
    assert bf16_update_noop(3, 4) == 0.75
    assert bf16_update_noop(0, 0) is None
