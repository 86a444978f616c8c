"""Plugs the probes into Megatron-LM's own training loop.

Two roads lead to the same ``attach``: the launcher calls ``install`` before an unedited script runs; a
patched Megatron calls ``attach`` itself. Everything is bound by name at run time, so one adapter serves
all supported versions.
"""

from megatron_probes.adapters.megatron_lm.attach import attach
from megatron_probes.adapters.megatron_lm.flag import add_probe_arguments
from megatron_probes.adapters.megatron_lm.install import install

__all__ = ["add_probe_arguments", "attach", "install"]
