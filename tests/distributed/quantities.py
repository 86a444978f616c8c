"""Named numbers of a step that can be compared: what the record's slots hold, and what it should hold.

A slot becomes one quantity a cell, named after what the cell counts, so that a layout in which the cells
stand for something else (data ranks) compares by its sum. Slots are found by the patterns of `SLOTS`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from toy_gpt import ToyGPT

STATISTICS = ("sum_sq", "sum_abs", "zeros", "nonfinite", "nan", "numel")
CLASSES = ("embedding", "expert", "dense")


class Kind(enum.Enum):
    """How closely two right values of a quantity agree."""

    REAL = "a sum or maximum of floating-point values"
    COUNT = "a count of tokens or elements: exact"
    ZEROS = "a count of exact zeros, or of values in a bin, which rounding can flip"


@dataclass(frozen=True)
class Quantity:
    """A value; `of` is the number of elements behind a count of zeros, `free` whether layouts share it."""

    value: float
    kind: Kind = Kind.REAL
    of: float = 0.0
    free: bool = True


Quantities = dict[str, Quantity]
Slot = Iterator[tuple[str, Quantity]]


def statistics(name: str, row: Sequence[float]) -> Slot:
    """The sums of a tensor's elements, in the order of STATISTICS."""
    named = dict(zip(STATISTICS, row, strict=True))
    for column, value in named.items():
        kind = Kind.REAL if column.startswith("sum") else Kind.ZEROS if column == "zeros" else Kind.COUNT
        yield f"{name}/{column}", Quantity(float(value), kind, of=named["numel"])


def data_ranks(kind: Kind) -> Callable[[str, Sequence[float], ToyGPT], Slot]:
    """One cell a data rank: their sum is the same in all layouts, each of them only in this one."""

    def read(name: str, cells: Sequence[float], model: ToyGPT) -> Slot:
        yield name, Quantity(float(np.sum(cells)), kind)
        for rank, value in enumerate(cells):
            yield f"{name}[data rank {rank}]", Quantity(float(value), kind, free=False)

    return read


def one_row(name: str, cells: Sequence[float], model: ToyGPT) -> Slot:
    return statistics(name.removesuffix("/sums"), cells)


def rows_of(groups: Callable[[ToyGPT], Sequence[str]]) -> Callable[[str, Sequence[float], ToyGPT], Slot]:
    def read(name: str, cells: Sequence[float], model: ToyGPT) -> Slot:
        rows = np.reshape(cells, (-1, len(STATISTICS)))
        for group, row in zip(groups(model), rows, strict=True):
            yield from statistics(f"grad/{group}", row)

    return read


def maxima_of(groups: Callable[[ToyGPT], Sequence[str]]) -> Callable[[str, Sequence[float], ToyGPT], Slot]:
    def read(name: str, cells: Sequence[float], model: ToyGPT) -> Slot:
        for group, value in zip(groups(model), cells, strict=True):
            yield f"grad/{group}/abs_max", Quantity(float(value))

    return read


def cells_of(kind: Kind) -> Callable[[str, Sequence[float], ToyGPT], Slot]:
    def read(name: str, cells: Sequence[float], model: ToyGPT) -> Slot:
        for index, value in enumerate(cells):
            yield f"{name}[{index}]" if len(cells) > 1 else name, Quantity(float(value), kind)

    return read


def sum_and_count(name: str, cells: Sequence[float], model: ToyGPT) -> Slot:
    """A sum of values of micro-batches, and their number: both depend on how the batch is cut."""
    total, count = cells
    yield f"{name}/sum", Quantity(float(total), free=False)
    yield f"{name}/micro_batches", Quantity(float(count), Kind.COUNT, free=False)


def bins(name: str, cells: Sequence[float], model: ToyGPT) -> Slot:
    """Counts of fixed bins: their sum is exact, a value near an edge may change its bin."""
    total = float(np.sum(cells))
    yield f"{name}/count", Quantity(total, Kind.COUNT)
    for index in np.flatnonzero(cells):
        yield f"{name}[{index}]", Quantity(float(cells[index]), Kind.ZEROS, of=total)


def layer_parts(model: ToyGPT) -> list[str]:
    """`layer_NNN/<part>` of every layer, in order."""
    parts = ["attention_proj", "attention_qkv"]
    parts += ["experts", "norm", "router"] if model.experts else ["mlp_fc1", "mlp_fc2", "norm"]
    ahead = [*parts, "other"]
    return [
        *(f"layer_{layer:03d}/{part}" for layer in range(model.layers) for part in sorted(parts)),
        *(f"mtp_{depth:03d}/{part}" for depth in range(model.heads_ahead) for part in sorted(ahead)),
    ]


def classes(model: ToyGPT) -> list[str]:
    return [*CLASSES, *(f"{name} padding" for name in CLASSES)]


SLOTS: Mapping[str, Callable[[str, Sequence[float], ToyGPT], Slot] | None] = {
    r"loss/sum": data_ranks(Kind.REAL),
    r"loss/tokens": data_ranks(Kind.COUNT),
    r"loss/mtp/sum": cells_of(Kind.REAL),
    r"loss/mtp/tokens": cells_of(Kind.COUNT),
    r"loss/source/sum": cells_of(Kind.REAL),
    r"loss/source/tokens": cells_of(Kind.COUNT),
    r"grad/sums": one_row,
    r"grad/clipped/sums": one_row,
    r"grad/class/sums": rows_of(classes),
    r"grad/class/abs_max": maxima_of(classes),
    r"grad/part/sums": rows_of(layer_parts),
    r"grad/part/abs_max": maxima_of(layer_parts),
    r"act/logits/sums": one_row,
    r"act/logits/absmax": cells_of(Kind.REAL),
    r"moe/(layer|mtp)_\d+/tokens": cells_of(Kind.COUNT),
    r"moe/(layer|mtp)_\d+/aux_loss": sum_and_count,
    r"moe/(layer|mtp)_\d+/topk_margin": bins,
    r"moe/dropped": cells_of(Kind.COUNT),
    # What a process or a device did, and whether a probe failed: no layout shares it.
    r"(system|memory|probe)/.+": None,
}
"""Pattern of slot names -> how their cells are read; None for slots that no layout shares."""


def read_parts(parts: Mapping[str, Sequence[float]], model: ToyGPT) -> Quantities:
    """The quantities of one record. Raises KeyError for a slot that no pattern of SLOTS covers."""
    found: Quantities = {}
    for name, cells in parts.items():
        pattern = next((p for p in SLOTS if re.fullmatch(p, name)), None)
        if pattern is None:
            raise KeyError(f"slot {name!r} has no reading in SLOTS: every slot must be compared")
        read = SLOTS[pattern]
        if read is not None:
            found.update(read(name, cells, model))
    return found
