"""Copies of the Megatron releases that the patches serve, laid out as their wheels are."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

RELEASES = ("0.17.1", "0.19.2")
REPOSITORY = Path(__file__).parents[2]


def copy_release(release: str, into: Path) -> Path:
    """A new folder in `into` with `megatron` of a release, of which `megatron/training` is a copy."""
    wheel = _wheel(release)
    megatron = into / release / "megatron"
    megatron.mkdir(parents=True)
    (megatron / "core").symlink_to(wheel / "core")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(wheel / "training", megatron / "training", ignore=ignore)
    return megatron.parent


def _wheel(release: str) -> Path:
    """The folder `megatron` of the wheel of `release`; the older one lies beside the environment."""
    if release == "0.17.1":
        root = os.environ.get("MEGATRON_CORE_0171", ".venv/megatron-core-0.17.1")
        megatron = REPOSITORY / root / "megatron"
        if not megatron.is_dir():
            pytest.skip(f"no megatron-core 0.17.1 in {root}: run `make setup` or set MEGATRON_CORE_0171")
        return megatron
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("megatron-core isn't installed")
    return Path(spec.origin).parents[1]
