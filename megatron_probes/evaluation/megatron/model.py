"""A GPT from a Megatron checkpoint, in float32 and in any layout, without the global state of training."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_probes.evaluation.megatron.checkpoint import Checkpoint
from megatron_probes.evaluation.megatron.layout import Layout
from megatron_probes.evaluation.megatron.safe_pickle import load_safely
from megatron_probes.evaluation.suite import SuiteError

_PLAIN_ARITHMETIC: dict[str, Any] = {
    # float32 all through, and no kernel that only some machine has
    "fp16": False,
    "bf16": False,
    "params_dtype": torch.float32,
    "fp8": None,
    "fp4": None,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "fp32_residual_connection": False,
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "use_kitchen": False,
    "te_precision_config_file": None,
}
_NO_TRAINING: dict[str, Any] = {
    # nothing random, nothing recomputed, no token dropped, no weights drawn only to be overwritten
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "perform_initialization": False,
    "use_cpu_initialization": True,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
    "moe_layer_recompute": False,
    "moe_input_jitter_eps": None,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_router_force_load_balancing": False,
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "cuda_graph_impl": "none",
    # further heads predict what isn't scored
    "mtp_num_layers": None,
}
_NO_OVERLAP: dict[str, Any] = {
    "tp_comm_overlap": False,
    "overlap_p2p_comm": False,
    "overlap_moe_expert_parallel_comm": False,
    "moe_shared_expert_overlap": False,
    "delay_wgrad_compute": False,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    # weights further split than tensors, which are gathered for each use
    "tensor_parallel_num_weight_shards": None,
    "gtp_weight_remat_size": 1,
    "expert_tensor_parallel_num_weight_shards": None,
    "expert_gtp_weight_remat_size": 1,
}
_EVEN_STAGES: dict[str, Any] = {
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


@dataclass(frozen=True)
class LoadedModel:
    """This rank's part of a model."""

    chunks: tuple[Any, ...]
    """GPTModels of this rank: one, or one a virtual stage."""
    args: argparse.Namespace
    """Megatron's arguments in effect."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights of this rank, each once, by the number of its chunk and its name."""
        seen: set[int] = set()
        for i, chunk in enumerate(self.chunks):
            for name, tensor in chunk.state_dict(keep_vars=True).items():
                if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{i}.{name}", tensor.data


def initialize(layout: Layout, checkpoint: Checkpoint) -> None:
    """Make Megatron's groups for ``layout``; the default process group must be there already.

    Raises ``SuiteError`` where ``checkpoint`` doesn't fit the layout, or the ranks don't make it up.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    layout.check(checkpoint)
    world = torch.distributed.get_world_size()
    if world != layout.ranks:
        raise SuiteError(
            f"--tp {layout.tp} --pp {layout.pp} --dp {layout.dp}: {layout.ranks} ranks are needed and "
            f"{world} were started"
        )
    args = checkpoint.args
    stages = args.virtual_pipeline_model_parallel_size if checkpoint.format == "torch" else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=stages,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=_expert_tp(layout, checkpoint),
    )
    model_parallel_cuda_manual_seed(0)  # attention asks for its states even without dropout


def _expert_tp(layout: Layout, checkpoint: Checkpoint) -> int:
    if checkpoint.format == "torch":
        return getattr(checkpoint.args, "expert_tensor_parallel_size", None) or layout.tp
    return layout.tp if layout.dp % layout.ep == 0 else 1


def build_model(checkpoint: Checkpoint, layout: Layout) -> LoadedModel:
    """Return this rank's part of a model of the shape in ``checkpoint``, in float32, with no weights yet.

    ``initialize`` was called before. Raises ``SuiteError`` for what isn't a GPT of Megatron's own layers.
    """
    args = _evaluation_args(checkpoint, layout)
    return LoadedModel(tuple(chunk.eval() for chunk in _build(args)), args)


def load_weights(model: LoadedModel, checkpoint: Checkpoint) -> None:
    """Overwrite the weights of ``model`` by those of ``checkpoint``.

    Raises ``SuiteError`` where any is missing.
    """
    if checkpoint.format == "torch_dist":
        _load_distributed(model, checkpoint)
    else:
        _load_legacy(model, checkpoint)


def _evaluation_args(checkpoint: Checkpoint, layout: Layout) -> argparse.Namespace:
    args = copy.copy(checkpoint.args)
    if getattr(args, "spec", None) or getattr(args, "hybrid_layer_pattern", None):
        raise SuiteError(
            f"--checkpoint: {checkpoint.folder} isn't a GPT of Megatron's own layer specifications "
            "(--spec or --hybrid-layer-pattern was given); only these can be evaluated"
        )
    overrides = {**_PLAIN_ARITHMETIC, **_NO_TRAINING, **_NO_OVERLAP}
    if checkpoint.format == "torch_dist":
        overrides |= _EVEN_STAGES
    if args.moe_token_dispatcher_type == "flex":
        overrides["moe_token_dispatcher_type"] = "alltoall"
    overrides |= {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": _expert_tp(layout, checkpoint),
        # Experts of several tensor ranks would each see all tokens without it.
        "sequence_parallel": layout.tp > 1 and bool(args.num_experts),
    }
    for name, value in overrides.items():
        if hasattr(args, name):
            setattr(args, name, value)
    return args


def _build(args: argparse.Namespace) -> Iterator[Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    config.perform_initialization = False
    stages = args.virtual_pipeline_model_parallel_size
    for stage in range(stages or 1):
        place = {"ignore_virtual": False, "vp_stage": stage if stages else None}
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(
                config,
                use_transformer_engine=False,
                normalization=args.normalization,
                qk_l2_norm=getattr(args, "qk_l2_norm", False),
                vp_stage=place["vp_stage"],
            ),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            vp_stage=place["vp_stage"],
        )
        yield chunk.cuda()


def _load_distributed(model: LoadedModel, checkpoint: Checkpoint) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    common = checkpoint.common  # checks the index, which Megatron reads again
    metadata = dict(common.get("content_metadata") or {})
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    names = ["model"] if len(model.chunks) == 1 else [f"model{i}" for i in range(len(model.chunks))]
    wanted = {
        name: chunk.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, model.chunks, strict=True)
    }
    # Objects would be unpickled. Those of a model are scales of 8-bit formats, which float32 has no use for.
    _, tensors = extract_matching_values(wanted, lambda value: isinstance(value, ShardedObject))
    try:
        loaded = dist_checkpointing.load(tensors, str(checkpoint.folder))
    except Exception as error:  # of many types, by the layer that finds the key or the shape missing
        raise SuiteError(
            f"--checkpoint: {checkpoint.folder} doesn't hold the weights of a GPT with its arguments: {error}"
        ) from None
    for name, chunk in zip(names, model.chunks, strict=True):
        _assign(chunk, loaded[name], checkpoint)


def _load_legacy(model: LoadedModel, checkpoint: Checkpoint) -> None:
    from megatron.core import parallel_state

    place = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        place += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        place += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    file = checkpoint.folder / place / "model_optim_rng.pt"
    if not file.is_file():
        raise SuiteError(f"--checkpoint: {file} is missing")
    state = load_safely(file, str(file))
    names = ["model"] if len(model.chunks) == 1 else [f"model{i}" for i in range(len(model.chunks))]
    for name, chunk in zip(names, model.chunks, strict=True):
        _assign(chunk, _with_local_names(state[name]), checkpoint)


def _with_local_names(state: dict[str, Any]) -> dict[str, Any]:
    """Weights by the names of local layers, where Transformer Engine's fused layers saved them."""
    renamed = {}
    for name, value in state.items():
        name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        head, grouped, tail = name.partition(".experts.linear_fc")
        if grouped and tail[1:].startswith((".weight", ".bias")):
            layer, kind = tail[0], tail[2:].rstrip("0123456789")
            number = tail[2 + len(kind) :]
            name = f"{head}.experts.local_experts.{number}.linear_fc{layer}.{kind}"
        renamed[name] = value
    return renamed


def _assign(chunk: Any, state: dict[str, Any], checkpoint: Checkpoint) -> None:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    missing, unexpected = chunk.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    unexpected = [name for name in unexpected if not name.startswith("mtp.")]
    for what, names in (("lacks", missing), ("has more than the model:", unexpected)):
        if names:
            raise SuiteError(f"--checkpoint: {checkpoint.folder} {what} {', '.join(_few(names))}")


def _few(names: Sequence[str]) -> list[str]:
    return [*names[:3], f"and {len(names) - 3} more"] if len(names) > 3 else list(names)
