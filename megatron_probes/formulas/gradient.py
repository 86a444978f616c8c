"""Gradient norm and clip rate (Specification, section 2)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any


def norm(sum_sq: float, nonfinite: int = 0, nan: int = 0) -> float:
    """Return sqrt(sum g^2), or what the norm over all elements would be if some aren't finite.

    ``sum_sq`` runs over finite elements, ``nonfinite`` counts NaN and infinite ones, ``nan`` the NaN among
    them: any NaN gives NaN, else any infinite element gives infinity.
    """
    if nan:
        return math.nan
    if nonfinite:
        return math.inf
    return math.sqrt(sum_sq)


class ClipRate:
    """Share of the last min(W, seen) steps with a finite norm on which clipping acted: norm > threshold."""

    def __init__(self, *, window: int = 100) -> None:
        self.window = window
        self._clipped: deque[bool] = deque(maxlen=window)

    def push(self, grad_norm: float, threshold: float) -> None:
        """Take in one step; a norm that isn't finite is left out."""
        if math.isfinite(grad_norm):
            self._clipped.append(grad_norm > threshold)

    @property
    def value(self) -> float | None:
        """The clip rate; ``None`` before the first finite norm."""
        return sum(self._clipped) / len(self._clipped) if self._clipped else None

    def state_dict(self) -> dict[str, Any]:
        """Return the window as JSON-able data."""
        return {"clipped": list(self._clipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; of a longer window the newest steps are kept."""
        self._clipped = deque(state["clipped"], maxlen=self.window)
