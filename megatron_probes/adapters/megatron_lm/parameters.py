"""What Megatron's parameters are: their names, the global layer they belong to, their class and part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Module name -> part of the layer; of two that a name holds, the one further up here decides.
_PARTS = (
    ("shared_experts", "shared_experts"),
    ("experts", "experts"),
    ("router", "router"),
    ("layer_norm_weight", "norm"),
    ("layer_norm_bias", "norm"),
    ("q_layernorm", "norm"),
    ("k_layernorm", "norm"),
    ("kv_layernorm", "norm"),
    ("linear_qkv", "attention_qkv"),
    ("linear_q_proj", "attention_qkv"),
    ("linear_q_down_proj", "attention_qkv"),
    ("linear_q_up_proj", "attention_qkv"),
    ("linear_kv", "attention_qkv"),
    ("linear_kv_down_proj", "attention_qkv"),
    ("linear_kv_up_proj", "attention_qkv"),
    ("linear_q", "attention_qkv"),
    ("linear_proj", "attention_proj"),
    ("linear_fc1", "mlp_fc1"),
    ("linear_fc2", "mlp_fc2"),
    ("mixer", "mamba"),
)
_NORMS = ("layernorm", "norm")


def parameter_names(model: list[Any]) -> dict[int, str]:
    """id(parameter) -> global name: stages and virtual stages number their layers from the model's start.

    ``decoder.layers.1.`` of a later stage becomes ``layer_005.``, a multi-token-prediction layer
    ``mtp_000.``; what stands outside the layers keeps its name. A parameter with two names has the first.
    """
    from megatron.core.utils import unwrap_model

    names: dict[int, str] = {}
    for chunk in (unwrap_model(chunk) for chunk in model):
        prefixes = _layer_prefixes(chunk)
        for local, parameter in chunk.named_parameters():
            names.setdefault(id(parameter), _global_name(local, prefixes))
    return names


def unused_parameters(model: list[Any]) -> set[int]:
    """id(parameter) of the output weights that no head uses.

    A last stage with prediction heads holds the embedding and ties its heads to that one; Megatron still
    allocates the output layer's own weight there.
    """
    from megatron.core.utils import unwrap_model

    return {
        id(chunk.output_layer.weight)
        for chunk in (unwrap_model(chunk) for chunk in model)
        if getattr(chunk, "share_embeddings_and_output_weights", False)
        and getattr(chunk, "mtp_process", False)
        and getattr(chunk, "post_process", False)
        and chunk.output_layer.weight is not None
        and chunk.output_layer.weight is not chunk.shared_embedding_or_output_weight()
    }


def _layer_prefixes(chunk: Any) -> dict[str, str]:
    """Local module name of each layer -> its global name; the outermost numbered module is the layer."""
    prefixes: dict[str, str] = {}
    for name, module in chunk.named_modules():
        is_layer = name.rpartition(".")[2].isdigit() and getattr(module, "layer_number", None) is not None
        if is_layer and not any(name.startswith(outer) for outer in prefixes):
            kind = "mtp" if name.startswith("mtp.") else "layer"
            prefixes[f"{name}."] = f"{kind}_{module.layer_number - 1:03d}."
    return prefixes


def _global_name(local: str, prefixes: Mapping[str, str]) -> str:
    for prefix, name in prefixes.items():
        if local.startswith(prefix):
            return name + local.removeprefix(prefix)
    return local


def is_routed_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert (shared experts are dense)."""
    return "experts" in name.split(".")


def parameter_class(name: str) -> str:
    """``embedding``, ``expert`` or ``dense``; an untied output layer is dense (Specification, section 2)."""
    if is_routed_expert(name):
        return "expert"
    return "embedding" if name.startswith("embedding.") else "dense"


def layer_part(name: str) -> str | None:
    """``layer_NNN/<part>`` of a global parameter name, None outside the layers (Specification, section 2)."""
    layer, _, rest = name.partition(".")
    if not layer.startswith(("layer_", "mtp_")):
        return None
    modules = rest.split(".")
    for module, part in _PARTS:
        if module in modules:
            return f"{layer}/{part}"
    if any(module.endswith(_NORMS) for module in modules):
        return f"{layer}/norm"
    return f"{layer}/other"


def pads_vocabulary(name: str) -> bool:
    """Whether the rows of a parameter are the vocabulary, padded to a multiple that depends on tp."""
    return name in ("embedding.word_embeddings.weight", "output_layer.weight")
