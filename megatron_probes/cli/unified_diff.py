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
        result: list[bytes] = []
        begin = 0
        for hunk in self.hunks:
            at = _only_place(lines, hunk.old, begin)
            result += [*lines[begin:at], *hunk.new]
            begin = at + len(hunk.old)
        return b"".join(result + lines[begin:])

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


def _only_place(lines: list[bytes], block: tuple[bytes, ...], begin: int) -> int:
    """The index from ``begin`` on at which ``block`` stands in ``lines``."""
    wanted = list(block)
    last = len(lines) - len(wanted)
    places = [at for at in range(begin, last + 1) if lines[at : at + len(wanted)] == wanted]
    if len(places) == 1:
        return places[0]
    if places:
        raise HunkMismatch(places[0] + 1, f"the lines to change stand here and on line {places[1] + 1}")
    at, missing = _where_they_part(lines, wanted, begin)
    found = _show(lines[at]) if at < len(lines) else "the end of the file"
    raise HunkMismatch(at + 1, f"{found} where {_show(wanted[missing])} should be")


def _where_they_part(lines: list[bytes], block: list[bytes], begin: int) -> tuple[int, int]:
    """The indices in ``lines`` and ``block`` next to the longest beginning or end of ``block`` found."""
    ends = range(begin, len(lines) + 1)
    head, at = max((_in_common(block, lines[at : at + len(block)]), at) for at in ends)
    tail, to = max((_in_common(block[::-1], lines[max(0, to - len(block)) : to][::-1]), to) for to in ends)
    if head >= tail:
        return at + head, head
    return max(0, to - tail - 1), len(block) - tail - 1


def _in_common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many lines are the same from the first on."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _show(line: bytes) -> str:
    return repr(line.rstrip(b"\n").decode(errors="replace"))
