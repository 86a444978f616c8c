"""The session on one rank: what a step writes, late values, stalls, failures."""

import logging
import time

import pytest
import torch

from megatron_probes import writer as writer_module
from megatron_probes.config import ProbeConfig
from megatron_probes.probes import Facts, HeldOutProbe, LossProbe, StabilityProbe, TensorsProbe
from megatron_probes.session import JobState, ProbeSession
from megatron_probes.sinks import RecordFileSink, read_records
from megatron_probes.topology import Topology
from tests.manifests import manifest


def start(folder, config: ProbeConfig | None = None) -> ProbeSession:
    config = config or ProbeConfig()
    topology = Topology.single()
    probes = [LossProbe(topology), StabilityProbe(config.stability), TensorsProbe()]
    session = ProbeSession(config, topology, torch.device("cpu"), probes)
    session.write_to([RecordFileSink(folder)], manifest())
    return session


def run_step(session: ProbeSession, step: int, losses: list[float], mask: list[float] | None = None) -> None:
    loss, tensors = session.probes["loss"], session.probes["tensors"]
    session.step_begin(step)
    session.pass_begin()
    if loss.gate.open:
        observe = session.guard(loss, loss.observe)
        observe(torch.tensor(losses), None if mask is None else torch.tensor(mask))
    if tensors.gate.open:
        session.guard(tensors, tensors.observe_logits)(torch.tensor([[[1.0, -3.0]]]))
    session.step_end(Facts(step=step, time=time.time(), step_time_s=0.0))


def test_a_pass_that_is_run_again_replaces_the_first_one(tmp_path):
    session = start(tmp_path)
    loss = session.probes["loss"]
    session.step_begin(1)
    for losses in ([9.0, 9.0], [2.0, 4.0]):
        session.pass_begin()
        loss.observe(torch.tensor(losses), None)
    session.step_end(Facts(step=1, time=0.0, step_time_s=0.0))
    session.close()
    (record,) = read_records(tmp_path)
    assert record.values["loss/global"] == 3.0
    assert record.values["data/valid_tokens"] == 2


def test_a_step_without_valid_targets_has_no_loss_and_says_so(tmp_path):  # PC16
    session = start(tmp_path)
    run_step(session, 1, [2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    run_step(session, 2, [5.0, 5.0], [0.0, 0.0])
    run_step(session, 3, [float("nan"), 2.0, 2.0], [0.0, 1.0, 1.0])
    session.close()
    first, empty, third = (record.values for record in read_records(tmp_path))
    assert (first["loss/global"], first["data/valid_tokens"]) == (2.0, 3)
    assert empty["data/valid_tokens"] == 0
    assert not {"loss/global", "loss/worst_rank", "loss/worst_rank_index"} & set(empty)
    assert (third["loss/global"], third["data/valid_tokens_total"]) == (2.0, 5)


def test_what_the_job_did_next_joins_its_step(tmp_path):
    session = start(tmp_path)
    run_step(session, 1, [2.0])
    session.enter(JobState.EVALUATING)
    run_step(session, 2, [2.0])
    session.finish(JobState.FINISHED)
    states = [record.values["job/state"] for record in read_records(tmp_path)]
    assert states == [JobState.EVALUATING, JobState.FINISHED]
    session.close()


def test_a_step_that_does_not_end_is_a_stall(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "STALL_SECONDS", 0.5)
    session = start(tmp_path)
    run_step(session, 1, [2.0])
    session.step_begin(2)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        records = read_records(tmp_path)
        if records and records[-1].values["job/state"] == JobState.STALLED:
            break
        time.sleep(0.1)
    else:
        pytest.fail("no stall was written")
    session.pass_begin()
    session.step_end(Facts(step=2, time=0.0, step_time_s=0.0))
    session.close()
    assert read_records(tmp_path)[-1].values["job/state"] == JobState.TRAINING


def test_a_probe_that_raises_is_off_and_the_others_go_on(tmp_path, caplog, monkeypatch):
    session = start(tmp_path)
    run_step(session, 1, [2.0])

    def broken(*_):
        raise RuntimeError("no such tensor")

    monkeypatch.setattr(session.probes["tensors"], "observe_logits", broken)
    with caplog.at_level(logging.WARNING, logger="megatron_probes"):
        for step in (2, 3):
            run_step(session, step, [2.0])
    session.close()
    assert [r.levelname for r in caplog.records if "no such tensor" in r.message] == ["WARNING"]
    first, *later = (record.values for record in read_records(tmp_path))
    assert first["act/logits/absmax"] == 3.0
    for values in later:
        assert values["probe/disabled"] == 1
        assert not any(tag.startswith("act/") for tag in values)
        assert values["loss/global"] == 2.0


def test_strict_lets_a_probe_s_exception_through(tmp_path, monkeypatch):
    session = start(tmp_path, ProbeConfig(strict=True))

    def broken(*_):
        raise RuntimeError("no such tensor")

    monkeypatch.setattr(session.probes["tensors"], "observe_logits", broken)
    with pytest.raises(RuntimeError, match="no such tensor"):
        run_step(session, 1, [2.0])
    session.close()


def test_state_survives_a_checkpoint(tmp_path):
    session = start(tmp_path / "first")
    for step in range(1, 41):
        run_step(session, step, [2.0 + 0.01 * (step % 3)])
    states = []
    session.call_after_steps(states.append)
    session.close()
    (state,) = states
    config = ProbeConfig()
    topology = Topology.single()
    resumed = ProbeSession(
        config,
        topology,
        torch.device("cpu"),
        [LossProbe(topology), StabilityProbe(config.stability), TensorsProbe()],
        start_step=40,
    )
    resumed.load_state_dict(state)
    assert resumed.tokens_total == 40
    assert resumed.state_dict() == state


def test_a_held_out_set_joins_its_step_and_leaves_training_s_sums_alone(tmp_path):  # PC45 (a)
    config, topology = ProbeConfig(), Topology.single()
    held_out = HeldOutProbe([1, 2, 0])
    loss = LossProbe(topology)
    session = ProbeSession(config, topology, torch.device("cpu"), [loss], held_out=held_out)
    session.write_to([RecordFileSink(tmp_path)], manifest())
    for step, losses in ((1, [6.0, 4.0]), (2, [5.0, 5.0])):
        session.step_begin(step)
        session.pass_begin()
        loss.observe(torch.tensor(losses), None)
        session.step_end(Facts(step=step, time=0.0, step_time_s=0.0))
        session.evaluation_begin()
        held_out.observe(torch.tensor([0.0, 100.0]), torch.ones(2), torch.tensor([1, 2]))
        session.evaluation_end("validation")
    session.close()
    for record in read_records(tmp_path):
        assert record.values["loss/global"] == 5.0
        assert record.values["data/valid_tokens"] == 2
        assert record.values["eval/validation/nll"] == 50.0
        assert record.values["eval/validation/bpb"] == 0.0  # token 2 covers no byte


def test_a_held_out_probe_that_cannot_finish_keeps_training_going(tmp_path, monkeypatch):
    topology = Topology.single()
    held_out = HeldOutProbe(None)
    session = ProbeSession(
        ProbeConfig(), topology, torch.device("cpu"), [LossProbe(topology)], held_out=held_out
    )
    session.write_to([RecordFileSink(tmp_path)], manifest())

    def broken(*_):
        raise RuntimeError("no such set")

    monkeypatch.setattr(held_out, "finalize_set", broken)
    for step in (1, 2):
        session.step_begin(step)
        session.pass_begin()
        session.probes["loss"].observe(torch.tensor([2.0]), None)
        session.step_end(Facts(step=step, time=0.0, step_time_s=0.0))
        session.evaluation_begin()
        session.evaluation_end("validation")
    session.close()
    assert [record.values["loss/global"] for record in read_records(tmp_path)] == [2.0, 2.0]
