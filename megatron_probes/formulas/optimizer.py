"""Size of the update relative to the weights (Specification, section 6)."""

from __future__ import annotations

import math

from megatron_probes.formulas.ratio import ratio

EPS = 1e-12


def update_ratio(update_sum_sq: float, weight_sum_sq: float, count: float) -> float | None:
    """Return RMS(dw) / (RMS(w) + eps) of ``count`` elements, from sums over owners of all shards.

    w are the weights before the step, dw what was really added. ``None`` where sum w^2 is 0: relative to
    nothing, a change has no size.
    """
    if not weight_sum_sq:
        return None
    return math.sqrt(update_sum_sq / count) / (math.sqrt(weight_sum_sq / count) + EPS)


def bf16_update_noop(unchanged: int, changed_master: int) -> float | None:
    """Return count(dw != 0 and BF16 copy unchanged) / count(dw != 0); ``None`` where no weight moved."""
    return ratio(unchanged, changed_master)
