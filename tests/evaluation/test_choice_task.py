"""Multiple choice: units, ties, and choices that are awkward (case PC20)."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_scorers import GivenScorer, TableScorer, context

from megatron_probes.evaluation.documents import Item, ItemFault
from megatron_probes.evaluation.suite import ChoiceTask, PerplexityTask
from megatron_probes.evaluation.tasks.choice import MultipleChoice
from megatron_probes.evaluation.tasks.perplexity import Perplexity


def task(scorer: TableScorer, **changes: object) -> MultipleChoice:
    spec = {"name": "mc", "kind": "multiple_choice", "data": Path("unused"), **changes}
    return MultipleChoice(ChoiceTask.model_validate(spec), context(scorer))


def item(choices: list[str], answer: int, prompt: str = "q", line: int = 1) -> Item:
    return Item(line, {"prompt": prompt, "choices": choices, "answer": answer})


def outcome(nll: list[float], choices: list[str], answer: int) -> dict:
    return {"nll": nll, "tokens": [1] * len(nll), "choices": choices, "answer": answer, "prompts_cut": 0}


def test_pc20_the_unit_decides_and_is_named() -> None:
    nll, choices = [3.0, 4.2, 6.3], ["cat", "日本語", "elephants"]
    mc = task(TableScorer())
    right = {"accuracy_raw": 0, "accuracy_character": 2, "accuracy": 1}
    for name, answer in right.items():
        values = mc.summarize([outcome(nll, choices, answer)]).values
        assert {n for n in right if values[n] == 1.0} == {name}


@pytest.mark.parametrize("answer", [0, 3])
def test_pc20_ties_earn_their_share_and_are_counted(answer: int) -> None:
    outcomes = [outcome([2.0] * 4, ["a", "b", "c", "d"], answer)] * 4
    summary = task(TableScorer()).summarize(outcomes)
    assert summary.values["accuracy"] == 0.25
    assert summary.counts["ties_byte"] == 4


def test_choices_are_scored_after_the_prompt() -> None:
    mc = task(TableScorer())
    question = mc.prepare(item(["one", "two"], 1, prompt="count:"))
    assert [row.ids for row in question.rows] == [(256, *b"count: one"), (256, *b"count: two")]
    assert [row.first_scored for row in question.rows] == [7, 7]
    (found,) = mc.score([question])
    assert found["tokens"] == [4, 4]


def test_a_choice_that_begins_another_is_scored_to_its_own_end() -> None:
    scorer = GivenScorer(lambda row, j: 1.0)
    mc = task(scorer)
    (found,) = mc.score([mc.prepare(item(["a", "ab", "abc"], 0))])
    assert found["nll"] == [2.0, 3.0, 4.0]


def test_spaces_that_end_the_prompt_go_to_the_choice() -> None:
    question = task(TableScorer(), choice="{choice}", prefix="none").prepare(item(["x"], 0, prompt="q  "))
    assert question.rows[0].ids == tuple(b"q  x")
    assert question.rows[0].first_scored == 1


def test_without_prompt_and_prefix_the_first_token_follows_the_end_of_a_document() -> None:
    question = task(TableScorer(), prefix="none", choice="{choice}").prepare(item(["xy"], 0, prompt=""))
    assert question.rows[0].ids == (256, *b"xy")


def test_a_prompt_longer_than_the_context_loses_its_beginning() -> None:
    mc = task(TableScorer(context_length=8))
    question = mc.prepare(item(["yes", "no"], 0, prompt="0123456789"))
    assert question.rows[0].ids == tuple(b"56789 yes")
    assert question.cut
    assert mc.summarize(mc.score([question])).counts["prompts_cut"] == 1


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"choices": ["long" * 9], "answer": 0}, "too_long"),
        ({"choices": [], "answer": 0}, "wrong_type"),
        ({"choices": ["a", ""], "answer": 0}, "wrong_type"),
        ({"choices": "ab", "answer": 0}, "wrong_type"),
        ({"choices": ["a", "b"], "answer": 2}, "wrong_type"),
        ({"choices": ["a", "b"], "answer": True}, "wrong_type"),
        ({"choices": ["a", "b"]}, "missing_field"),
    ],
)
def test_faulty_questions_are_left_out(fields: dict, kind: str) -> None:
    with pytest.raises(ItemFault) as fault:
        task(TableScorer(context_length=16)).prepare(Item(1, {"prompt": "q", **fields}))
    assert fault.value.kind == kind


def test_media_as_tokens_stand_in_the_prompt_for_themselves() -> None:
    spec = PerplexityTask.model_validate(
        {"name": "d", "kind": "perplexity", "data": Path("unused"), "context": "see {media}: "}
    )
    document = Perplexity(spec, context(TableScorer())).prepare(
        Item(1, {"text": "cat", "media": [200, 201, 202]})
    )
    assert document.rows[0].ids == (256, *b"see ", 200, 201, 202, *b": cat", 256)
