"""Routing histograms against direct counts."""

import math

import pytest
import torch

from megatron_probes import ops


@pytest.mark.parametrize(
    ("tokens", "experts"), [(0, 8), (1, 1), (300, 7), (2000, 64), (777, 130), (600, 257)]
)
@pytest.mark.parametrize("padded", [False, True])
def test_map(tokens: int, experts: int, padded: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    routed = torch.rand(tokens, experts, generator=generator) < 0.3
    padding = torch.rand(tokens, generator=generator) < 0.2 if padded else None
    kept = routed if padding is None else routed & ~padding[:, None]
    assert torch.equal(ops.routing_histogram(routed, experts, padding), kept.sum(0).double())


def test_a_full_map_does_not_overflow_a_byte() -> None:
    assert ops.routing_histogram(torch.ones(1000, 40, dtype=torch.bool), 40).tolist() == [1000.0] * 40


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(-1, 10, (50, 4, 3), generator=generator).to(dtype)
    padding = torch.rand(50, 4, generator=generator) < 0.3
    valid = chosen[~padding]
    expected = [int((valid == e).sum()) for e in range(8)]  # -1, 8 and 9 are no expert's
    assert ops.routing_histogram(chosen, 8, padding).tolist() == expected


def test_strides_accumulation_and_flag() -> None:
    routed = torch.rand(64, 20, generator=torch.Generator().manual_seed(0)) < 0.5
    out = torch.ones(10, dtype=torch.float64)
    ops.routing_histogram(routed[:, ::2], 10, out=out, accumulate=True)
    ops.routing_histogram(routed[:, ::2], 10, out=out, accumulate=True, enabled=torch.zeros(1))
    assert torch.equal(out, 1 + routed[:, ::2].sum(0).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_margins(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.rand(500, 8, generator=generator).to(dtype)
    padding = torch.rand(500, generator=generator) < 0.2
    ordered = scores.double().sort(-1, descending=True).values
    margins = (ordered[:, k - 1] - ordered[:, k])[~padding]
    expected = torch.bincount(ops.bin_index(margins), minlength=ops.NUM_BINS).double()
    assert torch.equal(ops.topk_margin_histogram(scores, k, padding), expected)


def test_margins_of_ties_infinities_and_nan() -> None:
    inf = math.inf
    scores = torch.tensor([[1.0, 1.0, 0.0], [inf, inf, 0.0], [1.0, -inf, -inf], [math.nan, 1.0, 0.0]])
    counts = ops.topk_margin_histogram(scores, 1)
    assert counts[0] == 2
    assert counts[-1] == 1
    assert counts.sum() == 3


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match="float32"):
        ops.routing_histogram(torch.zeros(2, 3), 3)
    with pytest.raises(ValueError, match="3 columns for 4 experts"):
        ops.routing_histogram(torch.zeros(2, 3, dtype=torch.bool), 4)
    with pytest.raises(ValueError, match="padding_mask"):
        ops.routing_histogram(torch.zeros(2, 3, dtype=torch.bool), 3, torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="k is 8"):
        ops.topk_margin_histogram(torch.zeros(2, 8), 8)
