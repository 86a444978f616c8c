"""Which families a run can measure, from the configuration and Megatron's arguments alone."""

import argparse

import pytest

from megatron_probes.adapters.megatron_lm.bindings import FAMILIES, decide_bindings
from megatron_probes.config import ProbeConfig


def arguments(**args: object) -> argparse.Namespace:
    """Megatron's arguments as far as they decide, for a plain MoE pretraining run."""
    return argparse.Namespace(**({"num_experts": 8, "dataloader_type": "single"} | args))


def off(config: ProbeConfig | None = None, **args: object) -> dict[str, str]:
    """Family -> reason of those that are off for an MoE model with two sources."""
    config = config or ProbeConfig(sources=("web", "code"))
    bindings = decide_bindings(config, arguments(**args))
    assert set(bindings) == set(FAMILIES)
    return {family: b.reason for family, b in bindings.items() if b.status == "off"}


def test_an_ordinary_run_measures_everything():
    assert off() == {}


def test_what_the_model_or_the_config_lacks_is_off_with_the_reason():
    bindings = decide_bindings(ProbeConfig(), arguments(num_experts=None))
    reasons = {family: b.reason for family, b in bindings.items() if b.status == "off"}
    assert reasons == {
        "sources": "the config lists no sources",
        "experts": "the model has no MoE layer",
    }


@pytest.mark.parametrize(
    ("args", "hidden"),
    [
        ({"cuda_graph_impl": "none"}, set()),
        ({"cuda_graph_impl": "local"}, {"experts"}),
        ({"cuda_graph_impl": "transformer_engine"}, {"experts"}),
        (
            {"cuda_graph_impl": "full_iteration"},
            {"loss", "sources", "tensors", "experts", "evaluation"},
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
            {"loss", "sources", "tensors", "experts", "evaluation"},
        ),
        ({"enable_cuda_graph": True}, {"experts"}),
        ({"optimizer_cuda_graph": True}, {"gradient"}),
        ({"use_megatron_fsdp": True}, {"gradient"}),
        ({"use_torch_fsdp2": True}, {"gradient"}),
        ({"gtp_weight_remat_size": 2}, {"gradient"}),
        ({"cross_entropy_fusion_impl": "linear"}, {"tensors"}),
        ({"cross_entropy_fusion_impl": "native"}, set()),
    ],
)
def test_a_mode_that_hides_a_tensor_switches_its_family_off(args, hidden):
    assert set(off(**args)) == hidden


def test_the_reason_names_the_option():
    assert "--optimizer-cuda-graph" in off(optimizer_cuda_graph=True)["gradient"]
    assert "--cuda-graph-impl local" in off(cuda_graph_impl="local")["experts"]


def test_detectors_are_off_without_anything_to_watch():
    config = ProbeConfig.model_validate({"loss": {"enabled": False}, "gradient": {"enabled": False}})
    assert {"loss", "gradient", "stability"} <= set(off(config))


@pytest.mark.parametrize(
    "option", ["log_memory_to_tensorboard", "log_memory_interval", "log_device_memory_used"]
)
def test_memory_peaks_are_lifetime_peaks_while_megatron_reads_them_too(option):
    bindings = decide_bindings(ProbeConfig(), arguments(**{option: 1}))
    assert bindings["system"].status == "degraded"
    assert "whole run" in bindings["system"].reason
