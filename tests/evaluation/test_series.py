"""A series on disk: what is finished stays, what was interrupted goes on, what changed is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from reference_scorers import GivenScorer, TableScorer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_probes.evaluation import (
    CheckpointIdentity,
    Context,
    Row,
    RowScore,
    Series,
    SuiteError,
    TaskResult,
    build_tokenizer,
    load_suite,
    run_suite,
    suite_parts,
)
from megatron_probes.evaluation import runner as runner_module

SUITE = """
tokenizer: {kind: bytes}
tasks:
  - {name: docs, kind: perplexity, data: docs.jsonl}
  - {name: mc, kind: multiple_choice, data: mc.jsonl}
"""
FIRST = CheckpointIdentity(path="run/iter_0000010", iteration=10, tokens=5120, digest="a")
SECOND = CheckpointIdentity(path="run/iter_0000020", iteration=20, tokens=10240, digest="b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    docs = [{"text": f"document {i} ☃"} for i in range(30)]
    lines = [json.dumps(doc) for doc in docs]
    lines[3:3] = ['{"text": "cut', '{"no": 1}', '{"text": ""}']
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    questions = [{"prompt": "q", "choices": ["a", "b"], "answer": i % 2} for i in range(5)]
    (tmp_path / "mc.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (tmp_path / "suite.yaml").write_text(SUITE)
    return tmp_path


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "CHUNK_ITEMS", 7)


def evaluate(
    folder: Path,
    scorer: TableScorer,
    checkpoint: CheckpointIdentity = FIRST,
    *,
    new: bool = False,
    keep_items: bool = False,
    weights: str = "raw",
) -> tuple[list[TaskResult], Series]:
    suite = load_suite(folder / "suite.yaml")
    scoring = Context(scorer, build_tokenizer(suite.tokenizer))  # type: ignore[arg-type]
    series = Series(folder / "out", suite_parts(suite, scoring), new=new, keep_items=keep_items)
    store = series.store(checkpoint, weights)  # type: ignore[arg-type]
    return run_suite(suite, scoring, checkpoint, store=store, weights=weights), series  # type: ignore[arg-type]


class DyingScorer(TableScorer):
    """Is interrupted at its nth call, as a killed process would be."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._left = calls

    def score(self, rows: Sequence[Row]) -> list[RowScore]:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1
        return super().score(rows)


def test_faulty_lines_are_counted_and_the_task_goes_on(folder: Path) -> None:
    (docs, _), _ = evaluate(folder, TableScorer())
    assert docs.counts["documents"] == 30
    assert docs.faults == {"not_json": 1, "missing_field": 1, "empty_document": 1}
    assert [example.split(":")[0] for example in docs.fault_examples] == ["line 4", "line 5", "line 6"]


def test_a_finished_task_is_not_run_again(folder: Path) -> None:
    first, _ = evaluate(folder, TableScorer())
    scorer = TableScorer()
    again, _ = evaluate(folder, scorer)
    assert scorer.calls == 0
    assert again == first


@pytest.mark.parametrize("cut", [False, True])
def test_an_interrupted_task_goes_on(folder: Path, cut: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, DyingScorer(3))
    (partial,) = (folder / "out").rglob("docs.partial.jsonl")
    assert stat.S_IMODE(partial.stat().st_mode) == 0o600
    if cut:
        partial.write_bytes(partial.read_bytes()[:-9])
    scorer = TableScorer()
    resumed, series = evaluate(folder, scorer)
    kept = 20 if cut else 21
    assert scorer.rows == 30 - kept + 10
    assert not list(series.folder.rglob("*.partial.jsonl"))
    whole, _ = evaluate(folder, TableScorer(), new=True)
    assert [r.values for r in resumed] == [r.values for r in whole]
    assert [r.counts for r in resumed] == [r.counts for r in whole]


def test_another_checkpoint_at_the_same_step_is_scored(folder: Path) -> None:
    evaluate(folder, TableScorer())
    scorer = TableScorer()
    evaluate(folder, scorer, dataclasses.replace(FIRST, digest="other"))
    assert scorer.calls > 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda f: (f / "docs.jsonl").write_text('{"text": "new"}'), "task docs.*data was"),
        (
            lambda f: (f / "suite.yaml").write_text(SUITE.replace("docs.jsonl", "docs.jsonl, prefix: none")),
            r"task docs.*task\.prefix was \"eod\", is \"none\"",
        ),
        (
            lambda f: (f / "suite.yaml").write_text(
                SUITE.replace("{kind: bytes}", "{kind: bytes, begin_of_document: 3}")
            ),
            r"tokenizer\.begin_of_document was null, is 3",
        ),
        (
            lambda f: (f / "suite.yaml").write_text(
                SUITE + "averaging: {method: ema}\ndecision_weights: averaged\n"
            ),
            "decision_weights was",
        ),
    ],
)
def test_a_changed_task_is_refused(folder: Path, change: object, expected: str) -> None:
    evaluate(folder, TableScorer())
    change(folder)  # type: ignore[operator]
    with pytest.raises(SuiteError, match=expected) as error:
        evaluate(folder, TableScorer(), SECOND)
    assert "--new-series" in str(error.value)
    _, series = evaluate(folder, TableScorer(), SECOND, new=True)
    assert series.folder.name == "series_002"
    assert len(series.results()) == 2


def test_tasks_may_be_added_and_left_out(folder: Path) -> None:
    evaluate(folder, TableScorer())
    lines = SUITE.splitlines()
    (folder / "suite.yaml").write_text("\n".join([*lines[:3], lines[4].replace("mc,", "more,")]))
    results, series = evaluate(folder, TableScorer(), SECOND)
    assert [result.task for result in results] == ["more"]
    assert series.folder.name == "series_001"
    assert {r.task for r in series.results()} == {"docs", "mc", "more"}


def test_items_are_kept_when_asked_for(folder: Path) -> None:
    _, series = evaluate(folder, TableScorer(), keep_items=True)
    (path,) = series.folder.rglob("docs.items.jsonl")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().splitlines()) == 31


def test_results_are_exact_and_strict_json(folder: Path) -> None:
    (docs, _), series = evaluate(folder, GivenScorer(lambda row, j: math.inf if j == 2 else 1 / 3))
    (path,) = series.folder.rglob("docs.json")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = json.loads(path.read_text(), parse_constant=refuse)
    assert text["values"]["nll"] == "Infinity"
    assert series.results()[0] == docs
    assert docs.values["ppl"] == math.inf


def test_tensorboard_has_each_checkpoint_at_its_step_and_tokens(folder: Path) -> None:
    evaluate(folder, TableScorer(), SECOND)
    results, series = evaluate(folder, TableScorer(), FIRST)  # the earlier one later
    out = series.write_tensorboard("raw")
    out = series.write_tensorboard("raw")  # in place of the first
    for run, expected in (("by_step", [10, 20]), ("by_tokens", [5120, 10240])):
        events = EventAccumulator(str(out / run), size_guidance={"tensors": 0})
        events.Reload()
        points = events.Tensors("eval/docs/bpb")
        assert [point.step for point in points] == expected
        value = results[0].values["bpb"]
        assert points[0].tensor_proto.float_val[0] == pytest.approx(value)
        assert "eval/mc/accuracy" in events.Tags()["tensors"]


def test_raw_and_averaged_are_a_pair_and_one_decides(folder: Path) -> None:
    raw, _ = evaluate(folder, TableScorer())
    _, series = evaluate(folder, GivenScorer(lambda row, j: 2.0), weights="averaged")
    out = series.write_tensorboard("averaged")
    events = EventAccumulator(str(out / "by_step"))
    events.Reload()

    def shown(tag: str) -> float:
        return events.Tensors(tag)[0].tensor_proto.float_val[0]

    assert shown("eval/docs/nll/raw") == pytest.approx(raw[0].values["nll"])
    assert shown("eval/docs/nll/averaged") == shown("eval/docs/nll") == 2.0
