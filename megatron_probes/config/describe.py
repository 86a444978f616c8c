"""The documentation of the configuration, taken from its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_probes.config.model import ProbeConfig, Section


@dataclass(frozen=True)
class FieldDoc:
    """What a user may write under one key."""

    path: str
    """Key path, such as ``stability.window``."""
    accepts: str
    """The kind of value, such as ``whole number, at least 1``."""
    default: str
    """The default as YAML; empty for a section, whose fields follow."""
    text: str


def describe_config() -> tuple[FieldDoc, ...]:
    """Return every key of the configuration in the order of the file; a section goes before its fields."""
    return tuple(_describe(ProbeConfig, ""))


def _describe(section: type[Section], prefix: str) -> Iterator[FieldDoc]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield FieldDoc(prefix + name, "section", "", kind.__doc__ or "")
            yield from _describe(kind, f"{prefix}{name}.")
        else:
            default = json.dumps(field.get_default(call_default_factory=True))
            yield FieldDoc(prefix + name, _accepts(field), default, field.description or "")


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _KINDS:
        return _KINDS[annotation]
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return "list of names"
    if origin is Mapping:
        return f"mapping of {_kind(arguments[0])} to {_kind(arguments[1])}"
    return " or ".join(_kind(argument) for argument in arguments)


def _accepts(field: FieldInfo) -> str:
    bounds = [
        f", {word} {value:g}"
        for item in field.metadata
        for attribute, word in (("ge", "at least"), ("gt", "above"))
        if (value := getattr(item, attribute, None)) is not None
    ]
    return _kind(field.annotation) + "".join(bounds)
