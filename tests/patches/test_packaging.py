from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_releases import REPOSITORY, copy_release

PARTS = ("megatron_probes", "patches", "setup.py", "pyproject.toml", "README.md")


def test_an_installed_package_finds_its_patches(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for part in PARTS:
        if (REPOSITORY / part).is_dir():
            shutil.copytree(REPOSITORY / part, source / part, ignore=ignore)
        else:
            shutil.copy(REPOSITORY / part, source)
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(installed)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    shutil.rmtree(source)

    root = copy_release("0.19.2", tmp_path)
    program = "from megatron_probes.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "patch", "--check", str(root)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "would be patched" in done.stdout
