"""One batch through all pipeline stages, forward only.

Every rank knows every batch's shape, so stages hand over plain tensors: no schedule, no exchange of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Pipeline:
    """The stages of a model: this rank's chunks, and the ranks before and after it.

    With virtual stages a batch goes round the ranks once for each chunk.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        from megatron.core import parallel_state
        from megatron.core.utils import get_attr_wrapped_model, get_model_config

        self._chunks = list(chunks)
        self._inner = [
            get_attr_wrapped_model(chunk, "set_input_tensor", return_model_obj=True) for chunk in chunks
        ]
        self._config = get_model_config(self._chunks[0])
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._rank, self._size = self._group.rank(), self._group.size()
        self._sent: list[Any] = []
        self._in_flight: list[torch.Tensor] = []

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the output layer."""
        return self._rank == self._size - 1

    def forward(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor,
        mask: torch.Tensor | None,
        hidden_SBH: tuple[int, ...],
    ) -> torch.Tensor | None:
        """Return the logits (B, S, vocabulary of this rank) on the last stage, None on the others.

        ``hidden_SBH`` is the shape of what stages hand over.
        """
        logits = None
        for i, (chunk, inner) in enumerate(zip(self._chunks, self._inner, strict=True)):
            is_first = self._rank == 0 and i == 0
            is_last = self.is_last and i == len(self._chunks) - 1
            if not is_first:
                inner.set_input_tensor(self._receive(hidden_SBH))
            out = chunk(tokens_BS, positions_BS, mask)
            if not is_first:
                inner.set_input_tensor(None)  # the live model must not keep the batch
            if is_last:
                logits = out
            else:
                self._send(out)
        return logits

    def _receive(self, shape: tuple[int, ...]) -> torch.Tensor:
        hidden = torch.empty(shape, dtype=self._config.pipeline_dtype, device=torch.cuda.current_device())
        dist.recv(hidden, group=self._group, group_src=(self._rank - 1) % self._size)
        return hidden

    def _send(self, hidden: torch.Tensor) -> None:
        hidden = hidden.contiguous()
        self._in_flight.append(hidden)
        self._sent.append(dist.isend(hidden, group=self._group, group_dst=(self._rank + 1) % self._size))

    def finish(self) -> None:
        """Wait until the next stage has taken everything."""
        for work in self._sent:
            work.wait()
        self._sent.clear()
        self._in_flight.clear()
