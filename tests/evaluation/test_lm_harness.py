"""Our numbers and lm-evaluation-harness's on the same model and items."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import evaluation_ranks as ranks
import harness_tasks
import pytest
from evaluation_ranks import Place, run_on_ranks

from megatron_probes.evaluation import TaskResult

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.megatron]

SUITE = """
tokenizer: {kind: bytes}
tasks:
  - {name: docs, kind: perplexity, data: documents.jsonl, score_end: false}
  - {name: mc, kind: multiple_choice, data: questions.jsonl, prefix: none}
  - {name: gen, kind: greedy, data: generation.jsonl, prefix: none, stop: "\\n", max_new_tokens: 8}
  - {name: harness, kind: lm_eval, tasks: [held_out_questions], include_path: .}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    # Texts that start at a word: the harness strips the ends of documents' templates of white space.
    harness_tasks.write_harness_tasks(folder, [text.strip() for text in texts[:48]], [" e"] * 12)
    (folder / "suite.yaml").write_text(SUITE)
    return folder


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def ours(checkpoints: Path, folder: Path, environment: None) -> dict[str, TaskResult]:
    run = partial(ranks.run_tasks, place=Place(checkpoints), suite=folder / "suite.yaml", out=folder / "out")
    return {result.task: result for result in run_on_ranks(run, 1)[0]}


@pytest.fixture(scope="module", params=[{}, {"pp": 2}], ids=["one rank", "PP2"])
def theirs(
    request: pytest.FixtureRequest, checkpoints: Path, folder: Path, environment: None
) -> dict[str, float]:
    place = Place(checkpoints, **request.param)
    found = run_on_ranks(partial(harness_tasks.run_harness_tasks, place=place, folder=folder), place.ranks)
    assert all(rank == found[0] for rank in found)
    return found[0]


def test_bits_per_byte_and_perplexities(ours: dict[str, TaskResult], theirs: dict[str, float]) -> None:
    docs = ours["docs"]
    bpb = docs.values["bpb"]
    assert bpb is not None
    assert bpb == pytest.approx(theirs["held_out_documents/bits_per_byte"], abs=1e-6)
    assert 2.0**bpb == pytest.approx(theirs["held_out_documents/byte_perplexity"], rel=1e-6)
    # A token is a byte here, and no target is without bytes: both perplexities are of the same unit.
    assert docs.values["ppl"] == pytest.approx(theirs["held_out_documents/byte_perplexity"], rel=1e-6)
    assert docs.values["nll"] == pytest.approx(bpb * math.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "harness"),
    [("accuracy_raw", "acc"), ("accuracy_character", "acc_norm"), ("accuracy", "acc_bytes")],
)
def test_accuracies(ours: dict[str, TaskResult], theirs: dict[str, float], name: str, harness: str) -> None:
    assert ours["mc"].values[name] == pytest.approx(theirs[f"held_out_questions/{harness}"], abs=1e-6)
    assert ours["mc"].counts["ties_byte"] == 0


def test_units_decide_differently(ours: dict[str, TaskResult], folder: Path) -> None:
    """Else the comparison would prove nothing of the units."""
    lines = (folder / "out/series_001/results/iter_0000024/raw/mc.items.jsonl").read_text().splitlines()
    chosen = []
    for item in map(json.loads, lines[1:]):
        lengths = [(1, len(text), len(text.encode())) for text in item["choices"]]
        per_unit = [
            [nll / length[unit] for nll, length in zip(item["nll"], lengths, strict=True)]
            for unit in range(3)
        ]
        chosen.append([nll.index(min(nll)) for nll in per_unit])
    assert any(raw != byte for raw, _, byte in chosen)
    assert any(character != byte for _, character, byte in chosen)


def test_greedy(ours: dict[str, TaskResult], theirs: dict[str, float]) -> None:
    assert ours["gen"].values["greedy"] == theirs["held_out_generation/exact_match"]


def test_harness_as_a_task_of_a_suite(ours: dict[str, TaskResult], theirs: dict[str, float]) -> None:
    values = {f"held_out_questions/{name}" for name in ("acc", "acc_norm", "acc_bytes")}
    assert {name: ours["harness"].values[name] for name in values} == {name: theirs[name] for name in values}
