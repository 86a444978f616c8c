"""The residual path: how large a branch is against the stream that it joins. Specification, section 8.

s is the stream before, b the branch added, a = s + b; per token.
"""

import math

import torch
from torch import Tensor

from megatron_probes.ops import library
from megatron_probes.ops.bins import NUM_BINS, histogram

RESIDUAL_HISTOGRAMS = (
    "branch_scale",
    "stream_norm",
    "branch_norm",
    "block_importance",
    "angular_distance",
    "bf16_noop",
)
RESIDUAL_COLUMNS = ("tokens", "nonfinite_tokens", *RESIDUAL_HISTOGRAMS)
TOKEN_COLUMNS = ("stream_norm", "branch_norm", "dot", "sum_norm", "noop")
EPS = 1e-12

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def residual_stats(
    s: Tensor,
    b: Tensor,
    mask: Tensor | None = None,
    stride: int = 1,
    *,
    out: Tensor | None = None,
    histograms: Tensor | None = None,
    per_token: Tensor | None = None,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> Tensor:
    """Sum the residual-path quantities over valid tokens: float64 [8], columns ``RESIDUAL_COLUMNS``.

    Column ``tokens`` counts the tokens in the sums, ``nonfinite_tokens`` those left out because s or b holds
    NaN or an infinity. Per token, with eps = 1e-12 and cos = s.a / (|s| |a| + eps)::

        branch_scale     = |b| / (|s| + eps)         block_importance = 1 - cos
        stream_norm      = |s|                       angular_distance = arccos(cos) / pi
        branch_norm      = |b|                       bf16_noop        = share of the d elements with
                                                         bf16(s + b) == bf16(s) and b != 0

    Both angles come from the Gram determinant of s and b, so they stay right where s and a are nearly
    parallel. In the angle, eps only decides that a zero stream or sum is at 1/2.

    s, b: [..., d], one shape and dtype (float32, float16, bfloat16); a token is an index into the leading
        dimensions, flattened.
    mask: bool or number, one element a token, non-zero where the token is valid. None: all are.
    stride: only tokens 0, stride, 2 * stride, ... are looked at.
    histograms: float64 [6, NUM_BINS], rows ``RESIDUAL_HISTOGRAMS``, bins of :mod:`megatron_probes.ops.bins`;
        written only when given.
    per_token: float64 [tokens, 5], columns ``TOKEN_COLUMNS`` (noop as a count), always overwritten; rows of
        tokens that are not looked at become 0; written only when given.
    out, accumulate, enabled: as in :func:`megatron_probes.ops.tensor_stats`; sums and histograms are added.
    Raises TypeError for another dtype, ValueError for shapes that do not fit or a stride below 1.
    Specification, section 8.
    """
    if s.dtype not in _DTYPES or s.dtype != b.dtype:
        raise TypeError(
            f"residual_stats: got {s.dtype} and {b.dtype}; use one of float32, float16, bfloat16 for both"
        )
    if s.shape != b.shape or s.dim() == 0:
        raise ValueError(
            f"residual_stats: shapes {list(s.shape)} and {list(b.shape)}; use one shape [..., d]"
        )
    if stride < 1:
        raise ValueError(f"residual_stats: stride is {stride}; use 1 or more")
    tokens = math.prod(s.shape[:-1])
    if mask is not None and mask.numel() != tokens:
        raise ValueError(f"residual_stats: mask has {mask.numel()} elements for {tokens} tokens")
    out = library.slot(out, (len(RESIDUAL_COLUMNS),), s.device)
    if histograms is not None:
        library.slot(histograms, (len(RESIDUAL_HISTOGRAMS), NUM_BINS), s.device)
    if per_token is not None:
        library.slot(per_token, (tokens, len(TOKEN_COLUMNS)), s.device)
    library.notice(s)
    torch.ops.megatron_probes.residual_stats(
        s, b, mask, stride, out, histograms, per_token, accumulate, enabled
    )
    return out


def _residual_reference(
    s: Tensor,
    b: Tensor,
    mask: Tensor | None,
    stride: int,
    out: Tensor,
    histograms: Tensor | None = None,
    per_token: Tensor | None = None,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> None:
    d = s.shape[-1]
    tokens = s.shape[:-1].numel()
    s_TD, b_TD = s.reshape(tokens, d)[::stride], b.reshape(tokens, d)[::stride]
    valid_T = torch.ones(s_TD.shape[0], dtype=torch.bool, device=s.device)
    if mask is not None:
        valid_T = mask.reshape(-1)[::stride] != 0

    moved_TD = (s_TD.float() + b_TD.float()).bfloat16()
    noop_T = ((moved_TD == s_TD.bfloat16()) & (b_TD != 0)).sum(-1).double()
    s64_TD, b64_TD = s_TD.double(), b_TD.double()
    ss_T, bb_T, sb_T = s64_TD.square().sum(-1), b64_TD.square().sum(-1), (s64_TD * b64_TD).sum(-1)
    aa_T = (ss_T + 2 * sb_T + bb_T).clamp_min(0)
    sa_T = ss_T + sb_T
    finite_T = torch.isfinite(ss_T + bb_T)
    s_norm_T, b_norm_T = ss_T.sqrt(), bb_T.sqrt()

    # 1 - x/(p + eps) with p = |s||a| and x = s.a, without the cancellation: (p - x)/(p + eps) + eps/(p +
    # eps), where p - x = (p^2 - x^2)/(p + x) and p^2 - x^2 = ss*aa - sa^2 = ss*bb - sb^2.
    p_T = s_norm_T * aa_T.sqrt()
    gram_T = (ss_T * bb_T - sb_T.square()).clamp_min(0)
    gap_T = torch.where(sa_T > 0, gram_T / (p_T + sa_T), p_T - sa_T)
    importance_T = ((gap_T + EPS) / (p_T + EPS)).clamp(0, 2)
    half_sine_T = torch.where(p_T > 0, gap_T / (2 * p_T), 0.5).clamp(0, 1).sqrt()
    quantities_QT = torch.stack(
        [
            b_norm_T / (s_norm_T + EPS),
            s_norm_T,
            b_norm_T,
            importance_T,
            2 / math.pi * half_sine_T.asin(),
            noop_T / max(d, 1),
        ]
    )
    keep_T = valid_T & finite_T
    sums = torch.where(keep_T, quantities_QT, 0.0).sum(-1)
    row = torch.cat([torch.stack([keep_T.sum(), (valid_T & ~finite_T).sum()]).double(), sums])
    library.write(out, out + row if accumulate else row, enabled)
    if histograms is not None:
        counts = torch.stack([histogram(q_T, keep_T) for q_T in quantities_QT])
        library.write(histograms, histograms + counts if accumulate else counts, enabled)
    if per_token is not None:
        rows = torch.zeros_like(per_token)
        columns = torch.stack([s_norm_T, b_norm_T, sb_T, aa_T.sqrt(), noop_T], dim=-1)
        rows[::stride] = torch.where(valid_T[:, None], columns, 0.0)
        library.write(per_token, rows, enabled)


library.define(
    "residual_stats(Tensor s, Tensor b, Tensor? mask, int stride, Tensor(a!) out, "
    "Tensor(b!)? histograms=None, Tensor(c!)? per_token=None, bool accumulate=False, "
    "Tensor? enabled=None) -> ()",
    _residual_reference,
)
