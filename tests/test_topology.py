"""Ownership follows from the axes alone: each distinct piece has exactly one owner."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_probes.topology import factoring_of
from tests.meshes import ranks_of

sizes = st.sampled_from([1, 2, 3])


@given(dp=sizes, cp=sizes, tp=sizes, pp=sizes, distinct=st.sets(st.sampled_from(["dp", "cp", "tp"])))
@settings(max_examples=60, deadline=None)
def test_each_distinct_piece_of_a_dense_quantity_has_one_owner(dp, cp, tp, pp, distinct):
    ranks = ranks_of(dp=dp, cp=cp, tp=tp, pp=pp)
    owners = [rank for rank in ranks if rank.owns(distinct)]
    pieces = [tuple(owner.index(axis) for axis in sorted({*distinct, "pp"})) for owner in owners]
    length = {"dp": dp, "cp": cp, "tp": tp, "pp": pp}
    expected = itertools.product(*(range(length[axis]) for axis in sorted({*distinct, "pp"})))
    assert sorted(pieces) == sorted(expected)


@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)])
def test_expert_weights_are_counted_once_per_expert_and_slice(ep, expert_tp):
    ranks = ranks_of(dp=2, cp=1, tp=2, pp=2, ep=ep, expert_tp=expert_tp)
    owners = [rank for rank in ranks if rank.owns(("ep", "expert_tp"))]
    pieces = {(owner.index("ep"), owner.index("expert_tp"), owner.index("pp")) for owner in owners}
    assert len(owners) == len(pieces) == ep * expert_tp * 2


def test_data_holders_are_the_lowest_ranks_of_the_last_stage():
    ranks = ranks_of(dp=2, cp=2, tp=2, pp=2, ep=1, expert_tp=1)
    assert {topology.data_holders() for topology in ranks} == {(8, 10, 12, 14)}
    assert [ranks[rank].data_index for rank in (8, 10, 12, 14)] == [0, 1, 2, 3]


def test_axes_of_both_factorings_are_refused():
    with pytest.raises(ValueError, match="mix the dense and the expert factoring"):
        factoring_of(("dp", "ep"))
    with pytest.raises(ValueError, match="unknown mesh axes"):
        factoring_of(("depth",))
