"""What a score depends on besides the weights: prompt assembly, normalisation, tokenizer and data."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_probes.evaluation.prompts import ASSEMBLY_VERSION
from megatron_probes.evaluation.suite import HarnessTask, MediaGainTask, Suite, TaskSpec
from megatron_probes.evaluation.tokenization import Tokenizer

Parts = dict[str, Any]


def task_parts(spec: TaskSpec, suite: Suite, tokenizer: Tokenizer, context_length: int) -> Parts:
    """Return everything that changes a score of ``spec`` if it changes; files by their content.

    The averaging and the weights that decide are part of it, so they are fixed for a series.
    """
    definition = spec.model_dump(mode="json", exclude={"data", "name", "include_path"})
    held = definition["score"] if isinstance(spec, MediaGainTask) else definition
    if held.get("scorer"):
        file, _, function = held["scorer"].rpartition(":")
        held["scorer"] = f"{_sha256(Path(file))}:{function}"
    return {
        "assembly": ASSEMBLY_VERSION,
        "task": definition,
        "data": _harness_data(spec) if isinstance(spec, HarnessTask) else _sha256(spec.data),
        "tokenizer": tokenizer.identity,
        "context_length": context_length,
        "decision_weights": suite.decision_weights,
        "averaging": None if suite.averaging is None else suite.averaging.model_dump(mode="json"),
    }


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of ``parts`` as canonical JSON, in hexadecimal."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return in words what changed from ``old`` to ``new``, by the path of its key."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key} was {_short(before)}, is {_short(after)}")
    return found


def _harness_data(spec: HarnessTask) -> dict[str, str]:
    """The harness's version, and the user's task files; its own files come with the version."""
    files = sorted(spec.include_path.rglob("*")) if spec.include_path is not None else []
    named = {str(f.relative_to(spec.include_path)): _sha256(f) for f in files if f.is_file()}  # type: ignore[arg-type]
    return {"lm_eval": importlib.metadata.version("lm_eval"), **named}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
