from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_probes.cli.unified_diff import FileDiff, HunkMismatch, parse_diff

BEFORE = [f"line {number}\n" for number in range(1, 21)]
AFTER = [*BEFORE[:9], "added\n", *BEFORE[9:]]


def diff_of(before: list[str], after: list[str], path: str = "pkg/file.py") -> FileDiff:
    text = "".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}"))
    _, (diff,) = parse_diff(text.encode())
    return diff


def text_of(lines: list[str]) -> bytes:
    return "".join(lines).encode()


@given(st.lists(st.sampled_from(["keep", "drop", "replace", "insert"]), min_size=1, max_size=60))
def test_applies_what_difflib_wrote_and_takes_it_back(edits: list[str]) -> None:
    before = [f"line {number}\n" for number in range(len(edits))]
    after = []
    for line, edit in zip(before, edits, strict=True):
        if edit != "drop":
            after.append(f"not {line}" if edit == "replace" else line)
        if edit == "insert":
            after.append(f"after {line}")
    if before == after:
        return
    diff = diff_of(before, after)
    assert diff.path == "pkg/file.py"
    assert diff.apply(text_of(before)) == text_of(after)
    assert diff.reversed().apply(text_of(after)) == text_of(before)


def test_the_preamble_is_what_stands_before_the_first_file() -> None:
    files = [
        "".join(difflib.unified_diff(BEFORE, AFTER, f"a/{path}", f"b/{path}"))
        for path in ("one.py", "two.py")
    ]
    preamble, diffs = parse_diff(("Serves: 1.0\n\n" + "".join(files)).encode())
    assert preamble == "Serves: 1.0\n\n"
    assert [diff.path for diff in diffs] == ["one.py", "two.py"]
    assert [diff.apply(text_of(BEFORE)) for diff in diffs] == [text_of(AFTER)] * 2


def test_only_the_line_number_may_differ() -> None:
    shift = ["edited elsewhere\n"] * 7
    assert diff_of(BEFORE, AFTER).apply(text_of(shift + BEFORE)) == text_of(shift + AFTER)


def test_line_endings_and_bytes_that_are_no_text_are_kept() -> None:
    odd = b"\xff\r\n"
    assert diff_of(BEFORE, AFTER).apply(odd + text_of(BEFORE) + odd) == odd + text_of(AFTER) + odd


@pytest.mark.parametrize(
    ("edited", "line", "reason"),
    [
        ([*BEFORE[:10], "LINE 11\n", *BEFORE[11:]], 11, "'LINE 11' where 'line 11' should be"),
        ([*BEFORE[:8], "new\n", *BEFORE[8:]], 9, "'new' where 'line 8' should be"),
        ([*BEFORE[:9], "new\n", *BEFORE[9:]], 10, "'new' where 'line 10' should be"),
        ([*BEFORE[:11]], 12, "the end of the file where 'line 12' should be"),
        ([*BEFORE[:10], "line 11\r\n", *BEFORE[11:]], 11, r"'line 11\r' where 'line 11' should be"),
    ],
    ids=["changed", "inserted early", "inserted late", "cut off", "line ending"],
)
def test_a_differing_line_is_named(edited: list[str], line: int, reason: str) -> None:
    diff = diff_of(BEFORE, AFTER)
    assert not diff.fits(text_of(edited))
    with pytest.raises(HunkMismatch) as caught:
        diff.apply(text_of(edited))
    assert (caught.value.line, caught.value.reason) == (line, reason)


def test_the_line_is_counted_from_the_top_in_later_hunks_too() -> None:
    before = [f"line {number}\n" for number in range(1, 41)]
    diff = diff_of(before, [*before[:5], "first\n", *before[5:30], "second\n", *before[30:]])
    assert len(diff.hunks) == 2
    with pytest.raises(HunkMismatch) as caught:
        diff.apply(text_of([*before[:29], "changed\n", *before[30:]]))
    assert caught.value.line == 30


def test_lines_that_stand_twice_are_refused() -> None:
    with pytest.raises(HunkMismatch, match="stand here and on line 27") as caught:
        diff_of(BEFORE, AFTER).apply(text_of(BEFORE + BEFORE))
    assert caught.value.line == 7
