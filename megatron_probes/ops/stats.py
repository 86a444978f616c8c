"""One-pass statistics of tensors.

Specification, sections 2 and 5. Combination of moments: Pébay, SAND2008-6212.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_probes.ops import library

STATS_COLUMNS = ("sum_sq", "sum_abs", "abs_max", "zeros", "nonfinite", "nan", "numel")
MOMENT_COLUMNS = ("count", "mean", "m2", "m3", "m4")

_WIDTHS = {False: len(STATS_COLUMNS), True: len(STATS_COLUMNS) + len(MOMENT_COLUMNS)}
_ABS_MAX = STATS_COLUMNS.index("abs_max")
_CHUNK = 1 << 22  # elements that the reference widens to float64 at a time
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def tensor_stats(
    x: Tensor,
    out: Tensor | None = None,
    *,
    moments: bool = False,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> Tensor:
    """Return the statistics of one tensor as a float64 row, columns ``STATS_COLUMNS``.

    ``sum_sq``, ``sum_abs`` and ``abs_max`` run over finite elements; ``zeros`` counts ``x == 0``;
    ``nonfinite`` counts NaN and infinities, ``nan`` NaN alone. With ``moments`` the row goes on with
    ``MOMENT_COLUMNS``: the number, the mean and the second to fourth central sums of the finite elements. An
    empty tensor gives zeros.

    x: any shape and strides; float32, float16, bfloat16, and float64 by the reference.
    out: float64 [7] or, with moments, [12], written in place; its width decides when it is given.
    accumulate: combine with what ``out`` holds (sums and counts added, maxima maxed, moments merged), not
        overwrite.
    enabled: one element on x's device; where it is 0, ``out`` stays as it is.
    Raises TypeError for another dtype, ValueError for an ``out`` of another shape or dtype.
    Specification, sections 2 and 5.
    """
    _check_dtype(x)
    out = _rows((), x.device, out, moments)
    if x.dtype == torch.float64:
        _tensor_stats_reference(x, out, accumulate, enabled)
        return out
    library.notice(x)
    torch.ops.megatron_probes.tensor_stats(x, out, accumulate, enabled)
    return out


def multi_tensor_stats(
    tensors: Sequence[Tensor],
    out: Tensor | None = None,
    *,
    moments: bool = False,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> Tensor:
    """Return one row of :func:`tensor_stats` a tensor, float64 [n, 7] or, with moments, [n, 12], in one
    launch.

    The tensors lie on one device; their dtypes may differ.
    """
    tensors = list(tensors)
    for x in tensors:
        _check_dtype(x)
    device = tensors[0].device if tensors else (out.device if out is not None else torch.device("cpu"))
    out = _rows((len(tensors),), device, out, moments)
    if any(x.dtype == torch.float64 for x in tensors):
        _multi_tensor_stats_reference(tensors, out, accumulate, enabled)
    elif tensors:
        library.notice(tensors[0])
        torch.ops.megatron_probes.multi_tensor_stats(tensors, out, accumulate, enabled)
    return out


def combine_moments(rows: Tensor) -> Tensor:
    """Merge moments of disjoint parts, float64 [n, 5] (``MOMENT_COLUMNS``), into those of the whole, [5]."""
    total = torch.zeros(len(MOMENT_COLUMNS), dtype=torch.float64, device=rows.device)
    for row in rows.unbind():
        total = _merge_moments(total, row)
    return total


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"tensor_stats: dtype {x.dtype} is not supported; use float32, float16, bfloat16 or float64"
        )


def _rows(lead: tuple[int, ...], device: torch.device, out: Tensor | None, moments: bool) -> Tensor:
    if out is None:
        return torch.zeros(*lead, _WIDTHS[moments], dtype=torch.float64, device=device)
    if out.dtype != torch.float64 or out.shape[:-1] != lead or out.shape[-1] not in _WIDTHS.values():
        raise ValueError(
            f"out: got {out.dtype} {list(out.shape)}; use float64 {[*lead, 7]} or, for moments, {[*lead, 12]}"
        )
    return out


def _stats_row(x: Tensor) -> Tensor:
    v = x.double()
    magnitude = torch.where(torch.isfinite(v), v.abs(), 0.0)
    return torch.stack(
        [
            magnitude.square().sum(),
            magnitude.sum(),
            magnitude.amax() if v.numel() else magnitude.new_zeros(()),
            (v == 0).sum(),
            (~torch.isfinite(v)).sum(),
            torch.isnan(v).sum(),
            magnitude.new_full((), v.numel()),
        ]
    )


def _moment_row(x: Tensor) -> Tensor:
    v = x.double()
    finite = torch.isfinite(v)
    count = finite.sum().double()
    mean = torch.where(finite, v, 0.0).sum() / count.clamp_min(1)
    centred = torch.where(finite, v - mean, 0.0)
    square = centred.square()
    return torch.stack([count, mean, square.sum(), (square * centred).sum(), square.square().sum()])


def _merge_moments(a: Tensor, b: Tensor) -> Tensor:
    n_a, mean_a, m2_a, m3_a, m4_a = a.unbind(-1)
    n_b, mean_b, m2_b, m3_b, m4_b = b.unbind(-1)
    n = n_a + n_b
    f_a, f_b = n_a / n.clamp_min(1), n_b / n.clamp_min(1)
    delta = mean_b - mean_a
    m2 = m2_a + m2_b + delta**2 * n_a * f_b
    m3 = m3_a + m3_b + delta**3 * n_a * f_b * (f_a - f_b) + 3 * delta * (f_a * m2_b - f_b * m2_a)
    m4 = (
        m4_a
        + m4_b
        + delta**4 * n_a * f_b * (f_a**2 - f_a * f_b + f_b**2)
        + 6 * delta**2 * (f_a**2 * m2_b + f_b**2 * m2_a)
        + 4 * delta * (f_a * m3_b - f_b * m3_a)
    )
    return torch.stack([n, mean_a + delta * f_b, m2, m3, m4], dim=-1)


def _merge_rows(a: Tensor, b: Tensor) -> Tensor:
    stats_a, stats_b = a[..., : _WIDTHS[False]], b[..., : _WIDTHS[False]]
    merged = stats_a + stats_b
    merged[..., _ABS_MAX] = torch.maximum(stats_a[..., _ABS_MAX], stats_b[..., _ABS_MAX])
    if a.shape[-1] == _WIDTHS[True]:
        merged = torch.cat(
            [merged, _merge_moments(a[..., _WIDTHS[False] :], b[..., _WIDTHS[False] :])], dim=-1
        )
    return merged


def _reference_row(x: Tensor, width: int) -> Tensor:
    row = torch.zeros(width, dtype=torch.float64, device=x.device)
    for chunk in x.reshape(-1).split(_CHUNK):
        part = _stats_row(chunk)
        if width == _WIDTHS[True]:
            part = torch.cat([part, _moment_row(chunk)])
        row = _merge_rows(row, part)
    return row


@torch.no_grad()
def _tensor_stats_reference(
    x: Tensor, out: Tensor, accumulate: bool = False, enabled: Tensor | None = None
) -> None:
    row = _reference_row(x, out.shape[-1])
    library.write(out, _merge_rows(out, row) if accumulate else row, enabled)


@torch.no_grad()
def _multi_tensor_stats_reference(
    tensors: list[Tensor], out: Tensor, accumulate: bool = False, enabled: Tensor | None = None
) -> None:
    rows = torch.stack([_reference_row(x, out.shape[-1]) for x in tensors])
    library.write(out, _merge_rows(out, rows) if accumulate else rows, enabled)


library.define(
    "tensor_stats(Tensor x, Tensor(a!) out, bool accumulate=False, Tensor? enabled=None) -> ()",
    _tensor_stats_reference,
)
library.define(
    "multi_tensor_stats(Tensor[] tensors, Tensor(a!) out, bool accumulate=False, Tensor? enabled=None) -> ()",
    _multi_tensor_stats_reference,
)
