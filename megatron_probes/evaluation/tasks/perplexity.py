"""NLL, perplexity and bits per byte of documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_probes.evaluation.documents import Item, ItemFault
from megatron_probes.evaluation.prompts import Prompts, fill
from megatron_probes.evaluation.scoring import Row
from megatron_probes.evaluation.suite import PerplexityTask
from megatron_probes.evaluation.tasks.base import Context, Outcome, Summary, total
from megatron_probes.formulas.evaluation import bits_per_byte, perplexity, strided_windows
from megatron_probes.formulas.ratio import ratio


@dataclass(frozen=True)
class Document:
    """A document's windows with the bytes that each of their targets covers."""

    line: int
    rows: tuple[Row, ...]
    num_bytes: tuple[tuple[int, ...], ...]


class Perplexity:
    """Each token of a document is scored once, whatever the number of windows.

    A long document is read in windows of the model's whole context, ``stride`` tokens apart. A target that
    covers no byte (the end of the document) counts in the NLL, not in bits per byte (Specification,
    section 10).
    """

    score_name = "nll"

    def __init__(self, spec: PerplexityTask, context: Context) -> None:
        self._spec = spec
        self._context = context
        self._prompts = Prompts(context.tokenizer, spec.prefix)
        self._window = context.scorer.context_length + 1  # the last token of a window is only a target
        self._stride = spec.stride or max(self._window // 2, 1)
        strided_windows(2, self._window, self._stride).__next__()  # a stride that can't be used fails here

    def prepare(self, item: Item) -> Document:
        text = item.text(self._spec.text_field)
        if not text:
            raise ItemFault("empty_document", f"field {self._spec.text_field!r} is empty")
        encoded = self._context.tokenizer.encode(text)
        if not encoded.ids:
            raise ItemFault("empty_document", f"field {self._spec.text_field!r} gives no token")
        before = self._before(item)
        ids = before + encoded.ids
        num_bytes = (0,) * len(before) + encoded.num_bytes
        if self._spec.score_end:
            ids, num_bytes = (*ids, self._context.tokenizer.end_of_document), (*num_bytes, 0)
        first = max(len(before), 1)
        rows, covered = [], []
        for window in strided_windows(len(ids), self._window, self._stride):
            begin = max(window.first_scored, first)
            if begin < window.end:
                rows.append(Row(ids[window.begin : window.end], begin - window.begin))
                covered.append(num_bytes[begin : window.end])
        if not rows:
            raise ItemFault("empty_document", "one token without a prefix has no context to be scored in")
        return Document(item.line, tuple(rows), tuple(covered))

    def _before(self, item: Item) -> tuple[int, ...]:
        if not self._spec.context:
            return self._prompts.prefix_ids()
        return self._prompts.context(fill(self._spec.context, item))

    def score(self, prepared: Sequence[Document]) -> list[Outcome]:
        scores = iter(self._context.scorer.score([row for document in prepared for row in document.rows]))
        outcomes = []
        for document in prepared:
            nll: list[float] = []
            num_bytes: list[int] = []
            for covered in document.num_bytes:
                nll.extend(next(scores).nll_N.tolist())
                num_bytes.extend(covered)
            with_bytes = [x for x, n in zip(nll, num_bytes, strict=True) if n]
            outcomes.append(
                {
                    "line": document.line,
                    "nll": math.fsum(nll),
                    "targets": len(nll),
                    "nll_with_bytes": math.fsum(with_bytes),
                    "targets_without_bytes": len(nll) - len(with_bytes),
                    "bytes": sum(num_bytes),
                    "windows": len(document.rows),
                }
            )
        return outcomes

    def summarize(self, outcomes: Sequence[Outcome]) -> Summary:
        targets, num_bytes = total(outcomes, "targets"), total(outcomes, "bytes")
        nll = ratio(math.fsum(float(outcome["nll"]) for outcome in outcomes), targets)
        exponential = None if nll is None else perplexity(nll)
        bpb = bits_per_byte(math.fsum(float(outcome["nll_with_bytes"]) for outcome in outcomes), num_bytes)
        return Summary(
            {"nll": nll, "ppl": None if exponential is None else exponential.value, "bpb": bpb},
            {
                "documents": len(outcomes),
                "windows": total(outcomes, "windows"),
                "targets": targets,
                "targets_without_bytes": total(outcomes, "targets_without_bytes"),
                "bytes": num_bytes,
                "ppl_overflow": int(exponential is not None and exponential.overflow),
            },
        )
