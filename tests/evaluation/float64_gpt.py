"""A GPT written from its definition in float64 numpy: one sequence at a time, no cache, no padding.

It shares no code with the package. Shapes: S positions, H hidden, D per head, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

HEADS = 4
TOP_K = 2
EPS = 1e-5


def _rms_norm(x_SH: np.ndarray, weight_H: np.ndarray) -> np.ndarray:
    return x_SH / np.sqrt((x_SH**2).mean(-1, keepdims=True) + EPS) * weight_H


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _rotate(x_SD: np.ndarray) -> np.ndarray:
    """Rotary embedding: the two halves of a head are the coordinates of planes turned by position * rate."""
    s, d = x_SD.shape
    rates = 10000.0 ** (-np.arange(0, d, 2) / d)
    angles = np.arange(s)[:, None] * rates
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x_SD[:, : d // 2], x_SD[:, d // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def _attention(x_SH: np.ndarray, qkv: np.ndarray, proj: np.ndarray) -> np.ndarray:
    s, h = x_SH.shape
    d = h // HEADS
    out = np.empty((s, h))
    mixed = (x_SH @ qkv.T).reshape(s, HEADS, 3, d)  # each head's query, key and value lie together
    future = np.triu(np.full((s, s), -np.inf), 1)
    for a in range(HEADS):
        q, k, v = (mixed[:, a, i] for i in range(3))
        weights = _softmax(_rotate(q) @ _rotate(k).T / math.sqrt(d) + future)
        out[:, a * d : (a + 1) * d] = weights @ v
    return out @ proj.T


def _swiglu(x: np.ndarray, fc1: np.ndarray, fc2: np.ndarray) -> np.ndarray:
    gate, up = np.split(x @ fc1.T, 2, axis=-1)
    return gate / (1.0 + np.exp(-gate)) * up @ fc2.T


def _experts(x_SH: np.ndarray, router_EH: np.ndarray, fc1_E: np.ndarray, fc2_E: np.ndarray) -> np.ndarray:
    """Each token goes to its TOP_K experts, weighted by the softmax over those."""
    out = np.zeros_like(x_SH)
    logits_SE = x_SH @ router_EH.T
    chosen_SK = np.argsort(-logits_SE, axis=1)[:, :TOP_K]
    share_SK = _softmax(np.take_along_axis(logits_SE, chosen_SK, axis=1))
    for e in range(len(router_EH)):
        tokens, rank = np.nonzero(chosen_SK == e)
        out[tokens] += share_SK[tokens, rank, None] * _swiglu(x_SH[tokens], fc1_E[e], fc2_E[e])
    return out


def logits(weights: Mapping[str, np.ndarray], ids: Sequence[int]) -> np.ndarray:
    """Logits (S, V) of the token after each position."""
    w = weights
    embedding_VH = w["embedding.word_embeddings.weight"]
    x_SH = embedding_VH[list(ids)]
    layer = "decoder.layers."
    for i in range(len(w[layer + "self_attention.linear_qkv.weight"])):
        normed = _rms_norm(x_SH, w[layer + "self_attention.linear_qkv.layer_norm_weight"][i])
        qkv, proj = (w[f"{layer}self_attention.linear_{name}.weight"][i] for name in ("qkv", "proj"))
        x_SH = x_SH + _attention(normed, qkv, proj)
        normed = _rms_norm(x_SH, w[layer + "mlp.linear_fc1.layer_norm_weight"][i])
        experts = (w[f"{layer}mlp.experts.experts.linear_fc{n}.weight"][i] for n in (1, 2))
        x_SH = x_SH + _experts(normed, w[layer + "mlp.router.weight"][i], *experts)
    return _rms_norm(x_SH, w["decoder.final_layernorm.weight"]) @ embedding_VH.T


def nll(weights: Mapping[str, np.ndarray], ids: Sequence[int]) -> list[float]:
    """Negative log-likelihoods of ids[1:], each given all before it."""
    rows_SV = logits(weights, ids[:-1])
    return [
        float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[target])
        for row, target in zip(rows_SV, ids[1:], strict=True)
    ]
