"""Counting what would make the host wait for a GPU, on a machine without one.

On the CPU runtime a read of a tensor by the host costs nothing and goes unseen; on a GPU it stalls the thread
until the device is done. `count_host_reads` counts such reads where they are made: methods of Tensor giving
values to Python or NumPy, operators whose output depends in shape on values, explicit synchronisation.

Every tensor counts as being on the device, so a read of a true host tensor, or `x.to(y.device)`, counts too.
A copy into another tensor (`copy_`) doesn't: whether it waits depends on pinned memory, which the CPU lacks.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class HostReads:
    """Host reads of one thread, by the place that made them and by kind.

    A place is the "file:line" of the innermost caller that isn't torch, NumPy, the standard library or the
    CPU runtime. A kind is the name of the method or operator, such as "Tensor.item" or "aten.nonzero".
    """

    by_site: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.by_site.total()

    def under(self, folder: str | Path) -> int:
        """Reads made by files under `folder`."""
        prefix = os.path.abspath(folder) + os.sep
        return sum(n for site, n in self.by_site.items() if os.path.abspath(site).startswith(prefix))


@contextmanager
def count_host_reads() -> Iterator[HostReads]:
    """Count the host reads that this thread makes inside the block; other threads' aren't counted."""
    reads = HostReads()
    operators = nullcontext() if _this_thread.counters else _Operators()
    _watch_methods()
    _this_thread.counters = (*_this_thread.counters, reads)
    try:
        with operators:
            yield reads
    finally:
        _this_thread.counters = tuple(counter for counter in _this_thread.counters if counter is not reads)
        _unwatch_methods()


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.counters: tuple[HostReads, ...] = ()
        self.inside_read = False  # what a read calls in turn is part of it


_this_thread = _ThreadState()


def _record(kind: str) -> None:
    site = _site(sys._getframe(2))
    for counter in _this_thread.counters:
        counter.by_site[site] += 1
        counter.by_kind[kind] += 1


_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_SITE_PACKAGES = "site-packages"
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, np.__file__, __file__)
)


def _site(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_library(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown:0"


@functools.cache
def _is_library(file: str) -> bool:
    in_standard_library = file.startswith(_STANDARD_LIBRARY) and _SITE_PACKAGES not in file
    return file.startswith((*_LIBRARIES, "<frozen")) or in_standard_library


# ---------------------------------------------------------------- operators

_VALUE_SHAPED = frozenset(
    {
        "aten._local_scalar_dense",
        "aten._unique",
        "aten._unique2",
        "aten.allclose",
        "aten.bincount",
        "aten.equal",
        "aten.masked_select",
        "aten.nonzero",
        "aten.unique_consecutive",
        "aten.unique_dim",
        "aten.unique_dim_consecutive",
    }
)
"""Operators that give a value to the host or whose output's shape depends on values."""

_INDEXING = frozenset({"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"})


class _Operators(TorchDispatchMode):
    """Sees every operator that its thread dispatches, from Python or from C++."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _this_thread.inside_read and _waits(func, args, kwargs):
            _record(str(func.overloadpacket))
        return func(*args, **kwargs)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = str(func.overloadpacket)
    if name in _VALUE_SHAPED:
        return True
    if name == "aten.repeat_interleave":
        return kwargs.get("output_size") is None
    return name in _INDEXING and _has_mask(args[1]) and not _is_masked_fill(name, args)


def _has_mask(indices: list[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_masked_fill(name: str, args: tuple[Any, ...]) -> bool:
    """Whether `x[mask] = value` has one value, which torch fills in without counting the mask."""
    accumulate = len(args) > 3 and args[3]
    return name != "aten.index" and args[2].numel() == 1 and not accumulate


# ------------------------------------------------------------------ methods

_READING_METHODS = (
    "__bool__",
    "__complex__",
    "__float__",
    "__format__",
    "__index__",
    "__int__",
    "__reduce_ex__",
    "__repr__",
    "cpu",
    "item",
    "numpy",
    "tolist",
)


def _reading(kind: str, method: Callable[..., Any], reads: Callable[..., bool]) -> Callable[..., Any]:
    """`method`, which records a read on a counted thread when `reads` says so of its arguments."""

    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        state = _this_thread
        if not state.counters or state.inside_read or not reads(*args, **kwargs):
            return method(*args, **kwargs)
        _record(kind)
        state.inside_read = True
        try:
            return method(*args, **kwargs)
        finally:
            state.inside_read = False

    return counted


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _to_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether `tensor.to(...)` names the CPU and waits for the copy."""
    device = kwargs.get("device", args[0] if args else None)
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    named = isinstance(device, str | torch.device) and torch.device(device).type == "cpu"
    return named and not non_blocking


_MISSING = object()
_lock = threading.Lock()
_watchers = 0
_originals: list[tuple[Any, str, Any]] = []


def _watch_methods() -> None:
    """Wrap the reading methods, for the first of the blocks that are open in any thread."""
    global _watchers
    with _lock:
        _watchers += 1
        if _watchers > 1:
            return
        for name in _READING_METHODS:
            _wrap(torch.Tensor, name, _always)
        _wrap(torch.Tensor, "to", _to_host)
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            _wrap(owner, "synchronize", _always)


def _wrap(owner: Any, name: str, reads: Callable[..., bool]) -> None:
    _originals.append((owner, name, owner.__dict__.get(name, _MISSING)))
    kind = f"{owner.__name__}.{name}"
    setattr(owner, name, _reading(kind, getattr(owner, name), reads))


def _unwatch_methods() -> None:
    global _watchers
    with _lock:
        _watchers -= 1
        if _watchers:
            return
        while _originals:
            owner, name, original = _originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
