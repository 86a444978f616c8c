"""What a rank sees in each step, taken by hooks of the tests' own, without the package."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sharding import Place, global_parameters, load_weights, this_place
from toy_gpt import ToyGPT


@dataclass
class Shard:
    """A run of a rank's parameter: the flat elements from `start` on, of the parameter's whole `name`."""

    name: str
    start: int
    values: np.ndarray


@dataclass
class MicroBatch:
    """Per-token losses [b, s/cp], mask and labels of one micro-batch of the last stage."""

    losses: np.ndarray
    mask: np.ndarray
    labels: np.ndarray
    ahead: list[np.ndarray]
    """Losses of each depth of multi-token prediction."""


@dataclass
class Routed:
    """One micro-batch's tokens in one router: logits [tokens, experts], the map after any dropping."""

    logits: np.ndarray
    kept: np.ndarray


@dataclass
class StepCapture:
    """All that one rank saw in one step."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    held_out: list[MicroBatch] = field(default_factory=list)
    """Those of an evaluation after this step."""
    logits: list[np.ndarray] = field(default_factory=list)
    """[s, b, v/tp] of each micro-batch, padding columns included."""
    routing: dict[int, list[Routed]] = field(default_factory=dict)
    """Global layer (from 0) -> its micro-batches."""
    gradients: list[Shard] = field(default_factory=list)
    clipped: list[Shard] = field(default_factory=list)
    grad_norm: float | None = None
    """Megatron's own."""


@dataclass
class RankCapture:
    """A rank's steps, from the first on."""

    place: Place
    is_last_stage: bool
    sequence_parallel: bool
    steps: list[StepCapture]


class Recorder:
    """Wraps the script and Megatron in a rank, before the package does."""

    def __init__(self, script: Any, model: ToyGPT, *, load: bool = True) -> None:
        self._model = model
        self._load = load
        self._labels: torch.Tensor | None = None
        self._heads: list[np.ndarray] = []
        self._logits = np.empty(0)
        self.steps: list[StepCapture] = []
        self._wrap(script)

    def result(self) -> RankCapture:
        from megatron.core import parallel_state as mpu
        from megatron.training import get_args

        return RankCapture(
            this_place(),
            mpu.is_pipeline_last_stage(ignore_virtual=True),
            get_args().sequence_parallel,
            self.steps,
        )

    def _wrap(self, script: Any) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.training import training

        get_batch, loss_func = script.get_batch, script.loss_func

        def watched_batch(*args: Any, **kwargs: Any) -> Any:
            batch = get_batch(*args, **kwargs)
            self._labels = batch["labels"]
            return batch

        def watched_loss(mask: torch.Tensor, losses: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            *ahead, _ = self._heads
            seen = MicroBatch(_array(losses), _array(mask), self._labels.numpy(), ahead)
            step = self.steps[-1]
            if torch.is_grad_enabled():
                step.micro_batches.append(seen)
                step.logits.append(self._logits)
            else:
                step.held_out.append(seen)
            self._heads = []
            return loss_func(mask, losses, *args, **kwargs)

        script.get_batch, script.loss_func = watched_batch, watched_loss

        train_step = training.train_step

        @functools.wraps(train_step)
        def watched_step(*args: Any, **kwargs: Any) -> Any:
            self.steps.append(StepCapture())
            outcome = train_step(*args, **kwargs)
            self.steps[-1].grad_norm = outcome[5]
            return outcome

        training.train_step = watched_step

        build_optimizer = training.get_megatron_optimizer

        @functools.wraps(build_optimizer)
        def optimizer_of_loaded_model(config: Any, chunks: list[Any], *args: Any, **kwargs: Any) -> Any:
            if self._load:
                load_weights(chunks, self._model)
            return build_optimizer(config, chunks, *args, **kwargs)

        training.get_megatron_optimizer = optimizer_of_loaded_model

        setup = training.setup_model_and_optimizer

        @functools.wraps(setup)
        def watched_setup(*args: Any, **kwargs: Any) -> Any:
            chunks, optimizer, scheduler = setup(*args, **kwargs)
            self._watch_optimizer(chunks, optimizer)
            return chunks, optimizer, scheduler

        training.setup_model_and_optimizer = watched_setup

        head_loss = GPTModel.compute_language_model_loss

        @functools.wraps(head_loss)
        def watched_head(chunk: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            """Once for each depth of multi-token prediction, last for the main head; it overwrites logits."""
            self._logits = _array(logits)
            losses = head_loss(chunk, labels, logits)
            self._heads.append(_array(losses))
            return losses

        GPTModel.compute_language_model_loss = watched_head
        routing = TopKRouter.routing

        @functools.wraps(routing)
        def watched_routing(router: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            probs, routing_map = routing(router, logits, *args, **kwargs)
            if torch.is_grad_enabled() and router.training:
                seen = Routed(_array(logits).reshape(routing_map.shape), routing_map.numpy().copy())
                self.steps[-1].routing.setdefault(router.layer_number - 1, []).append(seen)
            return probs, routing_map

        TopKRouter.routing = watched_routing

    def _watch_optimizer(self, chunks: list[Any], optimizer: Any) -> None:
        prepare, consume = optimizer.prepare_grads, optimizer.step_with_ready_grads

        def watched_prepare(*args: Any, **kwargs: Any) -> Any:
            found_inf = prepare(*args, **kwargs)
            self.steps[-1].gradients = self._gradients(chunks, optimizer)
            return found_inf

        def watched_consume(*args: Any, **kwargs: Any) -> Any:
            self.steps[-1].clipped = self._gradients(chunks, optimizer)
            return consume(*args, **kwargs)

        optimizer.prepare_grads, optimizer.step_with_ready_grads = watched_prepare, watched_consume

    def _gradients(self, chunks: list[Any], optimizer: Any) -> list[Shard]:
        """The gradient that the optimizer holds for each parameter, or for this rank's shard of it."""
        from megatron.core.utils import unwrap_model

        place = this_place()
        leaves = getattr(optimizer, "chained_optimizers", [optimizer])
        return [
            Shard(name, *_held_gradient(parameter, leaves))
            for chunk in unwrap_model(chunks)
            for name, parameter in global_parameters(chunk, place, self._model)
        ]


def _held_gradient(parameter: torch.nn.Parameter, leaves: list[Any]) -> tuple[int, np.ndarray]:
    """Where the optimizer's gradient of a parameter begins, flat, and its values; empty for no shard."""
    for leaf in leaves:
        if not hasattr(leaf, "model_param_group_index_map"):  # only the distributed optimizer has shards
            continue
        if parameter in leaf.model_param_group_index_map:
            group, order = leaf.model_param_group_index_map[parameter]
            shard = leaf.optimizer.param_groups[group]["params"][order]
            return leaf._get_model_param_range_map(parameter)["param"].start, _array(shard.grad).reshape(-1)
    if any(hasattr(leaf, "model_param_group_index_map") for leaf in leaves):
        return 0, np.empty(0, np.float32)
    held = getattr(parameter, "main_param", parameter)
    return 0, _array(held.grad).reshape(-1)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().clone().float().numpy()
