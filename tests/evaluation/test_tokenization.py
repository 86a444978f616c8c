"""Every byte of the original text belongs to one token, whatever the tokenizer."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_probes.evaluation import SuiteError, build_tokenizer
from megatron_probes.evaluation.suite import TokenizerSpec
from megatron_probes.evaluation.tokenization import Tokenizer

CORPUS = ["hello world, this is a test", "naïve café straße", "日本語 テスト", "the quick brown fox"] * 40
TEXTS = ["hello world", " two  spaces ", "naïve ☃ 日本語 🙂", "<|endoftext|></s><s>", "①ﬁ\ttab\nline", "é"]


def sentencepiece_file(folder: Path) -> Path:
    spm = pytest.importorskip("sentencepiece")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "model"),
        vocab_size=340,
        byte_fallback=True,
        character_coverage=0.98,
        model_type="bpe",
        minloglevel=2,
    )
    return folder / "model.model"


def tiktoken_file(folder: Path) -> Path:
    pytest.importorskip("tiktoken")
    tokens = [bytes([i]) for i in range(256)] + [b"he", b"ll", b"hell", " 日".encode()[:3], b"ca"]
    lines = [base64.b64encode(token) + b" " + str(i).encode() for i, token in enumerate(tokens)]
    path = folder / "vocabulary.tiktoken"
    path.write_bytes(b"\n".join(lines))
    return path


def megatron_tiktoken_file(folder: Path) -> Path:
    lines = [line.split() for line in tiktoken_file(folder).read_text().splitlines()]
    entries = [{"rank": int(rank), "token_bytes": token, "token_str": None} for token, rank in lines]
    path = folder / "vocabulary.json"
    path.write_text(json.dumps(entries))
    return path


def huggingface_file(folder: Path, kind: str) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    path = folder / f"{kind}.json"
    if kind == "byte_level":
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
        )
    else:  # as Llama 2's: a space becomes a letter of its own, unknown characters fall back to bytes
        fallback = [f"<0x{i:02X}>" for i in range(256)]
        model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
        model.normalizer = tokenizers.normalizers.Sequence(
            [
                tokenizers.normalizers.NFKC(),
                tokenizers.normalizers.Prepend("\u2581"),
                tokenizers.normalizers.Replace(" ", "\u2581"),
            ]
        )
        decoders = tokenizers.decoders
        model.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=420, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=[]
        )
        model.train_from_iterator(["the quick brown fox hello world"] * 20, trainer)
        described = json.loads(model.to_str())
        vocabulary = described["model"]["vocab"]
        for token in fallback:
            vocabulary[token] = len(vocabulary)
        path.write_text(json.dumps(described))
        return path
    model.train_from_iterator(CORPUS, trainer)
    model.save(str(path))
    return path


@pytest.fixture(
    scope="module",
    params=["bytes", "sentencepiece", "tiktoken", "megatron_tiktoken", "byte_level", "byte_fallback"],
)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    match request.param:
        case "bytes":
            spec = TokenizerSpec(kind="bytes")
        case "sentencepiece":
            spec = TokenizerSpec(kind="sentencepiece", path=sentencepiece_file(folder))
        case "tiktoken":
            spec = TokenizerSpec(kind="tiktoken", path=tiktoken_file(folder), end_of_document=300)
        case "megatron_tiktoken":
            path = megatron_tiktoken_file(folder)
            spec = TokenizerSpec(kind="tiktoken", path=path, special_tokens=10)
        case kind:
            spec = TokenizerSpec(kind="huggingface", path=huggingface_file(folder, kind))
    return build_tokenizer(spec)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_cover_the_original_bytes(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode(text)
    assert len(encoded.ids) == len(encoded.num_bytes)
    assert sum(encoded.num_bytes) == len(text.encode())
    assert min(encoded.num_bytes) >= 0
    assert tokenizer.end_of_document not in encoded.ids


@given(text=st.text(min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_text_is_covered(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode(text)
    if encoded.ids:
        assert sum(encoded.num_bytes) == len(text.encode())


def test_special_tokens_have_no_bytes_and_leave_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes()[tokenizer.end_of_document] == 0
    assert len(tokenizer.token_bytes()) == tokenizer.vocab_size
    ids = tokenizer.encode("hello world").ids
    assert tokenizer.decode([*ids, tokenizer.end_of_document]).strip() == "hello world"


def test_the_tokens_of_a_split_character_share_its_bytes(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode("☃")
    parts = [n for n in encoded.num_bytes if n]
    assert sum(parts) == 3
    if len(encoded.ids) >= 3:  # no tokenizer here has a token of its own for it
        assert parts == [1, 1, 1]


def test_out_of_context_bytes_agree_with_those_in_a_text(tokenizer: Tokenizer) -> None:
    table = tokenizer.token_bytes()
    encoded = tokenizer.encode("hello world")
    # The space that SentencePiece puts before a text is in the table, not in the text.
    assert sum(table[i] for i in encoded.ids) - sum(encoded.num_bytes) in (0, 1)


def test_names_of_special_tokens_are_plain_text_in_a_document(tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="huggingface", path=huggingface_file(tmp_path, "byte_level"))
    tokenizer = build_tokenizer(spec)
    assert len(tokenizer.encode("<|endoftext|>").ids) > 1


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="tiktoken", path=tiktoken_file(tmp_path))
    with pytest.raises(SuiteError, match=r"tokenizer\.end_of_document"):
        build_tokenizer(spec)


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "huggingface"])
def test_an_unreadable_file_is_the_users_error(tmp_path: Path, kind: str) -> None:
    (tmp_path / "broken").write_text("no tokenizer")
    with pytest.raises(SuiteError, match=r"tokenizer\.path"):
        build_tokenizer(TokenizerSpec(kind=kind, path=tmp_path / "broken"))


def test_the_identity_follows_the_files_content(tmp_path: Path) -> None:
    path = tiktoken_file(tmp_path)
    spec = TokenizerSpec(kind="tiktoken", path=path, end_of_document=300)
    before = build_tokenizer(spec).identity
    path.write_bytes(path.read_bytes() + b"\n" + base64.b64encode(b"xyz") + b" 261")
    assert build_tokenizer(spec).identity != before
