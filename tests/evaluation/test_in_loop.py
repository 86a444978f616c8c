"""Evaluation inside training: the saved checkpoint's numbers, and a training that never notices."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import evaluation_ranks as ranks
import in_loop_run
import numpy as np
import pytest
from evaluation_ranks import Place, run_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.megatron]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[:20]))
    prompts = [{"prompt": text[:8], "answer": "e"} for text in texts[:4]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    (folder / "suite.yaml").write_text(
        """
        tokenizer: {kind: bytes}
        tasks:
          - {name: docs, kind: perplexity, data: docs.jsonl}
          - {name: gen, kind: greedy, data: prompts.jsonl, match: contains, max_new_tokens: 6}
        """
    )
    return folder / "suite.yaml"


@pytest.fixture(scope="module")
def training(checkpoints: Path, suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training of `checkpoints` over again, with evaluations in it."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name in ("text.bin", "text.idx"):
        shutil.copy(checkpoints.parent / name, folder)
    run = partial(in_loop_run.train_and_evaluate, flags=ranks.flags(folder), suite=suite, out=folder)
    run_on_ranks(run, 2)
    return folder


LAYOUTS = {
    "CP2": ["--context-parallel-size", "2"],
    "PP2 with two virtual stages": [
        *("--pipeline-model-parallel-size", "2", "--num-layers", "4"),
        *("--num-layers-per-virtual-pipeline-stage", "1", "--micro-batch-size", "4"),
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_only_training_has(checkpoints: Path, suite: Path, tmp_path: Path, layout: str) -> None:
    """The live model, spread as training has it, against its checkpoint on one rank."""
    for name in ("text.bin", "text.idx"):
        shutil.copy(checkpoints.parent / name, tmp_path)
    more = [*LAYOUTS[layout], "--train-iters", "6"]
    flags = ranks.flags(tmp_path, *more, tp=1, experts=False)
    run_on_ranks(partial(in_loop_run.train_and_evaluate, flags=flags, suite=suite, out=tmp_path), 2)
    live = json.loads((tmp_path / "rank1.json").read_text())["6"]
    place = Place(tmp_path / "checkpoint", iteration=6)
    saved = run_on_ranks(partial(ranks.run_tasks, place=place, suite=suite, out=tmp_path / "out"), 1)[0]
    expected = {f"eval/{r.task}/{name}": value for r in saved for name, value in r.values.items()}
    assert live["values"] == pytest.approx(expected, abs=1e-6, rel=1e-6)
    assert all(live["same"].values())


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_of_training_is_changed_or_kept(training: Path, rank: int) -> None:
    found = json.loads((training / f"rank{rank}.json").read_text())
    assert sorted(map(int, found)) == sorted(in_loop_run.EVALUATED)
    for step in found.values():
        assert all(step["same"].values()), step["same"]
        assert step["added"] == 2 * step["cached"]  # each entry is a view and what it views
    assert [found[str(step)]["cached"] for step in in_loop_run.EVALUATED][1] == 0


def test_training_ends_with_the_same_weights(checkpoints: Path, training: Path) -> None:
    plain, evaluated = (
        run_on_ranks(partial(ranks.read_weights, folder=folder / "iter_0000024"), 1)[0]
        for folder in (checkpoints, training / "checkpoint")
    )
    assert plain.keys() == evaluated.keys()
    assert all(np.array_equal(plain[name], evaluated[name]) for name in plain)


def test_the_values_are_those_of_the_saved_checkpoint(
    checkpoints: Path, training: Path, suite: Path, tmp_path: Path
) -> None:
    live = json.loads((training / "rank0.json").read_text())["12"]["values"]
    run = partial(ranks.run_tasks, place=Place(checkpoints, iteration=12), suite=suite, out=tmp_path)
    saved = run_on_ranks(run, 1)[0]
    expected = {f"eval/{r.task}/{name}": value for r in saved for name, value in r.values.items()}
    assert live == pytest.approx(expected, abs=1e-6, rel=1e-6)
    assert live == json.loads((training / "rank1.json").read_text())["12"]["values"]
