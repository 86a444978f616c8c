"""What tests of several folders share."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "scripts" / "demo.py"


@dataclass(frozen=True)
class DemoRun:
    """A finished run of the demo."""

    folder: Path
    steps: int
    anomaly_step: int
    output: str


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """The demo, shorter than a person's but long enough for its anomaly to be scored on a stable stretch.

    Its folder already holds an older run, which it must replace.
    """
    folder = tmp_path_factory.mktemp("demo") / "run"
    (folder / "records").mkdir(parents=True)
    (folder / ".megatron_probes_demo").touch()
    (folder / "records" / "record-00000.jsonl").write_text('{"attempt": 7}\n')
    command = [sys.executable, DEMO, "--steps", "200", "--out", folder]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=540)
    assert run.returncode == 0, run.stdout
    return DemoRun(folder, steps=200, anomaly_step=180, output=run.stdout)
