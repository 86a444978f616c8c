"""The ``megatron-probes`` command: what a person does before and after training."""

from __future__ import annotations

import typer

from megatron_probes.cli import check, evaluate, patch

__all__ = ["app", "main"]

app = typer.Typer(
    name="megatron-probes",
    help="Training-health instruments for Megatron-LM and TorchTitan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(name="patch")(patch.patch_megatron)
app.command(name="check")(check.check_config)
app.command(name="evaluate")(evaluate.evaluate)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="megatron-probes")
