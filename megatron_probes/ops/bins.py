"""Fixed logarithmic bins, so that a histogram can be summed over ranks before a percentile is read from it.

Bin 0 holds values below ``LOWEST_EDGE`` (it reads 0); bin i, 1 <= i < NUM_BINS - 1, holds ``[edge[i - 1],
edge[i])``; the last bin holds values from ``HIGHEST_EDGE`` upward, infinity included. NaN belongs to no bin.
Specification, section 8.
"""

import itertools
import operator

import torch
from torch import Tensor

LOWEST_EDGE = 1e-12
BIN_RATIO = 1.04
NUM_RATIO_BINS = 1057  # the fewest that reach 1e6
NUM_BINS = NUM_RATIO_BINS + 2

# Repeated multiplication, not pow: the compiled kernels build the same doubles at compile time, bit for bit.
_EDGES = tuple(
    itertools.accumulate(itertools.repeat(BIN_RATIO, NUM_RATIO_BINS), operator.mul, initial=LOWEST_EDGE)
)
HIGHEST_EDGE = _EDGES[-1]


def bin_edges() -> tuple[float, ...]:
    """Return the ``NUM_BINS - 1`` ascending edges, from ``LOWEST_EDGE`` to ``HIGHEST_EDGE``."""
    return _EDGES


def bin_index(values: Tensor) -> Tensor:
    """Return the bin of each value (int64); NaN gives the last bin, so mask it first."""
    edges = torch.tensor(_EDGES, dtype=torch.float64, device=values.device)
    return torch.bucketize(values.double(), edges, right=True)


def histogram(values: Tensor, keep: Tensor) -> Tensor:
    """Count ``values`` [n] where ``keep`` [n] into float64 [NUM_BINS], without a host synchronisation."""
    counts = torch.zeros(NUM_BINS, dtype=torch.float64, device=values.device)
    return counts.index_add_(0, bin_index(values), keep.double())
