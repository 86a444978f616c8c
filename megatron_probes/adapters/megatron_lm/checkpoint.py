"""Detectors and counters travel with the checkpoint, in a small file of their own beside its shards."""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

from megatron_probes.session import ProbeSession

logger = logging.getLogger("megatron_probes")

FORMAT_VERSION = 1


def sidecar_path(checkpoints: str, iteration: int) -> Path:
    """``<checkpoint of the iteration>/megatron_probes/state.json``."""
    from megatron.training.checkpointing import get_checkpoint_name

    return (
        Path(get_checkpoint_name(checkpoints, iteration, return_base_dir=True)) / "megatron_probes/state.json"
    )


def save_sidecar(session: ProbeSession, checkpoints: str, iteration: int) -> None:
    """Writes the state as of ``iteration`` once the background thread has processed that step."""
    path = sidecar_path(checkpoints, iteration)

    def write(state: dict[str, Any]) -> None:
        document = {"format": FORMAT_VERSION, "iteration": iteration, **state}
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(document))
            os.replace(partial, path)
        except OSError as error:
            logger.warning(
                "the probes' state of iteration %d could not be written to %s (%s): a run resumed from that "
                "checkpoint starts with empty detector windows",
                iteration,
                path,
                error,
            )

    session.call_after_steps(write)


def load_sidecar(session: ProbeSession, args: argparse.Namespace) -> str:
    """Restores the state of the checkpoint that Megatron resumed from; says in a phrase what it found."""
    if args.iteration == 0 or not args.load:
        return "new run"
    path = sidecar_path(args.load, args.iteration)
    if not path.is_file():
        return f"resumed at iteration {args.iteration} without saved probe state: windows start empty"
    empty = session.state_dict()
    try:
        state = json.loads(path.read_text())
        if state["iteration"] != args.iteration or state["format"] != FORMAT_VERSION:
            return f"{path} belongs to another iteration or version: windows start empty"
        session.load_state_dict(state)
    except (OSError, ValueError, KeyError, TypeError) as error:
        # A damaged file or another version's state must not keep a job from resuming.
        session.load_state_dict(empty)
        return f"{path} can't be used ({type(error).__name__}: {error}): windows start empty"
    return f"windows and counters continue from iteration {args.iteration}"
