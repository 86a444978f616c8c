"""Installing the runtime and running a script on it."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asserts it with TP or CP > 1
    "TORCHDYNAMO_DISABLE": "1",  # dynamo would trace through the stand-in
}
"""Environment variables that `install()` sets where they are not set."""

_installed: set[str] = set()


def install() -> None:
    """Replace what insists on CUDA in torch and, where megatron-core can be imported, in Megatron.

    Idempotent. Call it before the first import of Megatron: a name bound earlier by
    `from torch.cuda import ...` keeps its original.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch

    torch.set_num_threads(1)
    from megatron_probes.cpu import replacements

    if "torch" not in _installed:
        replacements.apply("torch")
        _installed.add("torch")
    if "megatron" not in _installed and _has_megatron():
        replacements.apply("megatron")
        _installed.add("megatron")


def _has_megatron() -> bool:
    return bool(importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"))


def run_script(script: str | Path, argv: Sequence[str], root: str | Path | None = None) -> None:
    """Run `script` as `__main__` on the runtime, with `argv` after its name in `sys.argv`.

    `root` is a Megatron checkout to take `megatron` from. As with `python SCRIPT`, the script's own folder
    comes first on `sys.path`. Raises SystemExit, naming the path, when there is no such script.
    """
    prepare_path(script, root)
    install()
    sys.argv = [str(script), *argv]
    runpy.run_path(str(script), run_name="__main__")


def prepare_path(script: str | Path, root: str | Path | None) -> None:
    """Put `script`'s folder and the checkout `root` first on `sys.path`, where they aren't on it yet."""
    if not Path(script).is_file():
        raise SystemExit(f"megatron_probes.cpu: no script at {script}; give the path of a Python file")
    if root is not None and not Path(root, "megatron", "core").is_dir():
        raise SystemExit(
            f"megatron_probes.cpu: --root {root}: no megatron/core there; give a Megatron-LM checkout"
        )
    folders = [Path(script).parent, *([Path(root)] if root is not None else [])]
    for folder in map(str, (folder.resolve() for folder in folders)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
