"""What a training step does on its thread: operators, collectives, host reads, and the time in the hooks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_probes.cpu.host_reads import count_host_reads

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Counts:
    """Of one step on one rank.

    `bytes` is what the rank gives to the collectives, without all-to-alls: their size follows the routing
    of the experts and differs from step to step.
    """

    ops: int
    collectives: int
    bytes: int
    host_reads: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.ops - other.ops,
            self.collectives - other.collectives,
            self.bytes - other.bytes,
            self.host_reads - other.host_reads,
        )


class _Operators(TorchDispatchMode):
    """Counts the operators that this thread dispatches; those of `c10d` are the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.collectives = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "c10d":
            self.ops += 1
        else:
            self.collectives += 1
            if "alltoall" not in func.name():
                self.bytes += sum(x.nbytes for x in tree_leaves(args[0]) if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def count(call: Callable[[], T]) -> tuple[T, Counts]:
    """Result of `call` with what it did on this thread."""
    operators = _Operators()
    with count_host_reads() as reads, operators:
        result = call()
    return result, Counts(operators.ops, operators.collectives, operators.bytes, reads.total)


class Stopwatch:
    """Seconds spent in the callables that it wraps; one inside another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            self._depth += 1
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - started

        return timed

    def take(self) -> float:
        """The seconds since the last call of this method."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
