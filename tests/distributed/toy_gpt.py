"""Two small GPTs that the layouts train, and one canonical state of weights for each, by global name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from toy_batches import SEQUENCE, VOCABULARY

PADDED_VOCABULARY = 128
"""What VOCABULARY pads to in every layout: the divisor given to Megatron shrinks as tp grows."""


@dataclass(frozen=True, kw_only=True)
class ToyGPT:
    """A GPT by the features that distinguish the two models."""

    name: str
    tied: bool
    rope: bool
    rms_norm: bool
    gated: bool
    bias: bool
    experts: int = 0
    heads_ahead: int = 0
    """Depths of multi-token prediction."""
    topk: int = 2
    layers: int = 4
    hidden: int = 32
    heads: int = 4
    groups: int = 2
    ffn: int = 48

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def flags(self, tp: int) -> list[str]:
        """Megatron's flags for this model under tensor parallelism of size `tp`."""
        flags = [
            f"--num-layers={self.layers}",
            f"--hidden-size={self.hidden}",
            f"--num-attention-heads={self.heads}",
            "--group-query-attention",
            f"--num-query-groups={self.groups}",
            f"--ffn-hidden-size={self.ffn}",
            f"--seq-length={SEQUENCE}",
            f"--max-position-embeddings={SEQUENCE}",
            f"--vocab-size={VOCABULARY}",
            f"--make-vocab-size-divisible-by={PADDED_VOCABULARY // tp}",
            f"--position-embedding-type={'rope' if self.rope else 'learned_absolute'}",
            f"--normalization={'RMSNorm' if self.rms_norm else 'LayerNorm'}",
            "--no-bias-gelu-fusion",
            "--no-bias-swiglu-fusion",
            "--no-rope-fusion",
        ]
        if not self.tied:
            flags.append("--untie-embeddings-and-output-weights")
        if self.gated:
            flags.append("--swiglu")
        if not self.bias:
            flags.append("--disable-bias-linear")
        if self.heads_ahead:
            flags.append(f"--mtp-num-layers={self.heads_ahead}")
        if self.experts:
            flags += [
                f"--num-experts={self.experts}",
                f"--moe-router-topk={self.topk}",
                f"--moe-ffn-hidden-size={self.ffn}",
                "--moe-router-load-balancing-type=none",
                "--moe-token-dispatcher-type=alltoall",
            ]
        return flags

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Global parameter name and full shape; layers and experts numbered over the whole model."""
        h = self.hidden
        yield "embedding.word_embeddings.weight", (PADDED_VOCABULARY, h)
        if not self.rope:
            yield "embedding.position_embeddings.weight", (SEQUENCE, h)
        for layer in range(self.layers):
            yield from self._layer(f"decoder.layers.{layer}")
        yield from self._norm("decoder.final_layernorm")
        if not self.tied:
            yield "output_layer.weight", (PADDED_VOCABULARY, h)
        for depth in range(self.heads_ahead):
            prefix = f"mtp.layers.{depth}"
            for norm in ("enorm", "hnorm", "final_layernorm"):
                yield from self._norm(f"{prefix}.{norm}")
            yield f"{prefix}.eh_proj.weight", (h, 2 * h)
            yield from self._layer(f"{prefix}.mtp_model_layer")

    def _layer(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        h, up = self.hidden, (2 if self.gated else 1) * self.ffn
        yield from self._norm(f"{prefix}.input_layernorm")
        yield from self._norm(f"{prefix}.pre_mlp_layernorm")
        attention = f"{prefix}.self_attention"
        yield from self._linear(f"{attention}.linear_qkv", (self.heads + 2 * self.groups) * self.head_dim, h)
        yield from self._linear(f"{attention}.linear_proj", h, self.heads * self.head_dim)
        if not self.experts:
            yield from self._linear(f"{prefix}.mlp.linear_fc1", up, h)
            yield from self._linear(f"{prefix}.mlp.linear_fc2", h, self.ffn)
            return
        yield f"{prefix}.mlp.router.weight", (self.experts, h)
        for expert in range(self.experts):
            name = f"{prefix}.mlp.experts.local_experts.{expert}"
            yield from self._linear(f"{name}.linear_fc1", up, h)
            yield from self._linear(f"{name}.linear_fc2", h, self.ffn)

    def _norm(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (self.hidden,)
        if not self.rms_norm:
            yield f"{name}.bias", (self.hidden,)

    def _linear(self, name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        if self.bias:
            yield f"{name}.bias", (rows,)

    def weights(self) -> dict[str, np.ndarray]:
        """The canonical state, float32 by global name: drawn from the name, so no layout can change it."""
        return {name: self._draw(name, shape) for name, shape in self.shapes()}

    def _draw(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        generator = np.random.default_rng(zlib.crc32(f"{self.name}/{name}".encode()))
        values = generator.standard_normal(shape)
        if "norm" in name and name.endswith("weight"):
            values = 1.0 + 0.1 * values
        elif name.endswith("bias"):
            values *= 0.05
        elif "router" in name:
            values *= 0.5
        else:
            values *= 0.12
        return values.astype(np.float32)


DENSE_TIED = ToyGPT(name="dense_tied", tied=True, rope=False, rms_norm=False, gated=False, bias=True)
MOE_UNTIED = ToyGPT(
    name="moe_untied", tied=False, rope=True, rms_norm=True, gated=True, bias=False, experts=4, ffn=24
)
PREDICTING = replace(DENSE_TIED, name="dense_tied, 2 depths", rope=True, heads_ahead=2)
"""The dense model with two depths of multi-token prediction."""
MODELS = {model.name: model for model in (DENSE_TIED, MOE_UNTIED, PREDICTING)}
