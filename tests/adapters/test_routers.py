"""Forensics and padding of the experts on Megatron's own runs, against what its routers were seen to do."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from capturing_run import Captured, Run, experts, printed, train, train_older

from megatron_probes.adapters.megatron_lm.routers import why_no_margin, why_padding
from megatron_probes.ops import bin_edges
from megatron_probes.sinks import StepRecord
from tests.patches.megatron_releases import copy_release

EXPERTS, TOPK = 4, 2
FORENSICS = {"experts": {"forensics": True}}
LAYERS = ("layer_000", "layer_001")
TP2 = ["--tensor-model-parallel-size=2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size=2"]
RECOMPUTE = ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
SIGMOID = [
    "--moe-router-score-function=sigmoid",
    "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate=0.25",
]


def calls_of(layer: str, ranks: list[Captured]) -> list[dict]:
    number = int(layer.removeprefix("layer_")) + 1
    return [call for seen in ranks for call in seen.routing.get(number, [])]


def ranked_values(call: dict, score_function: str) -> torch.Tensor:
    """What the router ranks: logits by default, else their scores plus the bias."""
    if score_function == "softmax":
        return call["logits"]
    if score_function == "pre_softmax":
        return torch.softmax(call["logits"], dim=-1, dtype=torch.float32)
    scores = torch.sigmoid(call["logits"].float())
    return scores if call["bias"] is None else scores + call["bias"]


def expected_margins(calls: list[dict], score_function: str) -> np.ndarray:
    """Valid tokens in each bin of the fixed edges, by sorting every token's values."""
    counts = np.zeros(len(bin_edges()) + 1)
    for call in calls:
        values = np.sort(ranked_values(call, score_function).double().numpy(), axis=1)[:, ::-1]
        valid = np.ones(len(values), bool) if call["padding"] is None else ~call["padding"].numpy()
        margins = (values[:, TOPK - 1] - values[:, TOPK])[valid]
        counts += np.bincount(np.searchsorted(bin_edges(), margins, side="right"), minlength=len(counts))
    return counts


def expected_counts(calls: list[dict]) -> np.ndarray:
    counts = np.zeros(EXPERTS)
    for call in calls:
        chosen = call["chosen"].numpy()
        if call["padding"] is not None:
            chosen = chosen[~call["padding"].numpy()]
        counts += chosen.sum(axis=0)
    return counts


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags", "score_function"),
    [
        (1, [], "softmax"),
        (1, RECOMPUTE, "softmax"),
        (1, ["--moe-router-pre-softmax"], "pre_softmax"),
        (1, SIGMOID, "sigmoid"),
        (2, [*SIGMOID, *TP2, "--expert-tensor-parallel-size=1"], "sigmoid"),
        (2, [*SIGMOID, *PP2], "sigmoid"),
        (2, ["--expert-model-parallel-size=2"], "softmax"),
        (1, ["--moe-expert-capacity-factor=1.0"], "softmax"),
    ],
    ids=["plain", "recompute", "pre-softmax", "bias", "bias tp2", "bias pp2", "ep2", "capacity"],
)
def test_forensics_are_what_the_routers_did(
    tmp_path: Path, ranks: int, flags: list[str], score_function: str
) -> None:
    records, seen = train(Run(str(tmp_path), experts(*flags), FORENSICS), ranks)
    check_forensics(records[0], seen, flags, score_function)


@pytest.mark.megatron
@pytest.mark.slow
def test_older_releases_show_their_scores_too(tmp_path: Path) -> None:
    run = Run(str(tmp_path), experts(*SIGMOID), FORENSICS)
    records, seen = train_older(run, copy_release("0.17.1", tmp_path))
    check_forensics(records[0], seen, SIGMOID, "sigmoid")


def check_forensics(first: StepRecord, seen: list[Captured], flags: list[str], score_function: str) -> None:
    for layer in LAYERS:
        calls = calls_of(layer, seen)
        margins = expected_margins(calls, score_function)
        assert margins.sum() == 4 * 16
        assert np.array_equal(first.parts[f"moe/{layer}/topk_margin"], margins)
        assert sum(first.histograms[f"moe/{layer}/topk_margin"].counts) == 4 * 16

        load = first.histograms[f"moe/{layer}/load"]
        assert load.edges == (0.0, 1.0, 2.0, 3.0, 4.0)
        counts = np.array(first.parts[f"moe/{layer}/tokens"])
        if "capacity" not in " ".join(flags):
            assert np.array_equal(counts, expected_counts(calls))
        assert counts.sum() == 4 * 16 * TOPK
        assert load.counts == pytest.approx(counts / counts.sum(), rel=1e-12)
        assert load.named[0] == (int(counts.argmax()), pytest.approx(counts.max() / counts.sum()))

        if "--moe-router-enable-expert-bias" in flags:
            held = [rank.biases[int(layer[-1]) + 1] for rank in seen if int(layer[-1]) + 1 in rank.biases]
            assert all(torch.equal(bias, held[0]) for bias in held)
            assert held[0].abs().max() == 0.25
            assert first.parts[f"moe/{layer}/bias"] == held[0].double().tolist()
            assert [bias for _, bias in first.histograms[f"moe/{layer}/bias"].named] == held[0].tolist()
        else:
            assert f"moe/{layer}/bias" not in first.histograms


@pytest.mark.megatron
@pytest.mark.slow
def test_forensics_change_no_bit_and_add_no_collective(tmp_path: Path) -> None:
    losses, collectives = [], []
    for name, config in (("with", FORENSICS), ("without", {})):
        run = Run(str(tmp_path / name), experts(*SIGMOID, *PP2), config)
        records, _ = train(run, 2)
        losses.append([record.values["loss/global"] for record in records])
        (line,) = [line for line in printed(run).splitlines() if "bytes in" in line]
        collectives.append(line.split(" bytes in ")[1].split(" collectives")[0])
        assert bool(records[0].histograms) == (name == "with")
    assert losses[0] == losses[1]
    assert collectives[0] == collectives[1]


@pytest.mark.megatron
@pytest.mark.slow
def test_recompute_counts_the_balancing_loss_once(tmp_path: Path) -> None:  # PC45 (b)
    balanced = ["--moe-router-load-balancing-type=aux_loss", "--moe-aux-loss-coeff=0.01"]
    parts = []
    for name, flags in (("plain", []), ("recompute", RECOMPUTE)):
        records, _ = train(Run(str(tmp_path / name), experts(*balanced, *flags)), 1)
        parts.append([records[0].parts[f"moe/{layer}/aux_loss"] for layer in LAYERS])
        values = [records[0].values[f"moe/{layer}/aux_loss"] for layer in LAYERS]
        assert all(0.9 < value < 1.5 for value in values)  # near the 1 of a balanced router, not twice that
    assert parts[0] == parts[1]
    assert [micro_batches for layer in parts[0] for micro_batches in layer[1:]] == [4.0, 4.0]


@pytest.mark.megatron
@pytest.mark.slow
def test_padding_that_the_script_names_is_left_out(tmp_path: Path) -> None:  # PC25
    run = Run(str(tmp_path), experts(), FORENSICS, gives_padding_mask=True)
    records, (seen,) = train(run, 1)
    valid = records[0].values["data/valid_tokens"]
    assert 0 < valid < 4 * 16
    for layer in LAYERS:
        calls = calls_of(layer, [seen])
        counts = records[0].parts[f"moe/{layer}/tokens"]
        assert counts == expected_counts(calls).tolist()
        assert sum(counts) == valid * TOPK
        margins = expected_margins(calls, "softmax")
        assert np.array_equal(records[0].parts[f"moe/{layer}/topk_margin"], margins)
        assert margins.sum() == valid
    assert "padding_mask" not in printed(run)


@pytest.mark.megatron
@pytest.mark.slow
def test_padding_that_no_router_is_told_of_is_reported_once(tmp_path: Path) -> None:
    run = Run(str(tmp_path), experts())
    records, _ = train(run, 1)
    masked = 4 * 16 - records[0].values["data/valid_tokens"]
    assert masked > 0
    (line,) = [line for line in printed(run).splitlines() if "moe/* counts it" in line]
    assert f"step 1: {masked} of 64 tokens have a masked loss" in line


@pytest.mark.megatron
@pytest.mark.slow
def test_a_stage_without_the_mask_is_named(tmp_path: Path) -> None:
    """The first stage's script gets no loss mask, so only the last one tells its routers of padding."""
    run = Run(str(tmp_path), experts(*PP2), gives_padding_mask=True)
    records, _ = train(run, 2)
    valid = records[0].values["data/valid_tokens"]
    assert [sum(records[0].parts[f"moe/{layer}/tokens"]) / TOPK for layer in LAYERS] == [64, valid]
    (line,) = [line for line in printed(run).splitlines() if "moe/* counts it" in line]
    assert f"layer_000 counted up to 64 tokens where other layers counted {valid}" in line


def arguments(**given: object) -> argparse.Namespace:
    plain = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_group_topk": None,
        "moe_enable_routing_replay": False,
        "moe_router_fusion": False,
        "moe_router_dtype": None,
        "moe_router_topk": 2,
        "num_experts": 8,
        "dataloader_type": "single",
    }
    return argparse.Namespace(**(plain | given))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"moe_router_group_topk": 2}, "--moe-router-group-topk"),
        ({"moe_enable_routing_replay": True}, "--moe-enable-routing-replay"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "quantile_balancing"),
        ({"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "sinkhorn"),
        ({"moe_router_fusion": True}, "--moe-router-fusion"),
        ({"moe_router_dtype": "fp64"}, "--moe-router-dtype fp64"),
        ({"moe_router_topk": 8}, "every expert"),
    ],
)
def test_a_margin_that_does_not_decide_is_off_with_the_reason(given: dict, named: str) -> None:
    assert why_no_margin(arguments()) == ""
    assert named in why_no_margin(arguments(**given))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"sft": True}, "--sft"),
        ({"perform_rl_step": True}, "--perform-rl-step"),
        ({"fim_data": True}, "--fim-data"),
        ({"dataloader_type": "external"}, "--dataloader-type external"),
    ],
)
def test_arguments_that_can_pad_are_named(given: dict, named: str) -> None:
    assert why_padding(arguments()) == ""
    assert why_padding(arguments(dataloader_type="cyclic")) == ""
    assert named in why_padding(arguments(**given))
