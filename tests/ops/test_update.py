"""BF16 no-ops against a reference that knows nothing but bit patterns."""

import math

import numpy as np
import pytest
import torch

from megatron_probes import ops

EXPONENT, MANTISSA = 8, 7


def decode(pattern: np.ndarray) -> np.ndarray:
    """The values of BF16 bit patterns in float64, from sign, exponent and mantissa alone."""
    sign = np.where(pattern >> 15, -1.0, 1.0)
    exponent, mantissa = (pattern >> MANTISSA) & 0xFF, pattern & 0x7F
    normal = np.ldexp(1 + mantissa / 128, exponent.astype(np.int64) - 127)
    value = sign * np.where(exponent == 0, np.ldexp(mantissa / 128, -126), normal)
    special = np.where(mantissa == 0, sign * np.inf, np.nan)
    return np.where(exponent == 0xFF, special, value)


def rounded(value: np.ndarray) -> np.ndarray:
    """float64 to the nearest BF16 value, ties to even: by the spacing of BF16 numbers around it.

    A float64 sum of two BF16 numbers is exact wherever the smaller could matter to that rounding.
    """
    exponent = np.maximum(np.frexp(value)[1] - 1, -126)
    spacing = np.ldexp(1.0, exponent - MANTISSA)
    nearest = np.rint(value / spacing) * spacing
    return np.where(np.abs(nearest) >= 2.0**128, np.copysign(np.inf, value), nearest)


def patterns(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def sampled_updates(rng: np.random.Generator, weight: int) -> np.ndarray:
    """256 updates for one weight: near half its spacing, the ends of the format, and at random."""
    exponent = (weight >> MANTISSA) & 0xFF
    half = max(exponent - EXPONENT, 0) << MANTISSA  # half the spacing at the weight
    near = np.clip(half + np.arange(-24, 25), 0, 0x7FFF)
    ends = np.array([0x0000, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, weight & 0x7FFF])
    signed = np.concatenate([near, near | 0x8000, ends, ends | 0x8000])
    return np.concatenate([signed, rng.integers(0, 1 << 16, 256 - signed.size)])


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bf16_weight_with_256_updates(step: int) -> None:
    """Counts of 256 pairs at a time too, so that two errors cannot cancel over the whole sample."""
    rng = np.random.default_rng(0)
    weights = np.arange(0, 1 << 16, step)
    update = np.concatenate([sampled_updates(rng, int(w)) for w in weights])
    weight = np.repeat(weights, 256)
    w64, u64 = decode(weight), decode(update)
    with np.errstate(all="ignore"):
        unmoved = (rounded(w64 + u64) == w64) & (u64 != 0)
    expected = [unmoved.sum(), (u64 != 0).sum()]
    assert expected[0] > unmoved.size / 20  # the sample does hold no-ops

    w, u = patterns(weight), patterns(update)
    for first in (w, w.float()):
        for second in (u, u.float()):
            assert ops.bf16_update_noop(first, second).tolist() == expected
    per_token = torch.zeros(weights.size, 5, dtype=torch.float64)
    ops.residual_stats(w.view(-1, 256), u.view(-1, 256), per_token=per_token)
    assert np.array_equal(per_token[:, 4].numpy(), unmoved.reshape(-1, 256).sum(1))


def test_master_weights_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    before = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype(np.uint32)
    steps = rng.choice([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000], before.size).astype(np.uint32)
    ties = rng.random(before.size) < 0.5
    before[ties] = before[ties] & np.uint32(0xFFFF0000) | rng.choice(
        np.array([0, 1, 0x7FFF, 0x8000, 0x8001], dtype=np.uint32), int(ties.sum())
    )
    after = before + steps
    x, y = before.view(np.float32), after.view(np.float32)
    with np.errstate(all="ignore"):
        nonzero = x != y
        noop = nonzero & (rounded(x.astype(np.float64)) == rounded(y.astype(np.float64)))
    out = ops.bf16_update_noop_master(torch.from_numpy(x), torch.from_numpy(y))
    assert out.tolist() == [noop.sum(), nonzero.sum()]
    assert 0 < noop.sum() < nonzero.sum()


def test_values_decide_not_bits() -> None:
    tiny = 2.0**-149
    count = ops.bf16_update_noop_master(
        torch.tensor([tiny, 0.0, math.nan]), torch.tensor([-tiny, -0.0, math.nan])
    )
    assert count.tolist() == [1, 2]  # +0 and -0 copies are equal; NaN moved and is equal to nothing
    inf = math.inf
    count = ops.bf16_update_noop(torch.tensor([inf, inf, 1.0, 1.0]), torch.tensor([1.0, -inf, math.nan, 0.0]))
    assert count.tolist() == [1, 3]


@pytest.mark.parametrize("n", [0, 1, 7, 8, 65_535, 65_536, 65_537, 300_000])
def test_sizes_strides_and_accumulation(n: int) -> None:
    w, u = torch.rand(n, 2)[:, 0] + 1, torch.full((n,), 1e-4)
    out = torch.tensor([5.0, 6.0], dtype=torch.float64)
    ops.bf16_update_noop(w, u, out, enabled=torch.zeros(1))
    assert out.tolist() == [5, 6]
    ops.bf16_update_noop(w, u, out, accumulate=True)
    expected = ((w + u).bfloat16() == w.bfloat16()).sum().item()
    assert out.tolist() == [5 + expected, 6 + n]


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match="float16"):
        ops.bf16_update_noop(torch.zeros(2, dtype=torch.float16), torch.zeros(2))
    with pytest.raises(ValueError, match="shapes differ"):
        ops.bf16_update_noop_master(torch.zeros(2), torch.zeros(3))
