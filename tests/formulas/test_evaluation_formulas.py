import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from megatron_probes.formulas import evaluation
from megatron_probes.formulas.ratio import ratio


def test_pc14_a_each_token_but_the_first_is_scored_once():
    scored = [t for w in evaluation.strided_windows(10, 4, 2) for t in range(w.first_scored, w.end)]
    assert scored == list(range(1, 10))
    nll = ratio(sum(scored), len(scored))
    assert nll == 5.0
    assert evaluation.perplexity(nll).value == pytest.approx(148.4131591, rel=1e-9)


@given(st.integers(0, 200), st.integers(2, 40), st.data())
def test_windows_cover_a_document_whatever_its_length(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    windows = list(evaluation.strided_windows(length, window, stride))
    scored = [t for w in windows for t in range(w.first_scored, w.end)]
    assert scored == list(range(1, length))
    for w in windows:
        assert w.end - w.begin <= window
        assert w.first_scored - w.begin >= min(w.first_scored, window - stride) >= 1


@pytest.mark.parametrize(("window", "stride"), [(4, 4), (4, 0), (1, 1)])
def test_windows_without_context_are_refused(window, stride):
    with pytest.raises(ValueError, match="use a stride from 1"):
        list(evaluation.strided_windows(10, window, stride))


CHOICES = [
    evaluation.Choice(3.0, 1, "cat"),
    evaluation.Choice(4.2, 2, "日本語"),
    evaluation.Choice(6.3, 2, "elephants"),
]


@pytest.mark.parametrize(
    ("unit", "best", "score"),
    [("raw", 0, -3.0), ("character", 2, -0.7), ("byte", 1, -0.4666667), ("token", 1, -2.1)],
)
def test_pc20_a_the_unit_decides(unit, best, score):
    scores = evaluation.choice_scores(CHOICES, unit)
    assert evaluation.best_choices(scores) == (best,)
    assert scores[best] == pytest.approx(score, rel=1e-6)


@pytest.mark.parametrize("gold", [0, 3])
def test_pc20_b_ties_earn_their_share(gold):
    best = evaluation.best_choices([-2.0] * 4)
    assert evaluation.accuracy([(best, gold)] * 4) == evaluation.Accuracy(0.25, ties=4)


def test_unknown_unit_and_empty_choices():
    with pytest.raises(ValueError, match="use one of raw, token, character, byte"):
        evaluation.choice_scores(CHOICES, "words")
    assert evaluation.choice_scores([evaluation.Choice(1.5, 0, "")], "byte") == [-1.5]
    assert evaluation.best_choices([0.0, math.nan]) == ()
    assert evaluation.accuracy([((), 0), ((1,), 1)]) == evaluation.Accuracy(0.5, ties=0)
    assert evaluation.accuracy([]) is None


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (5, 1, 5, 1.0),
        (10, 3, 5, 0.9166667),
        (1000, 5, 500, 0.9690623421817),
        (5, 0, 3, 0.0),
    ],
)
def test_pc40_pass_at_k(n, c, k, expected):
    assert evaluation.pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-7)


def test_pc40_small_chances_keep_their_digits():
    assert evaluation.pass_at_k(100_000, 1, 10) == pytest.approx(1e-4, rel=1e-9)
    assert evaluation.pass_at_k(1000, 5, 500) == pytest.approx(0.9690623421817, rel=1e-12)


def test_pc40_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="draw more samples or lower k"):
        evaluation.pass_at_k(3, 1, 5)
    with pytest.raises(ValueError, match="must be 0 to 3"):
        evaluation.pass_at_k(3, 4, 1)


def test_pc40_problems_are_averaged_and_not_pooled():
    assert evaluation.mean_pass_at_k([(4, 4), (16, 0)], 1) == 0.5
    assert evaluation.mean_pass_at_k([], 1) is None


@given(st.integers(1, 60), st.data())
def test_pass_at_k_is_the_binomial_quotient(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - special.comb(n - c, k, exact=True) / special.comb(n, k, exact=True)
    assert evaluation.pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-11, abs=1e-15)


def test_pc41_mean_over_all_targets():
    batches = [(3, 1), (96, 12), (0, 0)]
    nll = ratio(sum(s for s, _ in batches), sum(n for _, n in batches))
    assert nll == pytest.approx(7.6153846, rel=1e-7)
    documents = ratio(math.log(16.0), 1 + 3)
    assert evaluation.perplexity(documents).value == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize(
    ("nll", "value", "overflow"),
    [(25.0, 7.2004899e10, False), (100.0, 2.6881171e43, False), (1000.0, math.inf, True)],
)
def test_pc41_perplexity_has_no_cap_and_raises_nothing(nll, value, overflow):
    found = evaluation.perplexity(nll)
    assert found.value == pytest.approx(value, rel=1e-7)
    assert found.overflow is overflow


def test_an_infinite_nll_is_no_overflow():
    assert evaluation.perplexity(math.inf) == evaluation.Perplexity(math.inf, overflow=False)
    assert math.isnan(evaluation.perplexity(math.nan).value)


def test_bits_per_byte():
    assert evaluation.bits_per_byte(8 * math.log(2.0), 4) == pytest.approx(2.0, rel=1e-15)
    assert evaluation.bits_per_byte(0.0, 0) is None


@pytest.mark.parametrize(
    ("predicted", "reference", "expected"),
    [
        ((0, 0, 2, 2), (1, 1, 3, 3), 1 / 7),
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0),
        ((0, 0, 1, 1), (2, 2, 3, 3), 0.0),
        ((0, 0, 4, 4), (1, 1, 2, 2), 1 / 16),
        ((1, 1, 1, 1), (1, 1, 1, 1), 0.0),
        ((3, 3, 1, 1), (0, 0, 4, 4), 0.0),
    ],
)
def test_iou(predicted, reference, expected):
    assert evaluation.iou(predicted, reference) == pytest.approx(expected, rel=1e-12)
    assert evaluation.iou(reference, predicted) == pytest.approx(expected, rel=1e-12)
