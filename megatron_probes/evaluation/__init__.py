"""Evaluation of checkpoints on held-out data and tasks (Specification, section 10).

`load_suite` reads what is to be evaluated, `run_suite` runs it on a `Scorer`, `Series` keeps the results.
The Megatron side, `megatron_probes.evaluation.megatron`, is imported only where it is used.
"""

from megatron_probes.evaluation.results import CheckpointIdentity, TaskResult
from megatron_probes.evaluation.runner import run_suite, suite_parts
from megatron_probes.evaluation.scoring import Row, RowScore, Scorer
from megatron_probes.evaluation.series import Series
from megatron_probes.evaluation.suite import Suite, SuiteError, load_suite
from megatron_probes.evaluation.tasks import Context
from megatron_probes.evaluation.tokenization import build_tokenizer

__all__ = [
    "CheckpointIdentity",
    "Context",
    "Row",
    "RowScore",
    "Scorer",
    "Series",
    "Suite",
    "SuiteError",
    "TaskResult",
    "build_tokenizer",
    "load_suite",
    "run_suite",
    "suite_parts",
]
