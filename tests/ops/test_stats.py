"""Tensor statistics against float64, on every kind of input that has bitten such kernels."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_probes import ops
from megatron_probes.ops.stats import _moment_row, _stats_row

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
COUNTS = slice(2, 7)  # abs_max, zeros, nonfinite, nan, numel: exact
SUM_TOLERANCE = {torch.float32: 1e-12, torch.bfloat16: 5e-7, torch.float16: 5e-7}


def adversarial(name: str, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    normal = torch.randn(n, generator=generator)
    match name:
        case "normal":
            return normal
        case "zeros":
            return torch.zeros(n)
        case "negative zeros":
            return torch.full((n,), -0.0)
        case "a third":
            return torch.full((n,), 1 / 3)
        case "tenths":
            return torch.full((n,), 0.1)
        case "lognormal":
            return torch.exp(6 * normal)
        case "1e30":
            return normal * 1e30
        case "1e-30":
            return normal * 1e-30
        case "subnormal":
            return normal * 1e-39
        case "sparse":
            return torch.where(normal > 1, normal, 0.0)
        case "all NaN":
            return torch.full((n,), math.nan)
        case "largest":
            return torch.full((n,), torch.finfo(torch.float32).max)
    x = normal.clone()  # "non-finite": a NaN, both infinities, both zeros
    for i, value in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0, math.nan)):
        x[(i * 7919) % n] = value
    return x


KINDS = [
    *("normal", "zeros", "negative zeros", "a third", "tenths", "lognormal", "sparse", "all NaN"),
    *("1e30", "1e-30", "subnormal", "largest", "non-finite"),
]


def assert_row(row: torch.Tensor, x: torch.Tensor) -> None:
    expected = _stats_row(x.reshape(-1))
    assert torch.equal(row[COUNTS], expected[COUNTS])
    torch.testing.assert_close(row[:2], expected[:2], rtol=SUM_TOLERANCE[x.dtype], atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_counts_and_maximum(kind: str, dtype: torch.dtype) -> None:
    for n in (1, 31, 32, 1000, 65_537, 300_001):
        x = adversarial(kind, n).to(dtype)
        assert_row(ops.tensor_stats(x), x)
        assert_row(ops.tensor_stats(x, moments=True)[:7], x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_to_4097(dtype: torch.dtype) -> None:
    x = adversarial("sparse", 4097).to(dtype)
    x[::311] = math.inf
    rows = torch.stack([ops.tensor_stats(x[:n]) for n in range(4098)])
    v = x.double()
    finite = torch.isfinite(v)
    magnitude = torch.where(finite, v.abs(), 0.0)

    def running(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.float64), values.double().cumsum(0)])

    tolerance = SUM_TOLERANCE[dtype]
    torch.testing.assert_close(rows[:, 0], running(magnitude.square()), rtol=tolerance, atol=0)
    torch.testing.assert_close(rows[:, 1], running(magnitude), rtol=tolerance, atol=0)
    assert torch.equal(rows[1:, 2], magnitude.cummax(0).values)
    assert torch.equal(rows[:, 3], running(v == 0))
    assert torch.equal(rows[:, 4], running(~finite))
    assert torch.equal(rows[:, 5], torch.zeros(4098, dtype=torch.float64))
    assert torch.equal(rows[:, 6], torch.arange(4098, dtype=torch.float64))


def test_nan_is_told_from_infinity() -> None:
    row = dict(zip(ops.STATS_COLUMNS, ops.tensor_stats(adversarial("non-finite", 100)).tolist(), strict=True))
    assert (row["nonfinite"], row["nan"]) == (4, 2)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_an_empty_tensor_gives_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert torch.equal(
        ops.tensor_stats(torch.empty(shape, dtype=dtype), moments=True), torch.zeros(12).double()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments(dtype: torch.dtype) -> None:
    for kind in KINDS:
        for offset in (0.0, 3.0, 1000.0):
            x = (adversarial(kind, 30_011) + offset).to(dtype)
            row, expected = ops.tensor_stats(x, moments=True)[7:], _moment_row(x)
            assert row[0] == expected[0]
            count, deviation = expected[0].clamp_min(1), (expected[2] / expected[0].clamp_min(1)).sqrt()
            scale = torch.stack([deviation**k * count for k in (2, 3, 4)])
            mean_scale = torch.where(x.isfinite(), x.double().abs(), 0.0).sum() / count
            assert (row[1] - expected[1]).abs() <= 1e-6 * mean_scale
            # Central sums are compared on their own scale; the fourth moment sets it where the tail is long.
            assert (
                (row[2:] - expected[2:]).abs() <= 2e-6 * torch.maximum(scale, expected[2:].abs())
            ).all(), kind


def test_moments_survive_a_bad_first_guess_of_the_mean() -> None:
    x = torch.randn(131_072, generator=torch.Generator().manual_seed(0)) * 0.01
    x[:: 131_072 // 64] = 5000.0  # exactly the elements from which the shift is guessed
    torch.testing.assert_close(ops.tensor_stats(x, moments=True)[9:], _moment_row(x)[2:], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_kurtosis_of_1e8_values_far_from_zero() -> None:
    x = torch.randn(100_000_000, generator=torch.Generator().manual_seed(1)).add_(1e3)
    count, _, m2, _, m4 = ops.tensor_stats(x, moments=True)[7:].tolist()
    mean = sum(c.double().sum().item() for c in x.split(1 << 22)) / x.numel()
    second = fourth = 0.0
    for chunk in x.split(1 << 22):
        centred = (chunk.double() - mean).square()
        second += centred.sum().item()
        fourth += centred.square().sum().item()
    assert count == x.numel()
    assert abs(count * m4 / m2**2 - x.numel() * fourth / second**2) <= 1e-4


def test_multi_tensor_rows_are_the_single_rows_bit_for_bit() -> None:
    tensors = [adversarial("sparse", n).to(d) for n in (1, 5000, 300_001, 0, 131_072) for d in DTYPES]
    tensors += [torch.randn(300, 70).t(), torch.randn(64, 64)[::2, 1:]]
    for moments in (False, True):
        rows = ops.multi_tensor_stats(tensors, moments=moments)
        assert torch.equal(rows, torch.stack([ops.tensor_stats(x, moments=moments) for x in tensors]))


def test_no_tensors_give_no_rows() -> None:
    assert ops.multi_tensor_stats([]).shape == (0, 7)


@pytest.mark.parametrize("moments", [False, True])
def test_accumulation_is_the_statistic_of_all_parts(moments: bool) -> None:
    x = adversarial("non-finite", 10_000) + 2.0
    out = torch.zeros(12 if moments else 7, dtype=torch.float64)
    for part in x.split(777):
        ops.tensor_stats(part, out, accumulate=True)
    whole = ops.tensor_stats(x, moments=moments)
    assert torch.equal(out[COUNTS], whole[COUNTS])
    torch.testing.assert_close(out, whole, rtol=1e-6, atol=1e-6)
    if moments:
        parts = torch.stack([ops.tensor_stats(part, moments=True)[7:] for part in x.split(777)])
        torch.testing.assert_close(ops.combine_moments(parts), whole[7:], rtol=1e-6, atol=1e-6)


def test_the_flag_switches_the_operator_off() -> None:
    out = torch.full((7,), 5.0, dtype=torch.float64)
    for flag in (torch.zeros(1), torch.zeros((), dtype=torch.int32), torch.zeros(1, dtype=torch.bool)):
        ops.tensor_stats(torch.ones(10), out, enabled=flag)
        ops.multi_tensor_stats([torch.ones(10)], out[None], enabled=flag)
        assert torch.equal(out, torch.full((7,), 5.0, dtype=torch.float64))
    ops.tensor_stats(torch.ones(10), out, enabled=torch.ones(1))
    assert out.tolist() == [10, 10, 1, 0, 0, 0, 10]


def test_a_slot_is_written_in_place_and_nothing_beside_it() -> None:
    buffer = torch.full((3, 24), -1.0, dtype=torch.float64)
    ops.tensor_stats(torch.ones(4), buffer[1, 2:16:2])
    assert buffer[1, 2:16:2].tolist() == [4, 4, 1, 0, 0, 0, 4]
    assert (buffer == -1).sum() == buffer.numel() - 7


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(0, 23), min_size=0, max_size=4),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_shape_and_strides(shape: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    x = torch.randn([2 * size + 1 for size in shape], generator=torch.Generator().manual_seed(0)).to(dtype)
    for dim, size in enumerate(shape):
        step = data.draw(st.sampled_from([1, 2]))
        start = data.draw(st.integers(0, 2 * size + 1 - step * size)) if size else 0
        x = x.narrow(dim, start, max(0, step * (size - 1) + 1) if size else 0)
        x = x[(slice(None),) * dim + (slice(None, None, step),)]
    x = x.permute(data.draw(st.permutations(range(x.dim()))))
    if x.dim() and data.draw(st.booleans()):
        x = x[None].expand(3, *x.shape)
    assert_row(ops.tensor_stats(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_repeatable_whatever_the_number_of_threads(dtype: torch.dtype) -> None:
    x = adversarial("lognormal", 1_000_003).to(dtype)
    threads = torch.get_num_threads()
    rows = []
    try:
        for n in (1, 2, 1, 2):
            torch.set_num_threads(n)
            rows.append(ops.tensor_stats(x, moments=True))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(row, rows[0]) for row in rows)


def test_pc22_norms_are_not_taken_in_the_dtype_of_the_tensor() -> None:
    assert ops.tensor_stats(torch.ones(90_000, dtype=torch.float16))[0].sqrt() == 300.0
    tensors = [torch.full((1000,), 0.1, dtype=torch.bfloat16) for _ in range(3)]
    together = ops.multi_tensor_stats(tensors)[:, 0].sum().sqrt()
    split = (ops.tensor_stats(tensors[0])[0] + ops.multi_tensor_stats(tensors[1:])[:, 0].sum()).sqrt()
    assert together == pytest.approx(5.4825744, abs=1e-6)
    assert split == pytest.approx(5.4825744, abs=1e-6)


def test_float64_is_served_by_the_reference() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    assert torch.equal(ops.tensor_stats(x)[:2], _stats_row(x)[:2])
    assert torch.equal(ops.multi_tensor_stats([x, x])[1], ops.tensor_stats(x))


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match=r"torch\.int64"):
        ops.tensor_stats(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"float64 \[7\]"):
        ops.tensor_stats(torch.ones(3), torch.zeros(7))
    with pytest.raises(ValueError, match=r"float64 \[2, 7\]"):
        ops.multi_tensor_stats([torch.ones(3)] * 2, torch.zeros(3, 7, dtype=torch.float64))
