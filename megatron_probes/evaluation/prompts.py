"""Prompt assembly: templates and items to tokens. Its version is part of every task's fingerprint."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_probes.evaluation.documents import Item, ItemFault
from megatron_probes.evaluation.suite import template_fields
from megatron_probes.evaluation.tokenization import Tokenizer

ASSEMBLY_VERSION = 1

Piece = str | tuple[int, ...]
"""A stretch of text, or tokens that stand for themselves (discrete media)."""


def fill(template: str, item: Item, values: Mapping[str, Any] | None = None) -> list[Piece]:
    """Return ``template`` with the item's fields in place; lists of token ids stay tokens.

    ``values`` go before the item's fields. Raises ``ItemFault`` where a field is missing or no text.
    """
    list(template_fields(template))
    pieces: list[Piece] = [""]
    for literal, name, _, _ in string.Formatter().parse(template):
        _append(pieces, literal)
        if name is not None:
            value = values[name] if values and name in values else item.value(name)
            _append(pieces, _piece(name, value))
    return pieces


def _piece(name: str, value: Any) -> Piece:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list | tuple) and all(type(i) is int and i >= 0 for i in value):
        return tuple(value)
    raise ItemFault("wrong_type", f"field {name!r} must be text, a number or a list of token ids")


def _append(pieces: list[Piece], piece: Piece) -> None:
    last = pieces[-1]
    if isinstance(last, str) and isinstance(piece, str):
        pieces[-1] = last + piece
    else:
        pieces.append(piece)


@dataclass(frozen=True)
class Prompts:
    """Tokens of prompts, and of prompts with what follows them."""

    tokenizer: Tokenizer
    prefix: str

    def prefix_ids(self) -> tuple[int, ...]:
        """The token before each text, if any; BOS is the end of document where the tokenizer has none."""
        if self.prefix == "none":
            return ()
        begin, end = self.tokenizer.begin_of_document, self.tokenizer.end_of_document
        return (begin if self.prefix == "bos" and begin is not None else end,)

    def context(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """Tokens of a prompt, after the prefix; never empty: the first new token needs a context."""
        ids = self.prefix_ids() + tuple(i for piece in pieces for i in self._ids(piece))
        return ids or (self.tokenizer.end_of_document,)

    def continued(self, pieces: Sequence[Piece], text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens of a prompt and of the ``text`` that follows it.

        Both are encoded as one text, so that the text's first token is what the model saw in training:
        spaces that end the prompt go to it. Where a token would span the border, each is encoded by itself.
        """
        *before, last = pieces
        if not isinstance(last, str):
            before, last = [*before, last], ""
        stripped = last.rstrip(" ")
        text = last[len(stripped) :] + text
        alone = self._ids(stripped)
        whole = self._ids(stripped + text)
        split = whole[: len(alone)] == alone and len(whole) > len(alone)
        return self.context([*before, alone]), whole[len(alone) :] if split else self._ids(text)

    def _ids(self, piece: Piece) -> tuple[int, ...]:
        return self.tokenizer.encode(piece).ids if isinstance(piece, str) else piece
