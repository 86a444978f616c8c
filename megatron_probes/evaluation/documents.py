"""Items of a JSON-lines file; a line that can't be used is counted and left out, and the rest goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_probes.evaluation.suite import SuiteError

MOST_EXAMPLES = 20


class ItemFault(ValueError):
    """An item that can't be scored; ``kind`` is counted, the message goes to the first examples."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Item:
    """One line of a data file."""

    line: int
    """From 1, as an editor shows it."""
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """The text in field ``name``; raises ``ItemFault`` where it is missing or no text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise ItemFault("wrong_type", f"field {name!r} must be text, not {type(value).__name__}")
        return value

    def value(self, name: str) -> Any:
        """What stands in field ``name``; raises ``ItemFault`` where it is missing."""
        if name not in self.fields:
            raise ItemFault("missing_field", f"field {name!r} is missing")
        return self.fields[name]


@dataclass
class Faults:
    """Lines that were left out, by kind, with the first of them in words."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def add(self, line: int, fault: ItemFault) -> None:
        self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
        if len(self.examples) < MOST_EXAMPLES:
            self.examples.append(f"line {line}: {fault}")


def read_items(path: Path, limit: int | None = None) -> tuple[list[Item], Faults]:
    """Return the items of the first ``limit`` lines of ``path`` and what was wrong with the others.

    Empty lines aren't items. Raises ``SuiteError`` where the file can't be read.
    """
    items: list[Item] = []
    faults = Faults()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise SuiteError(f"data {path}: can't be read ({error})") from None
    for number, line in enumerate(lines[:limit], start=1):
        if not line.strip():
            continue
        try:
            items.append(Item(number, _fields(line)))
        except ItemFault as fault:
            faults.add(number, fault)
    return items, faults


def _fields(line: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ItemFault("not_utf8", f"byte {error.start + 1} is no UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ItemFault("not_json", f"not valid JSON, cut off perhaps: {error}") from None
    if not isinstance(value, dict):
        raise ItemFault("not_json", f"must be an object with fields, not {type(value).__name__}")
    for name, text in value.items():
        if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
            raise ItemFault("not_utf8", f"field {name!r} holds half a surrogate pair, which has no UTF-8")
    return value
