"""Scores on held-out data and tasks (Specification, section 10).

l is the negative log-likelihood of a target in nats. NLL is ``ratio(sum l, valid targets)`` over the whole
set, never a mean of batch means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_probes.formulas.ratio import ratio


@dataclass(frozen=True)
class Perplexity:
    """exp(NLL); ``overflow`` says that the value is infinite because a float64 can't hold it."""

    value: float
    overflow: bool


def perplexity(nll: float) -> Perplexity:
    """Return exp(NLL) in float64 without a cap: above the range infinity with a flag, never an exception."""
    try:
        return Perplexity(math.exp(nll), overflow=False)
    except OverflowError:
        return Perplexity(math.inf, overflow=True)


def bits_per_byte(nll_sum: float, num_bytes: int) -> float | None:
    """Return sum l / (bytes * ln 2).

    ``num_bytes`` are the original UTF-8 bytes that the targets of the sum cover; targets that cover none
    (begin and end of document, special tokens) are in neither. ``None`` where no byte is covered.
    """
    return ratio(nll_sum, num_bytes * math.log(2.0))


@dataclass(frozen=True)
class Window:
    """One forward pass over a stretch of a long document."""

    begin: int
    end: int
    """Tokens [begin, end) are given to the model."""
    first_scored: int
    """Tokens [first_scored, end) are scored, each with all tokens from ``begin`` before it."""


def strided_windows(length: int, window: int, stride: int) -> Iterator[Window]:
    """Yield windows over ``length`` tokens in which each token but the document's first is scored once.

    Neighbours are ``stride`` apart, so a scored token sees at least ``window - stride`` tokens before it.
    Raises ``ValueError`` unless 1 <= stride < window: with a larger stride some tokens have no context.
    """
    if not 1 <= stride < window:
        raise ValueError(
            f"stride {stride} with a window of {window}: some tokens would be scored without context; "
            f"use a stride from 1 to {window - 1}"
        )
    scored = 1
    begin = 0
    while scored < length:
        end = min(begin + window, length)
        yield Window(begin, end, scored)
        scored = end
        begin += stride


@dataclass(frozen=True)
class Choice:
    """One answer to choose: its NLL and its length in the units of normalisation."""

    nll: float
    tokens: int
    text: str


def choice_scores(choices: Sequence[Choice], unit: str) -> list[float]:
    """Return the log-likelihoods of ``choices``, each divided by its length in ``unit``.

    ``unit`` is ``raw`` (not divided), ``token``, ``character`` or ``byte`` (of UTF-8). An answer of length 0
    is divided by 1. Raises ``ValueError`` for another unit.
    """
    lengths = {
        "raw": [1] * len(choices),
        "token": [choice.tokens for choice in choices],
        "character": [len(choice.text) for choice in choices],
        "byte": [len(choice.text.encode()) for choice in choices],
    }
    if unit not in lengths:
        raise ValueError(f"unit {unit!r}: use one of {', '.join(lengths)}")
    return [-choice.nll / max(n, 1) for choice, n in zip(choices, lengths[unit], strict=True)]


def best_choices(scores: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of the highest score: several where choices tie, none where a score is NaN."""
    if any(math.isnan(score) for score in scores):
        return ()
    best = max(scores)
    return tuple(i for i, score in enumerate(scores) if score == best)


@dataclass(frozen=True)
class Accuracy:
    """Share of right decisions and the number of questions whose best choices tied."""

    value: float
    ties: int


def accuracy(decisions: Iterable[tuple[tuple[int, ...], int]]) -> Accuracy | None:
    """Return the accuracy of (best choices, right choice) pairs: a tie of k earns 1/k if it holds the right.

    ``None`` without questions.
    """
    credit: list[float] = []
    ties = 0
    for best, right in decisions:
        credit.append(1.0 / len(best) if right in best else 0.0)
        ties += len(best) > 1
    return Accuracy(math.fsum(credit) / len(credit), ties) if credit else None


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n-c, k) / C(n, k): the chance that one of k out of n samples, c of them right, is right.

    The quotient is the product over i < min(c, k) of 1 - max(c, k) / (n - i), summed as logarithms so that
    neither large factorials nor small results lose digits. Raises ``ValueError`` unless 0 <= c <= n and
    1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} right among {n} samples: must be 0 to {n}")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} from {n} samples: k must be 1 to {n}; draw more samples or lower k")
    if c == 0:
        return 0.0
    if n - c < k:
        return 1.0
    small, large = min(c, k), max(c, k)
    return -math.expm1(math.fsum(math.log1p(-large / (n - i)) for i in range(small)))


def mean_pass_at_k(problems: Sequence[tuple[int, int]], k: int) -> float | None:
    """Return the mean over problems of pass@k of (samples, right ones); ``None`` without problems.

    Samples are never pooled over problems.
    """
    return ratio(math.fsum(pass_at_k(n, c, k) for n, c in problems), len(problems))


Box = tuple[float, float, float, float]
"""Left, top, right and bottom; a box whose right is left of its left, or bottom above its top, is empty."""


def _area(box: Box) -> float:
    left, top, right, bottom = box
    return max(right - left, 0.0) * max(bottom - top, 0.0)


def iou(predicted: Box, reference: Box) -> float:
    """Return area of intersection / area of union; 0 where both boxes are empty."""
    intersection = _area(
        (
            max(predicted[0], reference[0]),
            max(predicted[1], reference[1]),
            min(predicted[2], reference[2]),
            min(predicted[3], reference[3]),
        )
    )
    union = _area(predicted) + _area(reference) - intersection
    return ratio(intersection, union) or 0.0
