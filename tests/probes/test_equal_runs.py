"""Probes draw no random number and touch no gradient; equal runs leave equal records (PC39)."""

import random

import numpy as np
import torch

from megatron_probes.catalog import lookup
from megatron_probes.config import ProbeConfig
from megatron_probes.probes import (
    Facts,
    GradientGroup,
    GradientProbe,
    LossProbe,
    StabilityProbe,
    TensorsProbe,
)
from megatron_probes.session import ProbeSession
from megatron_probes.sinks import RecordFileSink, read_records
from megatron_probes.topology import Topology
from tests.manifests import manifest

STEPS = 5
MEASURED = ("job", "system", "memory", "host")


def train(folder=None):
    """Five steps of a small MLP with dropout; with a folder the probes look on."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = None if folder is None else start(folder, len(list(model.parameters())))
    for step in range(1, STEPS + 1):
        x, target = torch.randn(12, 8), torch.randint(0, 5, (12,))
        optimizer.zero_grad()
        if session is not None:
            session.step_begin(step)
            session.pass_begin()
        logits = model(x)
        losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        losses.mean().backward()
        if session is not None:
            session.probes["tensors"].observe_logits(logits)
            session.probes["loss"].observe(losses, torch.ones(12))
            session.probes["gradient"].observe([p.grad for p in model.parameters()])
            session.step_end(Facts(step=step, time=0.0, step_time_s=0.0, clip_threshold=1.0))
        optimizer.step()
    if session is not None:
        session.close()
    generators = torch.get_rng_state(), repr(np.random.get_state()), repr(random.getstate())
    return [p.detach().clone() for p in model.parameters()], generators


def start(folder, tensors: int) -> ProbeSession:
    config = ProbeConfig(strict=True, sample_every=2)
    topology = Topology.single()
    groups = [GradientGroup("dense", None)] * tensors
    probes = [
        LossProbe(topology),
        GradientProbe(config.gradient, [], groups),
        StabilityProbe(config.stability),
        TensorsProbe(),
    ]
    session = ProbeSession(config, topology, torch.device("cpu"), probes)
    session.write_to([RecordFileSink(folder)], manifest())
    return session


def test_on_off_on_train_alike_and_record_alike(tmp_path):
    runs = [train(tmp_path / "first"), train(), train(tmp_path / "second")]
    for weights, generators in runs[1:]:
        assert all(map(torch.equal, weights, runs[0][0]))
        assert torch.equal(generators[0], runs[0][1][0])
        assert generators[1:] == runs[0][1][1:]
    first, second = (
        [
            repr({tag: v for tag, v in record.values.items() if lookup(tag).family not in MEASURED})
            for record in read_records(tmp_path / name)
        ]
        for name in ("first", "second")
    )
    assert len(first) == STEPS
    assert first == second


def test_the_record_keeps_every_digit(tmp_path):
    train(tmp_path)
    (file,) = [path for path in tmp_path.rglob("*.jsonl") if path.stat().st_size]
    for record in read_records(tmp_path):
        norm = record.values["grad/norm"]
        assert repr(norm) in file.read_text()
        assert float(repr(norm)) == norm
