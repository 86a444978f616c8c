"""`python -m megatron_probes.cpu [--root CHECKOUT] SCRIPT ARGS...`: run a script on the CPU runtime."""

from __future__ import annotations

import argparse

from megatron_probes.cpu.runtime import run_script


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_probes.cpu",
        description="Run a Megatron script on the CPU runtime, as one rank of torchrun when that starts it.",
    )
    parser.add_argument("--list", action="store_true", help="print every replaced name with the reason")
    parser.add_argument("--root", help="Megatron checkout to take `megatron` from, instead of the wheel")
    parser.add_argument("script", nargs="?", help="Python file to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args()
    if options.list:
        print_list()
    elif options.script is None:
        parser.error("the path of a script is missing; for the list of replaced names give --list")
    else:
        run_script(options.script, options.args, options.root)


def print_list() -> None:
    from megatron_probes.cpu.replacements import ADDITIONS, TABLE

    for replacement in TABLE:
        print(f"{replacement.owner}.{replacement.name}: {replacement.why}")
    for addition in ADDITIONS:
        print(f"added {addition.name}: {addition.why}")


main()
