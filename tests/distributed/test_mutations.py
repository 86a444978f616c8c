"""The matrix sees a fault: each one that is planted makes the comparison with its own ranks fail."""

import pytest
from matrix import judge, run_row
from mutations import MUTATIONS, Mutation

pytestmark = [pytest.mark.slow, pytest.mark.megatron, pytest.mark.matrix]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.plant.__name__)
def test_a_planted_fault_makes_the_matrix_fail(tmp_path, mutation: Mutation):
    run = run_row(mutation.row, tmp_path, before=mutation.plant)
    try:
        wrong = judge(mutation.row, run, None).wrong
    except (AssertionError, ValueError) as mismatch:  # slots that hold something else than they should
        wrong = [str(mismatch)]
    assert any(mutation.spoils in text for text in wrong), wrong
