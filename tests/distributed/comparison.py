"""How far two sets of quantities are apart, each by the rule of its kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantities import Kind, Quantities

ZERO_FLIPS = 2e-3
"""Share of the elements whose exact zero rounding may flip between layouts."""


@dataclass(frozen=True)
class Difference:
    """One quantity's two values; `error` is relative, of the elements for a count of zeros."""

    name: str
    kind: Kind
    found: float
    right: float
    error: float

    def __str__(self) -> str:
        return f"{self.name}: {self.found!r}, not {self.right!r} (off by {self.error:.2e})"


def compare(found: Quantities, right: Quantities, *, free_only: bool = False) -> list[Difference]:
    """Every quantity's difference. Raises AssertionError when the two don't hold the same names."""
    if free_only:
        found, right = ({n: q for n, q in side.items() if q.free} for side in (found, right))
    # A bin that only one side has a value in holds none on the other.
    binned = {
        n: q for side in (found, right) for n, q in side.items() if n.endswith("]") and q.kind is Kind.ZEROS
    }
    found, right = (
        side | {n: replace(q, value=0.0) for n, q in binned.items() if n not in side}
        for side in (found, right)
    )
    assert found.keys() == right.keys(), (
        f"only in the record: {sorted(found.keys() - right.keys())}, "
        f"only in the reference: {sorted(right.keys() - found.keys())}"
    )
    return [
        Difference(name, quantity.kind, quantity.value, right[name].value, _error(quantity.kind, *pair))
        for name, quantity in found.items()
        for pair in [(quantity.value, right[name].value, quantity.of)]
    ]


def _error(kind: Kind, found: float, right: float, elements: float) -> float:
    if found == right or (math.isnan(found) and math.isnan(right)):
        return 0.0
    if kind is Kind.ZEROS:
        return abs(found - right) / elements
    if not (math.isfinite(found) and math.isfinite(right)) or right == 0.0:
        return math.inf
    return abs(found - right) / abs(right)


def wrong(differences: Sequence[Difference], *, real: float, zeros: float) -> list[Difference]:
    """Those beyond `real` (relative) for real numbers, `zeros` of the elements, and any in counts."""
    allowed = {Kind.REAL: real, Kind.ZEROS: zeros, Kind.COUNT: 0.0}
    return [d for d in differences if d.error > allowed[d.kind]]


def largest(differences: Sequence[Difference], kind: Kind = Kind.REAL) -> Difference | None:
    """The largest difference of a kind."""
    return max((d for d in differences if d.kind is kind), key=lambda d: d.error, default=None)
