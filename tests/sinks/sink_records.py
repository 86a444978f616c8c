"""Records, manifests and child processes for the tests of the sinks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from megatron_probes.catalog import CATALOG
from megatron_probes.sinks import Manifest, StepRecord

TOKENS_PER_STEP = 1024


def manifest(attempt: int = 0, start_step: int = 1) -> Manifest:
    return Manifest(
        run_id="run",
        started=1.7e9,
        attempt=attempt,
        start_step=start_step,
        tokens_at_start=(start_step - 1) * TOKENS_PER_STEP,
        config={"sample_every": 100, "sources": ["code", "text"]},
        config_fingerprint="0123abcd",
        layout={"tp": 2, "pp": 1, "dp": 2},
        versions={"torch": "2.0", "megatron-core": "0.19.2"},
        flop_convention="megatron/1",
        metrics=tuple(spec for spec in CATALOG if not spec.planned),
    )


def record(step: int, attempt: int = 0, /, **values: int | float) -> StepRecord:
    """A record whose tags are written with `__` for `/`; `loss/global` is the step unless given."""
    return StepRecord(
        step=step,
        attempt=attempt,
        time=1.7e9 + step,
        tokens=step * TOKENS_PER_STEP,
        values={"loss/global": float(step), **{name.replace("__", "/"): v for name, v in values.items()}},
        context={"context/learning_rate": 1e-3, "context/consumed_samples": 8 * step},
    )


def run_child(
    code: str, *arguments: str | Path, wrapper: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """Run code in a process of its own that can import the package and this file."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*wrapper, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
