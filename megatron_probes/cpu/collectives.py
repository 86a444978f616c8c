"""torch.distributed on gloo: the calls that name NCCL or that gloo does not take as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Done:
    """The handle of work that was finished before it was returned."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def gloo(backend: Any) -> Any:
    """gloo for any backend string that holds NCCL; else `backend` itself."""
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend


def init_process_group(init: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` on gloo, without a device to bind to."""

    @functools.wraps(init)
    def on_gloo(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return init(gloo(backend) or "gloo", *args, **kwargs)

    return on_gloo


def new_group(new: Callable[..., Any]) -> Callable[..., Any]:
    """`new_group` on gloo; NCCL's options are dropped."""

    @functools.wraps(new)
    def on_gloo(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kwargs.pop("device_id", None)
        return new(ranks, timeout, gloo(backend), None, *args, **kwargs)

    return on_gloo


def barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """`barrier` without the devices that NCCL wants."""

    @functools.wraps(original)
    def on_gloo(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    return on_gloo


def all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """`all_reduce` with AVG, which gloo lacks, as a synchronous sum and a division."""

    @functools.wraps(original)
    def on_gloo(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != dist.ReduceOp.AVG:
            return original(tensor, op=op, group=group, async_op=async_op)
        original(tensor, op=dist.ReduceOp.SUM, group=group)
        tensor.div_(dist.get_world_size(group))
        return Done() if async_op else None

    return on_gloo


def reduce_scatter_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """`reduce_scatter_tensor` with AVG as a synchronous sum and a division."""

    @functools.wraps(original)
    def on_gloo(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if op != dist.ReduceOp.AVG:
            return original(output, input, op=op, group=group, async_op=async_op)
        original(output, input, op=dist.ReduceOp.SUM, group=group)
        output.div_(dist.get_world_size(group))
        return Done() if async_op else None

    return on_gloo


def _uneven(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.shape != tensors[0].shape for tensor in tensors)


def all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather` into tensors of unequal shapes, which NCCL takes, as synchronous broadcasts."""

    @functools.wraps(original)
    def on_gloo(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if not _uneven(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for source, part in enumerate(tensor_list):
            dist.broadcast(part, group=group, group_src=source)
        return Done() if async_op else None

    return on_gloo


def reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """`reduce_scatter` from tensors of unequal shapes as synchronous all-reduces."""

    @functools.wraps(original)
    def on_gloo(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _uneven(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        for destination, part in enumerate(input_list):
            total = part.clone()
            dist.all_reduce(total, op=op, group=group)
            if destination == dist.get_rank(group):
                output.copy_(total)
        return Done() if async_op else None

    return on_gloo
