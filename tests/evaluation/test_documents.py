"""Data files with every fault that a user's file may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_probes.evaluation.documents import ItemFault, read_items
from megatron_probes.evaluation.suite import SuiteError


def test_bad_lines_are_counted_and_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'{"text": "one"}\n'
        b"\n"
        b'{"text": "cut o\n'
        b'["no", "object"]\n'
        b'{"text": "\xff"}\n'
        b'{"text": "\\ud83d"}\n'
        b'{"text": "\xf0\x9f\x99\x82"}'
    )
    items, faults = read_items(path)
    assert [(item.line, item.fields["text"]) for item in items] == [(1, "one"), (7, "🙂")]
    assert faults.counts == {"not_json": 2, "not_utf8": 2}
    assert [example.split(":")[0] for example in faults.examples] == ["line 3", "line 4", "line 5", "line 6"]
    assert "cut off" in faults.examples[0]


def test_limit_counts_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    items, _ = read_items(path, limit=2)
    assert [item.fields["a"] for item in items] == [1, 2]


def test_fields_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": 5}\n')
    (item,), _ = read_items(path)
    for field, kind in (("text", "wrong_type"), ("absent", "missing_field")):
        with pytest.raises(ItemFault, match=field) as fault:
            item.text(field)
        assert fault.value.kind == kind


def test_a_missing_file_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"absent\.jsonl"):
        read_items(tmp_path / "absent.jsonl")
