from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megatron_probes.cli import app, megatron_patches
from megatron_probes.cli.megatron_patches import known_patches

ARGUMENTS, TRAINING = "megatron/training/arguments.py", "megatron/training/training.py"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["patch", *map(str, arguments)])


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def line_of(path: Path, text: str) -> int:
    return path.read_text().splitlines().index(text) + 1


def assert_refused(result: Result, tree: Path, before: dict[str, bytes]) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert content(tree) == before


def test_apply_and_reverse(tree: Path) -> None:
    before = content(tree)
    applied = run(tree)
    assert applied.exit_code == 0, applied.output
    assert "now patched" in applied.stdout
    assert "core_v0.19.0.diff" in applied.stdout
    after = content(tree)
    assert {name for name in before if before[name] != after[name]} == {ARGUMENTS, TRAINING}
    assert b"add_probe_arguments(parser)" in after[ARGUMENTS]
    assert b"attach_probes(model, optimizer, args)" in after[TRAINING]
    taken_back = run(tree, "--reverse")
    assert taken_back.exit_code == 0
    assert "now unpatched" in taken_back.stdout
    assert content(tree) == before


def test_what_is_done_already_is_said_and_left_alone(tree: Path) -> None:
    before = content(tree)
    assert "already unpatched" in run(tree, "--reverse").stdout
    assert content(tree) == before
    run(tree)
    patched = content(tree)
    again = run(tree)
    assert again.exit_code == 0
    assert "already patched" in again.stdout
    assert content(tree) == patched


def test_check_changes_nothing(tree: Path) -> None:
    before = content(tree)
    assert "would be patched" in run(tree, "--check").stdout
    assert content(tree) == before
    run(tree)
    patched = content(tree)
    assert "already patched" in run(tree, "--check").stdout
    assert "would be unpatched" in run(tree, "--check", "--reverse").stdout
    assert content(tree) == patched


@pytest.mark.parametrize("given", ["{tree}", "{tree}/megatron", ".", "megatron", "megatron/../megatron/"])
def test_checkout_and_megatron_folder_are_found(
    tree: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tree)
    assert "now patched" in run(given.format(tree=tree)).stdout


def test_inside_the_megatron_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "megatron")
    assert "now patched" in run(".").stdout


def test_a_checkout_that_is_called_megatron(tree: Path) -> None:
    checkout = tree.rename(tree.with_name("megatron"))
    assert "now patched" in run(checkout).stdout


def test_the_mode_of_the_files_is_kept(tree: Path) -> None:
    (tree / TRAINING).chmod(0o755)
    run(tree)
    assert (tree / TRAINING).stat().st_mode & 0o777 == 0o755


def test_an_unknown_version_is_refused_by_name(tree: Path) -> None:
    edit(tree / "megatron/core/package_info.py", "MINOR = 19", "MINOR = 21")
    edit(tree / "megatron/core/package_info.py", 'PRE_RELEASE = ""', 'PRE_RELEASE = "rc1"')
    before = content(tree)
    result = run(tree)
    assert_refused(result, tree, before)
    assert "no patch for Megatron 0.21.2rc1" in result.stderr
    for patch in known_patches():
        assert f"{', '.join(patch.serves)} ({patch.source})" in result.stderr
    assert "megatron_probes.launch" in result.stderr


@pytest.mark.parametrize("option", [(), ("--check",), ("--reverse",)])
def test_a_local_edit_in_the_way_is_refused_by_file_and_line(tree: Path, option: tuple[str, ...]) -> None:
    edit(tree / TRAINING, "    model_cfg = get_model_config(model[0])\n", "    model_cfg = mine(model[0])\n")
    before = content(tree)
    result = run(tree, *option)
    assert_refused(result, tree, before)
    line = line_of(tree / TRAINING, "    model_cfg = mine(model[0])")
    assert f"{tree / TRAINING}:{line}: '    model_cfg = mine(model[0])'" in result.stderr
    assert "Nothing was changed" in result.stderr


def test_a_local_edit_elsewhere_is_kept(tree: Path) -> None:
    mine = "# mine\n" * 5
    for name in (ARGUMENTS, TRAINING):
        (tree / name).write_text(mine + (tree / name).read_text())
    before = content(tree)
    assert run(tree).exit_code == 0
    assert content(tree)[TRAINING].startswith(mine.encode())
    assert run(tree, "--reverse").exit_code == 0
    assert content(tree) == before


def test_an_edit_of_the_patched_lines_is_not_taken_back(tree: Path) -> None:
    run(tree)
    edit(tree / ARGUMENTS, "parser = add_probe_arguments(parser)", "parser = add_probe_arguments(parser, 1)")
    before = content(tree)
    result = run(tree, "--reverse")
    assert_refused(result, tree, before)
    line = line_of(tree / ARGUMENTS, "        parser = add_probe_arguments(parser, 1)")
    assert f"{tree / ARGUMENTS}:{line}: " in result.stderr


@pytest.mark.parametrize("reverse", [False, True])
def test_a_half_patched_tree_is_completed_or_cleared(tree: Path, reverse: bool) -> None:
    """A machine that stops between the two replacements leaves one file patched."""
    unpatched = content(tree)
    run(tree)
    patched = content(tree)
    (tree / TRAINING).write_bytes(unpatched[TRAINING])
    result = run(tree, *(["--reverse"] if reverse else []))
    assert result.exit_code == 0
    assert content(tree) == (unpatched if reverse else patched)


def test_a_failed_write_leaves_the_tree_as_it_was(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(tree)
    replace_file, targets = os.replace, []

    def fail_at_second(source: Path, target: Path) -> None:
        targets.append(target)
        if len(targets) == 2:
            raise PermissionError(13, "Permission denied", str(target))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", fail_at_second)
    result = run(tree)
    assert_refused(result, tree, before)
    assert f"{tree / TRAINING}: Permission denied. Nothing was changed." in result.stderr


def test_a_missing_file_is_refused(tree: Path) -> None:
    (tree / TRAINING).unlink()
    before = content(tree)
    result = run(tree)
    assert_refused(result, tree, before)
    assert f"{tree / TRAINING}: no such file" in result.stderr


@pytest.mark.parametrize("reverse", [False, True])
def test_of_several_diffs_for_a_version_the_fitting_one_is_taken(
    tree: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    patches = [replace(patch, serves=("0.19.2",)) for patch in known_patches()]
    assert [patch.name for patch in patches][:2] == ["core_v0.17.1.diff", "core_v0.19.0.diff"]
    monkeypatch.setattr(megatron_patches, "known_patches", lambda: patches)
    before = content(tree)
    assert "core_v0.19.0.diff" in run(tree).stdout
    if reverse:
        assert "core_v0.19.0.diff" in run(tree, "--reverse").stdout
        assert content(tree) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: is not a folder"),
        (["{tmp}"], "{tmp}: holds no megatron/core/package_info.py"),
        ([], "Missing argument 'PATH_TO_MEGATRON'"),
        (["{tmp}", "--force"], "No such option"),
        (["{tmp}", "more"], "unexpected extra argument"),
    ],
)
def test_bad_usage_ends_with_a_clear_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert message.format(tmp=tmp_path) in re.sub(r"\s+", " ", result.stderr)
    assert "Traceback" not in result.output
