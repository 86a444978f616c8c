"""``--probe-config``: the one option that the probes add to Megatron's command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

from megatron_probes.config import ConfigError, load_config

OPTION = "--probe-config"


@contextlib.contextmanager
def refusing_bad_config() -> Iterator[None]:
    """Ends every rank with status 2 on a ConfigError; rank 0 says why, without a traceback."""
    try:
        yield
    except ConfigError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{OPTION}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def probe_config_path(path: str) -> str:
    """argparse type of ``--probe-config``: the path itself, once the file proved valid.

    An invalid file ends every rank with status 2 before a model is built; rank 0 says why. The value stays
    a plain string because Megatron pickles its arguments into every checkpoint.
    """
    with refusing_bad_config():
        load_config(path)
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
