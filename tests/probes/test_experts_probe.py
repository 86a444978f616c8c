"""The experts by hand: balancing loss over stages, padding, forensics, and what is said of padding."""

import logging

import pytest
import torch
import torch.distributed as dist

from megatron_probes import ops
from megatron_probes.catalog import Priority
from megatron_probes.config import ProbeConfig
from megatron_probes.cpu.fork import fork_ranks, gloo_process_group
from megatron_probes.formulas.experts import mean_aux_loss
from megatron_probes.probes import ExpertsProbe, Facts, Forensics, LossProbe, MoELayer
from megatron_probes.session import ProbeSession
from megatron_probes.sinks import RecordFileSink, StepRecord, read_records
from megatron_probes.topology import AXES, Axis, Topology, gather_coordinates
from tests.manifests import manifest
from tests.meshes import LocalLedger, ranks_of, reduce_together

P0 = Facts(step=1, priority=Priority.P0, time=0.0, step_time_s=1.0)
P1 = Facts(step=1, priority=Priority.P1, time=0.0, step_time_s=1.0)
CPU = torch.device("cpu")


def on_gloo_ranks(rank: int, axis: str, size: int) -> Topology:
    """The topology of ranks that differ on one axis."""
    group = dist.new_group(list(range(size)))
    axes = dict.fromkeys(AXES, Axis(0, 1)) | {axis: Axis(rank, size)}
    return Topology(
        rank=rank,
        world_size=size,
        axes=axes,
        stage_group=None if axis == "pp" else group,
        pipeline_group=group if axis == "pp" else None,
        coordinates=gather_coordinates(axes, CPU),
    )


def run_one_step(topology: Topology, probe: ExpertsProbe, observe, folder) -> None:
    """A sampled step of a session whose last rank writes."""
    session = ProbeSession(ProbeConfig(sample_every=1, strict=True), topology, CPU, [probe])
    if topology.rank == topology.world_size - 1:
        session.write_to([RecordFileSink(folder)], manifest())
    session.step_begin(1)
    session.pass_begin()
    observe()
    session.step_end(P1)
    session.close()


def values_of(folder) -> dict:
    (record,) = read_records(folder)
    assert isinstance(record, StepRecord)
    return dict(record.values)


def map_of(experts: list[int], number: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(experts), number).bool()


@pytest.mark.slow
def test_balancing_losses_of_all_stages_reach_the_writer_pc23(tmp_path):
    stages = [[[1.0, 1.0], [2.0, 2.0]], [[1.0, 4.0], [1.5, 1.5]]]
    layers = [MoELayer(f"layer_{index:03d}", 2) for index in range(4)]

    def train(rank: int) -> None:
        with gloo_process_group():
            topology = on_gloo_ranks(rank, "pp", 2)
            probe = ExpertsProbe(topology, layers)

            def observe() -> None:
                for layer, losses in zip(layers[2 * rank : 2 * rank + 2], stages[rank], strict=True):
                    for loss in losses:
                        probe.observe(layer.name, map_of([0, 1], 2), None)
                        probe.observe_aux_loss(layer.name, torch.tensor(loss))

            run_one_step(topology, probe, observe, tmp_path)

    fork_ranks(train, 2, timeout_s=120)
    values = values_of(tmp_path)
    means = [values[f"moe/{layer.name}/aux_loss"] for layer in layers]
    assert means == [1.0, 2.0, 2.5, 1.5]
    assert mean_aux_loss([[mean] for mean in means]) == 1.75


def test_a_model_without_experts_has_no_balancing_loss_pc23():
    (topology,) = ranks_of()
    probe, ledger = ExpertsProbe(topology, []), LocalLedger(topology, CPU)
    probe.declare(ledger)
    ledger.freeze()
    values = {}
    probe.finalize(reduce_together([ledger], Priority.P1), P1, values)
    assert values == {}


@pytest.mark.slow
def test_padding_shifts_neither_load_nor_drops_pc25(tmp_path):
    layer = MoELayer("layer_000", 4)
    routed = [[0, 0, 0, 0, 1, 1, 2, 3], [0, 1, 2, 3, 0, 0]]
    valid = [8, 4]  # the last two tokens of rank 1 are padding

    def train(rank: int) -> None:
        with gloo_process_group():
            topology = on_gloo_ranks(rank, "dp", 2)
            probe = ExpertsProbe(topology, [layer], drops_tokens=True)
            chosen = map_of(routed[rank], 4)
            padding = torch.arange(len(chosen)) >= valid[rank]
            kept = chosen & ((chosen & ~padding[:, None]).cumsum(dim=0) <= 2)

            def observe() -> None:
                probe.observe(layer.name, chosen, padding)
                probe.observe_dropped(chosen, kept, padding)

            run_one_step(topology, probe, observe, tmp_path)

    fork_ranks(train, 2, timeout_s=120)
    values = values_of(tmp_path)
    assert values["moe/dropped_fraction"] == pytest.approx(2 / 12, rel=1e-12)
    assert values["moe/layer_000/max_vio"] == pytest.approx(5 / 3 - 1, rel=1e-12)  # [5, 3, 2, 2]


def forensic_rank(topology: Topology, layers: list[MoELayer]) -> tuple[ExpertsProbe, LocalLedger]:
    probe = ExpertsProbe(topology, layers, topk=1, forensics=Forensics(bias=True, margin=True))
    ledger = LocalLedger(topology, CPU)
    probe.declare(ledger)
    ledger.freeze()
    ledger.reset()
    return probe, ledger


def test_forensics_of_a_layer():
    """DP2 x TP2 without sequence parallelism: tp ranks see the same tokens, all ranks hold the same bias."""
    layers = [MoELayer("layer_000", 3), MoELayer("layer_001", 3)]
    scores = torch.tensor([[4.0, 1.0, 0.0], [0.5, 0.5, 0.25], [9.0, 0.0, 0.0]])
    padding = torch.tensor([False, False, True])
    ranks = [forensic_rank(topology, layers) for topology in ranks_of(dp=2, tp=2)]
    for probe, _ in ranks:
        probe.observe("layer_000", map_of([0, 0, 1], 3), padding)
        probe.observe_margin("layer_000", scores, 1, padding)
        probe.watch_bias("layer_000", lambda: torch.tensor([0.5, -0.25, 0.5]))
        probe.end_step(P1)
    parts = reduce_together([ledger for _, ledger in ranks], Priority.P1)
    found = ranks[0][0].histograms(parts, P1)
    assert found.keys() == {f"moe/layer_000/{name}" for name in ("load", "bias", "topk_margin")}

    load = found["moe/layer_000/load"]
    assert (load.edges, load.counts) == ((0.0, 1.0, 2.0, 3.0), (1.0, 0.0, 0.0))
    assert load.named[0] == (0, 1.0)

    bias = found["moe/layer_000/bias"]
    assert bias.named == ((0, 0.5), (1, -0.25), (2, 0.5))
    assert (bias.edges[0], bias.counts[0], bias.edges[-1], bias.counts[-1]) == (-0.25, 1.0, 0.5, 2.0)

    margin = found["moe/layer_000/topk_margin"]
    assert (margin.edges[0], margin.counts[0]) == (0.0, 2.0)  # the tie, once on each data rank
    assert (margin.counts[-1], sum(margin.counts)) == (2.0, 4.0)
    assert margin.edges[-2] <= 3.0 < margin.edges[-1]
    assert margin.edges[1] == ops.LOWEST_EDGE

    assert ranks[0][0].histograms(parts, P0) == {}


def test_the_bias_is_read_at_sampled_steps_only():
    (topology,) = ranks_of()
    probe, ledger = forensic_rank(topology, [MoELayer("layer_000", 2)])

    def read() -> torch.Tensor:
        raise AssertionError("not due")

    probe.watch_bias("layer_000", read)
    probe.end_step(P0)
    assert reduce_together([ledger], Priority.P1)["moe/layer_000/bias"].tolist() == [0.0, 0.0]


def test_without_forensics_no_slot_is_declared():
    (topology,) = ranks_of()
    layers = [MoELayer("layer_000", 2)]
    payloads = []
    for forensics in (None, Forensics(bias=False, margin=False), Forensics(bias=True, margin=True)):
        probe, ledger = ExpertsProbe(topology, layers, forensics=forensics), LocalLedger(topology, CPU)
        probe.declare(ledger)
        ledger.freeze()
        payloads.append((ledger.payload_bytes(Priority.P0), ledger.payload_bytes(Priority.P1)))
    plain, empty, full = payloads
    assert plain == empty
    assert full[0] == plain[0]
    assert full[1] - plain[1] == 8 * (ops.NUM_BINS + 2)


def reported(
    caplog, tokens: dict[str, int], masks: dict[str, torch.Tensor | None], targets: int, steps: int = 1
) -> list[str]:
    """What is said of layers that saw ``tokens`` tokens with these masks, at a step of so many targets."""
    (topology,) = ranks_of()
    layers = [MoELayer(name, 2) for name in tokens]
    probe, loss = ExpertsProbe(topology, layers, topk=1), LossProbe(topology)
    ledger = LocalLedger(topology, CPU)
    for declared in (probe, loss):
        declared.declare(ledger)
    ledger.freeze()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megatron_probes"):
        for _ in range(steps):
            ledger.reset()
            loss.observe(torch.ones(targets), None)
            for name, number in tokens.items():
                probe.observe(name, map_of([0] * number, 2), masks[name])
            probe.finalize(reduce_together([ledger], Priority.P0), P0, {})
    return caplog.messages


def test_padding_is_reported_once_where_nothing_tells_the_routers_of_it(caplog):
    plain = {"layer_000": 8, "layer_001": 8}
    no_masks = dict.fromkeys(plain)
    (message,) = reported(caplog, plain, no_masks, targets=6, steps=3)
    assert message.startswith("step 1: 2 of 8 tokens have a masked loss")
    assert reported(caplog, plain, no_masks, targets=8) == []
    masked = dict.fromkeys(plain, torch.tensor([False] * 7 + [True]))
    assert reported(caplog, plain, masked, targets=6) == []


def test_layers_that_counted_more_tokens_are_named(caplog):
    (message,) = reported(
        caplog, {"layer_000": 8, "layer_001": 6}, dict.fromkeys(["layer_000", "layer_001"]), 6
    )
    assert message.startswith("step 1: layer_000 counted up to 8 tokens where other layers counted 6")
    heads = {"layer_000": 8, "mtp_000": 16}
    assert reported(caplog, heads, dict.fromkeys(heads), targets=8) == []
