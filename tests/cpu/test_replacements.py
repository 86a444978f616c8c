"""The list of what the runtime replaces is what it replaces, and nothing of it is loaded without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_probes.cpu.replacements import ADDITIONS, TABLE, owner_of

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


def python(*args: str) -> str:
    command = [sys.executable, "-W", "ignore", *args]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def listed() -> list[str]:
    return [f"{each.owner}.{each.name}" for each in TABLE]


@pytest.mark.megatron
@pytest.mark.slow
def test_the_list_is_what_install_changes() -> None:
    changed = json.loads(python(str(HERE / "name_changes.py")).splitlines()[-1])
    there = [each for each in TABLE if each.part == "megatron" or hasattr(owner_of(each), each.name)]
    assert changed["first"] == sorted(f"{each.owner}.{each.name}" for each in there)
    assert changed["second"] == []


def test_names_are_listed_once_and_have_a_reason() -> None:
    assert len(set(listed())) == len(TABLE)
    assert all(each.why for each in (*TABLE, *ADDITIONS))


def test_the_list_is_printed() -> None:
    lines = python("-m", "megatron_probes.cpu", "--list").splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        *listed(),
        *(f"added {each.name}" for each in ADDITIONS),
    ]


def test_importing_loads_and_replaces_nothing() -> None:
    assert python("-c", "import sys, megatron_probes.cpu; print('torch' in sys.modules)") == "False\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the path of a script is missing; for the list of replaced names give --list"),
        (["nowhere.py"], "no script at nowhere.py; give the path of a Python file"),
        (["--root", "nowhere", __file__], "--root nowhere: no megatron/core there; give a Megatron-LM"),
    ],
)
def test_mistakes_are_named(args: list[str], message: str) -> None:
    command = [sys.executable, "-m", "megatron_probes.cpu", *args]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert run.returncode != 0
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.megatron
@pytest.mark.slow
def test_a_script_runs_on_the_runtime_without_probes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, torch, neighbour\n"
        "ours = {name.split('.')[1] for name in sys.modules if name.startswith('megatron_probes.')}\n"
        "print(json.dumps([__name__, sys.argv[1:], torch.cuda.is_available(), sorted(ours)]))\n"
    )
    (tmp_path / "neighbour.py").write_text("")
    out = python("-m", "megatron_probes.cpu", str(script), "--flag", "value")
    assert json.loads(out.splitlines()[-1]) == ["__main__", ["--flag", "value"], True, ["cpu"]]
