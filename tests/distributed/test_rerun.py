"""Megatron's rerun machine runs a step's forward-backward pass again: nothing counts twice."""

import pytest
from layout_run import run_layout
from layouts import DP2
from toy_gpt import MOE_UNTIED

from megatron_probes.sinks import StepRecord

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

STEPS = 4
FAILED_STEP = 3
MEASURED = ("job/", "system/", "memory/")


def rerun_every_step(rank: int) -> None:
    """The machine's statistics mode; its command-line spelling names no mode of it."""
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.training import training

    run = training.train

    def train(*args, **kwargs):
        get_rerun_state_machine().set_mode(RerunMode.REPORT_DETERMINISM_STATS)
        return run(*args, **kwargs)

    training.train = train


def fail_one_validation(rank: int) -> None:
    """One rank's loss fails a validation that is not fatal; the second pass finds the same and goes on."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    from megatron_probes.cpu import pretrain_gpt as script

    loss_func = script.loss_func

    def validated(*args, **kwargs):
        loss, tokens, report = loss_func(*args, **kwargs)
        machine = get_rerun_state_machine()
        machine.validate_result(
            result=loss,
            rejection_func=lambda _: rank == 1 and machine.current_iteration == FAILED_STEP,
            message="planted",
            tolerance=0.0,
            fatal=False,
        )
        return loss, tokens, report

    script.loss_func = validated


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[StepRecord]:
    return run_layout(DP2, MOE_UNTIED, tmp_path_factory.mktemp("undisturbed"), steps=STEPS).records


@pytest.mark.parametrize(
    ("before", "passes"),
    [
        pytest.param(rerun_every_step, [2, 2, 2, 2], id="every step"),
        pytest.param(fail_one_validation, [1, 1, 2, 1], id="one failed validation"),
    ],
)
def test_a_step_that_ran_twice_counts_once(tmp_path, undisturbed, before, passes):
    run = run_layout(DP2, MOE_UNTIED, tmp_path, steps=STEPS, before=before)
    for rank in run.ranks:
        micro_batches = [len(step.micro_batches) // 2 for step in rank.steps]
        assert micro_batches == passes, "the machine did not run what this test is about"
    for record, right in zip(run.records, undisturbed, strict=True):
        for tag, value in right.values.items():
            if not tag.startswith(MEASURED):
                assert record.values[tag] == value, f"{tag} at step {record.step}"
        for slot, cells in right.parts.items():
            if not slot.startswith(MEASURED):
                assert record.parts[slot] == cells, f"{slot} at step {record.step}"
