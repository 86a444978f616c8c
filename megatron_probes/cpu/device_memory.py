"""Device memory on the CPU runtime: the process's own, resident and peak resident bytes, from /proc.

Allocated and reserved are the same number here, for the system has no caching allocator between the two.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")

TOTAL_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _field_bytes(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024  # the kernel's "kB" are 1024 bytes
    raise KeyError(f"{file} has no field {name}")


def resident_bytes(device: Any = None) -> int:
    """Resident bytes of this process (VmRSS)."""
    return _field_bytes(_STATUS, "VmRSS")


def peak_resident_bytes(device: Any = None) -> int:
    """Highest resident bytes of this process since the last reset or its start (VmHWM)."""
    return _field_bytes(_STATUS, "VmHWM")


def reset_peak(device: Any = None) -> None:
    """Set the peak back to what is resident now."""
    _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set size


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """Statistics under the names of torch.cuda.memory_stats that have a meaning here, in bytes.

    Allocation retries and out-of-memory errors are those of CUDA's caching allocator: always 0.
    """
    current, peak = resident_bytes(), peak_resident_bytes()
    stats = OrderedDict(
        (f"{kind}_bytes.{pool}.{moment}", value)
        for kind in ("allocated", "reserved", "active", "requested")
        for pool in ("all", "large_pool")
        for moment, value in (("current", current), ("peak", max(current, peak)))
    )
    return OrderedDict(stats, num_alloc_retries=0, num_ooms=0, num_device_alloc=0, num_device_free=0)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Available and total bytes of the machine."""
    return _field_bytes(_MEMINFO, "MemAvailable"), TOTAL_BYTES
