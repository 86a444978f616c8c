"""What Megatron lacks without Transformer Engine or a GPU: norms, context parallelism, dataset helpers."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_HELPERS = "megatron.core.datasets.helpers_cpp"


def lend_dataset_helpers() -> None:
    """Give a checkout, which has no built dataset helpers, the ones of an installed wheel.

    Their source is the same in all supported versions. Nothing is written into the checkout.
    """
    if _has_dataset_helpers():
        return
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for folder in sys.path:
        file = Path(folder, *_HELPERS.split(".")).with_suffix(suffix)
        if file.is_file():
            loader = importlib.machinery.ExtensionFileLoader(_HELPERS, str(file))
            sys.modules[_HELPERS] = loader.load_module()
            return


def compile_without_helpers(build: Callable[[], None]) -> Callable[[], None]:
    """`compile_helpers`, which runs `make`, only where built helpers neither are there nor could be lent."""

    def build_missing() -> None:
        if not _has_dataset_helpers():
            build()

    return build_missing


def _has_dataset_helpers() -> bool:
    return _HELPERS in sys.modules or importlib.util.find_spec(_HELPERS) is not None


def torch_norm(_: Callable[..., Any]) -> staticmethod[..., torch.nn.Module]:
    """`WrappedTorchNorm.__new__`, which refuses sequence parallelism.

    All it needs is the mark by which finalize_model_grads all-reduces the weights' gradients over TP.
    """

    def new(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> torch.nn.LayerNorm | torch.nn.RMSNorm:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](normalized_shape=hidden_size, eps=eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(new)


def attention_init(build: Callable[..., None]) -> Callable[..., None]:
    """`DotProductAttention.__init__`, which asserts that there is no context parallelism."""

    @functools.wraps(build)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cp_size = config.context_parallel_size
        config.context_parallel_size = 1
        try:
            build(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = cp_size

    return init


def attention_forward(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`DotProductAttention.forward` with context parallelism, which only Transformer Engine's has.

    Queries (s/c, b, heads, d) stay sharded in Megatron's zigzag order: of 2c chunks of the sequence, rank r
    holds chunks r and 2c-1-r. Keys and values are gathered over the group and put in order.
    """

    @functools.wraps(attend)
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        size = self.config.context_parallel_size
        if size == 1:
            return attend(self, query, key, value, attention_mask, *args, **kwargs)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = getattr(self.pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        chunk = query.size(0) // 2
        positions = torch.arange(2 * size * chunk).view(2 * size, chunk)
        owned = [positions[[rank, 2 * size - 1 - rank]].flatten() for rank in range(size)]
        in_order = torch.cat(owned).argsort()
        key = gather_from_sequence_parallel_region(key, group=group)[in_order]
        value = gather_from_sequence_parallel_region(value, group=group)[in_order]
        if attention_mask is None:
            mine = owned[group.rank()]
            attention_mask = (positions.flatten()[None, :] > mine[:, None])[None, None]
        return attend(self, query, key, value, attention_mask, *args, **kwargs)

    return forward


def forked_results_queue(make: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint's results travel through a manager process. A spawned one imports Megatron once more in
    every rank, most of the time that a save takes here; forking it is safe where no CUDA context is."""

    @functools.wraps(make)
    def queue(mp_mode: str = "fork") -> Any:
        return make("fork")

    return queue


def without_warm_up(_: Callable[..., None]) -> Callable[..., None]:
    """`_warmup_jit_function` without the warm-up of fused kernels.

    It draws from the "CUDA" generator, as many numbers as the layout makes it. Here that is the CPU generator
    too, so --use-cpu-initialization would give different weights to different layouts.
    """
    return lambda *args, **kwargs: None


def quiet_shared_generator() -> None:
    """Drop the warning of every fork of the RNG tracker that the CPU generator moved: here it must."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
