"""Everything here that knows Megatron: checkpoints, models in any layout, scoring, use inside training."""

from megatron_probes.evaluation.megatron.checkpoint import Checkpoint, find_checkpoints
from megatron_probes.evaluation.megatron.evaluate import evaluate_checkpoints
from megatron_probes.evaluation.megatron.in_loop import evaluate_in_loop
from megatron_probes.evaluation.megatron.layout import Layout
from megatron_probes.evaluation.megatron.model import LoadedModel, build_model, initialize, load_weights
from megatron_probes.evaluation.megatron.scorer import MegatronScorer

__all__ = [
    "Checkpoint",
    "Layout",
    "LoadedModel",
    "MegatronScorer",
    "build_model",
    "evaluate_checkpoints",
    "evaluate_in_loop",
    "find_checkpoints",
    "initialize",
    "load_weights",
]
