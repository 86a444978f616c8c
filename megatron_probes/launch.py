"""``python -m megatron_probes.launch [--cpu] SCRIPT ...``: an unedited Megatron script, with probes.

Under torchrun: ``torchrun ... -m megatron_probes.launch pretrain_gpt.py ... --probe-config probes.yaml``.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_probes.launch",
        description="Runs an unedited Megatron training script with --probe-config available.",
        usage="%(prog)s [--cpu] [--megatron CHECKOUT] SCRIPT [the script's arguments]",
    )
    parser.add_argument("--cpu", action="store_true", help="run on the CPU stand-in for CUDA (gloo)")
    parser.add_argument(
        "--megatron", metavar="CHECKOUT", help="take Megatron from this checkout instead of the environment"
    )
    parser.add_argument("script", metavar="SCRIPT", help="for example Megatron's pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    script = Path(options.script)
    if not script.is_file():
        parser.error(f"SCRIPT: there is no file {options.script!r}")
    sys.path.insert(0, str(script.resolve().parent))
    if options.megatron is not None:
        if not (Path(options.megatron) / "megatron").is_dir():
            parser.error(f"--megatron: {options.megatron!r} holds no folder 'megatron'")
        sys.path.insert(0, str(Path(options.megatron).resolve()))
    if options.cpu:
        from megatron_probes import cpu

        cpu.install()
    from megatron_probes.adapters import megatron_lm

    megatron_lm.install()
    sys.argv = [options.script, *options.arguments]
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
