"""Installing where the kernels can't be built: never a failure, unless it is asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_probes import ops

ROOT = Path(ops.__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if not (ROOT / "setup.py").exists():
        pytest.skip("needs the source tree")
    for name in ("csrc", "megatron_probes", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").touch()
    return tmp_path


def build(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=checkout,
        env={**os.environ, "CXX": "", "PATH": str(checkout / "no programs"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_compiler_the_installation_goes_on(checkout: Path) -> None:
    done = build(checkout, MEGATRON_PROBES_CUDA="0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("_ops_cpu is not built, the plain-torch references serve: no C++ compiler") == 1
    assert not list(checkout.glob("megatron_probes/*.so"))


def test_cuda_that_was_asked_for_is_not_left_out_in_silence(checkout: Path) -> None:
    done = build(checkout, MEGATRON_PROBES_CUDA="1")
    assert done.returncode != 0
    assert "MEGATRON_PROBES_CUDA=1: " in done.stderr


def test_the_extensions_can_be_switched_off(checkout: Path) -> None:
    done = build(checkout, MEGATRON_PROBES_NO_EXT="1")
    assert done.returncode == 0
    assert "not built" not in done.stderr
