"""Generation token by token: each next token comes from scoring the whole prefix, without any cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron_probes.evaluation.scoring import Scorer
from megatron_probes.evaluation.tokenization import Tokenizer

Choose = Callable[[int, np.ndarray], int]
"""The next token for (position of the context in what was asked, its logits over the vocabulary)."""


@dataclass
class Generated:
    """What followed a context."""

    ids: list[int] = field(default_factory=list)
    """New tokens, those of a stop string and the end of document included."""
    text: str = ""
    """Before the first stop string."""
    ended_by: Literal["stop", "end_of_document", "length"] = "length"


def greedy(_: int, logits_V: np.ndarray) -> int:
    """The most likely token; the lowest id where several are."""
    return int(logits_V.argmax())


def sampler(seeds: Sequence[Sequence[int]], temperature: float, top_p: float) -> Choose:
    """A choice at random, by a generator of its own for each context, seeded by its entry in ``seeds``.

    A sample depends on its seed alone, never on the batch it was drawn in. ``top_p`` keeps the most likely
    tokens up to that much probability.
    """
    generators = [np.random.Generator(np.random.Philox(np.random.SeedSequence(list(s)))) for s in seeds]

    def choose(context: int, logits_V: np.ndarray) -> int:
        scaled_V = (logits_V.astype(np.float64) - logits_V.max()) / temperature
        weights_V = np.exp(scaled_V)
        order_V = np.argsort(-weights_V, kind="stable")
        cumulative_V = weights_V[order_V].cumsum() / weights_V.sum()
        kept = int(np.searchsorted(cumulative_V, top_p)) + 1 if top_p < 1 else len(order_V)
        kept = min(kept, len(order_V))
        drawn = generators[context].random() * cumulative_V[kept - 1]
        return int(order_V[min(int(np.searchsorted(cumulative_V, drawn, side="right")), kept - 1)])

    return choose


def generate(
    scorer: Scorer,
    tokenizer: Tokenizer,
    contexts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[str],
    choose: Choose = greedy,
) -> list[Generated]:
    """Continue each of ``contexts`` until a stop string, the end of the document or ``max_new_tokens``.

    A context that leaves no room for ``max_new_tokens`` must have been cut by the caller.
    """
    done = [Generated() for _ in contexts]
    running = list(range(len(contexts)))
    for _ in range(max_new_tokens):
        if not running:
            break
        logits_BV = scorer.next_logits([[*contexts[i], *done[i].ids] for i in running])
        running = [
            i
            for i, logits_V in zip(running, logits_BV, strict=True)
            if _goes_on(done[i], choose(i, logits_V), tokenizer, stop)
        ]
    return done


def _goes_on(out: Generated, token: int, tokenizer: Tokenizer, stop: Sequence[str]) -> bool:
    """Add ``token`` to ``out``; False where generation ends with it."""
    out.ids.append(token)
    if token == tokenizer.end_of_document:
        out.ended_by = "end_of_document"
        return False
    out.text = tokenizer.decode(out.ids)
    found = [at for text in stop if (at := out.text.find(text)) >= 0]
    if found:
        out.text, out.ended_by = out.text[: min(found)], "stop"
    return not found


def cut_context(ids: Sequence[int], room: int) -> tuple[tuple[int, ...], bool]:
    """The last ``room`` tokens of a prompt, and whether any were cut off before them."""
    return tuple(ids[-room:]), len(ids) > room
