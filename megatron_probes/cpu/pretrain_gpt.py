"""The least that trains a GPT by Megatron's own `pretrain()`, from the megatron-core wheel alone.

The wheel (0.17.1 and later) holds megatron.core and megatron.training but not pretrain_gpt.py. This script
keeps the names and the behaviour of that one's get_batch, loss_func, forward_step and datasets, for mock data
and for (blended) indexed data; it leaves out packed sequences, ModelOpt, distillation, fill-in-the-middle.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import argument_utils, get_args, get_timers, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BY_CONFIG = hasattr(argument_utils, "gpt_config_from_args")
"""Whether `pretrain()` takes a config container (0.19) rather than a model provider (0.17)."""

BATCH_KEYS = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens")
DEFAULTS = {"tokenizer_type": "NullTokenizer"}
SPIKY_LOSS_FACTOR = 10  # as in pretrain_gpt.py: a loss that's 10x the largest seen


def has_mtp(vp_stage: int | None) -> bool:
    """Whether this rank holds layers of multi-token prediction."""
    config = core_transformer_config_from_args(get_args())
    if "config" in inspect.signature(mtp_on_this_rank).parameters:
        return mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp_stage)
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator: Iterator[dict[str, Any]] | None, vp_stage: int | None = None) -> dict[str, Any]:
    """This rank's slice (micro batch, sequence / cp) of the next micro-batch, by the names of BATCH_KEYS."""
    mtp = has_mtp(vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not mtp:
        return dict.fromkeys(BATCH_KEYS)
    batch = (_batch_by_config if BY_CONFIG else _batch_by_provider)(data_iterator, mtp)
    return {key: batch[key] for key in BATCH_KEYS}


def _batch_by_provider(data_iterator: Iterator[dict[str, Any]] | None, mtp: bool) -> dict[str, Any]:
    from megatron.training.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank

    return get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=mtp))


def _batch_by_config(data_iterator: Iterator[dict[str, Any]] | None, mtp: bool) -> dict[str, Any]:
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank

    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        assert data_iterator is not None
        loaded = next(data_iterator)
        # The other keys stay behind: CP would slice BlendedDataset's dataset_id, which has no sequence.
        batch = {key: loaded[key].cuda(non_blocking=True) if key in loaded else None for key in BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: GPTModel | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss (fp32) of a micro-batch, its count of unmasked tokens (int32), and both for the log."""
    args = get_args()
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    report = {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}

    rerun_state_machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            rerun_state_machine.validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rerun_state_machine.validate_result(
            result=loss,
            rejection_func=partial(
                rerun_state_machine.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    return loss, num_tokens, report


def forward_step(
    data_iterator: Iterator[dict[str, Any]] | None, model: GPTModel
) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]]:
    """Output of `model` for the next micro-batch, with the function that makes its loss."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"], model=model)


def train_valid_test_datasets_provider(
    num_samples: list[int], vp_stage: int | None = None
) -> tuple[Any, ...]:
    """Training, validation and test dataset of `num_samples` each, where this rank needs them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def built_on_this_rank() -> bool:
        if mpu.get_tensor_model_parallel_rank() != 0:
            return False
        return is_first_or_last_pipeline_stage(vp_stage) or has_mtp(vp_stage)

    print_rank_0("> building train, validation, and test datasets for GPT ...")
    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset_type, num_samples, built_on_this_rank, config).build()


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Ranks of a pipeline that hold the word embedding."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """The model that `args` describe, for a `pretrain()` that takes a provider."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    use_te = args.transformer_impl == "transformer_engine"
    layer_spec = specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_te,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    mtp_spec = None
    if args.mtp_num_layers is not None:
        layers = specs.get_gpt_decoder_layer_specs(
            config,
            use_transformer_engine=use_te,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )
        mtp_spec = specs.get_gpt_mtp_block_spec(
            config, layers[-1], use_transformer_engine=use_te, vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def main() -> None:
    """Train as the command line's flags of Megatron say."""
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    if not BY_CONFIG:
        pretrain(
            train_valid_test_datasets_provider,
            model_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            args_defaults=DEFAULTS,
            get_embedding_ranks=get_embedding_ranks,
        )
        return
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults=DEFAULTS)
    model_config = argument_utils.gpt_config_from_args(args)
    pretrain(
        argument_utils.pretrain_cfg_container_from_args(args, model_config),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )


if __name__ == "__main__":
    main()
