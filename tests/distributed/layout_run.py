"""Runs a model in a layout through Megatron's own `pretrain()`, with the probes and the tests' own hooks."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from layouts import Layout
from rank_capture import RankCapture, Recorder
from toy_batches import GLOBAL_BATCH, SOURCES, datasets_provider
from toy_gpt import ToyGPT

from megatron_probes.cpu.fork import fork_ranks
from megatron_probes.sinks import StepRecord, read_records

CLIP = 0.5
"""Clipping threshold, below the gradient norm of every toy model."""

COMMON_FLAGS = (
    "--transformer-impl=local",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--distributed-backend=gloo",
    "--tokenizer-type=NullTokenizer",
    "--attention-dropout=0",
    "--hidden-dropout=0",
    "--adam-eps=1e-4",
    "--lr=1e-3",
    "--lr-decay-style=constant",
    f"--clip-grad={CLIP}",
    "--log-interval=1",
    "--eval-interval=1000",
    "--eval-iters=0",
    "--num-workers=0",
    f"--global-batch-size={GLOBAL_BATCH}",
)
Hook = Callable[[int], None]

PER_TOKEN_LOSS = ("--calculate-per-token-loss",)


@dataclass(frozen=True)
class LayoutRun:
    """What one run of a layout left: the record's steps, and what each rank saw."""

    layout: Layout
    model: ToyGPT
    records: list[StepRecord]
    ranks: list[RankCapture]


def probe_config(folder: Path, **settings: Any) -> dict[str, Any]:
    """The probes' configuration for a run: everything measured at every step, parts kept."""
    return {
        "output_dir": str(folder / "probes"),
        "strict": True,
        "sample_every": 1,
        "sources": list(SOURCES),
        "record": {"parts": True},
        **settings,
    }


def train(flags: Sequence[str]) -> None:
    """Runs Megatron's `pretrain()` in this rank on the tests' batches, with the launcher's adapter."""
    from megatron_probes.adapters import megatron_lm
    from megatron_probes.cpu import pretrain_gpt as script

    sys.argv = ["pretrain_gpt.py", *flags]
    megatron_lm.install()
    script.train_valid_test_datasets_provider = datasets_provider
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    script.main()


def train_recorded(rank: int, flags: Sequence[str], model: ToyGPT, before: Hook | None) -> RankCapture:
    """Body of a rank: trains with the canonical weights and returns what the rank saw."""
    from megatron_probes.cpu import pretrain_gpt as script

    if before is not None:
        before(rank)
    recorder = Recorder(script, model)
    train(flags)
    return recorder.result()


def training_flags(
    layout: Layout,
    model: ToyGPT,
    folder: Path,
    *,
    steps: int,
    config: Mapping[str, Any] | None,
    flags: Sequence[str] = PER_TOKEN_LOSS,
) -> list[str]:
    """All of Megatron's flags; writes the probes' configuration into `folder` unless it is None."""
    all_flags = [
        *COMMON_FLAGS,
        *model.flags(layout.tp),
        *layout.all_flags(),
        *flags,
        f"--train-iters={steps}",
    ]
    if config is None:
        return all_flags
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "probes.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    return [*all_flags, f"--probe-config={path}"]


def run_layout(
    layout: Layout,
    model: ToyGPT,
    folder: Path,
    *,
    steps: int = 2,
    flags: Sequence[str] = PER_TOKEN_LOSS,
    config: Mapping[str, Any] | None = None,
    before: Hook | None = None,
    timeout_s: float = 300,
    preloaded: bool = True,
) -> LayoutRun:
    """Trains `model` for `steps` steps in `layout`; `before(rank)`, picklable, runs in each rank first.

    `config` changes the probes' configuration. Raises RankError where a rank failed.
    """
    if model.experts:
        layout = layout.of_experts()
    shutil.rmtree(folder, ignore_errors=True)
    all_flags = training_flags(
        layout, model, folder, steps=steps, config=probe_config(folder, **(config or {})), flags=flags
    )
    body = functools.partial(train_recorded, flags=all_flags, model=model, before=before)
    ranks = fork_ranks(body, layout.ranks, timeout_s=timeout_s, log_dir=folder / "logs", preloaded=preloaded)
    return LayoutRun(layout, model, read_records(folder / "probes"), ranks)
