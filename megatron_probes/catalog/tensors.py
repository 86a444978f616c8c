"""Section 5: statistics of tensors at the observation points."""

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

METRICS = (
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
