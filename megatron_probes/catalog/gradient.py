"""Section 2: the gradient."""

from __future__ import annotations

from megatron_probes.catalog.spec import PARAMETER_CLASSES, MetricSpec, Priority, Reduction

_PARAMETER_AXES = ("tp", "pp", "ep", "expert_tp")
_GRADIENT = "accumulated gradient, unscaled as the optimizer sees it, before clipping"

_STATISTICS = {
    "abs_mean": (
        "sum|g|",
        "elements",
        Reduction.RATIO,
        "Typical size of a gradient element, little moved by single outliers.",
    ),
    "abs_max": (
        "max|g|",
        None,
        Reduction.MAX,
        "Largest gradient element: a local explosion that means hide.",
    ),
    "zero_fraction": (
        "count(g == 0)",
        "elements",
        Reduction.RATIO,
        "Share of gradient elements that are exactly 0; rows that pad the vocabulary are left out.",
    ),
    "norm": ("sum g^2", None, Reduction.ROOT_SUM, "Euclidean norm of the gradient, before clipping."),
    "rms": ("sum g^2", "elements", Reduction.ROOT_RATIO, "Root mean square: scale comparable over sizes."),
}


def _gradient_statistic(prefix: str, kind: str, what: str) -> MetricSpec:
    numerator, denominator, reduction, meaning = _STATISTICS[kind]
    return MetricSpec(
        tag=f"{prefix}/{kind}",
        family="gradient",
        priority=Priority.P1,
        section=2,
        observed=f"{_GRADIENT}; {what}",
        numerator=numerator,
        denominator=denominator,
        reduction=reduction,
        axes=_PARAMETER_AXES,
        unit="1",
        meaning=meaning,
        reads_high="Dead paths, underflow, or parameters that get no gradient."
        if kind == "zero_fraction"
        else "",
    )


METRICS = (
    MetricSpec(
        tag="grad/norm",
        family="gradient",
        priority=Priority.P0,
        section=2,
        observed=_GRADIENT,
        numerator="sum g^2, each parameter once",
        reduction=Reduction.ROOT_SUM,
        axes=_PARAMETER_AXES,
        unit="1",
        meaning="Euclidean norm of the whole gradient: the first number to move before a run breaks.",
        reads_high="A spike with the loss: bad batch or instability. A slow climb: learning rate too large.",
        reads_low="The gradient vanishes, or most of the model is frozen.",
        first_screen=5,
    ),
    MetricSpec(
        tag="grad/norm_after_clip",
        family="gradient",
        priority=Priority.P1,
        section=2,
        observed="accumulated gradient, unscaled, after clipping: what the optimizer consumed",
        numerator="sum g^2, each parameter once",
        reduction=Reduction.ROOT_SUM,
        axes=_PARAMETER_AXES,
        unit="1",
        meaning="Norm of the gradient that the optimizer consumed; at most the clip threshold.",
    ),
    MetricSpec(
        tag="grad/clip_rate",
        family="gradient",
        priority=Priority.P0,
        section=2,
        observed="grad/norm of the last W steps with a finite norm (gradient.clip_window)",
        numerator="steps with norm > clip threshold",
        denominator="min(W, steps seen)",
        reduction=Reduction.HOST,
        unit="1",
        meaning="How often clipping acted lately; absent when clipping is off.",
        reads_high="Clipping has become a learning-rate schedule that nobody designed.",
        first_screen=6,
    ),
    MetricSpec(
        tag="grad/nonfinite",
        family="gradient",
        priority=Priority.P0,
        section=2,
        observed=_GRADIENT,
        numerator="count of NaN and infinite gradient elements",
        reduction=Reduction.SUM,
        axes=_PARAMETER_AXES,
        unit="elements",
        integer=True,
        meaning="Gradient elements that are NaN or infinite.",
        reads_high="The update is skipped or the weights are lost; with a loss scale a few overflows "
        "are normal.",
    ),
    *(
        _gradient_statistic("grad", kind, "all parameters")
        for kind in ("abs_mean", "abs_max", "zero_fraction")
    ),
    *(
        _gradient_statistic(f"grad/{name}", kind, f"parameters of the class {name}")
        for name in PARAMETER_CLASSES
        for kind in ("norm", "abs_mean", "abs_max", "zero_fraction")
    ),
    *(
        _gradient_statistic("grad/layer_{layer}/{part}", kind, "parameters of one part of one layer")
        for kind in ("rms", "abs_max", "abs_mean", "zero_fraction")
    ),
)
