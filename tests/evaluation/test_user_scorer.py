"""The user's scorer: a process of its own, with limits, whose failure is a counted 0."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from megatron_probes.evaluation.documents import Item
from megatron_probes.evaluation.user_scorer import UserScorer, Verdict

SOURCE = """
import os, subprocess, sys, time

def right(item, text):
    print("noise on the output")
    return text == item["answer"]

def half(item, text):
    return 0.5

def raises(item, text):
    raise KeyError("absent")

def endless(item, text):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", item["mark"]])
    while True:
        pass

def hungry(item, text):
    return len(bytearray(1 << 30)) > 0

def too_much(item, text):
    return 2.0

def undefined(item, text):
    return float("nan")

def ends(item, text):
    os._exit(3)

def runs_generated(item, text):
    scope = {}
    exec(text, scope)
    return scope["double"](21) == 42

def environment(item, text):
    return os.environ.get("SECRET") is None
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scorer") / "scorer.py"
    path.write_text(SOURCE)
    return path


def verdicts(
    file: Path, function: str, *texts: str, fields: dict | None = None, **limits: float
) -> list[Verdict]:
    scorer = UserScorer(f"{file}:{function}", allowed=True, **limits)  # type: ignore[arg-type]
    return scorer.scores([(Item(1, fields or {"answer": "yes"}), text) for text in texts])


def test_scores(file: Path) -> None:
    assert verdicts(file, "right", "yes", "no") == [Verdict(1.0), Verdict(0.0)]
    assert verdicts(file, "half", "x") == [Verdict(0.5)]


def test_generated_code_runs_where_it_can_do_no_harm_to_the_run(file: Path) -> None:
    good, wrong, broken = verdicts(
        file, "runs_generated", "def double(x): return 2 * x", "def double(x): return x", "def double(x"
    )
    assert (good.score, wrong.score, broken.score) == (1.0, 0.0, 0.0)
    assert wrong.problem is None
    assert "SyntaxError" in str(broken.problem) or "never closed" in str(broken.problem)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("raises", "KeyError"),
        ("absent", "KeyError"),
        ("too_much", "from 0 to 1"),
        ("undefined", "from 0 to 1"),
        ("ends", "exit status 3"),
    ],
)
def test_failures_score_zero_and_are_named(file: Path, function: str, problem: str) -> None:
    (verdict,) = verdicts(file, function, "x")
    assert verdict.score == 0.0
    assert problem in str(verdict.problem)


def test_memory_is_limited(file: Path) -> None:
    (verdict,) = verdicts(file, "hungry", "x", memory_limit_mb=256)
    assert "MemoryError" in str(verdict.problem)


def test_time_is_limited_and_what_it_started_is_stopped(file: Path) -> None:
    mark = f"mark-{time.time_ns()}"
    began = time.monotonic()
    (verdict,) = verdicts(file, "endless", "x", fields={"mark": mark}, time_limit_s=1.0)
    assert "longer than 1 s" in str(verdict.problem)
    assert time.monotonic() - began < 20
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(mark in " ".join(_command(p)) for p in psutil.process_iter()):
        time.sleep(0.1)
    assert not any(mark in " ".join(_command(p)) for p in psutil.process_iter())


def test_it_sees_nothing_of_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "value")
    assert verdicts(file, "environment", "x") == [Verdict(1.0)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
