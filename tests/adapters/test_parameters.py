"""Class and part of Megatron's parameter names."""

import pytest

from megatron_probes.adapters.megatron_lm.parameters import layer_part, pads_vocabulary, parameter_class
from megatron_probes.catalog.spec import GRADIENT_PARTS, PARAMETER_CLASSES

CASES = {
    "embedding.word_embeddings.weight": ("embedding", None),
    "embedding.position_embeddings.weight": ("embedding", None),
    "output_layer.weight": ("dense", None),
    "decoder.final_layernorm.weight": ("dense", None),
    "layer_000.input_layernorm.weight": ("dense", "layer_000/norm"),
    "layer_011.self_attention.linear_qkv.weight": ("dense", "layer_011/attention_qkv"),
    "layer_011.self_attention.linear_qkv.layer_norm_weight": ("dense", "layer_011/norm"),
    "layer_011.self_attention.q_layernorm.weight": ("dense", "layer_011/norm"),
    "layer_011.self_attention.linear_kv_up_proj.weight": ("dense", "layer_011/attention_qkv"),
    "layer_011.self_attention.linear_proj.bias": ("dense", "layer_011/attention_proj"),
    "layer_002.mlp.linear_fc1.weight": ("dense", "layer_002/mlp_fc1"),
    "layer_002.mlp.linear_fc2.bias": ("dense", "layer_002/mlp_fc2"),
    "layer_003.mlp.router.weight": ("dense", "layer_003/router"),
    "layer_003.mlp.experts.local_experts.1.linear_fc1.weight": ("expert", "layer_003/experts"),
    "layer_003.mlp.experts.linear_fc2.weight0": ("expert", "layer_003/experts"),
    "layer_003.mlp.shared_experts.linear_fc1.weight": ("dense", "layer_003/shared_experts"),
    "layer_004.mixer.in_proj.weight": ("dense", "layer_004/mamba"),
    "mtp_000.eh_proj.weight": ("dense", "mtp_000/other"),
    "mtp_000.enorm.weight": ("dense", "mtp_000/norm"),
}


@pytest.mark.parametrize(("name", "expected"), CASES.items())
def test_class_and_part(name, expected):
    assert (parameter_class(name), layer_part(name)) == expected


def test_names_are_those_of_the_catalogue():
    for parameter_class_, part in CASES.values():
        assert parameter_class_ in PARAMETER_CLASSES
        assert part is None or part.split("/")[1] in GRADIENT_PARTS


def test_only_vocabulary_rows_are_padded():
    assert [name for name in CASES if pads_vocabulary(name)] == [
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    ]
