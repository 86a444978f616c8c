"""A small Megatron tree to patch: the files of the installed wheel that the patches and the version need."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

FILES = ("core/package_info.py", "training/arguments.py", "training/training.py")


@pytest.fixture(scope="session")
def installed_megatron() -> Path:
    """The installed wheel's folder `megatron`."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("megatron-core isn't installed")
    return Path(spec.origin).parents[1]


@pytest.fixture
def tree(installed_megatron: Path, tmp_path: Path) -> Path:
    """A folder that holds a copy of `megatron`, as a checkout and site-packages do."""
    root = tmp_path / "tree"
    for name in FILES:
        copy = root / "megatron" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed_megatron / name, copy)
    return root
