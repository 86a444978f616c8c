"""Run as a script: prints, as JSON, the names of torch and of Megatron that `install()` changes."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from megatron_probes.cpu import install
from megatron_probes.cpu.replacements import TABLE, owner_of

Names = dict[tuple[int, str], tuple[str, Any]]


def owners() -> Iterator[tuple[str, Any]]:
    """Every module of torch and Megatron, and every class in one, with its name."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.split(".")[0] in ("torch", "megatron"):
            yield name, module
            for attribute, value in list(vars(module).items()):
                if inspect.isclass(value):
                    yield f"{name}.{attribute}", value


def names() -> Names:
    """Every name by its owner's identity, with the owner's name and what it stands for."""
    return {
        (id(owner), attribute): (owner_name, value)
        for owner_name, owner in owners()
        for attribute, value in list(vars(owner).items())
        if not isinstance(value, ModuleType)
    }


def changes(before: Names, after: Names) -> set[tuple[int, str]]:
    return {key for key, (_, value) in before.items() if key in after and after[key][1] is not value}


def main() -> None:
    listed = {(id(owner_of(each)), each.name): f"{each.owner}.{each.name}" for each in TABLE}
    before = names()
    install()
    after = names()
    # A method that its class inherited is a new name of the class.
    new = {key for key in listed if key not in before and key in after}
    changed = [listed.get(key) or f"{after[key][0]}.{key[1]}" for key in changes(before, after) | new]
    install()
    print(json.dumps({"first": sorted(changed), "second": sorted(map(str, changes(after, names())))}))


if __name__ == "__main__":
    main()
