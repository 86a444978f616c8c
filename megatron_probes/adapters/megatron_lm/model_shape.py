"""The true shapes of a Megatron model, for the FLOP convention of ``formulas.flops``."""

from __future__ import annotations

import argparse

from megatron_probes.formulas.flops import (
    Attention,
    Block,
    Experts,
    FeedForward,
    LatentAttention,
    ModelShape,
    step_flops,
)


class UncountedModel(ValueError):
    """A model whose matrix products the convention does not describe."""


def model_shape(args: argparse.Namespace, vocab_size: int) -> ModelShape:
    """The shapes of the model that Megatron's arguments describe.

    Raises UncountedModel for hybrid, heterogeneous and experimental-attention models, and for packed
    sequences, whose lengths the arguments do not tell.
    """
    for option in (
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "heterogeneous_layers_config_path",
        "heterogeneous_layers_config_encoded_json",
        "experimental_attention_variant",
    ):
        if getattr(args, option, None):
            raise UncountedModel(f"--{option.replace('_', '-')}")
    if getattr(args, "sft", False):
        raise UncountedModel("--sft packs sequences of lengths that are not known to the host")
    attention = _attention(args)
    dense = FeedForward(ffn_size=args.ffn_hidden_size, gated=bool(args.swiglu))
    layers = tuple(
        Block(attention=attention, feed_forward=_experts(args) if is_moe else dense)
        for is_moe in _moe_pattern(args)
    )
    return ModelShape(
        hidden_size=args.hidden_size,
        vocab_size=vocab_size,
        layers=layers,
        mtp_layers=layers[-1:] * (getattr(args, "mtp_num_layers", None) or 0),
    )


def _attention(args: argparse.Namespace) -> Attention | LatentAttention:
    heads = args.num_attention_heads
    if getattr(args, "multi_latent_attention", False):
        return LatentAttention(
            heads=heads,
            qk_head_dim=args.qk_head_dim,
            qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
            v_head_dim=args.v_head_dim,
            kv_lora_rank=args.kv_lora_rank,
            q_lora_rank=args.q_lora_rank,
        )
    return Attention(
        heads=heads,
        query_groups=args.num_query_groups if args.group_query_attention else heads,
        head_dim=args.kv_channels or args.hidden_size // heads,
        output_gate=bool(getattr(args, "attention_output_gate", False)),
    )


def _experts(args: argparse.Namespace) -> Experts:
    return Experts(
        num_experts=args.num_experts,
        topk=args.moe_router_topk,
        ffn_size=args.moe_ffn_hidden_size or args.ffn_hidden_size,
        gated=bool(args.swiglu),
        shared_ffn_size=args.moe_shared_expert_intermediate_size or 0,
        latent_size=getattr(args, "moe_latent_size", None),
    )


def _moe_pattern(args: argparse.Namespace) -> list[bool]:
    """Whether each layer is a mixture of experts."""
    if not args.num_experts:
        return [False] * args.num_layers
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(args.num_layers)]
    return [bool(is_moe) for is_moe in frequency]


def flops_of_batch(shape: ModelShape, args: argparse.Namespace, sequences: int) -> int:
    """FLOPs of a step over a global batch of ``sequences`` full sequences."""
    return step_flops(
        shape, tokens=sequences * args.seq_length, squared_lengths=sequences * args.seq_length**2
    )
