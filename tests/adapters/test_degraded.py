"""What a family that is on cannot show is said in the self-check, with the option that is the reason."""

import argparse

from megatron_probes.adapters.megatron_lm.bindings import Binding, decide_bindings
from megatron_probes.config import ProbeConfig


def binding(family: str, config: dict, **given: object) -> Binding:
    plain = {
        "num_experts": 8,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_group_topk": None,
        "moe_enable_routing_replay": False,
        "moe_router_fusion": False,
        "moe_router_dtype": None,
        "moe_router_topk": 2,
        "dataloader_type": "single",
        "data_parallel_size": 16,
        "context_parallel_size": 4,
    }
    args = argparse.Namespace(**(plain | given))
    return decide_bindings(ProbeConfig.model_validate(config), args)[family]


def test_rank_means_end_at_64_data_ranks():
    config = {"loss": {"per_rank": True}}
    assert binding("loss", config).status == "bound"
    found = binding("loss", config, data_parallel_size=17)
    assert (found.status, found.reason) == ("degraded", "no loss/rank_mean: 68 data ranks, more than 64")
    assert binding("loss", {}, data_parallel_size=17).status == "bound"


def test_data_that_can_pad_and_a_hidden_margin_are_both_named():
    config = {"experts": {"forensics": True}}
    assert binding("experts", config).status == "bound"
    found = binding("experts", config, sft=True, moe_router_fusion=True)
    assert found.status == "degraded"
    assert "--sft pads its sequences: padding is counted where" in found.reason
    assert "; no topk_margin: --moe-router-fusion" in found.reason
    assert binding("experts", {}, moe_router_fusion=True).status == "bound"


def test_a_family_that_is_off_stays_off():
    found = binding("experts", {"experts": {"enabled": False}}, sft=True)
    assert found == Binding("experts", "off", "experts.enabled is false")
