"""A small checkpoint, trained once a session by Megatron's own loop on the CPU, and texts to score."""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path

import evaluation_ranks as ranks
import pytest
from evaluation_ranks import run_on_ranks


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Texts of 16 to 60 bytes; each third one isn't ASCII."""
    source = Path(sysconfig.get_path("stdlib"), "textwrap.py").read_text()
    words = [
        "naïve café",
        "日本語のテキスト",
        "Ελληνικά γράμματα",
        "🙂 smile ☃",
        "Übergröße straße",
        "тихий дом",
    ]
    found = []
    for i in range(200):
        piece = source[i * 60 : i * 60 + 16 + i % 40]
        found.append(f"{words[i % len(words)]} {piece[:20]}" if i % 3 == 0 else piece)
    return found


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron's --save folder of an MoE GPT trained as TP2 with sequence parallelism, EP2."""
    folder = tmp_path_factory.mktemp("training")
    run_on_ranks(partial(ranks.write_dataset, prefix=folder / "text"), 1)
    run_on_ranks(partial(ranks.train, flags=ranks.flags(folder), logs=folder / "logs"), 2)
    return folder / "checkpoint"
