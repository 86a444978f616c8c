"""Sections 8 and 9: the residual path and the modalities."""

from __future__ import annotations

from megatron_probes.catalog.spec import MetricSpec, Priority, Reduction

_TOKEN_AXES = ("dp", "cp")
_PARAMETER_AXES = ("tp", "pp", "ep", "expert_tp")
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
                "Norm of the residual stream, token mean: where it rises alone, the stream grew.",
            ),
            (
                "branch_norm",
                "sum over tokens of ||b||",
                "tokens",
                "Norm of the branch, token mean: where it falls alone, the branch shrank.",
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

METRICS = (*_RESIDUAL, *_MODALITY)
