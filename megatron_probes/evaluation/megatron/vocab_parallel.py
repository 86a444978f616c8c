"""Likelihoods from logits whose vocabulary lies over the tensor-parallel ranks.

Shapes: N positions, V columns of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_CHUNK_ELEMENTS = 1 << 22


def target_scores(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (NLL in nats, whether the target is the most likely token), float64 and bool, on all ranks.

    ``logits_NV`` are columns [rank * V, (rank + 1) * V). NLL is log sum exp - logit of the target over all
    columns, as in training; columns from ``vocab_size`` on, which only pad, can't be the most likely token.
    Of equal logits the lowest id is. Sums run in float64, a chunk of positions at a time.
    """
    columns = logits_NV.size(1)
    first = group.rank() * columns
    real = max(min(vocab_size - first, columns), 0)
    local_N = targets_N - first
    owned_N = (local_N >= 0) & (local_N < columns)
    index_N = local_N.clamp(0, columns - 1)

    n = len(targets_N)
    highest_2N = logits_NV.new_full((2, n), -torch.inf, dtype=torch.float64)
    sums_2N = torch.zeros_like(highest_2N)
    best_N = torch.full_like(targets_N, vocab_size)
    rows = max(_CHUNK_ELEMENTS // columns, 1)
    for begin in range(0, n, rows):
        chunk = slice(begin, begin + rows)
        wide_MV = logits_NV[chunk].double()
        highest_2N[0, chunk] = wide_MV.logsumexp(-1)
        if real:
            highest_2N[1, chunk], best_N[chunk] = wide_MV[:, :real].max(-1)
        sums_2N[1, chunk] = wide_MV.gather(1, index_N[chunk, None])[:, 0]
    sums_2N[1].mul_(owned_N)
    local_best_N = highest_2N[1].clone()
    log_sum_N = highest_2N[0].clone()

    dist.all_reduce(highest_2N, dist.ReduceOp.MAX, group=group)
    sums_2N[0] = (log_sum_N - highest_2N[0]).exp()
    dist.all_reduce(sums_2N, group=group)
    best_N = torch.where(local_best_N == highest_2N[1], best_N + first, torch.iinfo(best_N.dtype).max)
    dist.all_reduce(best_N, dist.ReduceOp.MIN, group=group)
    nll_N = sums_2N[0].log() + highest_2N[0] - sums_2N[1]
    return nll_N, best_N == targets_N


def gather_vocabulary(logits_NV: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the logits of the whole vocabulary, on all ranks."""
    parts = [torch.empty_like(logits_NV) for _ in range(group.size())]
    dist.all_gather(parts, logits_NV.contiguous(), group=group)
    return torch.cat(parts, dim=1)
