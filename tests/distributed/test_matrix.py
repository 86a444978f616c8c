"""The matrix: every layout and variant against its references, and every metric in at least one row."""

import functools

import matrix
import pytest
from layouts import ONE

pytestmark = [pytest.mark.slow, pytest.mark.megatron, pytest.mark.matrix]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A row's outcome; each row runs once."""

    @functools.cache
    def plain(model):
        return matrix.run_row(matrix.Row(layout=ONE, model=model), tmp_path_factory.mktemp("plain"))

    @functools.cache
    def judge(row):
        is_plain = row.layout == ONE and not row.variant
        run = plain(row.model) if is_plain else matrix.run_row(row, tmp_path_factory.mktemp("row"))
        return matrix.judge(row, run, plain(row.model))

    return judge


@pytest.mark.parametrize("row", matrix.ROWS, ids=lambda row: f"{row.name}-{row.model.name}")
def test_the_layout_changes_no_number(judged, row):
    outcome = judged(row)
    assert outcome.captured
    assert not outcome.wrong


@pytest.mark.timeout(1800)  # chosen alone, it runs every row
def test_every_metric_with_a_probe_is_in_a_row(judged):
    tags = set().union(*(judged(row).tags for row in matrix.ROWS))
    assert matrix.uncovered(tags) == []
