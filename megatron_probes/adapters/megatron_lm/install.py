"""The launcher's road: an unedited Megatron gets the flag and calls ``attach`` when its model stands."""

from __future__ import annotations

import functools
from typing import Any

from megatron_probes.adapters.megatron_lm.attach import attach
from megatron_probes.adapters.megatron_lm.flag import OPTION, add_probe_arguments


def install() -> None:
    """Adds ``--probe-config`` to Megatron's parser and attaches the probes to the model it builds.

    Idempotent, and harmless on a patched Megatron, whose parser has the flag already.
    """
    from megatron.training import arguments, training

    if getattr(training, "_megatron_probes_installed", False):
        return
    training._megatron_probes_installed = True

    add_megatron_arguments = arguments.add_megatron_arguments

    @functools.wraps(add_megatron_arguments)
    def with_probe_arguments(parser: Any) -> Any:
        parser = add_megatron_arguments(parser)
        if OPTION not in parser._option_string_actions:
            add_probe_arguments(parser)
        return parser

    arguments.add_megatron_arguments = with_probe_arguments

    setup = training.setup_model_and_optimizer

    @functools.wraps(setup)
    def setup_and_attach(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **kwargs)
        attach(model, optimizer, training.get_args())
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = setup_and_attach
