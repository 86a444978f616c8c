"""The operator tests under the address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_probes import ops

ROOT = Path(ops.__file__).parents[2]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1 -O2"


def runtime(name: str) -> str | None:
    if (compiler := shutil.which("g++")) is None:
        return None
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return path.stdout.strip() if Path(path.stdout.strip()).is_absolute() else None


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_sanitizers_are_clean(tmp_path: Path) -> None:
    asan, ubsan = runtime("libasan.so"), runtime("libubsan.so")
    if asan is None or ubsan is None:
        pytest.skip("needs g++ with the address and undefined-behaviour sanitizers")
    copy = tmp_path / "copy"
    for part in ("csrc", "megatron_probes", "tests/ops"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    (copy / "README.md").touch()
    build = {**os.environ, "MEGATRON_PROBES_CUDA": "0", "CXX": "g++", "CXXFLAGS": FLAGS, "LDFLAGS": FLAGS}
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=copy, env=build, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (copy / "megatron_probes" / "_ops_cpu.so").exists(), built.stdout + built.stderr
    files = [f"tests/ops/test_{name}.py" for name in ("stats", "residual", "update", "routing", "bins")]
    preload = f"{asan} {ubsan}"
    checked = {"ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": preload, "PYTHONPATH": str(copy)}
    for capability in ("", "baseline"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *files],
            cwd=copy,
            env={**os.environ, **checked, "MEGATRON_PROBES_CPU": capability},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert "runtime error" not in done.stdout + done.stderr
