"""Model FLOPs of a training step, from the model's true shapes, by one stated convention.

The convention (``CONVENTION``; its name and version stand in the run's manifest):

- A product of an [m, n] and an [n, k] matrix is 2mnk FLOPs. Only matrix products count: projections, QK^T and
  AV, feed-forward networks, routers, logits. Norms, activations, softmax, rotary embeddings, embedding
  look-ups, the loss and the optimizer don't.
- Backward is twice forward: a step is 3 times its forward. Recomputed activations aren't model FLOPs.
- Attention over a sequence of L tokens costs 2 L^2 (d_qk + d_v) a head; a causal mask halves it exactly.
  Packed sequences count by the sum of their squared lengths.
- Key and value projections have the width of their groups. A gated feed-forward network has three matrices,
  a plain one two.
- A mixture of experts counts the top-k experts of a token, its shared experts and the router; all experts'
  width doesn't matter, nor does capacity dropping.
- A multi-token prediction head is its block, the projection of [2h] to [h], and logits of its own.
- The vocabulary is the model's own, without rows that only pad it for tensor parallelism: the figure
  doesn't depend on the layout.

Megatron-LM's ``num_floating_point_operations`` has the same structure and differs in four terms: it leaves
the router out; it counts the weights of some norms (3h a multi-token prediction head, the ranks of
multi-latent attention); it takes the padded vocabulary; its attention is always causal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CONVENTION = "megatron_probes-flops-v1"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Softmax attention with one key and value per query group (all heads, or fewer: GQA, MQA)."""

    heads: int
    query_groups: int
    head_dim: int
    output_gate: bool = False
    """A gate of the width of the queries comes out of the same projection."""

    def projection_macs(self, hidden_size: int) -> int:
        """Multiply-adds of the projections per token."""
        queries = self.heads * self.head_dim * (2 if self.output_gate else 1)
        keys_and_values = 2 * self.query_groups * self.head_dim
        output = self.heads * self.head_dim
        return hidden_size * (queries + keys_and_values + output)

    @property
    def core_macs(self) -> int:
        """Multiply-adds of QK^T and AV per pair of query and key."""
        return 2 * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-latent attention: keys and values, and queries where ``q_lora_rank`` is given, from low ranks."""

    heads: int
    qk_head_dim: int
    """Per head, without the rotary part."""
    qk_pos_emb_head_dim: int
    """The rotary part: per head in the queries, shared by all heads in the keys."""
    v_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int | None = None

    def projection_macs(self, hidden_size: int) -> int:
        """Multiply-adds of the projections per token."""
        q_dim = self.heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        if self.q_lora_rank is None:
            queries = hidden_size * q_dim
        else:
            queries = self.q_lora_rank * (hidden_size + q_dim)
        down = hidden_size * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
        up = self.kv_lora_rank * self.heads * (self.qk_head_dim + self.v_head_dim)
        output = self.heads * self.v_head_dim * hidden_size
        return queries + down + up + output

    @property
    def core_macs(self) -> int:
        """Multiply-adds of QK^T and AV per pair of query and key."""
        return self.heads * (self.qk_head_dim + self.qk_pos_emb_head_dim + self.v_head_dim)


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """A dense feed-forward network; ``gated`` as in SwiGLU."""

    ffn_size: int
    gated: bool

    def macs(self, hidden_size: int) -> int:
        """Multiply-adds per token."""
        return (3 if self.gated else 2) * hidden_size * self.ffn_size


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts of which a token takes ``topk``, beside the shared ones that all tokens take."""

    num_experts: int
    topk: int
    ffn_size: int
    """Of one routed expert."""
    gated: bool
    shared_ffn_size: int = 0
    """Of all shared experts together."""
    latent_size: int | None = None
    """Width at which the routed experts work, when they are projected down to it and up again."""

    def macs(self, hidden_size: int) -> int:
        """Multiply-adds per token, the router included."""
        matrices = 3 if self.gated else 2
        width = hidden_size if self.latent_size is None else self.latent_size
        routed = matrices * width * self.ffn_size * self.topk
        projections = 0 if self.latent_size is None else 2 * hidden_size * self.latent_size
        shared = matrices * hidden_size * self.shared_ffn_size
        return routed + projections + shared + self.router_macs(hidden_size)

    def router_macs(self, hidden_size: int) -> int:
        """Multiply-adds of the router per token."""
        return hidden_size * self.num_experts


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer: attention and a feed-forward network, dense or of experts; either may be missing."""

    attention: Attention | LatentAttention | None
    feed_forward: FeedForward | Experts | None


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shapes of a whole model, over all pipeline stages."""

    hidden_size: int
    vocab_size: int
    """Without the rows that pad it for tensor parallelism."""
    layers: tuple[Block, ...]
    mtp_layers: tuple[Block, ...] = ()
    """Blocks of the multi-token prediction heads."""
    causal: bool = True
    """Whether attention looks backward only."""

    @property
    def convention(self) -> str:
        """Name and version of the convention, with its treatment of the mask."""
        return f"{CONVENTION}, {'causal half' if self.causal else 'full attention'}"


def forward_macs_per_token(shape: ModelShape) -> int:
    """Return the multiply-adds of one token's forward pass, without QK^T and AV."""
    h = shape.hidden_size
    blocks = sum(
        (block.attention.projection_macs(h) if block.attention else 0)
        + (block.feed_forward.macs(h) if block.feed_forward else 0)
        for block in shape.layers + shape.mtp_layers
    )
    heads = len(shape.mtp_layers)
    return blocks + heads * 2 * h * h + (1 + heads) * h * shape.vocab_size


def core_macs_per_pair(shape: ModelShape) -> int:
    """Return the multiply-adds of QK^T and AV for one pair of query and key, summed over layers."""
    return sum(block.attention.core_macs for block in shape.layers + shape.mtp_layers if block.attention)


def step_flops(shape: ModelShape, *, tokens: int, squared_lengths: int) -> int:
    """Return the model FLOPs of a step, forward and backward.

    ``tokens`` is the sum over the global batch's sequences of their length, ``squared_lengths`` of their
    squared length; packed sequences count each by itself.
    """
    core = 2 * core_macs_per_pair(shape) * squared_lengths
    if shape.causal:
        core //= 2
    return 3 * (2 * forward_macs_per_token(shape) * tokens + core)


def step_flops_of_lengths(shape: ModelShape, lengths: Iterable[int]) -> int:
    """Return the model FLOPs of a step over sequences of the given lengths."""
    lengths = tuple(lengths)
    return step_flops(shape, tokens=sum(lengths), squared_lengths=sum(n * n for n in lengths))
