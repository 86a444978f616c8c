"""Generation at temperature 0, scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_probes.evaluation.documents import Item, ItemFault
from megatron_probes.evaluation.suite import GreedyTask
from megatron_probes.evaluation.tasks.base import Context, Outcome, Summary, total
from megatron_probes.evaluation.tasks.generative import Generation, Prompt
from megatron_probes.evaluation.user_scorer import UserScorer
from megatron_probes.formulas.ratio import ratio


@dataclass(frozen=True)
class Question:
    """A prompt with the answers that are right."""

    prompt: Prompt
    answers: tuple[str, ...]


class Greedy:
    """The score of an item is 1 where its answer matches, else 0; or what the user's scorer says."""

    score_name = "greedy"

    def __init__(self, spec: GreedyTask, context: Context, values: dict[str, Any] | None = None) -> None:
        self._spec = spec
        self._context = context
        self._generation = Generation(spec, context, values)
        self._scorer = None if spec.scorer is None else UserScorer(spec.scorer, allowed=context.run_code)

    def prepare(self, item: Item) -> Question:
        return Question(self._generation.prompt(item), () if self._scorer else self._answers(item))

    def _answers(self, item: Item) -> tuple[str, ...]:
        answers = item.value(self._spec.answer_field)
        answers = [answers] if isinstance(answers, str) else answers
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a for a in answers):
            raise ItemFault(
                "wrong_type", f"field {self._spec.answer_field!r} must be a text or a list of texts"
            )
        return tuple(answers)

    def score(self, prepared: Sequence[Question]) -> list[Outcome]:
        generated = self._generation.continuations([question.prompt for question in prepared])
        outcomes: list[Outcome] = [
            {
                "line": question.prompt.item.line,
                "text": out.text,
                "ids": out.ids,
                "ended_by": out.ended_by,
                "prompts_cut": int(question.prompt.cut),
            }
            for question, out in zip(prepared, generated, strict=True)
        ]
        if self._scorer is None:
            for outcome, question in zip(outcomes, prepared, strict=True):
                outcome["score"] = float(self._matches(outcome["text"], question.answers))
        else:
            calls = [
                (question.prompt.item, out.text) for question, out in zip(prepared, generated, strict=True)
            ]
            writer = self._context.scorer.is_writer
            verdicts = self._context.scorer.share(self._scorer.scores(calls) if writer else None)
            assert verdicts is not None
            for outcome, verdict in zip(outcomes, verdicts, strict=True):
                outcome |= {"score": verdict.score, "scorer_failed": int(verdict.problem is not None)}
                if verdict.problem:
                    outcome["problem"] = verdict.problem
        return outcomes

    def _matches(self, text: str, answers: Sequence[str]) -> bool:
        if self._spec.match == "contains":
            return any(answer in text for answer in answers)
        return any(answer.strip() == text.strip() for answer in answers)

    def summarize(self, outcomes: Sequence[Outcome]) -> Summary:
        return Summary(
            {"greedy": ratio(math.fsum(outcome["score"] for outcome in outcomes), len(outcomes))},
            {
                "items": len(outcomes),
                "ended_by_length": sum(outcome["ended_by"] == "length" for outcome in outcomes),
                "prompts_cut": total(outcomes, "prompts_cut"),
                "scorer_failed": total(outcomes, "scorer_failed"),
            },
        )
