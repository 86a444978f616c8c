"""Sections 5 to 9: tensors, the optimizer, experts, the residual path and modalities."""

from __future__ import annotations

from dataclasses import replace

from megatron_probes.catalog.spec import MetricSpec, Priority, Reduction

_TOKEN_AXES = ("dp", "cp")
_PARAMETER_AXES = ("tp", "pp", "ep", "expert_tp")

_SUFFIXES: dict[str, tuple[Priority, str, str | None, Reduction, str, str, str]] = {
    "absmax": (
        Priority.P0,
        "max|x| over finite elements",
        None,
        Reduction.MAX,
        "1",
        "Largest absolute element: the sharpest sign of outliers, overflow and local explosions.",
        "Values run towards the range of the number format; a jump is an outlier or a broken layer.",
    ),
    "rms": (
        Priority.P1,
        "sum x^2",
        "elements",
        Reduction.ROOT_RATIO,
        "1",
        "Root mean square: energy scale, comparable over sizes. The record keeps sum x^2 / N and N.",
        "",
    ),
    "absmean": (
        Priority.P1,
        "sum|x|",
        "elements",
        Reduction.RATIO,
        "1",
        "Typical size of an element; its gap to rms shows the tail.",
        "",
    ),
    "zero_fraction": (
        Priority.P1,
        "count(x == 0)",
        "elements",
        Reduction.RATIO,
        "1",
        "Share of elements that are exactly 0: sparsity, underflow, dead paths.",
        "Dead units or underflow.",
    ),
    "nonfinite": (
        Priority.P0,
        "count of NaN and infinite elements",
        None,
        Reduction.SUM,
        "elements",
        "Elements that are NaN or infinite.",
        "Anything above 0: the first such point in forward order is where it starts.",
    ),
}


def _statistic(prefix: str, suffix: str, observed: str) -> MetricSpec:
    priority, numerator, denominator, reduction, unit, meaning, reads_high = _SUFFIXES[suffix]
    return MetricSpec(
        tag=f"{prefix}/{suffix}",
        family="tensors",
        priority=priority,
        section=5,
        observed=observed,
        numerator=numerator,
        denominator=denominator,
        reduction=reduction,
        axes=(*_TOKEN_AXES, "tp", "pp"),
        unit=unit,
        meaning=meaning,
        reads_high=reads_high,
        integer=suffix == "nonfinite",
        planned=True,
    )


_LOGITS = "logits of every valid token, padded vocabulary columns left out, every step"

_TENSORS = (
    *(
        replace(
            _statistic("act/logits", suffix, _LOGITS),
            axes=(*_TOKEN_AXES, "tp"),
            planned=False,
            first_screen=12 if suffix == "absmax" else None,
        )
        for suffix in ("absmax", "nonfinite")
    ),
    *(
        _statistic(
            "act/{point}", suffix, "forward value at the observation point, valid tokens, every K-th step"
        )
        for suffix in _SUFFIXES
    ),
    *(
        _statistic(
            "act_grad/{point}",
            suffix,
            "gradient of the loss with respect to the same value, before clipping, every K-th step",
        )
        for suffix in _SUFFIXES
    ),
    MetricSpec(
        tag="weight/{tensor}/kurtosis",
        family="tensors",
        priority=Priority.P2,
        section=5,
        observed="weights, before the step",
        numerator="fourth central moment",
        denominator="variance^2, then - 3",
        reduction=Reduction.RATIO,
        axes=_PARAMETER_AXES,
        unit="1",
        meaning="Excess kurtosis of a weight; no point where its variance is 0.",
        reads_high="Heavy tails: a risk for training or serving in low precision.",
        planned=True,
    ),
)

_SCOPES = ("", "/{class}", "/layer_{layer}/{part}")

_OPTIMIZER = (
    *(
        MetricSpec(
            tag=f"optim/update_ratio{scope}",
            family="optimizer",
            priority=Priority.P1,
            section=6,
            observed="weights before the step and what the step really added (fp32 master weights where "
            "they exist)",
            numerator="RMS(dw)",
            denominator="RMS(w) + eps",
            reduction=Reduction.ROOT_RATIO,
            axes=_PARAMETER_AXES,
            unit="1",
            meaning="Size of the update relative to the weights; comparable over layers and runs. "
            "No point where all weights are 0.",
            reads_high="A jump: the update is too large for the weights.",
            reads_low="Towards 0: updates do nothing.",
            planned=True,
        )
        for scope in _SCOPES
    ),
    MetricSpec(
        tag="optim/param_norm",
        family="optimizer",
        priority=Priority.P1,
        section=6,
        observed="weights, each element from its owner only",
        numerator="sum w^2",
        reduction=Reduction.ROOT_SUM,
        axes=_PARAMETER_AXES,
        unit="1",
        meaning="Euclidean norm of all weights.",
        reads_high="Steady growth without weight decay is normal; a jump is a broken update.",
        planned=True,
    ),
    *(
        MetricSpec(
            tag=f"optim/bf16_update_noop{scope}",
            family="optimizer",
            priority=Priority.P1,
            section=6,
            observed="master weights and their BF16 copy, before and after the step",
            numerator="count(dw != 0 and BF16 copy unchanged)",
            denominator="count(dw != 0)",
            reduction=Reduction.RATIO,
            axes=_PARAMETER_AXES,
            unit="1",
            meaning="Share of updates that don't move the BF16 copy. With fp32 masters they add up "
            "over steps; "
            "without, they are lost.",
            reads_high="Learning rate below the resolution of BF16.",
            planned=True,
        )
        for scope in _SCOPES
    ),
    *(
        MetricSpec(
            tag=f"optim/chain/{link}{scope}/{statistic}",
            family="optimizer",
            priority=Priority.P2,
            section=6,
            observed=observed,
            numerator=numerator,
            denominator=denominator,
            reduction=reduction,
            axes=_PARAMETER_AXES,
            unit="1",
            meaning=f"{name} of this link of the optimizer's chain: shows where scale or outliers enter.",
            planned=True,
        )
        for link, observed in (
            (
                "raw_grad",
                "accumulated gradient; before normalisation, preconditioning, weight decay, learning "
                "rate and "
                "clipping",
            ),
            (
                "normalized_grad",
                "after normalisation and clipping; before preconditioning, weight decay and learning rate",
            ),
            (
                "preconditioned",
                "after normalisation, clipping and preconditioning; before weight decay and learning rate",
            ),
            (
                "applied_update",
                "what was added to the weights; after normalisation, clipping, preconditioning, weight decay "
                "and learning rate",
            ),
        )
        for scope in ("", "/layer_{layer}/{part}")
        for statistic, name, numerator, denominator, reduction in (
            ("rms", "Root mean square", "sum x^2", "elements", Reduction.ROOT_RATIO),
            ("absmax", "Largest absolute element", "max|x|", None, Reduction.MAX),
        )
    ),
)

_COUNTED = "the router's own map before capacity dropping, valid tokens, all micro-batches of the step"

_EXPERTS = (
    MetricSpec(
        tag="moe/layer_{layer}/max_vio",
        family="experts",
        priority=Priority.P0,
        section=7,
        observed=_COUNTED,
        numerator="max_i c_i",
        denominator="mean_i c_i, then - 1",
        reduction=Reduction.COUNTS,
        axes=_TOKEN_AXES,
        unit="1",
        meaning="How much more than average the busiest expert of the layer gets; 0.25 is 25 % more.",
        reads_high="The router prefers few experts; above about 1 it slows the step and starves the rest.",
    ),
    MetricSpec(
        tag="moe/max_vio",
        family="experts",
        priority=Priority.P0,
        section=7,
        observed=_COUNTED,
        numerator="max over MoE layers of moe/layer_NNN/max_vio",
        reduction=Reduction.COUNTS,
        axes=(*_TOKEN_AXES, "pp"),
        unit="1",
        meaning="MaxVio of the least balanced layer.",
        reads_high="Routing collapses in at least one layer.",
        first_screen=11,
    ),
    MetricSpec(
        tag="moe/imbalance",
        family="experts",
        priority=Priority.P0,
        section=7,
        observed=_COUNTED,
        numerator="moe/max_vio + 1",
        reduction=Reduction.COUNTS,
        axes=(*_TOKEN_AXES, "pp"),
        unit="1",
        meaning="Load of the busiest expert over the average load, least balanced layer; 1 is balanced.",
    ),
    MetricSpec(
        tag="moe/shard_max_vio",
        family="experts",
        priority=Priority.P0,
        section=7,
        observed=_COUNTED,
        numerator="max over expert-parallel shards of the shard's summed c_i",
        denominator="mean over shards, then - 1; maximum over layers",
        reduction=Reduction.COUNTS,
        axes=(*_TOKEN_AXES, "pp"),
        unit="1",
        meaning="MaxVio over expert-parallel shards, which decides the step time; absent without "
        "expert parallelism.",
        reads_high="One shard holds the step back.",
        layout_dependent=True,
        first_screen=11,
    ),
    *(
        MetricSpec(
            tag=f"moe/layer_{{layer}}/{kind}",
            family="experts",
            priority=Priority.P1,
            section=7,
            observed=_COUNTED,
            numerator=numerator,
            denominator=denominator,
            reduction=Reduction.COUNTS,
            axes=_TOKEN_AXES,
            unit=unit,
            meaning=meaning,
            reads_low="A drop is the router collapsing on few experts, often before MaxVio shows it.",
            planned=True,
        )
        for kind, numerator, denominator, unit, meaning in (
            ("entropy", "-sum p ln p, p = c / sum c", None, "nats", "Entropy of the load over the experts."),
            (
                "entropy_norm",
                "-sum p ln p",
                "ln E",
                "1",
                "Entropy as a share of its maximum: 0 is one expert, 1 is uniform.",
            ),
        )
    ),
    MetricSpec(
        tag="moe/layer_{layer}/aux_loss",
        family="experts",
        priority=Priority.P1,
        section=7,
        observed="router probabilities and map of a micro-batch, valid tokens",
        numerator="E * sum f_i P_i, f_i = c_i / (k T), summed over micro-batches",
        denominator="micro-batches",
        reduction=Reduction.RATIO,
        axes=_TOKEN_AXES,
        unit="1",
        meaning="Load-balancing loss without its coefficient; a balanced router gives 1.",
        reads_high="Load and router probability pile up on the same experts.",
        layout_dependent=True,
        planned=True,
    ),
    *(
        MetricSpec(
            tag=f"moe/layer_{{layer}}/{kind}",
            family="experts",
            priority=Priority.P2,
            section=7,
            observed=observed,
            numerator=numerator,
            denominator=denominator,
            reduction=Reduction.COUNTS,
            axes=_TOKEN_AXES,
            unit="1",
            meaning=meaning,
            planned=True,
        )
        for kind, observed, numerator, denominator, meaning in (
            ("load", _COUNTED, "c_i", "sum c", "Share of each expert: a histogram and the top few."),
            ("bias", "the router's bias, after the step", "b_i", None, "Routing bias of each expert."),
            (
                "topk_margin",
                "router scores, valid tokens",
                "score(k) - score(k+1)",
                None,
                "Distribution of the gap that decides the routing: near 0 rounding decides it.",
            ),
        )
    ),
    MetricSpec(
        tag="moe/dropped_fraction",
        family="experts",
        priority=Priority.P1,
        section=7,
        observed="routing before and after capacity dropping, valid tokens",
        numerator="dropped token-expert assignments",
        denominator="routed token-expert assignments",
        reduction=Reduction.RATIO,
        axes=(*_TOKEN_AXES, "pp"),
        unit="1",
        meaning="Share of assignments that didn't fit into an expert's capacity.",
        reads_high="Capacity is too small for the present balance: tokens skip their experts.",
        layout_dependent=True,
        planned=True,
    ),
)

_BRANCH = "residual s before, branch b added, a = s + b; per valid token"

_RESIDUAL = (
    *(
        MetricSpec(
            tag=f"residual/branch_scale/{kind}",
            family="residual",
            priority=Priority.P0,
            section=8,
            observed=f"{_BRANCH}; a fixed stride of tokens",
            numerator=f"{name} over all branches of the token mean of ||b|| / (||s|| + eps)",
            reduction=Reduction.CELLS,
            axes=(*_TOKEN_AXES, "tp", "pp"),
            unit="1",
            meaning=f"{name.capitalize()} over the branches of branch norm over stream norm, from a fixed "
            "stride of tokens.",
            reads_high="A branch drowns the stream.",
            reads_low="Branches add next to nothing: depth is unused.",
            planned=True,
        )
        for kind, name in (("p50", "median"), ("max", "maximum"))
    ),
    *(
        MetricSpec(
            tag=f"residual/layer_{{layer}}/{{branch}}/{kind}",
            family="residual",
            priority=Priority.P1,
            section=8,
            observed=_BRANCH,
            numerator=numerator,
            denominator=denominator,
            reduction=Reduction.RATIO,
            axes=(*_TOKEN_AXES, "tp"),
            unit="1",
            meaning=meaning,
            planned=True,
        )
        for kind, numerator, denominator, meaning in (
            (
                "branch_scale",
                "sum over tokens of ||b|| / (||s|| + eps)",
                "tokens",
                "Branch norm over stream norm, token mean: small does little, large masks the stream.",
            ),
            (
                "stream_norm",
                "sum over tokens of ||s||",
                "tokens",
                "Norm of the residual stream, token mean: did the stream grow?",
            ),
            (
                "branch_norm",
                "sum over tokens of ||b||",
                "tokens",
                "Norm of the branch, token mean: did the branch shrink?",
            ),
            (
                "block_importance",
                "sum over tokens of 1 - cos(s, a)",
                "tokens",
                "How much the branch turns the stream; towards 0 it contributes nothing, whatever its norm.",
            ),
            (
                "angular_distance",
                "sum over tokens of arccos(cos(s, a)) / pi",
                "tokens",
                "Angle between stream before and after, as a share of half a turn.",
            ),
            (
                "bf16_noop",
                "elements with bf16(s + b) == bf16(s) and b != 0",
                "elements",
                "Share of the branch that BF16 rounding swallows; grows with stream_norm, so read "
                "them together.",
            ),
        )
    ),
    *(
        MetricSpec(
            tag=f"gate/{{gate}}/closed_fraction/{threshold}",
            family="residual",
            priority=Priority.P1,
            section=8,
            observed="learned gate of a branch",
            numerator=f"channels with sigmoid(g / T) < {threshold}",
            denominator="channels",
            reduction=Reduction.RATIO,
            axes=_PARAMETER_AXES,
            unit="1",
            meaning=f"Share of a gate's channels below {threshold}; a closed gate hardly opens again.",
            reads_high="The branch is being shut off.",
            planned=True,
        )
        for threshold in ("0.05", "0.1", "0.25")
    ),
    MetricSpec(
        tag="residual/depth_profile",
        family="residual",
        priority=Priority.P1,
        section=8,
        observed=_BRANCH,
        numerator="branch_scale and block_importance against depth",
        reduction=Reduction.HOST,
        unit="picture",
        meaning="One picture of how much each depth of the model does.",
        planned=True,
    ),
)

_MODALITY = (
    MetricSpec(
        tag="modality/{modality}/feature_scale_ratio",
        family="modality",
        priority=Priority.P0,
        section=9,
        observed="embeddings given to the backbone, valid tokens",
        numerator="RMS(media embeddings)",
        denominator="RMS(text embeddings at the same place) + eps",
        reduction=Reduction.ROOT_RATIO,
        axes=_TOKEN_AXES,
        unit="1",
        meaning="Scale of the media features against the text's; about 1 when they match. "
        "Usually the projector, not the encoder.",
        reads_high="Media dominates the first layers.",
        reads_low="Small for long: the backbone ignores media.",
        planned=True,
    ),
    MetricSpec(
        tag="modality/encoder_grad_share",
        family="modality",
        priority=Priority.P1,
        section=9,
        observed="accumulated gradient, unscaled, before clipping",
        numerator="sum g^2 over the encoder",
        denominator="sum g^2",
        reduction=Reduction.RATIO,
        axes=_PARAMETER_AXES,
        unit="1",
        meaning="The encoder's share of the squared gradient norm, to be read beside its share of "
        "parameters.",
        reads_high="Far above the parameter share early on: the projector's scale is off.",
        reads_low="Towards 0: the encoder is frozen in effect.",
        planned=True,
    ),
    MetricSpec(
        tag="modality/encoder_param_share",
        family="modality",
        priority=Priority.P1,
        section=9,
        observed="parameters, once",
        numerator="parameters of the encoder",
        denominator="parameters",
        reduction=Reduction.RATIO,
        axes=_PARAMETER_AXES,
        unit="1",
        meaning="The encoder's share of the parameters: the yardstick of modality/encoder_grad_share.",
        planned=True,
    ),
)

METRICS = (*_TENSORS, *_OPTIMIZER, *_EXPERTS, *_RESIDUAL, *_MODALITY)
