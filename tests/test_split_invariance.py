"""Any split of tokens, parameters and experts over any small mesh gives the same reduced numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_probes.catalog import Priority
from megatron_probes.config import ProbeConfig
from megatron_probes.probes import (
    ExpertsProbe,
    Facts,
    GradientGroup,
    GradientProbe,
    LossProbe,
    MoELayer,
    SourcesProbe,
    TensorsProbe,
)
from tests.meshes import LocalLedger, ranks_of, reduce_together

FACTS = Facts(step=1, priority=Priority.P1, time=0.0, step_time_s=1.0)
BATCH, SEQUENCE, EXPERTS, VOCABULARY = 4, 8, 4, 6

meshes = st.builds(
    dict,
    dp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
    micro_batches=st.sampled_from([1, 2]),
)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Per-token quantities of a whole global batch, with unequal padding and one non-finite masked loss."""
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(BATCH, SEQUENCE, generator=draw) < 0.7).float()
    losses = 5 * torch.rand(BATCH, SEQUENCE, generator=draw)
    losses[mask == 0] = math.nan
    return {
        "losses": losses,
        "mask": mask,
        "sources": torch.randint(-1, 3, (BATCH,), generator=draw),
        "routing": torch.rand(BATCH, SEQUENCE, EXPERTS, generator=draw) < 0.5,
        "padding": torch.rand(BATCH, SEQUENCE, generator=draw) < 0.2,
        "logits": torch.randn(BATCH, SEQUENCE, VOCABULARY, generator=draw),
    }


def token_parts(seed: int, mesh: dict) -> dict[str, np.ndarray]:
    """The reduced parts of the token families when the batch is split over ``mesh``."""
    whole = batch(seed)
    mesh = dict(mesh)
    micro_batches = mesh.pop("micro_batches")
    ledgers = []
    for topology in ranks_of(**mesh):
        loss, sources, tensors = LossProbe(topology), SourcesProbe(["web", "code"]), TensorsProbe()
        experts = ExpertsProbe(topology, [MoELayer("layer_000", EXPERTS)])
        ledger = LocalLedger(topology, torch.device("cpu"))
        probes = [loss, sources, tensors, experts]
        for probe in probes:
            probe.declare(ledger)
        ledger.freeze()
        for probe in probes:
            probe.on_frozen(ledger.device)
        ledger.reset()
        for probe in probes:
            probe.begin_pass()
        rows = torch.arange(BATCH).chunk(topology.size("dp"))[topology.index("dp")]
        columns = torch.arange(SEQUENCE).chunk(topology.size("cp"))[topology.index("cp")]
        for micro in rows.chunk(min(micro_batches, len(rows))):
            piece = {name: tensor[micro] for name, tensor in whole.items()}
            piece |= {name: piece[name][:, columns] for name in piece if name != "sources"}
            if topology.index("pp") == topology.last_stage:
                loss.observe(piece["losses"], piece["mask"])
                sources.observe(piece["losses"], piece["mask"], piece["sources"])
                shard = piece["logits"].chunk(topology.size("tp"), dim=-1)[topology.index("tp")]
                tensors.observe_logits(shard)
            if topology.index("pp") == 0:
                routing = piece["routing"].reshape(-1, EXPERTS)
                padding = piece["padding"].reshape(-1)
                if topology.sequence_parallel:
                    mine = torch.arange(len(padding)).chunk(topology.size("tp"))[topology.index("tp")]
                    routing, padding = routing[mine], padding[mine]
                experts.observe("layer_000", routing, padding)
        for probe in probes:
            probe.end_step(FACTS)
        ledgers.append(ledger)
    return reduce_together(ledgers, Priority.P1)


@given(seed=st.integers(0, 2**16), mesh=meshes)
@settings(max_examples=40, deadline=None)
def test_token_quantities_do_not_depend_on_the_mesh(seed, mesh):
    alone = token_parts(seed, {"micro_batches": 1})
    split = token_parts(seed, mesh)
    assert alone.keys() == split.keys()
    for name, cells in alone.items():
        if name in ("loss/sum", "loss/tokens"):  # one cell a data rank: their sums must agree
            assert split[name].sum() == pytest.approx(cells.sum(), rel=1e-12)
        elif name.endswith(("/tokens", "/absmax")):
            assert np.array_equal(split[name], cells)
        else:
            assert split[name] == pytest.approx(cells, rel=1e-12)


def parameters(seed: int) -> list[tuple[str, GradientGroup, torch.Tensor]]:
    """(placement, group, full gradient) of a small model; experts are one tensor each."""
    draw = torch.Generator().manual_seed(seed)

    def gradient(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=draw)
        values[values.abs() < 0.3] = 0.0
        return values

    dense = [
        ("tp", GradientGroup("embedding", None), gradient(8, 4)),
        ("tp", GradientGroup("embedding", None, padding=True), gradient(2, 4)),
        ("tp", GradientGroup("dense", "layer_000/attention_qkv"), gradient(12, 4)),
        ("replicated", GradientGroup("dense", "layer_000/norm"), gradient(4)),
        ("replicated", GradientGroup("dense", "layer_000/router"), gradient(4, 4)),
    ]
    experts = [
        (f"expert {index}", GradientGroup("expert", "layer_000/experts"), gradient(8, 4))
        for index in range(EXPERTS)
    ]
    return dense + experts


def gradient_parts(seed: int, mesh: dict, *, sharded: bool) -> dict[str, np.ndarray]:
    """The reduced parts of the gradient when parameters, experts and optimizer shards are split."""
    ledgers = []
    for topology in ranks_of(**mesh):
        mine = []
        for placement, group, whole in parameters(seed):
            if topology.index("pp") != 0:
                continue
            piece = whole.reshape(-1)
            if placement.startswith("expert"):
                holder = int(placement.split()[1]) // (EXPERTS // topology.size("ep"))
                if holder != topology.index("ep"):
                    continue
                piece = piece.chunk(topology.size("expert_tp"))[topology.index("expert_tp")]
                data_index, data_size = topology.index("expert_dp"), topology.size("expert_dp")
            else:
                if placement == "tp":
                    piece = piece.chunk(topology.size("tp"))[topology.index("tp")]
                elif topology.index("tp") != 0:
                    continue
                data_index, data_size = topology.data_index, topology.data_size
            if sharded:
                bounds = [round(i * len(piece) / data_size) for i in range(data_size + 1)]
                piece = piece[bounds[data_index] : bounds[data_index + 1]]
            elif data_index != 0:
                continue
            mine.append((group, piece))
        probe = GradientProbe(
            ProbeConfig().gradient,
            ["layer_000/attention_qkv", "layer_000/experts", "layer_000/norm", "layer_000/router"],
            [group for group, _ in mine],
        )
        ledger = LocalLedger(topology, torch.device("cpu"))
        probe.declare(ledger)
        ledger.freeze()
        probe.on_frozen(ledger.device)
        ledger.reset()
        probe.gate.set(Priority.P1)
        probe.observe([piece for _, piece in mine])
        ledgers.append(ledger)
    return reduce_together(ledgers, Priority.P1)


@given(
    seed=st.integers(0, 2**16),
    mesh=st.sampled_from(
        [
            {"tp": 2},
            {"dp": 4},
            {"dp": 2, "cp": 2, "tp": 2, "pp": 2},
            {"dp": 2, "ep": 2},
            {"dp": 4, "tp": 2, "ep": 4},
            {"dp": 2, "tp": 2, "ep": 2, "expert_tp": 2},
            {"tp": 2, "ep": 2},
        ]
    ),
    sharded=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_gradient_quantities_do_not_depend_on_the_mesh(seed, mesh, sharded):
    alone = gradient_parts(seed, {}, sharded=False)
    split = gradient_parts(seed, mesh, sharded=sharded)
    for name, cells in alone.items():
        if name.endswith("abs_max"):
            assert np.array_equal(split[name], cells)
        else:
            assert split[name] == pytest.approx(cells, rel=1e-12)
