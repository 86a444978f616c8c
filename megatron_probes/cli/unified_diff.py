"""Unified diffs: parsing them, and applying them to bytes without tolerance for changed context.

``git apply`` and ``patch`` may be missing where a wheel is installed, and ``patch`` accepts context that
differs. Here every line of a hunk must be in the file, once, as the diff has it; only its line number may
differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_HUNK_HEADER = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class HunkMismatch(Exception):
    """The file doesn't hold a hunk's lines once: ``line`` (from 1) is where, ``reason`` how it differs."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines, each with its line ending, before and after."""

    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """The hunks of one file, in its order; ``path`` is relative to the root of the tree."""

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        """The diff that takes this one back."""
        return replace(self, hunks=tuple(Hunk(hunk.new, hunk.old) for hunk in self.hunks))

    def apply(self, text: bytes) -> bytes:
        """Return ``text`` with every hunk applied. Raises ``HunkMismatch`` when one doesn't fit."""
        lines = text.splitlines(keepends=True)
        done: list[bytes] = []
        for hunk in self.hunks:
            at = _only_place(lines, hunk.old, after=len(done))
            done += lines[:at]
            done += hunk.new
            lines = lines[at + len(hunk.old) :]
        return b"".join(done + lines)

    def fits(self, text: bytes) -> bool:
        """Whether ``apply`` would succeed; when the reversed diff fits, this one is applied already."""
        try:
            self.apply(text)
        except HunkMismatch:
            return False
        return True


def parse_diff(text: bytes) -> tuple[str, tuple[FileDiff, ...]]:
    """Return the text that stands before the first file, and the diff of each file.

    Only edits of existing files are understood, with paths that begin with ``a/`` and ``b/``.
    """
    lines = text.splitlines(keepends=True)
    files: list[FileDiff] = []
    preamble: list[bytes] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"+++ b/"):
            files.append(FileDiff(line[len(b"+++ b/") :].split(b"\t")[0].strip().decode(), ()))
        elif header := _HUNK_HEADER.match(line):
            counts = [int(count or b"1") for count in header.groups()]
            hunk, at = _parse_hunk(lines, at + 1, *counts)
            files[-1] = replace(files[-1], hunks=(*files[-1].hunks, hunk))
            continue
        elif not files and not line.startswith(b"--- a/"):
            preamble.append(line)
        at += 1
    return b"".join(preamble).decode(), tuple(files)


def _parse_hunk(lines: Sequence[bytes], at: int, old_count: int, new_count: int) -> tuple[Hunk, int]:
    """The hunk whose body begins at ``at``, and where it ends."""
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        kind, content = lines[at][:1], lines[at][1:]
        if kind in b" -":
            old.append(content)
        if kind in b" +":
            new.append(content)
        at += 1
    return Hunk(tuple(old), tuple(new)), at


def _only_place(lines: Sequence[bytes], block: Sequence[bytes], after: int) -> int:
    """The index at which ``block`` stands in ``lines``; ``after`` lines of the file come before these."""
    wanted = list(block)
    places = [at for at in range(len(lines)) if lines[at : at + len(wanted)] == wanted]
    if len(places) == 1:
        return places[0]
    if places:
        first, second = (after + at + 1 for at in places[:2])
        raise HunkMismatch(first, f"the lines that are to change stand here and on line {second}")
    nearest = max(
        range(len(lines) + 1), key=lambda at: sum(a == b for a, b in zip(wanted, lines[at:], strict=False))
    )
    here = [*lines[nearest : nearest + len(wanted)], b""]
    same = next(index for index, found in enumerate(here) if found != wanted[index])
    raise HunkMismatch(
        after + nearest + same + 1, f"{_show(here[same])} where {_show(wanted[same])} should be"
    )


def _show(line: bytes) -> str:
    return repr(line.rstrip(b"\n").decode(errors="replace")) if line else "the end of the file"
