import types

import pytest

from megatron_probes.formulas.flops import (
    Attention,
    Block,
    Experts,
    FeedForward,
    LatentAttention,
    ModelShape,
    forward_macs_per_token,
    step_flops,
    step_flops_of_lengths,
)

HEADS = Attention(heads=4, query_groups=2, head_dim=2)
MLP = FeedForward(ffn_size=16, gated=True)
MOE = Experts(num_experts=8, topk=2, ffn_size=4, gated=True, shared_ffn_size=4)


def shape(*blocks: Block, **changes) -> ModelShape:
    return ModelShape(**{"hidden_size": 8, "vocab_size": 32, "layers": blocks} | changes)


DENSE = shape(*[Block(attention=HEADS, feed_forward=MLP)] * 2)


def test_pc35_dense_model():
    full = shape(*DENSE.layers, causal=False)
    assert step_flops(full, tokens=4, squared_lengths=16) == 36864
    assert step_flops(DENSE, tokens=4, squared_lengths=16) == 35328
    assert full.convention == "megatron_probes-flops-v1, full attention"
    assert DENSE.convention == "megatron_probes-flops-v1, causal half"


def test_pc35_experts_per_token_forward():
    assert 2 * MOE.router_macs(8) == 128
    assert 2 * MOE.macs(8) == 704


def test_experts_that_a_token_does_not_take_cost_only_their_router_column():
    wide = Experts(num_experts=64, topk=2, ffn_size=4, gated=True, shared_ffn_size=4)
    assert wide.macs(8) - MOE.macs(8) == 8 * (64 - 8)


def test_packed_sequences_count_by_their_squared_lengths():
    lengths = [4, 3, 1]
    packed = step_flops_of_lengths(DENSE, lengths)
    assert packed == step_flops(DENSE, tokens=8, squared_lengths=16 + 9 + 1)
    assert packed == sum(step_flops_of_lengths(DENSE, [n]) for n in lengths)
    assert packed < step_flops_of_lengths(DENSE, [8])


def test_a_prediction_head_is_a_block_a_projection_and_logits():
    block = DENSE.layers[0]
    with_head = shape(*DENSE.layers, mtp_layers=(block,))
    head = HEADS.projection_macs(8) + MLP.macs(8) + 2 * 8 * 8 + 8 * 32
    assert forward_macs_per_token(with_head) - forward_macs_per_token(DENSE) == head
    core = step_flops(with_head, tokens=0, squared_lengths=16) - step_flops(
        DENSE, tokens=0, squared_lengths=16
    )
    assert core == 3 * HEADS.core_macs * 16


def test_latent_experts_work_at_their_own_width():
    latent = Experts(num_experts=8, topk=2, ffn_size=4, gated=False, latent_size=2)
    assert latent.macs(8) == 2 * 2 * 4 * 2 + 2 * 8 * 2 + 8 * 8


def test_blocks_may_lack_attention_or_feed_forward():
    assert forward_macs_per_token(shape(Block(attention=None, feed_forward=MLP))) == MLP.macs(8) + 8 * 32
    assert forward_macs_per_token(shape(Block(attention=HEADS, feed_forward=None))) == (
        HEADS.projection_macs(8) + 8 * 32
    )


def megatron_args(**changes) -> types.SimpleNamespace:
    values = {
        "hidden_size": 64,
        "num_layers": 6,
        "seq_length": 32,
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 16,
        "attention_output_gate": False,
        "multi_latent_attention": False,
        "ffn_hidden_size": 160,
        "swiglu": True,
        "num_experts": None,
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 48,
        "moe_latent_size": None,
        "moe_shared_expert_intermediate_size": 96,
        "mtp_num_layers": None,
        "experimental_attention_variant": None,
        "padded_vocab_size": 256,
        "hybrid_layer_pattern": None,
    }
    return types.SimpleNamespace(**values | changes)


GROUPED = Attention(heads=8, query_groups=2, head_dim=16)
DENSE_MLP = FeedForward(ffn_size=160, gated=True)
SPARSE_MLP = Experts(num_experts=16, topk=2, ffn_size=48, gated=True, shared_ffn_size=96)
LATENT_ATTENTION = {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
    "kv_lora_rank": 20,
}


def latent(q_lora_rank: int | None) -> LatentAttention:
    return LatentAttention(
        heads=8,
        qk_head_dim=12,
        qk_pos_emb_head_dim=4,
        v_head_dim=10,
        kv_lora_rank=20,
        q_lora_rank=q_lora_rank,
    )


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize(
    ("args", "attention", "feed_forwards", "heads", "norm_macs"),
    [
        pytest.param({}, GROUPED, [DENSE_MLP] * 6, 0, 0, id="gqa-swiglu"),
        pytest.param(
            {"group_query_attention": False, "swiglu": False, "attention_output_gate": True},
            Attention(heads=8, query_groups=8, head_dim=16, output_gate=True),
            [FeedForward(ffn_size=160, gated=False)] * 6,
            0,
            0,
            id="mha-gelu-gate",
        ),
        pytest.param(
            {"num_experts": 16, "moe_layer_freq": [0, 1, 1, 0, 1, 1]},
            GROUPED,
            [DENSE_MLP, SPARSE_MLP, SPARSE_MLP, DENSE_MLP, SPARSE_MLP, SPARSE_MLP],
            0,
            0,
            id="moe",
        ),
        pytest.param(
            {"num_experts": 16, "moe_latent_size": 24},
            GROUPED,
            [Experts(num_experts=16, topk=2, ffn_size=48, gated=True, shared_ffn_size=96, latent_size=24)]
            * 6,
            0,
            0,
            id="moe-latent",
        ),
        pytest.param(
            {"num_experts": 16, "mtp_num_layers": 2},
            GROUPED,
            [SPARSE_MLP] * 6,
            2,
            2 * 3 * 64,
            id="mtp",
        ),
        pytest.param(
            LATENT_ATTENTION | {"q_lora_rank": None}, latent(None), [DENSE_MLP] * 6, 0, 6 * 20, id="mla"
        ),
        pytest.param(
            LATENT_ATTENTION | {"q_lora_rank": 28}, latent(28), [DENSE_MLP] * 6, 0, 6 * (20 + 28), id="mla-q"
        ),
    ],
)
def test_differs_from_megatrons_figure_by_router_and_norms_only(
    args, attention, feed_forwards, heads, norm_macs
):
    training = pytest.importorskip("megatron.training.training")
    blocks = [Block(attention=attention, feed_forward=feed_forward) for feed_forward in feed_forwards]
    mine = ModelShape(
        hidden_size=64, vocab_size=256, layers=tuple(blocks), mtp_layers=tuple(blocks[-1:] * heads)
    )
    routers = sum(
        block.feed_forward.router_macs(64)
        for block in mine.layers + mine.mtp_layers
        if isinstance(block.feed_forward, Experts)
    )
    for lengths in ([32, 32, 32], [32, 20, 7, 5]):
        tokens, squares = sum(lengths), sum(n * n for n in lengths)
        theirs = training.num_floating_point_operations(
            megatron_args(**args), 3, seqlen_squared_sum_in_batch=squares, total_real_tokens_in_batch=tokens
        )
        difference = 6 * tokens * (routers - norm_macs)
        assert step_flops(mine, tokens=tokens, squared_lengths=squares) - difference == theirs
