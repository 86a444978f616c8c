"""Loading a checkpoint of the distributed optimizer into torch's Adam, Megatron's fallback without TE.

TE's FusedAdam counts steps in its parameter groups. torch's Adam counts them in the state of each parameter:
Megatron reads that state before a first step has made it, overwrites the loaded counts with the old ones, and
leaves all parameters with one counter tensor, which each of them would advance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def sharded_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DistributedOptimizer.sharded_state_dict`, which makes the optimizer's state before it is loaded."""

    @functools.wraps(original)
    def with_state(
        self: Any, model_state: Any = None, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if is_loading and isinstance(self.optimizer, torch.optim.Adam):
            initialize(self.optimizer)
        return original(self, model_state or {}, is_loading, *args, **kwargs)

    return with_state


def initialize(optimizer: torch.optim.Adam) -> None:
    """Give every parameter without a state the one from which its first step would start."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }


def set_parameter_state(original: Callable[..., None]) -> Callable[..., None]:
    """`DistributedOptimizer._set_main_param_and_optimizer_states`, which leaves the step counter alone."""

    @functools.wraps(original)
    def without_step(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        if isinstance(self.optimizer, torch.optim.Adam):
            group, position = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][position]]
            tensors = tensors | {"step": state["step"]}
        original(self, model_param, tensors)

    return without_step


def load_state_dict(original: Callable[..., None]) -> Callable[..., None]:
    """`DistributedOptimizer.load_state_dict`, after which every parameter has a step counter of its own."""

    @functools.wraps(original)
    def with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        if isinstance(self.optimizer, torch.optim.Adam):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    return with_own_steps
