"""A job that is killed and resumed from its checkpoint leaves one history without a seam."""

import functools
import inspect
import json
import os
import signal
import time
from pathlib import Path

import pytest
from layout_run import PER_TOKEN_LOSS, probe_config, train, training_flags
from layouts import Layout
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util
from toy_gpt import MOE_UNTIED

from megatron_probes.cpu.fork import RankError, fork_ranks
from megatron_probes.sinks import StepRecord, read_records

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

LAYOUT = Layout(name="TP2", ranks=2, tp=2).of_experts()
STEPS, SAVED, KILLED = 10, 4, 7
MEASURED = ("job/", "system/", "memory/")
CONFIG = {
    "stability": {"window": 6, "min_history": 2},
    "gradient": {"clip_window": 6},
    "record": {"parts": True, "flush_seconds": 0.05},
    "tensorboard": {"flush_seconds": 0.05},
}


def train_and_die(rank: int, flags: list[str], at_step: int | None) -> None:
    """Trains from the canonical weights; the writing rank kills itself when `at_step` begins."""
    from megatron.training import training
    from sharding import load_weights

    build, train_step = training.get_megatron_optimizer, training.train_step

    def optimizer_of_loaded_model(config, chunks, *args, **kwargs):
        load_weights(chunks, MOE_UNTIED)
        return build(config, chunks, *args, **kwargs)

    signature = inspect.signature(train_step)

    @functools.wraps(train_step)
    def watched(*args, **kwargs):
        step = signature.bind(*args, **kwargs).arguments["iteration"] + 1
        if step == at_step and rank == LAYOUT.ranks - 1:
            time.sleep(1.0)  # longer than flush_seconds: what came before is on its way to the disk
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*args, **kwargs)

    training.get_megatron_optimizer = optimizer_of_loaded_model
    training.train_step = watched
    train(flags)


def job(folder: Path, at_step: int | None = None) -> None:
    flags = training_flags(
        LAYOUT,
        MOE_UNTIED,
        folder,
        steps=STEPS,
        config=probe_config(folder, **CONFIG),
        flags=(
            *PER_TOKEN_LOSS,
            f"--save={folder}/checkpoints",
            f"--load={folder}/checkpoints",
            f"--save-interval={SAVED}",
            "--bf16",
            "--use-distributed-optimizer",
        ),
    )
    fork_ranks(
        functools.partial(train_and_die, flags=flags, at_step=at_step),
        LAYOUT.ranks,
        timeout_s=300,
        log_dir=folder / "logs",
        preloaded=True,
    )


def probe_state(folder: Path, iteration: int) -> dict:
    (path,) = (folder / "checkpoints").glob(f"iter_{iteration:07d}/megatron_probes/state.json")
    return json.loads(path.read_text())


def charted(folder: Path, run: str, tag: str) -> tuple[list[int], list[float]]:
    """Steps and values of a tag by TensorBoard's rule: a start hides older points from its step on."""
    points: list[tuple[int, float]] = []
    for file in sorted((folder / "probes" / run).iterdir()):
        older, points = points, []
        for event in EventFileLoader(str(file)).Load():
            if event.HasField("session_log"):
                older = [(step, value) for step, value in older if step < event.step]
            for value in event.summary.value:
                if value.tag == tag:
                    points.append((event.step, float(tensor_util.make_ndarray(value.tensor))))
        points = older + points
    return [step for step, _ in points], [value for _, value in points]


def values(records: list[StepRecord], step: int) -> dict[str, int | float]:
    (record,) = [record for record in records if record.step == step]
    return {tag: value for tag, value in record.values.items() if not tag.startswith(MEASURED)}


def test_a_killed_job_resumes_without_a_seam(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    job(whole)
    with pytest.raises(RankError) as death:
        job(broken, at_step=KILLED)
    assert death.value.exitcode == -signal.SIGKILL

    left = read_records(broken / "probes")
    assert [record.step for record in left] == list(range(1, KILLED))
    assert charted(broken, "by_step", "loss/global")[0] == list(range(1, KILLED))

    job(broken)
    right, found = read_records(whole / "probes"), read_records(broken / "probes")
    steps = list(range(1, STEPS + 1))
    assert [record.step for record in found] == [record.step for record in right] == steps
    assert [record.attempt for record in found] == [0] * SAVED + [1] * (STEPS - SAVED)
    for step in steps:
        assert values(found, step) == values(right, step), f"step {step}"
        assert found[step - 1].tokens == right[step - 1].tokens
    assert "stability/loss/z" in values(found, STEPS)

    # The detectors' windows, the clip window and all counters, as the last checkpoint holds them.
    last = STEPS - STEPS % SAVED
    assert probe_state(broken, last) == probe_state(whole, last)

    for folder in (whole, broken):
        charted_steps, losses = charted(folder, "by_step", "loss/global")
        assert charted_steps == steps
        assert losses == pytest.approx([record.values["loss/global"] for record in right], rel=1e-6)
