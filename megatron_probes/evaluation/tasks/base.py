"""What the runner needs of a task: prepare an item, score prepared items, sum the outcomes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from megatron_probes.evaluation.documents import Item
from megatron_probes.evaluation.scoring import Scorer
from megatron_probes.evaluation.tokenization import Tokenizer

P = TypeVar("P")
Outcome = dict[str, Any]
"""What was found of one item, as plain JSON; all results are made of these, so that a task can continue."""


@dataclass(frozen=True)
class Summary:
    """Results of a task: metric values by the last part of their tag, and what was counted on the way."""

    values: dict[str, float | int | None]
    """None is no data; it isn't written."""
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What tasks score with."""

    scorer: Scorer
    tokenizer: Tokenizer
    run_code: bool = False
    """Whether the user's scorers may run."""


class Task(Protocol, Generic[P]):
    """A task bound to a scorer."""

    score_name: str
    """The value that stands for the task as a whole, such as "accuracy"."""

    def prepare(self, item: Item) -> P:
        """The item as tokens; raises ``ItemFault`` where it can't be scored."""

    def score(self, prepared: Sequence[P]) -> list[Outcome]:
        """Outcomes of ``prepared`` items; independent of which items are scored together."""

    def summarize(self, outcomes: Sequence[Outcome]) -> Summary:
        """Results of all outcomes; independent of their order."""


BuildTask = Callable[..., Task[Any]]


def total(outcomes: Sequence[Outcome], name: str) -> int:
    """Sum of a count over ``outcomes``."""
    return sum(int(outcome.get(name, 0)) for outcome in outcomes)
