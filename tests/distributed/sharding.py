"""Which elements of a whole parameter a rank holds: Megatron's splits, written down once more by hand.

It loads the canonical weights into any layout and puts captured gradients back together. A wrong entry
shows as a wrong loss in the first forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from toy_gpt import ToyGPT


@dataclass(frozen=True)
class Place:
    """A rank's place on the mesh: (index, size) of each axis."""

    tp: tuple[int, int]
    ep: tuple[int, int]
    expert_tp: tuple[int, int]
    pp: int
    dp: int
    cp: int
    cp_size: int


def this_place() -> Place:
    from megatron.core import parallel_state as mpu

    return Place(
        tp=(mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()),
        ep=(mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()),
        expert_tp=(mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()),
        pp=mpu.get_pipeline_model_parallel_rank(),
        dp=mpu.get_data_parallel_rank(),
        cp=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
    )


def global_parameters(chunk: Any, place: Place, model: ToyGPT) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of an unwrapped model chunk under their global names, the tied output under its own."""
    layers = {
        f"{name}.": module.layer_number - 1
        for name, module in chunk.named_modules()
        if re.fullmatch(r"decoder\.layers\.\d+", name)
    }
    first_expert = place.ep[0] * (model.experts // place.ep[1])
    for local, parameter in chunk.named_parameters():
        name = local
        for prefix, layer in layers.items():
            if name.startswith(prefix):
                name = f"decoder.layers.{layer}.{name.removeprefix(prefix)}"
                break
        name = re.sub(
            r"(local_experts\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) + first_expert}", name
        )
        if model.tied and name == "output_layer.weight":
            if hasattr(chunk, "embedding"):
                continue  # a stage with prediction heads has the embedding itself, and this one hangs unused
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def held_elements(name: str, shape: tuple[int, ...], place: Place, gated: bool) -> np.ndarray:
    """Flat indices, in the whole parameter, of the elements that a rank's parameter holds, in its shape."""
    index, size = place.expert_tp if ".experts." in name else place.tp
    whole = np.arange(np.prod(shape)).reshape(shape)
    if name.endswith("linear_fc1.weight") or name.endswith("linear_fc1.bias"):
        halves = whole.reshape(2 if gated else 1, -1, *shape[1:])
        return np.split(halves, size, axis=1)[index].reshape(-1, *shape[1:])
    if re.search(r"(word_embeddings|output_layer|linear_qkv|eh_proj)\.(weight|bias)$", name):
        return np.split(whole, size)[index]
    if re.search(r"(linear_proj|linear_fc2)\.weight$", name):
        return np.split(whole, size, axis=1)[index]
    return whole


def load_weights(chunks: list[Any], model: ToyGPT) -> None:
    """Copies this rank's share of the canonical state into its model chunks."""
    from megatron.core.utils import unwrap_model

    place, weights = this_place(), model.weights()
    with torch.no_grad():
        for chunk in unwrap_model(chunks):
            for name, parameter in global_parameters(chunk, place, model):
                whole = weights[name]
                share = whole.reshape(-1)[held_elements(name, whole.shape, place, model.gated)]
                parameter.copy_(torch.from_numpy(share))
