"""A Megatron model as a scorer, in any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_probes.evaluation.megatron.pipeline import Pipeline
from megatron_probes.evaluation.megatron.vocab_parallel import gather_vocabulary, target_scores
from megatron_probes.evaluation.scoring import Row, RowScore, pad, plan_batches

T = TypeVar("T")

PADDING = 0
"""Any id does: no scored position sees padding."""


@dataclass(frozen=True)
class BatchLimits:
    """How much goes through each copy of the model at once."""

    rows: int = 16
    tokens: int = 16384
    """With padding."""


@dataclass(frozen=True)
class _Picked:
    """Logits at the positions of a batch that were asked for and that this rank holds."""

    logits_NV: torch.Tensor
    """V: the vocabulary's columns of this rank."""
    member_N: np.ndarray
    """Which input."""
    position_N: np.ndarray
    """Which of the input's tokens."""


class MegatronScorer:
    """Scores rows by a model whose chunks this rank holds, in whatever layout Megatron's groups describe.

    Data-parallel copies share the rows of each batch. All copies run batches of one shape, since experts may
    lie over them. Padding stands behind the tokens, where a causal model can't see it; on the left it is
    masked, which only Megatron's own attention can (not Transformer Engine's, and not with context
    parallelism).
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        *,
        context_length: int,
        vocab_size: int,
        limits: BatchLimits | None = None,
        padding_side: Literal["right", "left"] = "right",
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        self.context_length = context_length
        self.is_writer = dist.get_rank() == 0
        self._vocab_size = vocab_size
        self._limits = limits or BatchLimits()
        self._side = padding_side
        self._pipeline = Pipeline(chunks)
        self._config = get_model_config(chunks[0])
        self._tp = parallel_state.get_tensor_model_parallel_group()
        self._pp = parallel_state.get_pipeline_model_parallel_group()
        self._cp = parallel_state.get_context_parallel_group()
        self._dp = parallel_state.get_data_parallel_group()
        self._dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def share(self, value: T) -> T:
        """The first rank's ``value`` on every rank."""
        if dist.get_world_size() == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def score(self, rows: Sequence[Row]) -> list[RowScore]:
        """NLL of the targets of ``rows``, and whether each is the most likely token."""
        firsts = np.array([row.first_scored for row in rows], dtype=np.int64)
        counts = np.array([len(row.ids) for row in rows], dtype=np.int64) - firsts
        ends = counts.cumsum()
        found_2T = torch.zeros(2, int(counts.sum()), dtype=torch.float64)
        for picked in self._pick([row.ids[:-1] for row in rows], (firsts - 1).tolist()):
            nexts = zip(picked.member_N, picked.position_N + 1, strict=True)
            targets_N = torch.tensor([rows[i].ids[j] for i, j in nexts])
            scores = target_scores(
                picked.logits_NV, targets_N.cuda(), vocab_size=self._vocab_size, group=self._tp
            )
            member_N = picked.member_N
            cell_N = (ends - counts - firsts)[member_N] + picked.position_N + 1
            found_2T[:, torch.from_numpy(cell_N)] = torch.stack([s.double().cpu() for s in scores])
        nll_T, greedy_T = self._combined(found_2T)
        return [
            RowScore(nll_T[end - n : end], greedy_T[end - n : end] > 0.5)
            for end, n in zip(ends, counts, strict=True)
        ]

    def next_logits(self, contexts: Sequence[Sequence[int]]) -> np.ndarray:
        """Logits (contexts, vocabulary) in float32 of the token that follows each context."""
        found_CV = torch.zeros(len(contexts), self._vocab_size)
        for picked in self._pick(contexts, [len(context) - 1 for context in contexts]):
            whole_NV = gather_vocabulary(picked.logits_NV, self._tp)[:, : self._vocab_size]
            found_CV[torch.from_numpy(picked.member_N)] = whole_NV.float().cpu()
        return self._combined(found_CV)

    def _combined(self, found: torch.Tensor) -> np.ndarray:
        """What all ranks found: each number is known to the last stage of one data-parallel copy."""
        self._pipeline.finish()
        found = found.cuda()
        for group in (self._pp, self._dp_cp):
            if group.size() > 1:
                dist.all_reduce(found, group=group)
        return found.cpu().numpy()

    @torch.no_grad()
    def _pick(self, inputs: Sequence[Sequence[int]], firsts: Sequence[int]) -> Iterator[_Picked]:
        """Run ``inputs`` and yield the logits from position ``firsts[i]`` of input i to its end.

        Yields nothing on ranks without the output layer, which run the same batches.
        """
        lengths_I = np.array([len(ids) for ids in inputs], dtype=np.int64)
        firsts_I = np.array(firsts, dtype=np.int64)
        copies, copy = self._dp.size(), self._dp.rank()
        batches = plan_batches(
            lengths_I.tolist(),
            rows=self._limits.rows * copies,
            tokens=self._limits.tokens * copies,
            multiple=self._length_multiple(),
        )
        for batch in batches:
            share = -(-len(batch.members) // copies)
            mine_B = np.array(batch.members[copy * share : (copy + 1) * share], dtype=np.int64)
            rows = [inputs[i] for i in mine_B] + [(PADDING,)] * (share - len(mine_B))
            shift_B = np.zeros(share, dtype=np.int64)
            if self._side == "left":
                shift_B = batch.length - np.array([len(row) for row in rows], dtype=np.int64)
            logits_BSV = self._forward(pad(rows, batch.length, PADDING, self._side), shift_B)
            if logits_BSV is None or not len(mine_B):
                continue
            counts_B = (lengths_I - firsts_I)[mine_B]
            row_N = np.repeat(np.arange(len(mine_B)), counts_B)
            position_N = np.concatenate([np.arange(firsts_I[i], lengths_I[i]) for i in mine_B])
            column_N = self._local_columns(batch.length)[position_N + shift_B[row_N]]
            own_N = column_N >= 0
            if own_N.any():
                at = torch.from_numpy(row_N[own_N]), torch.from_numpy(column_N[own_N])
                yield _Picked(logits_BSV[at[0].cuda(), at[1].cuda()], mine_B[row_N[own_N]], position_N[own_N])

    def _length_multiple(self) -> int:
        """What the length of a batch must be a multiple of, to lie evenly over the ranks."""
        sequence = self._tp.size() if self._config.sequence_parallel else 1
        return sequence * (2 * self._cp.size() if self._cp.size() > 1 else 1)

    def _own_columns(self, length: int) -> np.ndarray:
        """Positions that this rank holds: of 2c chunks, context-parallel rank r has chunks r and 2c-1-r."""
        size, rank = self._cp.size(), self._cp.rank()
        if size == 1:
            return np.arange(length)
        chunks = np.arange(length).reshape(2 * size, -1)
        return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])

    def _local_columns(self, length: int) -> np.ndarray:
        """For each position its place among this rank's, -1 where another rank holds it."""
        places = np.full(length, -1, dtype=np.int64)
        own = self._own_columns(length)
        places[own] = np.arange(len(own))
        return places

    def _forward(self, tokens_BS: np.ndarray, shift_B: np.ndarray) -> torch.Tensor | None:
        rows, length = tokens_BS.shape
        column_S = np.arange(length)
        positions_BS = np.maximum(column_S - shift_B[:, None], 0)
        mask = None
        if self._side == "left":
            future_SS = column_S > column_S[:, None]
            mask = torch.from_numpy(future_SS | (column_S < shift_B[:, None])[:, None, :])[:, None].cuda()
        own = self._own_columns(length)
        hidden = (
            len(own) // (self._tp.size() if self._config.sequence_parallel else 1),
            rows,
            self._config.hidden_size,
        )
        tokens, positions = (
            torch.from_numpy(np.ascontiguousarray(x[:, own])) for x in (tokens_BS, positions_BS)
        )
        return self._pipeline.forward(tokens.cuda(), positions.cuda(), mask, hidden)
