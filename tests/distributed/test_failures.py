"""A probe that fails on one rank is off on all of them, and nothing else changes."""

import re

import pytest
from layout_run import run_layout
from layouts import Layout
from toy_gpt import MOE_UNTIED

from megatron_probes.catalog import lookup
from megatron_probes.cpu.fork import RankError
from megatron_probes.probes import ExpertsProbe, LossProbe, TensorsProbe
from megatron_probes.session import ProbeSession
from megatron_probes.sinks import StepRecord

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

LAYOUT = Layout(name="TP2 x DP2", ranks=4, tp=2)
STEPS = 5
BROKEN_STEP = 3
BROKEN_RANK = 2  # neither the first rank nor the one that writes

FAULTS = {
    "loss": (LossProbe, "observe"),
    "tensors": (TensorsProbe, "observe_logits"),
    "experts": (ExpertsProbe, "observe"),
}
DERIVED = {
    "loss": ("stability/loss/", "stability/joint_spike", "system/tokens_per_second"),
}
"""What is computed from a family's values, and goes with it."""
MEASURED = ("job/", "system/", "memory/", "probe/")
"""What two equal runs measure differently, and the count of disabled families."""


def break_probe(rank: int, family: str) -> None:
    """Has the family's probe raise at one step, on one rank."""
    if rank != BROKEN_RANK:
        return
    probe, name = FAULTS[family]
    observe, begin, step = getattr(probe, name), ProbeSession.step_begin, [0]

    def watched_begin(session, number):
        step[0] = number
        begin(session, number)

    def broken(*args, **kwargs):
        if step[0] == BROKEN_STEP:
            raise RuntimeError("planted fault")
        observe(*args, **kwargs)

    setattr(probe, name, broken)
    ProbeSession.step_begin = watched_begin


def break_loss(rank: int) -> None:
    break_probe(rank, "loss")


def break_tensors(rank: int) -> None:
    break_probe(rank, "tensors")


def break_experts(rank: int) -> None:
    break_probe(rank, "experts")


BEFORE = {"loss": break_loss, "tensors": break_tensors, "experts": break_experts}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> list[StepRecord]:
    folder = tmp_path_factory.mktemp("sound")
    return run_layout(LAYOUT, MOE_UNTIED, folder, steps=STEPS, config={"strict": False}).records


@pytest.mark.parametrize("family", FAULTS)
def test_one_rank_s_fault_switches_its_family_off_everywhere(tmp_path, sound, family):
    run = run_layout(
        LAYOUT, MOE_UNTIED, tmp_path, steps=STEPS, config={"strict": False}, before=BEFORE[family]
    )
    assert all(len(rank.steps) == STEPS for rank in run.ranks)
    assert [record.step for record in run.records] == [record.step for record in sound]
    for record, right in zip(run.records, sound, strict=True):
        broken = record.step >= BROKEN_STEP
        assert record.values["probe/disabled"] == int(broken)
        gone = {tag for tag in right.values if broken and goes_with(tag, family)}
        assert not gone & record.values.keys()
        for tag, value in right.values.items():
            if tag not in gone and not tag.startswith(MEASURED):
                assert record.values[tag] == value, f"{tag} at step {record.step}"
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    warnings = re.findall(
        rf"the {family} probe raised RuntimeError: planted fault at step \d+ on rank \d+", logs
    )
    assert warnings == [
        f"the {family} probe raised RuntimeError: planted fault at step {BROKEN_STEP} on rank {BROKEN_RANK}"
    ]


def goes_with(tag: str, family: str) -> bool:
    return lookup(tag).family == family or tag.startswith(DERIVED.get(family, ("nothing",)))


def test_strict_stops_the_run(tmp_path):
    with pytest.raises(RankError, match="planted fault") as failure:
        run_layout(LAYOUT, MOE_UNTIED, tmp_path, steps=STEPS, before=break_tensors)
    assert failure.value.rank == BROKEN_RANK
