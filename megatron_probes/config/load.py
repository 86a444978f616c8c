"""From a YAML file to the frozen configuration, or to one line a fault."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron_probes.config.model import ProbeConfig, Section


class ConfigError(ValueError):
    """The configuration can't be used; ``faults`` holds one line a fault, each with key, value and fix."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core types, with keys that are text and given once.

    YAML 1.1, the default of the library, reads ``1e-3`` as text, ``no`` as false and ``010`` as 8.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(
                    problem="a key must be text: put it in quotes", problem_mark=key_node.start_mark
                )
            if key_node.value in first:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} stands twice (first on line "
                    f"{first[key_node.value]}): keep one",
                    problem_mark=key_node.start_mark,
                )
            first[key_node.value] = line
        return super().construct_mapping(node, deep)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))


_Loader.yaml_implicit_resolvers = {}
for _tag, _expression, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9](?:_?[0-9])*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
        r"|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        re.compile(f"^(?:{_expression})$"),
        ["" if c == "\0" else c for c in _first],
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)


def load_config(path: str | os.PathLike[str]) -> ProbeConfig:
    """Return the configuration in the YAML file ``path``.

    Raises ``ConfigError`` when the file can't be read, isn't YAML or holds a value that can't be used.
    """
    name = os.fspath(path)
    value = _parse(name, _read(name))
    if not isinstance(value, Mapping | None):
        raise ConfigError(
            [f"{name}: must hold keys and values, such as `sample_every: 100`, not {_kind_of(value)}."]
        )
    try:
        return ProbeConfig.model_validate(value)
    except ValidationError as error:
        raise ConfigError([f"{name}: {fault}" for fault in _faults(error)]) from None


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        reason = "no such file. Check the path"
    except IsADirectoryError:
        reason = "is a directory. Give the path of a YAML file"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text (byte {error.start}). Save it as UTF-8"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}. Check the path and its permissions"
    raise ConfigError([f"{name}: {reason}."])


def _parse(name: str, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context
    except yaml.reader.ReaderError as error:
        where = f"line {text.count(chr(10), 0, error.position) + 1}: "
        problem = f"the character {chr(error.character)!r} isn't allowed"
    except RecursionError:
        where, problem = "", "nested too deeply"
    raise ConfigError([f"{name}: {where}not valid YAML: {problem}."])


def _kind_of(value: object) -> str:
    return "a list" if isinstance(value, list) else f"the single value {_show(value)}"


def _show(value: object) -> str:
    """Return ``value`` roughly as it stands in the file, cut to one short line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_EXPECTED = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list of names, such as [web, code]",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
}


def _faults(error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        location = fault["loc"]
        context = fault.get("ctx", {})
        if fault["type"] == "extra_forbidden":
            what, fix = "unknown key", _closest(location)
        else:
            what = _EXPECTED.get(fault["type"], fault["msg"]).format(**context)
            fix = context.get("fix", _documented_fix(location))
        yield f"{_key_path(location)}: {what} (value {_show(fault['input'])}).{fix and ' ' + fix}"


def _key_path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"\w+", part):
            path += f".{part}" if path else part
        else:
            path += f"[{part!r}]"
    return path


def _section_at(location: Sequence[int | str]) -> type[Section] | None:
    """Return the section that ``location`` leads to, or ``None`` when it leads to a value."""
    section: type[Section] = ProbeConfig
    for part in location:
        field = section.model_fields.get(str(part))
        if field is None or not _is_section(field):
            return None
        section = field.annotation  # type: ignore[assignment]
    return section


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _documented_fix(location: Sequence[int | str]) -> str:
    section = _section_at(location[:-1])
    field = section.model_fields.get(str(location[-1])) if section else None
    extra = field.json_schema_extra if field else None
    return str(extra.get("fix", "")) if isinstance(extra, dict) else ""


def _closest(location: Sequence[int | str]) -> str:
    """Say which valid key an unknown one is likely to stand for."""
    key = str(location[-1])
    section = _section_at(location[:-1])
    assert section is not None, "pydantic reports unknown keys of sections only"
    near = difflib.get_close_matches(key, section.model_fields, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    elsewhere = [path for path in _all_paths(ProbeConfig) if path.split(".")[-1] == key]
    if elsewhere:
        return f"Did you mean {' or '.join(map(repr, elsewhere))}?"
    return f"Valid keys here: {', '.join(section.model_fields)}."


def _all_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if _is_section(field):
            yield from _all_paths(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
