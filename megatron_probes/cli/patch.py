"""``megatron-probes patch``: gives a Megatron-LM tree ``--probe-config`` without the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from megatron_probes.cli.megatron_patches import PatchError, find_megatron, plan_patch
from megatron_probes.cli.replace_files import replace_files


def patch_megatron(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH_TO_MEGATRON",
            help="A Megatron-LM checkout, or the site-packages with megatron-core.",
        ),
    ],
    check: Annotated[bool, typer.Option("--check", help="Only say what would be done.")] = False,
    reverse: Annotated[bool, typer.Option("--reverse", help="Take the patch back.")] = False,
) -> None:
    """Add the option --probe-config to a Megatron-LM tree, so that it needs no launcher.

    Picks the diff for the version found and applies it whole or not at all. A tree that is patched already
    is left alone. An unknown version, or lines that differ from the diff's, are refused with exit status 2.
    """
    try:
        tree = find_megatron(path)
        patch, contents = plan_patch(tree, reverse=reverse)
        if not check:
            replace_files(contents)
    except PatchError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename or path}: {error.strerror}. Nothing was changed.")
    state = "unpatched" if reverse else "patched"
    how = "already" if not contents else "would be" if check else "now"
    typer.echo(f"Megatron {tree.version} in {tree.root}: {how} {state}.")
    typer.echo(f"{patch.name}, made for {patch.source}")
    for changed in contents:
        typer.echo(f"  {changed.relative_to(tree.root)}")


def _refuse(reason: str) -> NoReturn:
    typer.echo(reason, err=True)
    raise typer.Exit(2)
