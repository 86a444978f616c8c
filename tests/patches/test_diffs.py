from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from megatron_releases import RELEASES, REPOSITORY, copy_release
from typer.testing import CliRunner

from megatron_probes.cli import app
from megatron_probes.cli.megatron_patches import MegatronPatch, find_megatron, known_patches, plan_patch

PATCHES = {patch.name: patch for patch in known_patches()}
SERVED_BY = {"0.17.1": "core_v0.17.1.diff", "0.19.2": "core_v0.19.0.diff"}


def added_lines(patch: MegatronPatch) -> list[bytes]:
    lines = []
    for diff in patch.diffs:
        for hunk in diff.hunks:
            remaining = list(hunk.new)
            for line in hunk.old:
                remaining.remove(line)
            assert len(remaining) == len(hunk.new) - len(hunk.old), "the patches only add"
            lines += remaining
    return lines


def files_of(root: Path) -> dict[Path, bytes]:
    training = root / "megatron" / "training"
    return {path: path.read_bytes() for path in training.rglob("*") if path.is_file()}


def test_there_is_one_for_each_supported_version() -> None:
    assert list(PATCHES) == ["core_v0.17.1.diff", "core_v0.19.0.diff", "main-d98e8a64dd.diff"]
    assert [patch.serves for patch in PATCHES.values()] == [
        ("0.17.1",),
        ("0.19.0", "0.19.1", "0.19.2"),
        ("0.20.0",),
    ]


@pytest.mark.parametrize("name", PATCHES)
def test_each_is_tiny_and_touches_only_the_two_files(name: str) -> None:
    patch = PATCHES[name]
    files = [diff.path for diff in patch.diffs]
    assert files == ["megatron/training/arguments.py", "megatron/training/training.py"]
    assert [len(diff.hunks) for diff in patch.diffs] == [1, 1]
    assert len(added_lines(patch)) == 16
    assert re.fullmatch(r"NVIDIA/Megatron-LM, \S+, commit [0-9a-f]{40}", patch.source)


def test_all_add_the_same_lines() -> None:
    """So what runs with the releases is what the main branch gets."""
    first, *others = map(added_lines, PATCHES.values())
    assert others == [first, first]


@pytest.mark.parametrize("release", RELEASES)
def test_the_release_is_patched_and_restored(tmp_path: Path, release: str) -> None:
    root = copy_release(release, tmp_path)
    before = files_of(root)
    patch, contents = plan_patch(find_megatron(root), reverse=False)
    assert patch.name == SERVED_BY[release]
    assert set(contents) == {root / diff.path for diff in patch.diffs}
    for path, text in contents.items():
        compile(text, path, "exec")
    for arguments in ([], ["--reverse"]):
        result = CliRunner().invoke(app, ["patch", str(root), *arguments])
        assert result.exit_code == 0, result.output
    assert files_of(root) == before


@pytest.mark.parametrize("release", RELEASES)
def test_git_applies_the_same_change(tmp_path: Path, release: str) -> None:
    if shutil.which("git") is None:
        pytest.skip("git isn't installed")
    root = copy_release(release, tmp_path)
    patch, contents = plan_patch(find_megatron(root), reverse=False)
    file = REPOSITORY / "patches" / "megatron-lm" / patch.name
    # Outside of any repository of its own, `git apply` takes paths relative to the folder.
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "apply", "--whitespace=error-all", file], cwd=root, check=True)
    assert {path: path.read_bytes() for path in contents} == contents
