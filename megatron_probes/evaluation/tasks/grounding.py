"""Overlap of a generated box with the reference box."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_probes.evaluation.documents import Item, ItemFault
from megatron_probes.evaluation.suite import GroundingTask
from megatron_probes.evaluation.tasks.base import Context, Outcome, Summary, total
from megatron_probes.evaluation.tasks.generative import Generation, Prompt
from megatron_probes.formulas.evaluation import Box, iou
from megatron_probes.formulas.ratio import ratio

_NUMBER = r"([-+]?\d+(?:\.\d+)?)"
_BOX = re.compile(r"[\[(<\s]*" + r"[\s,;)(\]\[<>]+".join([_NUMBER] * 4))


@dataclass(frozen=True)
class Question:
    """A prompt with its reference box."""

    prompt: Prompt
    box: Box


class Grounding:
    """IoU of the first four numbers in a row of the generated text with the reference.

    A text without a box scores 0 and is counted. A box whose right is left of its left, or bottom above its
    top, is empty: it overlaps nothing. A reference box that is empty can't be scored and is left out.
    """

    score_name = "iou"

    def __init__(self, spec: GroundingTask, context: Context, values: dict[str, Any] | None = None) -> None:
        self._spec = spec
        self._generation = Generation(spec, context, values)

    def prepare(self, item: Item) -> Question:
        box = item.value(self._spec.box_field)
        numbers = isinstance(box, list) and len(box) == 4 and all(type(x) in (int, float) for x in box)
        if not numbers or not all(math.isfinite(x) for x in box):
            raise ItemFault(
                "wrong_type", f"field {self._spec.box_field!r} must be [left, top, right, bottom]"
            )
        left, top, right, bottom = box
        if right <= left or bottom <= top:
            raise ItemFault("empty_box", f"field {self._spec.box_field!r} is an empty box: {box}")
        return Question(self._generation.prompt(item), (left, top, right, bottom))

    def score(self, prepared: Sequence[Question]) -> list[Outcome]:
        generated = self._generation.continuations([question.prompt for question in prepared])
        return [
            {
                "line": question.prompt.item.line,
                "text": out.text,
                "box": box,
                "iou": 0.0 if box is None else iou(box, question.box),
                "without_box": int(box is None),
                "empty_boxes": int(box is not None and (box[2] <= box[0] or box[3] <= box[1])),
                "prompts_cut": int(question.prompt.cut),
            }
            for question, out in zip(prepared, generated, strict=True)
            for box in [parse_box(out.text)]
        ]

    def summarize(self, outcomes: Sequence[Outcome]) -> Summary:
        names = ("without_box", "empty_boxes", "prompts_cut")
        return Summary(
            {"iou": ratio(math.fsum(outcome["iou"] for outcome in outcomes), len(outcomes))},
            {"items": len(outcomes), **{name: total(outcomes, name) for name in names}},
        )


def parse_box(text: str) -> Box | None:
    """The first four numbers in a row, apart by commas, spaces or brackets: left, top, right, bottom."""
    found = _BOX.search(text)
    if found is None:
        return None
    left, top, right, bottom = (float(number) for number in found.groups())
    return left, top, right, bottom
