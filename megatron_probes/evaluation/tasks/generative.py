"""What tasks that generate have in common: prompts that leave room for the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_probes.evaluation.documents import Item, ItemFault
from megatron_probes.evaluation.generation import Choose, Generated, cut_context, generate, greedy
from megatron_probes.evaluation.prompts import Prompts, fill
from megatron_probes.evaluation.suite import GenerationPart
from megatron_probes.evaluation.tasks.base import Context


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, with the item that it came from."""

    item: Item
    ids: tuple[int, ...]
    cut: bool
    """A prompt longer than the context lost its beginning."""


class Generation:
    """Prompts and continuations of a task."""

    def __init__(self, spec: GenerationPart, context: Context, values: dict[str, Any] | None = None) -> None:
        self._spec = spec
        self._context = context
        self._values = values
        self._prompts = Prompts(context.tokenizer, spec.prefix)
        # The last new token is never given to the model.
        self._room = context.scorer.context_length - spec.max_new_tokens + 1

    def prompt(self, item: Item) -> Prompt:
        """The item's prompt, cut at its beginning to leave room for ``max_new_tokens``."""
        if self._room < 1:
            raise ItemFault(
                "too_long",
                f"max_new_tokens {self._spec.max_new_tokens} fills the context of "
                f"{self._context.scorer.context_length} tokens",
            )
        ids, cut = cut_context(self._prompts.context(fill(self._spec.prompt, item, self._values)), self._room)
        return Prompt(item, ids, cut)

    def continuations(self, prompts: Sequence[Prompt], choose: Choose = greedy) -> list[Generated]:
        return generate(
            self._context.scorer,
            self._context.tokenizer,
            [prompt.ids for prompt in prompts],
            max_new_tokens=self._spec.max_new_tokens,
            stop=self._spec.stop,
            choose=choose,
        )
