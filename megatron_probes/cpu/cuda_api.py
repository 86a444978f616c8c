"""Stand-ins for torch.cuda: presence, properties, streams, events and the one random generator.

Work runs in program order on the calling thread: streams need no ordering, an event is done once recorded.
"""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_probes.cpu.device_memory import TOTAL_BYTES

PROPERTIES = types.SimpleNamespace(
    name="CPU stand-in",
    major=9,
    minor=0,
    total_memory=TOTAL_BYTES,
    multi_processor_count=1,
    is_integrated=False,
    warp_size=32,
)


class Stream:
    """A stream on which everything is done as soon as it is issued."""

    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Event:
    """An event that records the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`; raises RuntimeError unless both were recorded."""
        if self._at is None or end._at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) * 1e3

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_current_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    return _current_stream


def set_stream(stream: Stream) -> None:
    global _current_stream
    _current_stream = stream


def device_count() -> int:
    """Ranks on this machine, from the environment at each call: ranks may be forked after `install()`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def current_device() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def returning(value: Any = None) -> Callable[[Any], Callable[..., Any]]:
    """Make a replacement that returns `value`, a new function each time.

    Dynamo, which torch.optim imports, wants no two names of torch.cuda to share a function.
    """
    return lambda original: lambda *args, **kwargs: value


def no_context(_: Any) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Make a replacement that returns a context manager which does nothing."""
    return lambda *args, **kwargs: contextlib.nullcontext()


def calling(fn: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Make a replacement that calls `fn`, a new function each time (see `returning`)."""
    return lambda original: lambda *args, **kwargs: fn(*args, **kwargs)


def call_now(call: Callable[[], Any], **kwargs: Any) -> None:
    call()


def cudart() -> types.SimpleNamespace:
    """The CUDA runtime's profiler switches, without a profiler."""
    return types.SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)


# The "CUDA" generator is the CPU generator: a draw from either moves both.


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state() for _ in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    set_rng_state(new_states[current_device()])


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def initial_seed() -> int:
    return torch.default_generator.initial_seed()
