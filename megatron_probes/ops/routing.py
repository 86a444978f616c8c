"""Routing: tokens an expert, and how close the choice of experts was. Specification, section 7."""

import torch
from torch import Tensor

from megatron_probes.ops import library
from megatron_probes.ops.bins import NUM_BINS, histogram

_SCORES = (torch.float32, torch.float16, torch.bfloat16)


def routing_histogram(
    map_or_indices: Tensor,
    num_experts: int,
    padding_mask: Tensor | None = None,
    out: Tensor | None = None,
    *,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> Tensor:
    """Count the valid tokens routed to each expert: float64 [num_experts].

    map_or_indices: bool [..., num_experts], True where the token goes to the expert; or int32/int64 [..., k],
        the chosen experts (an index outside 0 .. num_experts - 1 is no choice and is not counted).
    padding_mask: bool, one element a token, True where the token is padding (Megatron's convention).
    out, accumulate, enabled: as in :func:`megatron_probes.ops.tensor_stats`; counts are added.
    Raises TypeError for another dtype, ValueError for shapes that do not fit. Specification, section 7.
    """
    if map_or_indices.dtype not in (torch.bool, torch.int32, torch.int64):
        raise TypeError(
            f"routing_histogram: got {map_or_indices.dtype}; use a bool map or int32 or int64 indices"
        )
    if map_or_indices.dtype == torch.bool and map_or_indices.shape[-1] != num_experts:
        raise ValueError(
            f"routing_histogram: the map has {map_or_indices.shape[-1]} columns for {num_experts} experts"
        )
    _check_padding("routing_histogram", map_or_indices, padding_mask)
    out = library.slot(out, (num_experts,), map_or_indices.device)
    library.notice(map_or_indices)
    torch.ops.megatron_probes.routing_histogram(map_or_indices, padding_mask, out, accumulate, enabled)
    return out


def topk_margin_histogram(
    scores: Tensor,
    k: int,
    padding_mask: Tensor | None = None,
    out: Tensor | None = None,
    *,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> Tensor:
    """Count valid tokens by the margin score(k) - score(k + 1): float64 [NUM_BINS].

    score(j) is the j-th largest score of the token; a tie has margin 0. A token with a NaN score has no
    margin and is left
    out. Bins: :mod:`megatron_probes.ops.bins`.

    scores: [..., num_experts], float32, float16 or bfloat16; 1 <= k < num_experts.
    padding_mask, out, accumulate, enabled: as in :func:`routing_histogram`.
    Raises TypeError for another dtype, ValueError for a k out of range. Specification, section 7.
    """
    if scores.dtype not in _SCORES:
        raise TypeError(f"topk_margin_histogram: got {scores.dtype}; use float32, float16 or bfloat16")
    if not 1 <= k < scores.shape[-1]:
        raise ValueError(
            f"topk_margin_histogram: k is {k} of {scores.shape[-1]} experts; use 1 <= k < experts"
        )
    _check_padding("topk_margin_histogram", scores, padding_mask)
    out = library.slot(out, (NUM_BINS,), scores.device)
    library.notice(scores)
    torch.ops.megatron_probes.topk_margin_histogram(scores, k, padding_mask, out, accumulate, enabled)
    return out


def _check_padding(name: str, x: Tensor, padding_mask: Tensor | None) -> None:
    tokens = x.shape[:-1].numel()
    if padding_mask is not None and (padding_mask.dtype != torch.bool or padding_mask.numel() != tokens):
        raise ValueError(
            f"{name}: padding_mask is {padding_mask.dtype} with {padding_mask.numel()} elements; "
            f"use bool with {tokens}"
        )


def _valid(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    if padding_mask is None:
        return torch.ones(x.shape[:-1].numel(), dtype=torch.bool, device=x.device)
    return ~padding_mask.reshape(-1)


def _routing_reference(
    map_or_indices: Tensor,
    padding_mask: Tensor | None,
    out: Tensor,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> None:
    valid_T = _valid(map_or_indices, padding_mask)
    rows = map_or_indices.reshape(valid_T.numel(), map_or_indices.shape[-1])
    if rows.dtype == torch.bool:
        counts = (rows & valid_T[:, None]).sum(0).double()
    else:
        chosen = (rows >= 0) & (rows < out.numel()) & valid_T[:, None]
        counts = torch.zeros_like(out).index_add_(
            0, rows.clamp(0, out.numel() - 1).reshape(-1).long(), chosen.reshape(-1).double()
        )
    library.write(out, out + counts if accumulate else counts, enabled)


def _margin_reference(
    scores: Tensor,
    k: int,
    padding_mask: Tensor | None,
    out: Tensor,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> None:
    valid_T = _valid(scores, padding_mask)
    rows = scores.reshape(valid_T.numel(), scores.shape[-1])
    top = rows.double().topk(k + 1, dim=-1).values
    # inf - inf is a tie, not NaN
    margin_T = torch.where(top[:, k - 1] == top[:, k], 0.0, top[:, k - 1] - top[:, k])
    counts = histogram(margin_T, valid_T & ~rows.isnan().any(-1))
    library.write(out, out + counts if accumulate else counts, enabled)


library.define(
    "routing_histogram(Tensor map_or_indices, Tensor? padding_mask, Tensor(a!) out, bool accumulate=False, "
    "Tensor? enabled=None) -> ()",
    _routing_reference,
)
library.define(
    "topk_margin_histogram(Tensor scores, int k, Tensor? padding_mask, Tensor(a!) out, "
    "bool accumulate=False, Tensor? enabled=None) -> ()",
    _margin_reference,
)
