"""What the media adds: the score of a task with the media less its score without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_probes.evaluation.documents import Item
from megatron_probes.evaluation.suite import MediaGainTask
from megatron_probes.evaluation.tasks.base import BuildTask, Context, Outcome, Summary, Task


class MediaGain:
    """Every item is scored twice by the same task: with its media in the prompt, and with ``without``.

    Items without media can't be scored, so both scores are means over the same items.
    """

    score_name = "media_gain"

    def __init__(self, spec: MediaGainTask, context: Context, build: BuildTask) -> None:
        self._spec = spec
        self._with = lambda media: build(spec.scored, context, {"media": media})
        self._summary: Task[Any] = build(spec.scored, context, {"media": spec.without})

    def prepare(self, item: Item) -> tuple[Any, Any]:
        media = item.value(self._spec.media_field)
        return self._with(media).prepare(item), self._summary.prepare(item)

    def score(self, prepared: Sequence[tuple[Any, Any]]) -> list[Outcome]:
        # What is prepared holds the prompt, so one task scores both sides.
        scores = [self._summary.score([pair[side] for pair in prepared]) for side in (0, 1)]
        return [
            {"line": shown["line"], "with_media": shown, "without_media": hidden}
            for shown, hidden in zip(*scores, strict=True)
        ]

    def summarize(self, outcomes: Sequence[Outcome]) -> Summary:
        sides = ("with_media", "without_media")
        results = {side: self._summary.summarize([outcome[side] for outcome in outcomes]) for side in sides}
        name = self._summary.score_name
        values: dict[str, float | int | None] = {
            f"{name}_{side}": results[side].values[name] for side in sides
        }
        shown, hidden = (values[f"{name}_{side}"] for side in sides)
        values["media_gain"] = None if shown is None or hidden is None else shown - hidden
        counts = {f"{n}_{side}": c for side in sides for n, c in results[side].counts.items()}
        return Summary(values, counts)
