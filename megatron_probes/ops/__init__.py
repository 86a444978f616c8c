"""Fused statistics: each looks at a tensor once and adds a few numbers into a slot.

Every operator has a plain-torch reference beside it. The reference serves where no compiled kernel is loaded
and is what the tests compare the kernels against. Importing this room loads the compiled libraries but
initialises no device.
"""

from megatron_probes.ops.bins import BIN_RATIO, HIGHEST_EDGE, LOWEST_EDGE, NUM_BINS, bin_edges, bin_index
from megatron_probes.ops.library import compiled_devices, load
from megatron_probes.ops.residual import RESIDUAL_COLUMNS, RESIDUAL_HISTOGRAMS, TOKEN_COLUMNS, residual_stats
from megatron_probes.ops.routing import routing_histogram, topk_margin_histogram
from megatron_probes.ops.stats import (
    MOMENT_COLUMNS,
    STATS_COLUMNS,
    combine_moments,
    multi_tensor_stats,
    tensor_stats,
)
from megatron_probes.ops.update import NOOP_COLUMNS, bf16_update_noop, bf16_update_noop_master

load()

__all__ = [
    "BIN_RATIO",
    "HIGHEST_EDGE",
    "LOWEST_EDGE",
    "MOMENT_COLUMNS",
    "NOOP_COLUMNS",
    "NUM_BINS",
    "RESIDUAL_COLUMNS",
    "RESIDUAL_HISTOGRAMS",
    "STATS_COLUMNS",
    "TOKEN_COLUMNS",
    "bf16_update_noop",
    "bf16_update_noop_master",
    "bin_edges",
    "bin_index",
    "combine_moments",
    "compiled_devices",
    "multi_tensor_stats",
    "residual_stats",
    "routing_histogram",
    "tensor_stats",
    "topk_margin_histogram",
]
