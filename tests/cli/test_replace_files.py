from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_probes.cli.replace_files import replace_files


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_bytes(b"old one")
    two.write_bytes(b"old two")
    return one, two


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_are_replaced_and_nothing_else_is_left(pair: tuple[Path, Path]) -> None:
    one, two = pair
    replace_files({one: b"new one", two: b"new two"})
    assert content(one.parent) == {"one.py": b"new one", "two.py": b"new two"}


def test_the_mode_is_kept(pair: tuple[Path, Path]) -> None:
    one, two = pair
    one.chmod(0o755)
    two.chmod(0o640)
    replace_files({one: b"new", two: b"new"})
    assert [path.stat().st_mode & 0o777 for path in pair] == [0o755, 0o640]


def test_another_name_of_the_same_file_keeps_its_content(pair: tuple[Path, Path], tmp_path: Path) -> None:
    cache = tmp_path / "installer cache"
    os.link(pair[0], cache)
    replace_files({pair[0]: b"new"})
    assert cache.read_bytes() == b"old one"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_failure_half_way_restores_what_was_replaced(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    one, two = pair
    replace, calls = os.replace, []

    def fail_at_second(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_at_second)
    with pytest.raises(type(error)):
        replace_files({one: b"new one", two: b"new two"})
    assert calls[:2] == [one, two]
    assert content(one.parent) == {"one.py": b"old one", "two.py": b"old two"}


def test_a_disk_without_room_for_the_second_file_changes_nothing(pair: tuple[Path, Path]) -> None:
    one, two = pair
    program = f"""
import resource
from pathlib import Path
from megatron_probes.cli.replace_files import replace_files
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
replace_files({{Path({str(one)!r}): b"x" * 500, Path({str(two)!r}): b"x" * 2000}})
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "File too large" in run.stderr
    assert content(one.parent) == {"one.py": b"old one", "two.py": b"old two"}
