"""torch.distributed on the runtime: what NCCL takes and gloo doesn't, against the same sums done by hand."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_probes.cpu.fork import fork_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

RANKS = 3


def own(rank: int, size: int = 4) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float64) * (rank + 1) + rank


def joined(fn: Any) -> list[Any]:
    return fork_ranks(fn, RANKS, timeout_s=120, preloaded=True)


def join() -> None:
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=torch.device("cuda", 0))


def backends(rank: int) -> list[str]:
    join()
    dist.barrier(device_ids=[0])
    group = dist.new_group([0, 1, 2], backend="nccl")
    plain = dist.new_group([0, 1])
    names = [dist.get_backend(), dist.get_backend(group)]
    return names if rank == 2 else [*names, dist.get_backend(plain)]


def test_nccl_becomes_gloo() -> None:
    assert joined(backends) == [["gloo"] * 3, ["gloo"] * 3, ["gloo"] * 2]


def averages(rank: int) -> list[list[float]]:
    join()
    results = []
    for async_op in (False, True):
        reduced = own(rank)
        work = dist.all_reduce(reduced, op=dist.ReduceOp.AVG, async_op=async_op)
        scattered = torch.empty(2, dtype=torch.float64)
        other = dist.reduce_scatter_tensor(scattered, own(rank, 6), op=dist.ReduceOp.AVG, async_op=async_op)
        if async_op:
            assert work.wait()
            assert other.is_completed()
        results += [reduced.tolist(), scattered.tolist()]
    return results


def test_averages() -> None:
    whole = sum(own(rank) for rank in range(RANKS)) / RANKS
    parts = (sum(own(rank, 6) for rank in range(RANKS)) / RANKS).chunk(RANKS)
    for rank, results in enumerate(joined(averages)):
        assert results == [whole.tolist(), parts[rank].tolist()] * 2


def sums(rank: int) -> list[list[float]]:
    join()
    reduced = own(rank)
    dist.all_reduce(reduced)
    highest = own(rank)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, async_op=True).wait()
    scattered = torch.empty(2, dtype=torch.float64)
    dist.reduce_scatter_tensor(scattered, own(rank, 6))
    return [reduced.tolist(), highest.tolist(), scattered.tolist()]


def test_other_reductions_pass_through() -> None:
    whole = sum(own(rank) for rank in range(RANKS))
    highest = torch.stack([own(rank) for rank in range(RANKS)]).amax(0)
    parts = sum(own(rank, 6) for rank in range(RANKS)).chunk(RANKS)
    for rank, results in enumerate(joined(sums)):
        assert results == [x.tolist() for x in (whole, highest, parts[rank])]


def uneven(rank: int) -> tuple[list[list[float]], list[float]]:
    join()
    gathered = [torch.empty(source + 1, dtype=torch.float64) for source in range(RANKS)]
    dist.all_gather(gathered, own(rank, rank + 1), async_op=True).wait()
    scattered = torch.empty(rank + 1, dtype=torch.float64)
    inputs = [own(rank, destination + 1) for destination in range(RANKS)]
    dist.reduce_scatter(scattered, inputs)
    assert all(torch.equal(x, own(rank, i + 1)) for i, x in enumerate(inputs))
    return [x.tolist() for x in gathered], scattered.tolist()


def test_unequal_shapes() -> None:
    for rank, (gathered, scattered) in enumerate(joined(uneven)):
        assert gathered == [own(source, source + 1).tolist() for source in range(RANKS)]
        assert scattered == sum(own(source, rank + 1) for source in range(RANKS)).tolist()
