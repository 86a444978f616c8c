"""Step time, throughput, FLOP rate and memory peaks, each the maximum over ranks."""

from __future__ import annotations

import torch

from megatron_probes.config.model import SystemConfig
from megatron_probes.ledger import Kind, Ledger, Source
from megatron_probes.probes.base import Facts, Parts, Probe, Values
from megatron_probes.topology import Topology

# A peak and its rank share one cell, so that one MAX finds both: the device allocator hands out whole
# blocks of 512 bytes; below them lies the rank, counted from the end so that the lowest rank wins a tie.
# 2^31 blocks (1 TiB) x 2^22 ranks fill a float64's 53 exact bits.
_BLOCK_BYTES = 512
_RANKS = 1 << 22


class SystemProbe(Probe):
    """``system/*`` and ``memory/*`` of every step (Specification, section 4).

    ``lifetime_peaks`` leaves the allocator's peak counters alone: Megatron's own memory logging reads
    them too.
    """

    family = "system"

    def __init__(
        self, config: SystemConfig, topology: Topology, *, lifetime_peaks: bool, device: torch.device
    ) -> None:
        super().__init__()
        self._topology = topology
        self._peak_flops = config.peak_flops_per_device
        self._lifetime_peaks = lifetime_peaks
        self._measures_memory = torch.cuda.is_available()
        self._device = device if device.type == "cuda" else None

    def declare(self, ledger: Ledger) -> None:
        self._ledger = ledger
        everywhere = ("dp", "cp", "tp", "pp")
        self._step_time, self._allocated, self._reserved, self._peak_rank = (
            ledger.declare(name, family=self.family, kind=Kind.MAX, axes=everywhere, source=Source.HOST)
            for name in (
                "system/step_time_s",
                "memory/peak_allocated_bytes",
                "memory/peak_reserved_bytes",
                "memory/peak_block_and_rank",
            )
        )

    def begin_step(self) -> None:
        if self._measures_memory and not self._lifetime_peaks:
            torch.cuda.reset_peak_memory_stats(self._device)

    def end_step(self, facts: Facts) -> None:
        self._ledger.set_host(self._step_time, facts.step_time_s)
        if not self._measures_memory:
            return
        stats = torch.cuda.memory_stats(self._device)
        allocated = stats["allocated_bytes.all.peak"]
        self._ledger.set_host(self._allocated, allocated)
        self._ledger.set_host(self._reserved, stats["reserved_bytes.all.peak"])
        self._ledger.set_host(self._peak_rank, pack_peak(allocated, self._topology.rank))

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        step_time_s = float(parts["system/step_time_s"][0])
        values["system/step_time_s"] = step_time_s
        if "data/valid_tokens" in values:
            values["system/tokens_per_second"] = values["data/valid_tokens"] / step_time_s
        if facts.flops is not None:
            rate = facts.flops / (self._topology.world_size * step_time_s)
            values["system/flops_per_device"] = rate
            if self._peak_flops is not None:
                values["system/mfu"] = rate / self._peak_flops
        if parts["memory/peak_allocated_bytes"][0] >= 0:
            values["memory/peak_allocated_bytes"] = int(parts["memory/peak_allocated_bytes"][0])
            values["memory/peak_reserved_bytes"] = int(parts["memory/peak_reserved_bytes"][0])
            values["memory/peak_rank_index"] = unpack_peak_rank(parts["memory/peak_block_and_rank"][0])


def pack_peak(peak_bytes: int, rank: int) -> float:
    """A float64 that orders peaks by their 512-byte blocks and, among equal ones, lower ranks first."""
    blocks = -(-peak_bytes // _BLOCK_BYTES)
    return float(blocks * _RANKS + (_RANKS - 1 - rank))


def unpack_peak_rank(packed: float) -> int:
    """The rank that ``pack_peak`` put into its value."""
    return _RANKS - 1 - int(packed) % _RANKS
