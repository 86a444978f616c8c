"""A trained checkpoint in every layout: the same numbers, the same tokens."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import evaluation_ranks as ranks
import float64_gpt
import numpy as np
import pytest
from evaluation_ranks import Place, run_on_ranks

from megatron_probes.evaluation import Row, TaskResult

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

LAYOUTS = {
    "one rank": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "DP2 EP2": {"dp": 2, "ep": 2},
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    docs = [*texts, "import sys\nimport os\n" * 12]  # the last one is longer than the context
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in docs))
    questions = [
        {"prompt": text[:20], "choices": [text[20:26] or "x", "日本", "self", "s"], "answer": 0}
        for text in texts[:24]
    ]
    (folder / "mc.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    prompts = [{"prompt": text[:n], "answer": "e"} for n, text in zip(range(4, 16), texts, strict=False)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    (folder / "suite.yaml").write_text(
        """
        tokenizer: {kind: bytes}
        tasks:
          - {name: docs, kind: perplexity, data: docs.jsonl}
          - {name: mc, kind: multiple_choice, data: mc.jsonl}
          - {name: gen, kind: greedy, data: prompts.jsonl, match: contains, max_new_tokens: 16}
        """
    )
    return folder / "suite.yaml"


@pytest.fixture(scope="module")
def found(checkpoints: Path, suite: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Series folder by layout."""
    folders = {}
    for name, sizes in LAYOUTS.items():
        place = Place(checkpoints, **sizes)
        out = tmp_path_factory.mktemp("out")
        run_on_ranks(partial(ranks.run_tasks, place=place, suite=suite, out=out), place.ranks)
        folders[name] = out / "series_001" / "results" / "iter_0000024" / "raw"
    return folders


@pytest.fixture(scope="module")
def weights(checkpoints: Path) -> dict[str, np.ndarray]:
    return run_on_ranks(partial(ranks.read_weights, folder=checkpoints / "iter_0000024"), 1)[0]


def result(folder: Path, task: str) -> TaskResult:
    return TaskResult.from_json(json.loads((folder / f"{task}.json").read_text()))


def items(folder: Path, task: str) -> list[dict]:
    lines = (folder / f"{task}.items.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
@pytest.mark.parametrize("task", ["docs", "mc", "gen"])
def test_every_layout_gives_the_same_values(found: dict[str, Path], layout: str, task: str) -> None:
    alone, spread = (result(found[name], task) for name in ("one rank", layout))
    assert spread.counts == alone.counts
    assert spread.values == pytest.approx(dict(alone.values), abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
def test_greedy_tokens_are_identical(found: dict[str, Path], layout: str) -> None:
    alone, spread = ([item["ids"] for item in items(found[name], "gen")] for name in ("one rank", layout))
    assert spread == alone
    assert sum(map(len, alone)) > 100


def test_greedy_tokens_come_from_every_prefix(
    found: dict[str, Path], weights: dict[str, np.ndarray], texts: list[str]
) -> None:
    generated = items(found["TP2 PP2"], "gen")
    for item, n, text in zip(generated, range(4, 16), texts, strict=False):
        prefix = [ranks.END_OF_DOCUMENT, *text[:n].encode()]
        for token in item["ids"]:
            last_V = float64_gpt.logits(weights, prefix)[-1, : ranks.VOCAB_SIZE]
            assert token == last_V.argmax()
            prefix.append(token)


def test_documents_match_a_float64_scorer(
    found: dict[str, Path], weights: dict[str, np.ndarray], texts: list[str]
) -> None:
    scored = items(found["TP2 PP2"], "docs")[: len(texts)]
    nll = with_bytes = num_bytes = targets = 0.0
    for item, text in zip(scored, texts, strict=True):
        ids = [ranks.END_OF_DOCUMENT, *text.encode(), ranks.END_OF_DOCUMENT]
        expected = float64_gpt.nll(weights, ids)
        assert item["nll"] == pytest.approx(sum(expected), rel=2e-6)
        nll, targets = nll + sum(expected), targets + len(expected)
        with_bytes, num_bytes = with_bytes + sum(expected[:-1]), num_bytes + len(text.encode())
    ours = math.fsum(item["nll"] for item in scored) / targets
    assert ours == pytest.approx(nll / targets, abs=1e-6)
    bits = math.fsum(item["nll_with_bytes"] for item in scored) / (num_bytes * math.log(2))
    assert bits == pytest.approx(with_bytes / (num_bytes * math.log(2)), abs=1e-6)
    assert any(len(text) < len(text.encode()) for text in texts)


def test_a_long_document_is_scored_in_windows(found: dict[str, Path], weights: dict[str, np.ndarray]) -> None:
    item = items(found["PP2"], "docs")[-1]
    ids = [ranks.END_OF_DOCUMENT, *("import sys\nimport os\n" * 12).encode(), ranks.END_OF_DOCUMENT]
    window, stride = ranks.SEQ_LENGTH + 1, (ranks.SEQ_LENGTH + 1) // 2
    expected, scored, begin = [], 1, 0
    while scored < len(ids):
        end = min(begin + window, len(ids))
        expected += float64_gpt.nll(weights, ids[begin:end])[scored - begin - 1 :]
        scored, begin = end, begin + stride
    assert len(expected) == item["targets"] == len(ids) - 1
    assert item["nll"] == pytest.approx(sum(expected), rel=2e-6)


@pytest.mark.parametrize("other", [{"rows": 1}, {"rows": 7}, {"padding_side": "left"}, {"reversed": True}])
def test_batching_padding_and_order_change_nothing(
    checkpoints: Path, texts: list[str], other: dict[str, object]
) -> None:
    rows = [Row((ranks.END_OF_DOCUMENT, *text.encode()), 1) for text in texts[:40]]
    reverse = bool(other.pop("reversed", False))
    plain = run_on_ranks(partial(ranks.score_rows, place=Place(checkpoints), rows=rows), 1)[0]
    asked = rows[::-1] if reverse else rows
    changed = run_on_ranks(partial(ranks.score_rows, place=Place(checkpoints, **other), rows=asked), 1)[0]
    for a, b in zip(plain, changed[::-1] if reverse else changed, strict=True):
        assert np.abs(a.nll_N - b.nll_N).mean() < 1e-6
        assert (a.greedy_N == b.greedy_N).all()
