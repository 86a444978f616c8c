"""Which Megatron lies in a folder, and which of the diffs in ``patches/megatron-lm`` serves it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import megatron_probes
from megatron_probes.cli.unified_diff import FileDiff, HunkMismatch, parse_diff

_WITHOUT_PATCH = (
    "Nothing was changed. Probes need no patch either: `python -m megatron_probes.launch SCRIPT ...` trains "
    "with an unedited Megatron."
)


class PatchError(Exception):
    """The tree can't be patched; the text says why and what helps."""


@dataclass(frozen=True)
class MegatronTree:
    """A Megatron-LM checkout or an installed megatron-core."""

    root: Path
    """The folder that holds ``megatron/``."""
    version: str


@dataclass(frozen=True)
class MegatronPatch:
    """One diff with what its header says."""

    name: str
    source: str
    """Where the diff was made: repository, tag or branch, commit."""
    serves: tuple[str, ...]
    """The versions of megatron-core whose trees it fits."""
    diffs: tuple[FileDiff, ...]


def find_megatron(path: Path) -> MegatronTree:
    """The Megatron at ``path``: a checkout, a site-packages folder, or the ``megatron`` folder in either.

    Raises ``PatchError`` when there is none.
    """
    path = path.absolute()
    for root in (path, path.parent) if path.name == "megatron" else (path,):
        info = root / "megatron" / "core" / "package_info.py"
        if info.is_file():
            return MegatronTree(root, _version(info.read_text(encoding="utf-8")))
    problem = "holds no megatron/core/package_info.py" if path.is_dir() else "is not a folder"
    raise PatchError(
        f"{path}: {problem}. Give a Megatron-LM checkout, a site-packages folder with megatron-core, or the "
        "megatron folder in either."
    )


def _version(package_info: str) -> str:
    """The version in the source text; run as code, a checkout's would add the commit."""
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)", package_info, re.MULTILINE))
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**parts)


def known_patches() -> list[MegatronPatch]:
    """All diffs for Megatron-LM, by name."""
    package = Path(megatron_probes.__file__).parent
    installed = package / "patches" / "megatron-lm"
    folder = installed if installed.is_dir() else package.parent / "patches" / "megatron-lm"  # a checkout
    return [_read(path) for path in sorted(folder.glob("*.diff"))]


def _read(path: Path) -> MegatronPatch:
    header, diffs = parse_diff(path.read_bytes())
    fields = dict(re.findall(r"^(Source|Serves): (.*)$", header, re.MULTILINE))
    return MegatronPatch(path.name, fields["Source"], tuple(fields["Serves"].split(", ")), diffs)


def plan_patch(tree: MegatronTree, *, reverse: bool) -> tuple[MegatronPatch, dict[Path, bytes]]:
    """The diff that fits ``tree``, and the new bytes of every file that it has yet to change.

    Several diffs may serve one version, for the main branch keeps its version while it moves: the first that
    fits is taken. Raises ``PatchError`` when the version is unknown and when no diff fits.
    """
    patches = known_patches()
    misfits = []
    for patch in patches:
        if tree.version in patch.serves:
            try:
                return patch, dict(_changes(tree, patch, reverse))
            except PatchError as misfit:
                misfits.append(str(misfit))
    if not misfits:
        known = "; ".join(f"{', '.join(patch.serves)} ({patch.source})" for patch in patches)
        misfits = [f"{tree.root}: no patch for Megatron {tree.version}. There are patches for {known}."]
    raise PatchError("\n".join([*misfits, _WITHOUT_PATCH]))


def _changes(tree: MegatronTree, patch: MegatronPatch, reverse: bool) -> Iterator[tuple[Path, bytes]]:
    for diff in patch.diffs:
        path = tree.root / diff.path
        if not path.is_file():
            raise PatchError(f"{path}: no such file, and {patch.name} changes it.")
        text = path.read_bytes()
        forward, backward = (diff.reversed(), diff) if reverse else (diff, diff.reversed())
        try:
            if not backward.fits(text):
                yield path, forward.apply(text)
        except HunkMismatch as mismatch:
            raise PatchError(
                f"{path}:{mismatch.line}: {mismatch.reason}; {patch.name} was made for {patch.source}."
            ) from None
