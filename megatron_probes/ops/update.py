"""Updates that a BF16 copy of the weights does not see. Specification, section 6."""

import torch
from torch import Tensor

from megatron_probes.ops import library

NOOP_COLUMNS = ("noop", "nonzero")

_WIDE = (torch.float32, torch.bfloat16)


def bf16_update_noop(
    weight: Tensor,
    update: Tensor,
    out: Tensor | None = None,
    *,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> Tensor:
    """Count the updates that leave the BF16 weight where it was: float64 [2], columns ``NOOP_COLUMNS``.

    ``nonzero`` counts ``update != 0`` (NaN included); ``noop`` those of them with ``bf16(weight + update) ==
    bf16(weight)``, the sum taken in float32 and rounded to nearest even. Equality is of values: NaN equals
    nothing, -0 equals 0.

    weight, update: one shape; float32 or bfloat16 each.
    out, accumulate, enabled: as in :func:`megatron_probes.ops.tensor_stats`; counts are added.
    Raises TypeError for another dtype, ValueError for shapes that differ. Specification, section 6.
    """
    return _count("bf16_update_noop", weight, update, out, accumulate, enabled)


def bf16_update_noop_master(
    before: Tensor,
    after: Tensor,
    out: Tensor | None = None,
    *,
    accumulate: bool = False,
    enabled: Tensor | None = None,
) -> Tensor:
    """Count the steps of float32 master weights that their BF16 copy does not see: float64 [2],
    ``NOOP_COLUMNS``.

    ``nonzero`` counts ``after != before``; ``noop`` those of them with ``bf16(after) == bf16(before)``.

    before, after: float32 (or bfloat16), one shape. Everything else as in :func:`bf16_update_noop`.
    """
    return _count("bf16_update_noop_master", before, after, out, accumulate, enabled)


def _count(
    name: str, first: Tensor, second: Tensor, out: Tensor | None, accumulate: bool, enabled: Tensor | None
) -> Tensor:
    if first.dtype not in _WIDE or second.dtype not in _WIDE:
        raise TypeError(f"{name}: got {first.dtype} and {second.dtype}; use float32 or bfloat16")
    if first.shape != second.shape:
        raise ValueError(f"{name}: shapes differ: {list(first.shape)} and {list(second.shape)}")
    out = library.slot(out, (len(NOOP_COLUMNS),), first.device)
    library.notice(first)
    getattr(torch.ops.megatron_probes, name)(first, second, out, accumulate, enabled)
    return out


def _write_counts(moved: Tensor, same: Tensor, out: Tensor, accumulate: bool, enabled: Tensor | None) -> None:
    counts = torch.stack([(moved & same).sum(), moved.sum()]).double()
    library.write(out, out + counts if accumulate else counts, enabled)


def _update_reference(
    weight: Tensor, update: Tensor, out: Tensor, accumulate: bool = False, enabled: Tensor | None = None
) -> None:
    moved_to = (weight.float() + update.float()).bfloat16()
    _write_counts(update != 0, moved_to == weight.bfloat16(), out, accumulate, enabled)


def _master_reference(
    before: Tensor, after: Tensor, out: Tensor, accumulate: bool = False, enabled: Tensor | None = None
) -> None:
    _write_counts(after != before, after.bfloat16() == before.bfloat16(), out, accumulate, enabled)


library.define(
    "bf16_update_noop(Tensor weight, Tensor update, Tensor(a!) out, bool accumulate=False, "
    "Tensor? enabled=None) -> ()",
    _update_reference,
)
library.define(
    "bf16_update_noop_master(Tensor before, Tensor after, Tensor(a!) out, bool accumulate=False, "
    "Tensor? enabled=None) -> ()",
    _master_reference,
)
