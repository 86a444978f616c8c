"""Multiple choice by the likelihood of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_probes.evaluation.documents import Item, ItemFault
from megatron_probes.evaluation.generation import cut_context
from megatron_probes.evaluation.prompts import Prompts, fill
from megatron_probes.evaluation.scoring import Row, sum_nll
from megatron_probes.evaluation.suite import ChoiceTask
from megatron_probes.evaluation.tasks.base import Context, Outcome, Summary, total
from megatron_probes.formulas.evaluation import Choice, accuracy, best_choices, choice_scores

UNITS = {
    "byte": "accuracy",
    "raw": "accuracy_raw",
    "token": "accuracy_token",
    "character": "accuracy_character",
}
"""Unit of normalisation -> name of the accuracy by it; the plain name is the decision (Specification, 10)."""


@dataclass(frozen=True)
class Question:
    """A row for each choice."""

    line: int
    rows: tuple[Row, ...]
    choices: tuple[str, ...]
    answer: int
    cut: bool
    """A prompt longer than the context lost its beginning."""


class MultipleChoice:
    """Each choice is scored as what follows the prompt, up to its last token and no further.

    So a choice that begins another is scored like any other. Lengths are those of the choice as it stands in
    the data, without the template around it.
    """

    score_name = "accuracy"

    def __init__(self, spec: ChoiceTask, context: Context, values: dict[str, Any] | None = None) -> None:
        self._spec = spec
        self._context = context
        self._values = values
        self._prompts = Prompts(context.tokenizer, spec.prefix)

    def prepare(self, item: Item) -> Question:
        choices = item.value(self._spec.choices_field)
        answer = item.value(self._spec.answer_field)
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise ItemFault("wrong_type", f"field {self._spec.choices_field!r} must be a list of texts")
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise ItemFault(
                "wrong_type",
                f"field {self._spec.answer_field!r} must be 0 to {len(choices) - 1}, not {answer!r}",
            )
        pieces = fill(self._spec.prompt, item, self._values)
        rows, cuts = [], []
        for choice in choices:
            text = fill(self._spec.choice, item, {"choice": choice})[0]
            assert isinstance(text, str)
            before, after = self._prompts.continued(pieces, text)
            room = self._context.scorer.context_length + 1 - len(after)
            if room < 1:
                raise ItemFault("too_long", f"the choice {choice[:40]!r} alone is longer than the context")
            before, cut = cut_context(before, room)
            rows.append(Row(before + after, len(before)))
            cuts.append(cut)
        return Question(item.line, tuple(rows), tuple(choices), answer, any(cuts))

    def score(self, prepared: Sequence[Question]) -> list[Outcome]:
        scores = iter(self._context.scorer.score([row for question in prepared for row in question.rows]))
        outcomes = []
        for question in prepared:
            found = [next(scores) for _ in question.rows]
            outcomes.append(
                {
                    "line": question.line,
                    "answer": question.answer,
                    "nll": [sum_nll(score) for score in found],
                    "tokens": [len(score.nll_N) for score in found],
                    "choices": list(question.choices),
                    "prompts_cut": int(question.cut),
                }
            )
        return outcomes

    def summarize(self, outcomes: Sequence[Outcome]) -> Summary:
        values: dict[str, float | int | None] = {}
        counts = {"questions": len(outcomes), "prompts_cut": total(outcomes, "prompts_cut")}
        for unit, name in UNITS.items():
            result = accuracy((best_choices(choice_scores(_choices(o), unit)), o["answer"]) for o in outcomes)
            values[name] = None if result is None else result.value
            counts[f"ties_{unit}"] = 0 if result is None else result.ties
        return Summary(values, counts)


def _choices(outcome: Outcome) -> list[Choice]:
    lists = (outcome["nll"], outcome["tokens"], outcome["choices"])
    return [Choice(float(nll), tokens, text) for nll, tokens, text in zip(*lists, strict=True)]
