"""Batches hold every row once, within the limits, whatever the lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_probes.evaluation.scoring import pad, plan_batches


@given(
    lengths=st.lists(st.integers(1, 90), max_size=60),
    rows=st.integers(1, 9),
    tokens=st.integers(1, 300),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_plan(lengths: list[int], rows: int, tokens: int, multiple: int) -> None:
    batches = plan_batches(lengths, rows=rows, tokens=tokens, multiple=multiple)
    assert sorted(i for batch in batches for i in batch.members) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[i] for i in batch.members)
        assert longest <= batch.length < longest + multiple
        assert batch.length % multiple == 0
        assert len(batch.members) <= rows
        assert len(batch.members) == 1 or len(batch.members) * batch.length <= tokens
    assert [batch.length for batch in batches] == sorted((b.length for b in batches), reverse=True)


def test_padding_sides() -> None:
    rows = [[1, 2, 3], [4]]
    assert np.array_equal(pad(rows, 4, 0, "right"), [[1, 2, 3, 0], [4, 0, 0, 0]])
    assert np.array_equal(pad(rows, 4, 0, "left"), [[0, 1, 2, 3], [0, 0, 0, 4]])
