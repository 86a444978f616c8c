"""Per-token losses, their mask and their sources, picked up around the script's forward step."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_probes.config import ConfigError
from megatron_probes.probes import LossProbe, SourcesProbe
from megatron_probes.session import ProbeSession

ForwardStep = Callable[..., Any]
SourceFunction = Callable[[Any], torch.Tensor]


def load_source_function(name: str | None) -> SourceFunction | None:
    """The function that ``source_function: module:function`` names.

    Raises ConfigError when it cannot be imported or called.
    """
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            [f"source_function: {name!r} can't be imported ({error}). Put its module on PYTHONPATH."]
        ) from None
    if not callable(function):
        raise ConfigError([f"source_function: {name!r} is no function."])
    return function


class LossWatch:
    """Wraps ``forward_step_func``: shows each micro-batch's losses to the loss and the source probe."""

    def __init__(self, session: ProbeSession, source_function: SourceFunction | None = None) -> None:
        self._source_function = source_function
        loss, sources = session.probes.get("loss"), session.probes.get("sources")
        self._loss = loss if isinstance(loss, LossProbe) else None
        # Only the ranks that count sources may need ids: on others a script reads no batch.
        counted = session.topology.owns(("dp", "cp"))
        self._sources = sources if isinstance(sources, SourcesProbe) and counted else None
        if self._loss is not None:
            self._observe_loss = session.guard(self._loss, self._show_loss)
        if self._sources is not None:
            self._observe_sources = session.guard(self._sources, self._show_sources)

    def wrap(self, forward_step: ForwardStep) -> ForwardStep:
        loss, sources = self._loss, self._sources
        if loss is None and sources is None:
            return forward_step

        @functools.wraps(forward_step)
        def watched(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            batches = None
            if sources is not None and sources.gate.open and data_iterator is not None:
                batches = data_iterator = _BatchTap(data_iterator)
            output, loss_func = forward_step(data_iterator, model, *args, **kwargs)

            def observed_loss(losses: Any, *rest: Any, **named: Any) -> Any:
                if loss is not None and loss.gate.open:
                    self._observe_loss(losses, loss_func)
                if sources is not None and sources.gate.open and batches is not None:
                    self._observe_sources(losses, loss_func, batches.batch)
                return loss_func(losses, *rest, **named)

            return output, observed_loss

        return watched

    def _show_loss(self, losses: torch.Tensor, loss_func: Callable[..., Any]) -> None:
        assert self._loss is not None
        self._loss.observe(losses, loss_mask(loss_func, losses))

    def _show_sources(self, losses: torch.Tensor, loss_func: Callable[..., Any], batch: Any) -> None:
        assert self._sources is not None
        if self._source_function is not None:
            ids = self._source_function(batch)
        else:
            ids = _source_ids(batch, self._sources.num_named, losses)
        if ids.dim() > 1 and ids.numel() != losses.numel():
            raise ValueError(
                f"source ids of shape {tuple(ids.shape)} do not fit losses of shape {tuple(losses.shape)}: "
                "with context parallelism give one id a sample"
            )
        self._sources.observe(losses, loss_mask(loss_func, losses), ids)


class _BatchTap:
    """The iterator that a forward step reads, remembering the batch that this step was given.

    The batch belongs to the loss function of the same call, whatever the order in which a pipeline
    schedule runs forward steps of several micro-batches and chunks.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.batch: Any = None

    def __iter__(self) -> _BatchTap:
        return self

    def __next__(self) -> Any:
        self.batch = next(self._batches)
        return self.batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def loss_mask(loss_func: Callable[..., Any], losses: torch.Tensor) -> torch.Tensor:
    """The mask that Megatron's scripts bind to their loss function with functools.partial.

    Raises ValueError for a script that binds none.
    """
    bound = [*getattr(loss_func, "args", ()), *getattr(loss_func, "keywords", {}).values()]
    for value in bound:
        if isinstance(value, torch.Tensor) and value.numel() == losses.numel():
            return value
    raise ValueError(
        "the script's loss function binds no loss mask of the losses' size "
        "(functools.partial(loss_func, loss_mask) is expected)"
    )


def _source_ids(batch: Any, num_named: int, losses: torch.Tensor) -> torch.Tensor:
    """``dataset_id`` [batch] of Megatron's blended dataset; one single data set has none and is source 0."""
    ids = batch.get("dataset_id") if isinstance(batch, dict) else None
    if ids is not None:
        return ids
    if num_named == 1:
        return torch.zeros(losses.size(0), dtype=torch.int64, device=losses.device)
    raise ValueError(
        f"sources: names {num_named} sources, but the batches carry no dataset_id: Megatron adds it when it "
        "blends several data sets (--data-path with weights)"
    )
