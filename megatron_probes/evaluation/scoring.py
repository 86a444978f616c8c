"""What a model is asked: likelihoods of tokens in a context, and the next token's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A sequence of tokens of which [first_scored, end) are scored, each given all before it."""

    ids: tuple[int, ...]
    first_scored: int
    """At least 1: a token without context has no likelihood."""

    def __post_init__(self) -> None:
        assert 1 <= self.first_scored < len(self.ids)

    @property
    def num_inputs(self) -> int:
        """Tokens that the model is given: the last one is only a target."""
        return len(self.ids) - 1


@dataclass(frozen=True)
class RowScore:
    """Scores of a row's targets, in their order."""

    nll_N: np.ndarray
    """float64, nats."""
    greedy_N: np.ndarray
    """bool: the target is the most likely token (the lowest id where several are)."""


class Scorer(Protocol):
    """A model under evaluation.

    With several ranks all call the same methods with the same arguments and get the same results.
    """

    context_length: int
    """Most tokens that the model can be given at once."""
    is_writer: bool
    """Whether this rank writes files and runs the user's code."""

    def score(self, rows: Sequence[Row]) -> list[RowScore]:
        """Scores of ``rows``, in their order; none has more than ``context_length`` inputs."""

    def next_logits(self, contexts: Sequence[Sequence[int]]) -> np.ndarray:
        """Logits (contexts, vocabulary) in float32 of the token that follows each context.

        Ids that only pad the vocabulary read -inf.
        """

    def share(self, value: T) -> T:
        """The writer's ``value``, on every rank; any data that can be pickled."""


def sum_nll(score: RowScore) -> float:
    """Sum of a row's NLL in nats."""
    return float(score.nll_N.sum())


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together."""

    members: tuple[int, ...]
    """Positions of the rows in what was asked."""
    length: int
    """Tokens of each row, with padding."""


def plan_batches(lengths: Sequence[int], *, rows: int, tokens: int, multiple: int = 1) -> list[Batch]:
    """Bucket rows of ``lengths`` tokens by length into batches of at most ``rows`` rows.

    A batch holds at most ``tokens`` tokens with padding, but always one row. Lengths are padded to a multiple
    of ``multiple``. The longest come first, so that a batch that doesn't fit into memory fails at once.
    """
    batches: list[Batch] = []
    members: list[int] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if members and (len(members) == rows or (len(members) + 1) * width > tokens):
            batches.append(Batch(tuple(members), width))
            members = []
        if not members:
            width = -(-lengths[i] // multiple) * multiple
        members.append(i)
    if members:
        batches.append(Batch(tuple(members), width))
    return batches


def pad(rows: Sequence[Sequence[int]], length: int, padding: int, side: str) -> Any:
    """Token ids (rows, length) in int64, padded with ``padding`` on the ``side`` "left" or "right"."""
    out_BS = np.full((len(rows), length), padding, dtype=np.int64)
    for row, ids in zip(out_BS, rows, strict=True):
        if side == "right":
            row[: len(ids)] = ids
        else:
            row[length - len(ids) :] = ids
    return out_BS
