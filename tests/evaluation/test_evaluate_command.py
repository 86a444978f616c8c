"""The command as a user runs it, and what batching by length gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from megatron_probes.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]
SUITE = """
tokenizer: {kind: bytes}
averaging: {method: ema}
tasks:
  - {name: docs, kind: perplexity, data: docs.jsonl}
  - {name: samples, kind: pass_at_k, data: prompts.jsonl, scorer: "s.py:right", samples: 3, max_new_tokens: 4}
"""


def command(*args: object) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, args)], catch_exceptions=False)


@pytest.fixture
def suite(tmp_path: Path, texts: list[str]) -> Path:
    lines = [json.dumps({"text": text}) for text in texts[:10]]
    (tmp_path / "docs.jsonl").write_text("\n".join([*lines, '{"text": "cut']))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def "}\n')
    (tmp_path / "s.py").write_text("def right(item, text):\n    return 'e' in text\n")
    (tmp_path / "suite.yaml").write_text(SUITE)
    return tmp_path / "suite.yaml"


def test_a_series_of_checkpoints(checkpoints: Path, suite: Path) -> None:
    out = suite.parent / "out"
    asked = ("--checkpoint", checkpoints, "--suite", suite, "--out", out, "--device", "cpu")
    first = command(*asked, "--iteration", "all", "--run-scorers", "--tp", 2)
    assert first.exit_code == 0, first.stderr
    for text in ("step 12", "step 24", "averaged", "bpb", "pass_at_k", "tensorboard --logdir"):
        assert text in first.stdout
    assert "left out: docs, line 11: not valid JSON" in first.stderr
    results = sorted((out / "series_001" / "results").rglob("*.json"))
    assert len(results) == 8
    written = {path: path.stat().st_mtime_ns for path in results}

    again = command(*asked, "--iteration", "all", "--run-scorers")
    assert again.exit_code == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in results} == written

    (suite.parent / "prompts.jsonl").write_text('{"prompt": "class "}\n')
    refused = command(*asked, "--run-scorers")
    assert refused.exit_code == 2
    assert "task samples: not the same as in" in refused.stderr
    assert "--new-series" in refused.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--iteration", "7", "--run-scorers"), "--iteration 7:"),
        (("--iteration", "x"), "--iteration x: must be a number"),
        (("--device", "tpu"), "--device tpu: must be auto, cuda or cpu"),
        (("--tp", "3", "--run-scorers"), "--tp 3: the model's 4 attention heads can't be split so"),
        ((), "give --run-scorers"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    checkpoints: Path, suite: Path, options: tuple[str, ...], expected: str
) -> None:
    out = suite.parent / "out"
    device = () if "--device" in options else ("--device", "cpu")
    done = command("--checkpoint", checkpoints, "--suite", suite, "--out", out, *device, *options)
    assert done.exit_code == 2
    assert expected in done.stderr
