"""The fixed bins, and that the compiled kernels bin as the reference does at every edge."""

import itertools
import math

import torch

from megatron_probes import ops


def test_the_bins_are_those_of_the_specification() -> None:
    edges = ops.bin_edges()
    assert (edges[0], len(edges), ops.NUM_BINS) == (1e-12, 1058, 1059)
    assert edges[-2] < 1e6 <= edges[-1]
    assert all(math.isclose(b / a, 1.04, rel_tol=1e-12) for a, b in itertools.pairwise(edges))


def test_index() -> None:
    values = torch.tensor([0.0, 9e-13, 1e-12, 1.04e-12, 1.0, 2e6, math.inf], dtype=torch.float64)
    index = ops.bin_index(values).tolist()
    assert index[:2] == [0, 0]
    assert index[2] == 1
    assert index[-2:] == [1058, 1058]
    edges = ops.bin_edges()
    assert edges[index[4] - 1] <= 1.0 < edges[index[4]]


def test_kernels_and_reference_agree_at_every_edge() -> None:
    """A row of one element has stream_norm |s|: float32 values on both sides of each edge of the bins."""
    edges = torch.tensor(ops.bin_edges(), dtype=torch.float64).float()
    s = torch.cat([edges, edges.nextafter(torch.tensor(math.inf)), edges.nextafter(torch.tensor(0.0))])[
        :, None
    ]
    histograms = torch.zeros(6, ops.NUM_BINS, dtype=torch.float64)
    ops.residual_stats(s, torch.zeros_like(s), histograms=histograms)
    expected = torch.bincount(ops.bin_index(s.double().square().sqrt().flatten()), minlength=ops.NUM_BINS)
    assert torch.equal(histograms[1], expected.double())
