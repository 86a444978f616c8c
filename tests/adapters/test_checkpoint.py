"""The probes' state beside a checkpoint: found, missing, damaged, or of another version."""

import argparse
import json

import pytest
import torch

from megatron_probes.adapters.megatron_lm import checkpoint
from megatron_probes.config import ProbeConfig
from megatron_probes.probes import LossProbe
from megatron_probes.session import ProbeSession
from megatron_probes.topology import Topology


@pytest.fixture
def session() -> ProbeSession:
    topology = Topology.single()
    return ProbeSession(ProbeConfig(), topology, torch.device("cpu"), [LossProbe(topology)])


@pytest.fixture
def state_file(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    monkeypatch.setattr(checkpoint, "sidecar_path", lambda *_: path)
    return path


def resume(session: ProbeSession) -> str:
    return checkpoint.load_sidecar(session, argparse.Namespace(iteration=7, load="somewhere"))


def document(**changed: object) -> str:
    loss = {"tokens_total": 640, "nonfinite": {"nan": 1, "inf": 0}}
    return json.dumps({"format": 1, "iteration": 7, "probes": {"loss": loss}} | changed)


def test_the_state_of_the_iteration_continues(session, state_file):
    state_file.write_text(document())
    assert resume(session) == "windows and counters continue from iteration 7"
    assert session.tokens_total == 640


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"format": 1, "iterat',
        "[]",
        document(iteration=6),
        document(format=99),
        document(probes={"loss": {}}),
    ],
)
def test_state_that_cannot_be_used_never_keeps_a_job_from_resuming(session, state_file, content):
    state_file.write_text(content)
    assert resume(session).endswith("windows start empty")
    assert session.tokens_total == 0


def test_a_checkpoint_without_state_says_so(session, state_file):
    assert "without saved probe state" in resume(session)
