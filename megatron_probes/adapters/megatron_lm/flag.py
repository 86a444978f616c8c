"""``--probe-config``: the one option that the probes add to Megatron's command line."""

from __future__ import annotations

import argparse
import os
import sys

from megatron_probes.config import ConfigError, load_config

OPTION = "--probe-config"


def probe_config_path(path: str) -> str:
    """argparse type of ``--probe-config``: the path itself, once the file proved valid.

    An invalid file ends every rank with status 2 before a model is built; rank 0 says why. The value stays
    a plain string because Megatron pickles its arguments into every checkpoint.
    """
    try:
        load_config(path)
    except ConfigError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{OPTION}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return path


def add_probe_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--probe-config PATH`` to Megatron's parser."""
    group = parser.add_argument_group(title="megatron_probes")
    group.add_argument(
        OPTION,
        type=probe_config_path,
        default=None,
        metavar="PATH",
        help="YAML file that configures the training-health probes; without it there are none.",
    )
    return parser


def requested_config(args: argparse.Namespace) -> str | None:
    """The path given on the command line, also where Megatron's --yaml-cfg replaced the namespace."""
    path = getattr(args, "probe_config", None)
    if path is not None:
        return path
    fallback = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    fallback.add_argument(OPTION, type=probe_config_path, default=None)
    return fallback.parse_known_args()[0].probe_config
