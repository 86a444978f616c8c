"""Section 6: what the optimizer does to the weights."""

from __future__ import annotations

from megatron_probes.catalog.spec import MetricSpec, Priority, Reduction

_PARAMETER_AXES = ("tp", "pp", "ep", "expert_tp")
_SCOPES = ("", "/{class}", "/layer_{layer}/{part}")

METRICS = (
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
