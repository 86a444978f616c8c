"""The two models once more in plain torch: one process, float64, autograd; nothing of Megatron.

b = batch, s = sequence, h = hidden, n = heads, g = query groups, d = head size, e = experts, v = vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from toy_batches import VOCABULARY, Batches
from toy_gpt import ToyGPT


@dataclass
class Reference:
    """What a step of the model is, for the batch of `samples` and the canonical weights."""

    losses_BS: np.ndarray
    mask_BS: np.ndarray
    logits_BSV: np.ndarray
    """Real vocabulary only."""
    routing: dict[int, np.ndarray]
    """Layer -> bool [b * s, e]."""
    margin: float
    """Smallest distance between the k-th and the next router logit; inf without experts."""
    gradients: dict[str, np.ndarray]
    """d(mean loss over valid targets) / d(parameter), by global name."""

    @property
    def loss(self) -> float:
        return float((self.losses_BS * self.mask_BS).sum() / self.mask_BS.sum())


def run_reference(
    model: ToyGPT,
    samples: Sequence[int],
    dtype: torch.dtype = torch.float64,
    *,
    token_weights_BS: np.ndarray | None = None,
    perturb: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> Reference:
    """Forward and backward of one global batch.

    float32 shows what the forward's own rounding explains. `token_weights_BS` weighs the losses for the
    gradient, instead of 1 / (valid targets) each. `perturb` changes the weights of the model first.
    """
    weights = {
        name: torch.from_numpy(perturb(values)).to(dtype).requires_grad_()
        for name, values in model.weights().items()
    }
    batches = Batches(max(samples) + 1)
    batch = [batches[sample] for sample in samples]
    tokens_BS, labels_BS, mask_BS = (
        torch.stack([s[k] for s in batch]) for k in ("tokens", "labels", "loss_mask")
    )
    forward = _Forward(model, weights)
    logits_BSV = forward.logits(tokens_BS)
    losses_BS = F.cross_entropy(logits_BSV.transpose(1, 2), labels_BS, reduction="none")
    mask_BS = mask_BS.to(dtype)
    each_BS = mask_BS / mask_BS.sum() if token_weights_BS is None else torch.from_numpy(token_weights_BS)
    (losses_BS * each_BS.to(dtype)).sum().backward()
    gradients = {name: weight.grad.double().numpy() for name, weight in weights.items()}
    return Reference(
        losses_BS=losses_BS.detach().double().numpy(),
        mask_BS=mask_BS.double().numpy(),
        logits_BSV=logits_BSV.detach()[..., :VOCABULARY].double().numpy(),
        routing=forward.routing,
        margin=forward.margin,
        gradients=gradients,
    )


class _Forward:
    def __init__(self, model: ToyGPT, weights: dict[str, torch.Tensor]) -> None:
        self._model = model
        self._weights = weights
        self.routing: dict[int, np.ndarray] = {}
        self.margin = float("inf")

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        model, weights = self._model, self._weights
        words = weights["embedding.word_embeddings.weight"]
        x = words[tokens_BS]
        if not model.rope:
            x = x + weights["embedding.position_embeddings.weight"][: tokens_BS.size(1)]
        for layer in range(model.layers):
            prefix = f"decoder.layers.{layer}"
            x = x + self._attention(f"{prefix}.self_attention", self._norm(f"{prefix}.input_layernorm", x))
            y = self._norm(f"{prefix}.pre_mlp_layernorm", x)
            x = x + (self._experts(layer, y) if model.experts else self._mlp(f"{prefix}.mlp", y))
        x = self._norm("decoder.final_layernorm", x)
        return x @ (words if model.tied else weights["output_layer.weight"]).T

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if not self._model.rms_norm:
            x = x - x.mean(-1, keepdim=True)
        x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self._weights[f"{name}.weight"]
        return x if self._model.rms_norm else x + self._weights[f"{name}.bias"]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self._weights[f"{name}.weight"].T
        return y + self._weights[f"{name}.bias"] if self._model.bias else y

    def _attention(self, name: str, x_BSH: torch.Tensor) -> torch.Tensor:
        """Causal; the fused projection holds, for each query group, its query heads, its key, its value."""
        model = self._model
        batch, length, _ = x_BSH.shape
        per_group = model.heads // model.groups
        qkv = self._linear(f"{name}.linear_qkv", x_BSH).view(
            batch, length, model.groups, per_group + 2, model.head_dim
        )
        q_BSGND, k_BSGD, v_BSGD = qkv[..., :per_group, :], qkv[..., per_group, :], qkv[..., per_group + 1, :]
        if model.rope:
            q_BSGND, k_BSGD = _rotate(q_BSGND), _rotate(k_BSGD)
        scores = torch.einsum("bsgnd,btgd->bgnst", q_BSGND, k_BSGD) / model.head_dim**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("bgnst,btgd->bsgnd", attention, v_BSGD).reshape(batch, length, -1)
        return self._linear(f"{name}.linear_proj", mixed)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self._linear(f"{name}.linear_fc1", x)
        if self._model.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y)
        return self._linear(f"{name}.linear_fc2", y)

    def _experts(self, layer: int, x_BSH: torch.Tensor) -> torch.Tensor:
        """Top-k of the router's logits, softmax over those k, weighted sum of the experts."""
        name = f"decoder.layers.{layer}.mlp"
        x_TH = x_BSH.reshape(-1, x_BSH.size(-1))
        scores_TE = x_TH @ self._weights[f"{name}.router.weight"].T
        ranked = scores_TE.detach().sort(dim=-1, descending=True).values
        k = self._model.topk
        self.margin = min(self.margin, float((ranked[:, k - 1] - ranked[:, k]).min()))
        chosen_TK, experts_TK = scores_TE.topk(k, dim=-1)
        probs_TE = torch.zeros_like(scores_TE).scatter(1, experts_TK, chosen_TK.softmax(-1))
        routing = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, experts_TK, True)
        self.routing[layer] = routing.numpy()
        outputs_ETH = [
            self._mlp(f"{name}.experts.local_experts.{expert}", x_TH) for expert in range(self._model.experts)
        ]
        mixed = sum(probs_TE[:, expert, None] * y_TH for expert, y_TH in enumerate(outputs_ETH))
        return mixed.view_as(x_BSH)


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [b, s, ..., d]: component i of the first half pairs with i of the second."""
    half = x.size(-1) // 2
    # Megatron computes the angles in float32.
    frequency = 1.0 / 10000 ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angle = torch.outer(torch.arange(x.size(1), dtype=torch.float32), frequency).to(x.dtype)
    angle = angle.view(1, x.size(1), *[1] * (x.dim() - 3), half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
    )
