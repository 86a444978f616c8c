"""One file a kind of task."""

from __future__ import annotations

from typing import Any

from megatron_probes.evaluation.suite import (
    ChoiceTask,
    GreedyTask,
    GroundingTask,
    ItemTask,
    MediaGainTask,
    PassAtKTask,
    PerplexityTask,
    ScoredTask,
)
from megatron_probes.evaluation.tasks.base import Context, Outcome, Summary, Task
from megatron_probes.evaluation.tasks.choice import MultipleChoice
from megatron_probes.evaluation.tasks.greedy import Greedy
from megatron_probes.evaluation.tasks.grounding import Grounding
from megatron_probes.evaluation.tasks.media_gain import MediaGain
from megatron_probes.evaluation.tasks.pass_at_k import PassAtK
from megatron_probes.evaluation.tasks.perplexity import Perplexity

__all__ = ["Context", "Outcome", "Summary", "Task", "build_task"]


def build_task(spec: ItemTask, context: Context) -> Task[Any]:
    """Return the task that ``spec`` describes, bound to the scorer in ``context``.

    Raises ``SuiteError`` where its scorer may not run, ``ValueError`` where the stride doesn't fit the model.
    """
    match spec:
        case PerplexityTask():
            return Perplexity(spec, context)
        case MediaGainTask():
            return MediaGain(spec, context, _scored_task)
        case _:
            return _scored_task(spec, context)


def _scored_task(spec: ScoredTask, context: Context, values: dict[str, Any] | None = None) -> Task[Any]:
    match spec:
        case ChoiceTask():
            return MultipleChoice(spec, context, values)
        case GreedyTask():
            return Greedy(spec, context, values)
        case PassAtKTask():
            return PassAtK(spec, context, values)
        case GroundingTask():
            return Grounding(spec, context, values)
