"""The residual path against a direct float64 computation."""

import math

import pytest
import torch
from torch import Tensor

from megatron_probes import ops
from megatron_probes.ops.residual import _residual_reference

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
D = torch.float64


def stream_and_branch(tokens: int, d: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * d)
    s = torch.randn(tokens, d, generator=generator)
    return s.to(dtype), (torch.randn(tokens, d, generator=generator) * scale).to(dtype)


def direct(s: Tensor, b: Tensor) -> Tensor:
    """The definitions of section 8 as they are written, [6, tokens]."""
    s64, b64 = s.double(), b.double()
    a64 = s64 + b64
    s_norm, b_norm, a_norm = s64.norm(dim=-1), b64.norm(dim=-1), a64.norm(dim=-1)
    cosine = ((s64 * a64).sum(-1) / (s_norm * a_norm + 1e-12)).clamp(-1, 1)
    noop = ((s.float() + b.float()).bfloat16() == s.bfloat16()) & (b != 0)
    return torch.stack(
        [
            b_norm / (s_norm + 1e-12),
            s_norm,
            b_norm,
            1 - cosine,
            cosine.arccos() / math.pi,
            noop.double().mean(-1),
        ]
    )


def reference(
    s: Tensor, b: Tensor, mask: Tensor | None = None, stride: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    out, hist = torch.zeros(8, dtype=D), torch.zeros(6, ops.NUM_BINS, dtype=D)
    per_token = torch.zeros(math.prod(s.shape[:-1]), 5, dtype=D)
    _residual_reference(s, b, mask, stride, out, hist, per_token)
    return out, hist, per_token


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "d", "scale"), [(64, 512, 1.0), (33, 1000, 1e-2), (16, 17, 0.3), (5, 1, 2.0)]
)
def test_sums_are_those_of_the_definitions(tokens: int, d: int, scale: float, dtype: torch.dtype) -> None:
    s, b = stream_and_branch(tokens, d, scale, dtype)
    out = ops.residual_stats(s, b)
    assert out[:2].tolist() == [tokens, 0]
    torch.testing.assert_close(out[2:], direct(s, b).sum(-1), rtol=1e-6, atol=1e-6)
    assert out[7] * d == pytest.approx((direct(s, b)[5] * d).sum().item(), abs=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_stride_histograms_and_tokens(dtype: torch.dtype) -> None:
    s, b = stream_and_branch(96, 256, 0.05, dtype)
    s, b = s.view(12, 8, 256), b.view(12, 8, 256)
    mask = torch.rand(12, 8, generator=torch.Generator().manual_seed(0)) > 0.4
    for stride in (1, 3, 100):
        for m in (None, mask, mask.long(), mask.float()):
            hist, per_token = torch.zeros(6, ops.NUM_BINS, dtype=D), torch.full((96, 5), 9.0, dtype=D)
            out = ops.residual_stats(s, b, m, stride, histograms=hist, per_token=per_token)
            want_out, want_hist, want_tokens = reference(s, b, m, stride)
            torch.testing.assert_close(out, want_out, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(per_token, want_tokens, rtol=1e-6, atol=1e-6)
            assert torch.equal(hist.sum(1), out[0].expand(6))
            # A value beside an edge may fall on either side of it.
            assert (hist.cumsum(1) - want_hist.cumsum(1)).abs().max() <= 1


def test_a_quantile_of_the_histogram_is_right_within_2_percent() -> None:
    s, b = stream_and_branch(2000, 64, 0.05, torch.bfloat16)
    hist = torch.zeros(6, ops.NUM_BINS, dtype=D)
    ops.residual_stats(s, b, histograms=hist)
    edges = torch.tensor(ops.bin_edges(), dtype=D)
    for row, values in zip(hist[:5], direct(s, b)[:5], strict=True):
        for q in (0.5, 0.95, 0.99):
            bin_ = int((row.cumsum(0) >= q * 2000).nonzero()[0])
            middle = (edges[bin_ - 1] * edges[bin_]).sqrt()
            exact = values.sort().values[math.ceil(q * 2000) - 1]
            assert abs(middle / exact - 1) <= 0.02


def test_nearly_parallel_stream_and_sum() -> None:
    s = torch.zeros(1, 64, dtype=torch.float32)
    s[0, 0] = 1.0
    for angle in (1e-3, 1e-6, 1e-9):
        b = torch.zeros_like(s)
        b[0, 1] = angle
        out = ops.residual_stats(s, b)
        exact = math.atan2(float(b[0, 1]), 1.0)
        assert out[6] == pytest.approx(exact / math.pi, rel=1e-6)
        assert out[5] == pytest.approx(2 * math.sin(exact / 2) ** 2 + 1e-12, rel=1e-6)


def test_opposite_and_zero_rows() -> None:
    s = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    b = torch.tensor([[-3.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    per_token = torch.zeros(4, 5, dtype=D)
    out = ops.residual_stats(s, b, per_token=per_token)
    assert out[0] == 4
    # opposite: B = 2; no stream or no sum: cos = 0 by the eps, B = 1; no branch: B = 0
    assert out[5] == pytest.approx(2 + 1 + 1 + 0, abs=1e-9)
    assert out[6] == pytest.approx(1 + 0.5 + 0.5 + 0, abs=1e-9)
    assert per_token[:, 3].tolist() == [2, 1, 0, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_is_counted_and_left_out(value: float) -> None:
    s, b = stream_and_branch(20, 40, 0.1, torch.bfloat16)
    keep = torch.ones(20, dtype=torch.bool)
    keep[[3, 7]] = False
    s[3, 39], b[7, 0] = value, value
    out = ops.residual_stats(s, b)
    assert out[:2].tolist() == [18, 2]
    torch.testing.assert_close(out[2:], ops.residual_stats(s[keep], b[keep])[2:], rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e17])
def test_rows_near_the_ends_of_the_range(scale: float) -> None:
    s, b = stream_and_branch(8, 128, 0.1, torch.float32)
    s, b = s * scale, b * scale
    torch.testing.assert_close(ops.residual_stats(s, b), reference(s, b)[0], rtol=1e-6, atol=0)


def test_accumulate_and_flag() -> None:
    s, b = stream_and_branch(30, 64, 0.1, torch.bfloat16)
    out, hist = torch.zeros(8, dtype=D), torch.zeros(6, ops.NUM_BINS, dtype=D)
    for part in (slice(0, 11), slice(11, 30)):
        ops.residual_stats(s[part], b[part], out=out, histograms=hist, accumulate=True)
    whole_hist = torch.zeros(6, ops.NUM_BINS, dtype=D)
    torch.testing.assert_close(out, ops.residual_stats(s, b, histograms=whole_hist), rtol=1e-12, atol=0)
    assert torch.equal(hist, whole_hist)
    before, before_hist = out.clone(), hist.clone()
    ops.residual_stats(s, b, out=out, histograms=hist, accumulate=True, enabled=torch.zeros(1))
    assert torch.equal(out, before)
    assert torch.equal(hist, before_hist)


def test_other_strides_give_the_same_numbers() -> None:
    s, b = stream_and_branch(24, 48, 0.1, torch.bfloat16)
    wide = torch.zeros(24, 96, dtype=torch.bfloat16)
    wide[:, ::2] = s
    assert torch.equal(ops.residual_stats(wide[:, ::2], b.t().contiguous().t()), ops.residual_stats(s, b))


def test_no_tokens_give_zeros() -> None:
    empty = torch.empty(0, 8, dtype=torch.bfloat16)
    assert torch.equal(ops.residual_stats(empty, empty), torch.zeros(8, dtype=D))


def test_mistakes_are_named() -> None:
    s = torch.zeros(4, 8)
    with pytest.raises(TypeError, match="float64"):
        ops.residual_stats(s.double(), s.double())
    with pytest.raises(ValueError, match="stride is 0"):
        ops.residual_stats(s, s, stride=0)
    with pytest.raises(ValueError, match="3 elements for 4 tokens"):
        ops.residual_stats(s, s, torch.ones(3))
    with pytest.raises(ValueError, match=r"\[6, 1059\]"):
        ops.residual_stats(s, s, histograms=torch.zeros(6, 10, dtype=D))
