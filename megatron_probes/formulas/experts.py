"""Load of the experts (Specification, section 7).

c_i is the number of valid tokens routed to expert i before capacity dropping, summed over the whole step
and all ranks. Every function gives ``None`` for a layer that got no
valid token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def imbalance(counts: ArrayLike) -> float | None:
    """Return I = max_i c_i / mean_i c_i of the loads ``counts`` [experts]; 1 is balanced."""
    loads = np.asarray(counts, np.float64)
    total = loads.sum()
    return float(loads.max() * loads.size / total) if total else None


def max_vio(counts: ArrayLike) -> float | None:
    """Return MaxVio = max_i c_i / mean_i c_i - 1 of the loads ``counts`` [experts]; 0 is balanced."""
    loads = np.asarray(counts, np.float64)
    total = loads.sum()
    return float((loads.max() * loads.size - total) / total) if total else None


def shard_max_vio(counts: ArrayLike, shards: int) -> float | None:
    """Return MaxVio of the loads of expert-parallel shards, each of E / ``shards`` consecutive experts.

    ``None`` also without expert parallelism (``shards`` 1). Raises ``ValueError`` when the experts don't
    divide evenly.
    """
    if shards == 1:
        return None
    return max_vio(np.asarray(counts, np.float64).reshape(shards, -1).sum(axis=1))


def entropy(counts: ArrayLike) -> float | None:
    """Return H = -sum p ln p in nats with p_i = c_i / sum c and 0 ln 0 = 0."""
    loads = np.asarray(counts, np.float64)
    total = loads.sum()
    if not total:
        return None
    p = loads[loads > 0] / total
    return float(-(p * np.log(p)).sum()) + 0.0


def entropy_norm(counts: ArrayLike) -> float | None:
    """Return H / ln E: 0 for one expert, 1 for a uniform load. ``None`` also for a single expert."""
    experts = np.size(counts)
    h = entropy(counts)
    return None if h is None or experts == 1 else h / float(np.log(experts))


def aux_loss(counts: ArrayLike, prob_sums: ArrayLike, tokens: float, topk: int) -> float | None:
    """Return the load-balancing loss E * sum_i f_i P_i of one micro-batch, without its coefficient.

    ``counts`` [experts] are c_i, ``prob_sums`` [experts] the router probabilities summed over the ``tokens``
    valid tokens: f_i = c_i / (k T), P_i = prob_sums_i / T. A balanced router gives 1 for every E and k.
    """
    if not tokens:
        return None
    f = np.asarray(counts, np.float64) / (topk * tokens)
    p = np.asarray(prob_sums, np.float64) / tokens
    return float(f.size * (f * p).sum())


def mean_aux_loss(layers: Sequence[Sequence[float]]) -> float | None:
    """Return the mean over MoE layers of each layer's mean over micro-batches.

    ``layers`` [MoE layers][micro-batches with a valid token] holds MoE layers only, of all pipeline stages.
    ``None`` where none of them has a value.
    """
    means = [math.fsum(layer) / len(layer) for layer in layers if layer]
    return math.fsum(means) / len(means) if means else None
