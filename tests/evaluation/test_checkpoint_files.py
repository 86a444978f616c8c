"""Checkpoints as files: averages, the legacy format, and files that must not be trusted."""

from __future__ import annotations

import json
import pickle
import shutil
from functools import partial
from pathlib import Path

import evaluation_ranks as ranks
import numpy as np
import pytest
from evaluation_ranks import Place, run_on_ranks

from megatron_probes.cpu.fork import RankError
from megatron_probes.evaluation import SuiteError, TaskResult
from megatron_probes.evaluation.megatron.checkpoint import find_checkpoints
from megatron_probes.evaluation.megatron.safe_pickle import check_index
from megatron_probes.evaluation.suite import Averaging

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

SUITE = """
tokenizer: {kind: bytes}
tasks: [{name: docs, kind: perplexity, data: docs.jsonl}]
"""


@pytest.fixture
def suite(tmp_path: Path, texts: list[str]) -> Path:
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[:20]))
    (tmp_path / "suite.yaml").write_text(SUITE)
    return tmp_path / "suite.yaml"


def evaluate(place: Place, suite: Path, out: str) -> dict[str, TaskResult]:
    run = partial(ranks.run_tasks, place=place, suite=suite, out=suite.parent / out)
    results = run_on_ranks(run, place.ranks)[0]
    return {result.weights: result for result in results}


@pytest.mark.parametrize("averaging", [Averaging(), Averaging(method="ema", decay=0.75)])
def test_averages_of_weights(checkpoints: Path, averaging: Averaging) -> None:
    old, new = (
        run_on_ranks(partial(ranks.read_weights, folder=checkpoints / f"iter_{step:07d}"), 1)[0]
        for step in ranks.STEPS
    )
    share = 0.5 if averaging.method == "uniform" else averaging.decay
    averaged = run_on_ranks(partial(ranks.average_weights, place=Place(checkpoints), averaging=averaging), 1)[
        0
    ]
    expected = (
        share * old["decoder.final_layernorm.weight"] + (1 - share) * new["decoder.final_layernorm.weight"]
    )
    assert averaged["0.decoder.final_layernorm.weight"] == pytest.approx(expected, abs=1e-7)
    name = "self_attention.linear_qkv.weight"
    expected = share * old[f"decoder.layers.{name}"][1] + (1 - share) * new[f"decoder.layers.{name}"][1]
    assert np.abs(averaged[f"0.decoder.layers.1.{name}"] - expected).max() < 1e-7
    assert np.abs(old[f"decoder.layers.{name}"] - new[f"decoder.layers.{name}"]).max() > 1e-3


def test_raw_and_averaged_weights_are_evaluated_as_a_pair(checkpoints: Path, suite: Path) -> None:
    suite.write_text(SUITE + "averaging: {method: uniform, last: 2}\ndecision_weights: averaged\n")
    alone = evaluate(Place(checkpoints), suite, "alone")
    spread = evaluate(Place(checkpoints, tp=2), suite, "spread")
    assert set(alone) == {"raw", "averaged"}
    for weights, result in alone.items():
        assert spread[weights].values == pytest.approx(dict(result.values), abs=1e-6, rel=1e-6)
    assert alone["raw"].values["nll"] != alone["averaged"].values["nll"]
    assert alone["raw"].checkpoint.digest != alone["averaged"].checkpoint.digest


@pytest.fixture(scope="module")
def legacy(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training, saved in the legacy format at step 12."""
    folder = tmp_path_factory.mktemp("legacy")
    for name in ("text.bin", "text.idx"):
        shutil.copy(checkpoints.parent / name, folder)
    flags = ranks.flags(folder, "--ckpt-format", "torch", "--train-iters", str(ranks.STEPS[0]))
    run_on_ranks(partial(ranks.train, flags=flags, logs=folder / "logs"), 2)
    return folder / "checkpoint"


def test_a_legacy_checkpoint_scores_the_same_in_its_own_layout(
    checkpoints: Path, legacy: Path, suite: Path
) -> None:
    step = ranks.STEPS[0]
    assert find_checkpoints(legacy, "latest")[0].format == "torch"
    new = evaluate(Place(checkpoints, iteration=step), suite, "new")["raw"]
    old = evaluate(Place(legacy, tp=2, ep=2, iteration=step), suite, "old")["raw"]
    assert old.values == pytest.approx(dict(new.values), abs=1e-6, rel=1e-6)
    assert old.checkpoint.tokens == new.checkpoint.tokens == step * 8 * ranks.SEQ_LENGTH


def test_a_legacy_checkpoint_in_another_layout_is_refused_with_the_way_out(legacy: Path, suite: Path) -> None:
    with pytest.raises(RankError, match="SuiteError") as error:
        evaluate(Place(legacy, iteration=ranks.STEPS[0]), suite, "refused")
    assert "give --tp 2 --pp 1 --ep 2, or convert it" in error.value.reason
    assert "--ckpt-convert-format torch_dist" in error.value.reason


def test_an_index_that_names_anything_else_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    check_index(checkpoints / "iter_0000024" / ".metadata")
    proof = tmp_path / "proof"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(ranks.Malicious(proof)))
    with pytest.raises(SuiteError, match="refused"):
        check_index(tmp_path / ".metadata")
    assert not proof.exists()


@pytest.mark.parametrize("kind", ["index", "object", "common.pt", "legacy"])
def test_a_checkpoint_that_would_run_code_is_refused(
    checkpoints: Path, legacy: Path, suite: Path, tmp_path: Path, kind: str
) -> None:
    proof = tmp_path / "proof"
    step = ranks.STEPS[0]
    copy = tmp_path / "copy" / f"iter_{step:07d}"
    shutil.copytree((legacy if kind == "legacy" else checkpoints) / copy.name, copy)
    run_on_ranks(partial(ranks.poison, folder=copy, kind=kind, proof=proof), 1)
    with pytest.raises(RankError, match="is refused"):
        evaluate(Place(copy.parent, iteration=step), suite, "poisoned")
    assert not proof.exists()


def test_which_checkpoints(checkpoints: Path, tmp_path: Path) -> None:
    steps = list(ranks.STEPS)
    assert [c.iteration for c in find_checkpoints(checkpoints, "all")] == steps
    assert [c.iteration for c in find_checkpoints(checkpoints, "latest")] == steps[-1:]
    assert [c.iteration for c in find_checkpoints(checkpoints / "iter_0000012", "latest")] == [12]
    with pytest.raises(SuiteError, match=r"--iteration 13: .* holds 12, 24"):
        find_checkpoints(checkpoints, [13])
    for folder, expected in ((tmp_path, "holds no iter_"), (tmp_path / "absent", "no such folder")):
        with pytest.raises(SuiteError, match=expected):
            find_checkpoints(folder, "latest")
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(SuiteError, match="holds neither"):
        _ = find_checkpoints(tmp_path, "all")[0].format


def test_the_digest_follows_the_content(checkpoints: Path, tmp_path: Path) -> None:
    first, second = find_checkpoints(checkpoints, "all")
    assert first.digest != second.digest
    copy = tmp_path / first.folder.name
    shutil.copytree(first.folder, copy)
    assert find_checkpoints(copy, "latest")[0].digest == first.digest
    (copy / "megatron_probes").mkdir()
    (copy / "megatron_probes" / "state.json").write_text('{"probes": {"loss": {"tokens_total": 77}}}')
    moved = find_checkpoints(copy, "latest")[0]
    assert moved.digest == first.digest
    assert moved.tokens == 77
