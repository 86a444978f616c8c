"""Replacing the contents of several files, all or none."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Give every file its new bytes and keep its mode; when one can't be replaced, all stay as they were.

    New and old bytes lie on the disk before the first file changes, so that a full disk or a folder without
    permission is met earlier. Each file gets a new inode: installers link one file into several
    environments, and only this one is meant. Raises ``OSError``.
    """
    with contextlib.ExitStack() as staged:
        new = {path: _stage(staged, path, data) for path, data in contents.items()}
        old = {path: _stage(staged, path, path.read_bytes()) for path in contents}
        begun: list[Path] = []
        try:
            for path, source in new.items():
                begun.append(path)
                os.replace(source, path)
        except BaseException:
            for path in begun:
                os.replace(old[path], path)
            raise


def _stage(staged: contextlib.ExitStack, path: Path, data: bytes) -> Path:
    """A file beside ``path`` with its mode, holding ``data``, removed with ``staged`` if it's still there."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        source = Path(file.name)
        staged.callback(source.unlink, missing_ok=True)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(path, source)
    return source
