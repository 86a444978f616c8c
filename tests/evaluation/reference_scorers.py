"""Scorers without a network: exact models whose answers a test can know."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from megatron_probes.evaluation import Context, Row, RowScore, build_tokenizer
from megatron_probes.evaluation.suite import TokenizerSpec

VOCAB_SIZE = 257


class TableScorer:
    """A trigram model: the two tokens before decide the logits, drawn once for each pair."""

    is_writer = True

    def __init__(self, context_length: int = 64) -> None:
        self.context_length = context_length
        self.calls = 0
        self.rows = 0

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        seed = zlib.crc32(repr(tuple(ids[-2:])).encode())
        return np.random.default_rng(seed).normal(size=VOCAB_SIZE) * 3.0

    def score(self, rows: Sequence[Row]) -> list[RowScore]:
        self.calls += 1
        self.rows += len(rows)
        assert all(row.num_inputs <= self.context_length for row in rows)
        return [self._score(row) for row in rows]

    def _score(self, row: Row) -> RowScore:
        nll, greedy = [], []
        for j in range(row.first_scored, len(row.ids)):
            logits_V = self.logits(row.ids[:j])
            nll.append(float(np.log(np.exp(logits_V).sum()) - logits_V[row.ids[j]]))
            greedy.append(bool(logits_V.argmax() == row.ids[j]))
        return RowScore(np.array(nll), np.array(greedy))

    def next_logits(self, contexts: Sequence[Sequence[int]]) -> np.ndarray:
        assert all(len(context) <= self.context_length for context in contexts)
        return np.stack([self.logits(context) for context in contexts]).astype(np.float32)

    def share(self, value: object) -> object:
        return value


class GivenScorer(TableScorer):
    """Each target's NLL is ``nll(row, position)``."""

    def __init__(self, nll: Callable[[Row, int], float], context_length: int = 64) -> None:
        super().__init__(context_length)
        self._nll = nll

    def _score(self, row: Row) -> RowScore:
        positions = range(row.first_scored, len(row.ids))
        nll_N = np.array([self._nll(row, j) for j in positions])
        return RowScore(nll_N, np.zeros(len(nll_N), dtype=bool))


class WritingScorer(TableScorer):
    """Writes ``answer(prompt)`` after each prompt, byte by byte, then ends the document."""

    def __init__(self, answer: Callable[[str], str], context_length: int = 256) -> None:
        super().__init__(context_length)
        self._answer = answer

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        text = bytes(i for i in ids if i < 256)
        prompt, arrow, written = text.partition(b"->")
        assert arrow, "prompts of these tests end in ->"
        whole = self._answer(prompt.decode()).encode()
        logits_V = np.zeros(VOCAB_SIZE)
        logits_V[whole[len(written)] if len(written) < len(whole) else 256] = 50.0
        return logits_V


def context(scorer: TableScorer, *, run_code: bool = False) -> Context:
    return Context(scorer, build_tokenizer(TokenizerSpec(kind="bytes")), run_code=run_code)  # type: ignore[arg-type]
