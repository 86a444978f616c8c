import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from megatron_probes.formulas import experts
from megatron_probes.formulas.ratio import ratio


def test_pc23_aux_loss_is_the_mean_over_moe_layers():
    assert experts.mean_aux_loss([[1.2], [1.0], [1.4]]) == pytest.approx(1.2, rel=1e-12)
    assert experts.mean_aux_loss([[1, 1], [2, 2], [1, 4], [1.5, 1.5]]) == 1.75
    assert experts.mean_aux_loss([]) is None


def test_pc25_padding_is_left_out():
    prob_sums = [3 * 0.75 + 3 * 0.25, 3 * 0.25 + 3 * 0.75]
    assert experts.aux_loss([3, 3], prob_sums, tokens=6, topk=1) == 1.0
    assert experts.max_vio([3, 3]) == 0.0
    assert ratio(2 + 0, 8 + 4) == pytest.approx(0.1666667, rel=1e-6)


@pytest.mark.parametrize(("num_experts", "topk"), [(4, 1), (8, 2), (64, 6)])
def test_pc45_c_a_balanced_router_gives_one(num_experts, topk):
    tokens = 3 * num_experts
    counts = np.full(num_experts, tokens * topk / num_experts)
    prob_sums = np.full(num_experts, tokens / num_experts)
    assert experts.aux_loss(counts, prob_sums, tokens, topk) == pytest.approx(1.0, rel=1e-12)


def test_max_vio_by_hand():
    assert experts.max_vio([5, 4, 4, 3]) == 0.25
    assert experts.imbalance([5, 4, 4, 3]) == 1.25
    assert experts.max_vio([8, 0]) == 1.0


def test_shards_can_be_balanced_where_experts_are_not():
    assert experts.shard_max_vio([6, 0, 3, 3], 2) == 0.0
    assert experts.shard_max_vio([6, 2, 3, 1], 2) == pytest.approx(1 / 3, rel=1e-12)
    assert experts.shard_max_vio([6, 2, 3, 1], 4) == experts.max_vio([6, 2, 3, 1])
    assert experts.shard_max_vio([6, 2, 3, 1], 1) is None


def test_no_token_is_no_value():
    for formula in (experts.max_vio, experts.imbalance, experts.entropy, experts.entropy_norm):
        assert formula([0, 0, 0]) is None
    assert experts.shard_max_vio([0, 0], 2) is None
    assert experts.aux_loss([0, 0], [0, 0], 0, 1) is None
    assert experts.mean_aux_loss([[], [1.5]]) == 1.5


def test_entropy_of_one_expert_is_zero():
    assert math.copysign(1.0, experts.entropy([7, 0, 0])) == 1.0
    assert (experts.entropy([7, 0, 0]), experts.entropy_norm([7, 0, 0])) == (0.0, 0.0)
    assert experts.entropy_norm([7]) is None


loads = st.lists(st.integers(0, 10**9), min_size=2, max_size=64).filter(any)


@given(loads)
def test_entropy_is_that_of_the_load(counts):
    assert experts.entropy(counts) == pytest.approx(stats.entropy(counts), rel=1e-9, abs=1e-12)
    assert -1e-12 <= experts.entropy_norm(counts) <= 1 + 1e-12


@given(loads, st.integers(1, 5), st.randoms())
def test_any_split_over_ranks_gives_the_same_balance(counts, ranks, random):
    shares = np.zeros((ranks, len(counts)))
    for expert, count in enumerate(counts):
        cuts = sorted(random.randint(0, count) for _ in range(ranks - 1))
        shares[:, expert] = np.diff([0, *cuts, count])
    summed = shares.sum(axis=0)
    assert experts.max_vio(summed) == experts.max_vio(counts)
    assert experts.max_vio(counts) == pytest.approx(max(counts) / np.mean(counts) - 1, rel=1e-9, abs=1e-9)
    assert experts.imbalance(counts) == pytest.approx(experts.max_vio(counts) + 1, rel=1e-12)
    assert experts.max_vio(counts) >= 0
