"""Documents: windows, bytes, and what a mean is of (cases PC14 and PC41)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from reference_scorers import GivenScorer, TableScorer, context

from megatron_probes.evaluation.documents import Item, ItemFault
from megatron_probes.evaluation.suite import PerplexityTask
from megatron_probes.evaluation.tasks.perplexity import Perplexity


def spec(**changes: object) -> PerplexityTask:
    return PerplexityTask.model_validate(
        {"name": "docs", "kind": "perplexity", "data": Path("unused"), **changes}
    )


def item(text: str, line: int = 1, **fields: object) -> Item:
    return Item(line, {"text": text, **fields})


def test_pc14_each_token_but_the_first_is_scored_once() -> None:
    scorer = GivenScorer(lambda row, j: float(row.ids[j]), context_length=3)  # windows of 4 tokens
    task = Perplexity(spec(prefix="none", score_end=False, stride=2), context(scorer))
    (outcome,) = task.score([task.prepare(item("".join(map(chr, range(10)))))])
    summary = task.summarize([outcome])
    assert outcome["targets"] == 9
    assert summary.values["nll"] == 5.0
    assert summary.values["ppl"] == pytest.approx(148.4131591)


def test_pc14_documents_together_score_as_alone() -> None:
    task = Perplexity(spec(), context(TableScorer()))
    documents = [task.prepare(item(text, line)) for line, text in enumerate(("abc", "defgh"))]
    together = task.score(documents)
    alone = [outcome for document in documents for outcome in task.score([document])]
    assert together == alone


def test_pc41_sums_are_divided_once() -> None:
    task = Perplexity(spec(), context(TableScorer()))

    def outcomes(*parts: tuple[float, int]) -> list[dict]:
        return [{"nll": n, "targets": t, "nll_with_bytes": n, "bytes": t} for n, t in parts]

    assert task.summarize(outcomes((3, 1), (96, 12), (0, 0))).values["nll"] == pytest.approx(7.6153846)
    assert task.summarize(outcomes((math.log(16), 1), (0, 3))).values["ppl"] == pytest.approx(2.0)
    assert task.summarize(outcomes((25, 1))).values["ppl"] == pytest.approx(7.2004899e10)
    assert task.summarize(outcomes((100, 1))).values["ppl"] == pytest.approx(2.6881171e43)
    above = task.summarize(outcomes((1000, 1)))
    assert above.values["ppl"] == math.inf
    assert above.counts["ppl_overflow"] == 1
    assert task.summarize([]).values == {"nll": None, "ppl": None, "bpb": None}


def test_bits_per_byte_leaves_out_targets_without_bytes() -> None:
    scorer = GivenScorer(lambda row, j: 100.0 if row.ids[j] == 256 else math.log(2))
    task = Perplexity(spec(), context(scorer))
    (outcome,) = task.score([task.prepare(item("日本"))])
    summary = task.summarize([outcome])
    assert summary.values["bpb"] == pytest.approx(1.0)
    assert summary.values["nll"] == pytest.approx((6 * math.log(2) + 100) / 7)
    assert (summary.counts["targets_without_bytes"], summary.counts["bytes"]) == (1, 6)


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
def test_windows_give_each_token_the_context_that_they_promise(stride: int) -> None:
    seen: list[tuple[int, int]] = []

    def note(row: object, j: int) -> float:
        seen.append((row.ids[j], j))  # type: ignore[attr-defined]
        return 1.0

    scorer = GivenScorer(note, context_length=8)
    task = Perplexity(spec(stride=stride, score_end=False), context(scorer))
    task.score([task.prepare(item("".join(map(chr, range(50)))))])
    assert sorted(token for token, _ in seen) == list(range(50))
    assert all(before >= min(token + 1, 9 - stride) for token, before in seen)


def test_a_context_is_given_and_not_scored() -> None:
    scorer = GivenScorer(lambda row, j: 1.0)
    task = Perplexity(spec(context="{question} "), context(scorer))
    document = task.prepare(item("answer", question="why?"))
    assert document.rows[0].ids == (256, *b"why? ", *b"answer", 256)
    assert document.rows[0].first_scored == 6


def test_a_stride_that_leaves_tokens_without_context_is_refused() -> None:
    with pytest.raises(ValueError, match="stride 9"):
        Perplexity(spec(stride=9), context(TableScorer(context_length=8)))


def test_an_empty_document_is_counted_apart() -> None:
    task = Perplexity(spec(), context(TableScorer()))
    with pytest.raises(ItemFault, match="empty") as fault:
        task.prepare(item(""))
    assert fault.value.kind == "empty_document"
    alone = Perplexity(spec(prefix="none", score_end=False), context(TableScorer()))
    with pytest.raises(ItemFault, match="no context"):
        alone.prepare(item("x"))


def test_the_order_of_documents_changes_nothing() -> None:
    task = Perplexity(spec(), context(TableScorer()))
    outcomes = task.score([task.prepare(item("é" * n + "x", n)) for n in range(1, 40)])
    assert task.summarize(outcomes).values == task.summarize(outcomes[::-1]).values
