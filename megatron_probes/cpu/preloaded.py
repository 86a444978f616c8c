"""Importing this module is `preload()`: for the server from which `fork_ranks` forks preloaded ranks."""

from megatron_probes.cpu.fork import preload

preload()
