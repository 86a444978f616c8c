"""Tasks that generate: greedy, pass@k (case PC40), grounding, and what media adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_scorers import TableScorer, WritingScorer, context

from megatron_probes.evaluation import SuiteError
from megatron_probes.evaluation.documents import Item, ItemFault
from megatron_probes.evaluation.generation import generate, sampler
from megatron_probes.evaluation.suite import GreedyTask, GroundingTask, MediaGainTask, PassAtKTask
from megatron_probes.evaluation.tasks import build_task
from megatron_probes.evaluation.tasks.grounding import parse_box

SPECS = {
    "greedy": GreedyTask,
    "grounding": GroundingTask,
    "pass_at_k": PassAtKTask,
    "media_gain": MediaGainTask,
}


def task(model: TableScorer, kind: str, *, run_code: bool = False, **fields: Any) -> Any:
    given = {"name": "t", "kind": kind, "data": Path("unused"), **fields}
    return build_task(SPECS[kind].model_validate(given), context(model, run_code=run_code))


def run(bound: Any, items: list[dict]) -> tuple[list[dict], Any]:
    outcomes = bound.score([bound.prepare(Item(i, fields)) for i, fields in enumerate(items, start=1)])
    return outcomes, bound.summarize(outcomes)


def test_exact_match_and_contains() -> None:
    scorer = WritingScorer(lambda prompt: {"2+2=": " 4 ", "sky": "it is blue", "x": "no"}[prompt])
    items = [
        {"prompt": "2+2=->", "answer": "4"},
        {"prompt": "sky->", "answer": ["red", "blue"]},
        {"prompt": "x->", "answer": "yes"},
    ]
    _, exact = run(task(scorer, "greedy"), items)
    _, contains = run(task(scorer, "greedy", match="contains"), items)
    assert exact.values["greedy"] == pytest.approx(1 / 3)
    assert contains.values["greedy"] == pytest.approx(2 / 3)


def test_generation_ends_before_a_stop_string_at_the_end_of_the_document_and_by_length() -> None:
    scorer = WritingScorer(lambda prompt: {"a": "one\ntwo", "b": "done", "c": "long" * 9}[prompt])
    items = [{"prompt": f"{p}->", "answer": "one"} for p in "abc"]
    outcomes, summary = run(task(scorer, "greedy", stop="\n", max_new_tokens=12), items)
    assert [outcome["text"] for outcome in outcomes] == ["one", "done", "long" * 3]
    assert [outcome["ended_by"] for outcome in outcomes] == ["stop", "end_of_document", "length"]
    assert summary.counts["ended_by_length"] == 1


def test_a_stop_string_may_span_tokens_and_the_earliest_counts() -> None:
    (out,) = generate(
        WritingScorer(lambda _: "ab###cd"),  # type: ignore[arg-type]
        context(TableScorer()).tokenizer,
        [tuple(b"->")],
        max_new_tokens=20,
        stop=["d", "##"],
    )
    assert out.text == "ab"


def test_prompts_that_leave_no_room_are_cut_and_counted() -> None:
    scorer = TableScorer(context_length=10)
    bound = task(scorer, "greedy", max_new_tokens=4)
    prompt = bound.prepare(Item(1, {"prompt": "0123456789", "answer": "x"})).prompt
    assert prompt.ids == tuple(b"3456789")
    assert prompt.cut
    with pytest.raises(ItemFault, match="fills the context"):
        task(scorer, "greedy", max_new_tokens=11).prepare(Item(1, {"prompt": "q", "answer": "x"}))


def test_greedy_is_the_choice_from_every_prefix_whatever_is_generated_with_it() -> None:
    scorer = TableScorer()
    prompts = [tuple(b"abc"), tuple(b"zz"), tuple(b"hello there")]
    tokenizer = context(scorer).tokenizer
    together = generate(scorer, tokenizer, prompts, max_new_tokens=10, stop=())  # type: ignore[arg-type]
    for prompt, out in zip(prompts, together, strict=True):
        for n, token in enumerate(out.ids):
            assert token == scorer.logits([*prompt, *out.ids[:n]]).argmax()


def test_samples_depend_on_their_seed_alone() -> None:
    scorer = TableScorer()
    tokenizer = context(scorer).tokenizer

    def draw(seeds: list[tuple[int, ...]]) -> list[list[int]]:
        choose = sampler(seeds, 1.0, 1.0)
        prompts = [tuple(b"ab")] * len(seeds)
        found = generate(scorer, tokenizer, prompts, max_new_tokens=8, stop=(), choose=choose)  # type: ignore[arg-type]
        return [out.ids for out in found]

    together = draw([(0, 1), (0, 2), (1, 1)])
    assert [draw([seed])[0] for seed in [(0, 1), (0, 2), (1, 1)]] == together
    assert len({tuple(ids) for ids in together}) == 3


def test_samples_follow_temperature_and_top_p() -> None:
    logits_V = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    n = 4000

    def shares(temperature: float, top_p: float) -> np.ndarray:
        choose = sampler([(7, i) for i in range(n)], temperature, top_p)
        return np.bincount([choose(i, logits_V) for i in range(n)], minlength=4) / n

    assert shares(1.0, 1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    flat = np.array([0.5, 0.3, 0.15, 0.05]) ** 0.5
    assert shares(2.0, 1.0) == pytest.approx(flat / flat.sum(), abs=0.03)
    assert shares(1.0, 0.75) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)


def test_pc40_pass_at_k_is_the_mean_over_problems(tmp_path: Path) -> None:
    bound = task(
        TableScorer(), "pass_at_k", run_code=True, scorer=f"{tmp_path}/s.py:right", samples=16, k=[1]
    )
    pooled = [{"samples": 4, "right": 4}, {"samples": 16, "right": 0}]
    assert bound.summarize(pooled).values["pass_at_k"] == 0.5
    for n, c, k, expected in ((10, 3, 5, 0.9166667), (1000, 5, 500, 0.9690623421817)):
        spec = {"scorer": f"{tmp_path}/s.py:right", "samples": n, "k": [k]}
        values = (
            task(TableScorer(), "pass_at_k", run_code=True, **spec)
            .summarize([{"samples": n, "right": c}])
            .values
        )
        assert values["pass_at_k"] == values[f"pass_at_{k}"] == pytest.approx(expected, rel=1e-6)


def test_pass_at_k_scores_every_sample_in_its_own_process(tmp_path: Path) -> None:
    scorer = tmp_path / "s.py"
    scorer.write_text("def right(item, text):\n    return len(text) % 2 == item['odd']\n")
    bound = task(
        TableScorer(),
        "pass_at_k",
        run_code=True,
        scorer=f"{scorer}:right",
        samples=6,
        k=[1, 3],
        max_new_tokens=5,
        temperature=1.5,
    )
    items = [{"prompt": "p", "odd": 0}, {"prompt": "q", "odd": 1}]
    outcomes, summary = run(bound, items)
    again, _ = run(bound, items)
    assert outcomes == again
    for outcome, fields in zip(outcomes, items, strict=True):
        assert outcome["right"] == sum(len(text) % 2 == fields["odd"] for text in outcome["texts"])
    assert summary.values["pass_at_1"] == sum(o["right"] for o in outcomes) / 12
    assert summary.counts["scorer_failed"] == 0


def test_scorers_are_off_unless_asked() -> None:
    with pytest.raises(SuiteError, match="--run-scorers"):
        task(TableScorer(), "pass_at_k", scorer="s.py:right", samples=2)
    with pytest.raises(SuiteError, match="--run-scorers"):
        task(TableScorer(), "greedy", match="scorer", scorer="s.py:right")


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("[1, 2, 3, 4]", (1, 2, 3, 4)),
        ("The box is (0.5,1.5),(3,4.25) indeed", (0.5, 1.5, 3, 4.25)),
        ("1 2 3 4 5", (1, 2, 3, 4)),
        ("<-1><2><3><4>", (-1, 2, 3, 4)),
        ("12 apples and 3, 4", None),
        ("", None),
    ],
)
def test_boxes_are_read_from_text(text: str, box: tuple | None) -> None:
    assert parse_box(text) == box


def test_grounding_scores_overlap_and_counts_what_is_no_box() -> None:
    answers = {"a": "[0, 0, 10, 10]", "b": "[5, 0, 15, 10]", "c": "somewhere", "d": "[9, 9, 1, 1]"}
    bound = task(WritingScorer(answers.__getitem__), "grounding")
    items = [{"prompt": f"{p}->", "box": [0, 0, 10, 10]} for p in answers]
    outcomes, summary = run(bound, items)
    assert [outcome["iou"] for outcome in outcomes] == pytest.approx([1.0, 1 / 3, 0.0, 0.0])
    assert summary.values["iou"] == pytest.approx(1 / 3)
    assert (summary.counts["without_box"], summary.counts["empty_boxes"]) == (1, 1)


@pytest.mark.parametrize(
    ("box", "kind"),
    [
        ([0, 0, 0, 5], "empty_box"),
        ([5, 0, 1, 5], "empty_box"),
        ([1, 2, 3], "wrong_type"),
        ("x", "wrong_type"),
    ],
)
def test_reference_boxes_that_are_none_are_left_out(box: object, kind: str) -> None:
    bound = task(TableScorer(), "grounding", max_new_tokens=2)
    with pytest.raises(ItemFault) as fault:
        bound.prepare(Item(1, {"prompt": "p", "box": box}))
    assert fault.value.kind == kind


def test_media_gain_is_the_difference_on_the_same_items() -> None:
    scorer = WritingScorer(lambda prompt: "cat" if prompt.startswith("<img>") else "dog")
    bound = task(scorer, "media_gain", score={"kind": "greedy", "prompt": "{media}{prompt}"})
    items = [
        {"media": "<img>", "prompt": "1->", "answer": "cat"},
        {"media": "<img>", "prompt": "2->", "answer": "cat"},
        {"media": "<img>", "prompt": "3->", "answer": "dog"},
    ]
    _, summary = run(bound, items)
    assert summary.values["greedy_with_media"] == pytest.approx(2 / 3)
    assert summary.values["greedy_without_media"] == pytest.approx(1 / 3)
    assert summary.values["media_gain"] == pytest.approx(1 / 3)


def test_media_gain_takes_tokens_and_any_score() -> None:
    score = {"kind": "multiple_choice", "prompt": "{media}{prompt}"}
    bound = task(TableScorer(), "media_gain", score=score, without="none: ")
    item = Item(1, {"media": [201, 202], "prompt": "p", "choices": ["a", "b"], "answer": 0})
    shown, hidden = bound.prepare(item)
    assert shown.rows[0].ids == (256, 201, 202, *b"p a")
    assert hidden.rows[0].ids == (256, *b"none: p a")
    with pytest.raises(ItemFault, match="media"):
        bound.prepare(Item(1, {"prompt": "p", "choices": ["a"], "answer": 0}))
