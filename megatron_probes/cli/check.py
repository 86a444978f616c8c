"""``megatron-probes check``: what training would say about a configuration, without training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_probes.config import ConfigError, ProbeConfig, describe_config, load_config


def check_config(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file for --probe-config.")],
) -> None:
    """Validate a configuration and print it whole, with every default.

    A file that training would refuse is refused with the same message and exit status 2.
    """
    try:
        loaded = load_config(config)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"# {config} is valid. In effect:")
    for line in effective_lines(loaded):
        typer.echo(line)


def effective_lines(config: ProbeConfig) -> Iterator[str]:
    """Lines of a YAML file that gives ``config``; a value other than the default names the default."""
    values = config.model_dump(mode="json")
    for doc in describe_config():
        *sections, key = doc.path.split(".")
        value: Any = values
        for name in (*sections, key):
            value = value[name]
        line = f"{'  ' * len(sections)}{key}:"
        if doc.accepts != "section":
            text = json.dumps(value, ensure_ascii=False)
            line += f" {text}" if text == doc.default else f" {text}  # default: {doc.default}"
        yield line
