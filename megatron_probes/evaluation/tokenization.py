"""Tokenizers that know which bytes of the original text each token covers.

Bits per byte divides by original UTF-8 bytes, so every token states its own: 1 for a byte of a split
character, 0 for a special token. Over a whole text they add up to the text's bytes, whatever the tokenizer.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from megatron_probes.evaluation.suite import SuiteError, TokenizerSpec


@dataclass(frozen=True)
class Encoded:
    """A text as tokens."""

    ids: tuple[int, ...]
    num_bytes: tuple[int, ...]
    """Original UTF-8 bytes that each token covers; their sum is the text's length in bytes."""


class Tokenizer(Protocol):
    """Text to tokens and back. No special token is added or recognised in a text."""

    vocab_size: int
    end_of_document: int
    begin_of_document: int | None
    identity: dict[str, Any]
    """What a fingerprint must hold to tell this tokenizer from another."""

    def encode(self, text: str) -> Encoded: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens leave nothing, incomplete characters U+FFFD."""

    def token_bytes(self) -> list[int]:
        """Bytes that each id of the vocabulary stands for out of context; 0 for special tokens."""


def build_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Return the tokenizer of a suite.

    Raises ``SuiteError`` where its library is missing, its file is unusable or it has no
    end-of-document token and none is given.
    """
    if spec.kind == "bytes":
        return ByteTokenizer(spec)
    kinds: dict[str, tuple[str, Callable[[TokenizerSpec], Tokenizer]]] = {
        "sentencepiece": ("sentencepiece", SentencePieceTokenizer),
        "tiktoken": ("tiktoken", TiktokenTokenizer),
        "huggingface": ("tokenizers", HuggingFaceTokenizer),
    }
    library, build = kinds[spec.kind]
    try:
        return build(spec)
    except ImportError:
        raise SuiteError(f"tokenizer.kind {spec.kind}: `pip install {library}` is needed") from None
    except SuiteError:
        raise
    except Exception as error:  # each library raises types of its own for a file that it can't read
        raise SuiteError(f"tokenizer.path {spec.path}: {spec.kind} can't read it ({error})") from None


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Common:
    """Special ids and identity, which all kinds have."""

    def __init__(self, spec: TokenizerSpec, vocab_size: int, end: int | None, begin: int | None) -> None:
        end = spec.end_of_document if spec.end_of_document is not None else end
        if end is None:
            raise SuiteError(
                "tokenizer.end_of_document: the tokenizer names none; give the id that ends a document"
            )
        self.end_of_document = end
        self.begin_of_document = spec.begin_of_document if spec.begin_of_document is not None else begin
        self.vocab_size = max(vocab_size, end + 1, (self.begin_of_document or 0) + 1)
        self.identity: dict[str, Any] = {
            **spec.model_dump(mode="json", exclude={"path"}),
            "end_of_document": self.end_of_document,
            "begin_of_document": self.begin_of_document,
            "sha256": None if spec.path is None else _file_hash(spec.path),
        }


class ByteTokenizer(_Common):
    """A token is a byte of UTF-8; ids from 256 on are special, 256 ends a document by default."""

    def __init__(self, spec: TokenizerSpec) -> None:
        super().__init__(spec, vocab_size=257, end=256, begin=None)

    def encode(self, text: str) -> Encoded:
        ids = tuple(text.encode())
        return Encoded(ids, (1,) * len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self) -> list[int]:
        return [1 if i < 256 else 0 for i in range(self.vocab_size)]


class SentencePieceTokenizer(_Common):
    """SentencePiece: pieces may be normalised, fall back to bytes, or begin with a space that isn't there."""

    def __init__(self, spec: TokenizerSpec) -> None:
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor(model_file=str(spec.path))
        specials = (self._model.eos_id(), self._model.bos_id())
        end, begin = (i if i >= 0 else None for i in specials)
        super().__init__(spec, self._model.get_piece_size(), end, begin)

    def encode(self, text: str) -> Encoded:
        pieces = self._model.encode(text, out_type="proto").pieces
        covered = _attribute([len(piece.surface.encode()) for piece in pieces], len(text.encode()))
        ids = tuple(piece.id for piece in pieces)
        _share_fallback(covered, [self._model.is_byte(i) for i in ids])
        return Encoded(ids, tuple(covered))

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([i for i in ids if i < self._model.get_piece_size()])

    def token_bytes(self) -> list[int]:
        return [self._piece_bytes(i) for i in range(self._model.get_piece_size())] + [0] * (
            self.vocab_size - self._model.get_piece_size()
        )

    def _piece_bytes(self, i: int) -> int:
        if self._model.is_control(i) or self._model.is_unknown(i) or self._model.is_unused(i):
            return 0
        if self._model.is_byte(i):
            return 1
        return len(self._model.id_to_piece(i).replace("\u2581", " ").encode())


class TiktokenTokenizer(_Common):
    """tiktoken: a token is a string of bytes."""

    PATTERNS: ClassVar = {
        "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }

    def __init__(self, spec: TokenizerSpec) -> None:
        import tiktoken

        assert spec.path is not None
        ranks = {token: rank + spec.special_tokens for token, rank in _tiktoken_ranks(spec.path)}
        self._first_text, self._end_text = spec.special_tokens, spec.special_tokens + len(ranks)
        self._encoding = tiktoken.Encoding(
            name=spec.path.stem,
            pat_str=self.PATTERNS.get(spec.pattern, spec.pattern),
            mergeable_ranks=ranks,
            special_tokens={},
        )
        # Megatron's first special tokens: <unk> <s> </s>
        end, begin = (2, 1) if spec.special_tokens >= 3 else (None, None)
        super().__init__(spec, self._end_text, end, begin)

    def _is_text(self, i: int) -> bool:
        return self._first_text <= i < self._end_text

    def encode(self, text: str) -> Encoded:
        ids = tuple(self._encoding.encode_ordinary(text))
        return Encoded(ids, tuple(len(self._encoding.decode_single_token_bytes(i)) for i in ids))

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode_bytes([i for i in ids if self._is_text(i)]).decode(errors="replace")

    def token_bytes(self) -> list[int]:
        return [
            len(self._encoding.decode_single_token_bytes(i)) if self._is_text(i) else 0
            for i in range(self.vocab_size)
        ]


def _tiktoken_ranks(path: Path) -> Iterable[tuple[bytes, int]]:
    if path.suffix == ".json":
        return [
            (base64.b64decode(entry["token_bytes"]), entry["rank"]) for entry in json.loads(path.read_text())
        ]
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return [(base64.b64decode(token), int(rank)) for token, rank in lines]


class HuggingFaceTokenizer(_Common):
    """A `tokenizer.json` of Hugging Face's tokenizers."""

    ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
    BEGINS = ("<s>", "<|begin_of_text|>", "<bos>")

    def __init__(self, spec: TokenizerSpec) -> None:
        import tokenizers

        self._model = tokenizers.Tokenizer.from_file(str(spec.path))
        self._model.encode_special_tokens = True  # a special token's name in a document is plain text
        self._model.no_truncation()
        self._model.no_padding()
        self._special = {i for i, token in self._model.get_added_tokens_decoder().items() if token.special}
        description = json.loads(self._model.to_str())
        self._is_byte_level = "ByteLevel" in json.dumps(
            [description.get("pre_tokenizer"), description.get("decoder")]
        )
        self._has_byte_fallback = bool((description.get("model") or {}).get("byte_fallback"))
        end, begin = (
            next((i for name in names if (i := self._model.token_to_id(name)) is not None), None)
            for names in (self.ENDS, self.BEGINS)
        )
        super().__init__(spec, self._model.get_vocab_size(), end, begin)

    def encode(self, text: str) -> Encoded:
        encoding = self._model.encode(text, add_special_tokens=False)
        total = len(text.encode())
        if self._is_byte_level:
            # One letter of a token is one byte, so characters that tokens share are split exactly.
            letters = [len(token) for token in encoding.tokens]
            if sum(letters) == total:
                return Encoded(tuple(encoding.ids), tuple(letters))
        ends = [0]
        for character in text:
            ends.append(ends[-1] + len(character.encode()))
        covered = []
        done = 0
        starts = [begin for begin, _ in encoding.offsets[1:]] + [-1]
        for token, next_start, (begin, end) in zip(encoding.tokens, starts, encoding.offsets, strict=True):
            # In characters. Tokens that share one state it each; so does a space that isn't in the text.
            if begin == next_start and not token.strip("\u2581"):
                covered.append(0)
                continue
            covered.append(max(ends[end] - ends[max(begin, done)], 0) if end > done else 0)
            done = max(done, end)
        covered = _attribute(covered, total)
        _share_fallback(covered, [self._is_byte(token) for token in encoding.tokens])
        return Encoded(tuple(encoding.ids), tuple(covered))

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self) -> list[int]:
        return [self._bytes_of(i) for i in range(self.vocab_size)]

    def _is_byte(self, token: str) -> bool:
        return self._has_byte_fallback and len(token) == 6 and token.startswith("<0x")

    def _bytes_of(self, i: int) -> int:
        token = self._model.id_to_token(i)
        if token is None or i in self._special or i == self.end_of_document:
            return 0
        if self._is_byte_level:
            return len(token)
        if self._is_byte(token):
            return 1
        return len(token.replace("\u2581", " ").encode())


def _share_fallback(covered: list[int], is_byte: Sequence[bool]) -> None:
    """Give each token of a run of single bytes the byte that it is.

    Libraries state the bytes of a character that fell back at one of its tokens. Where normalisation changed
    the character, the run has another length and is left as stated.
    """
    end = 0
    while end < len(covered):
        begin = end
        while end < len(covered) and is_byte[end]:
            end += 1
        if sum(covered[begin:end]) == end - begin:
            covered[begin:end] = [1] * (end - begin)
        end += 1


def _attribute(covered: list[int], total: int) -> list[int]:
    """``covered`` with the bytes that no token states (dropped by normalisation) given to the first token."""
    if covered:
        covered[0] += total - sum(covered)
    return covered
