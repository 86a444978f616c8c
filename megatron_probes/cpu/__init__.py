"""The CPU runtime: Megatron's own training loop on gloo, on a machine without a GPU.

`install()` replaces the entry points of torch and of Megatron that insist on CUDA; nothing of either is
edited, and without `install()` nothing is replaced. `megatron_probes.cpu.replacements.TABLE` lists every
replaced name with the reason (`python -m megatron_probes.cpu --list` prints it).

    python -m megatron_probes.cpu SCRIPT ARGS...              one rank, or one of torchrun's
    python -m megatron_probes.cpu.fork -n 4 SCRIPT ARGS...    four ranks, forked after the imports

It knows nothing of probes. Linux only: device memory is read from /proc.
"""

from __future__ import annotations

from pathlib import Path

from megatron_probes.cpu.runtime import install, run_script

__all__ = ["PRETRAIN_SCRIPT", "install", "run_script"]

PRETRAIN_SCRIPT = Path(__file__).with_name("pretrain_gpt.py")
"""Trains a GPT by Megatron's `pretrain()` from the megatron-core wheel, which holds no pretrain_gpt.py."""
