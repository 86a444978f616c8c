"""Section 10: evaluation on held-out data and tasks."""

from __future__ import annotations

from dataclasses import replace

from megatron_probes.catalog.spec import MetricSpec, Priority, Reduction

_HELD_OUT = "per-token loss l of every held-out valid target"


def _metric(
    tag: str,
    observed: str,
    numerator: str,
    denominator: str | None,
    unit: str,
    meaning: str,
    *,
    priority: Priority = Priority.P0,
    reduction: Reduction = Reduction.RATIO,
    first_screen: int | None = None,
) -> MetricSpec:
    return MetricSpec(
        tag=tag,
        family="evaluation",
        priority=priority,
        section=10,
        observed=observed,
        numerator=numerator,
        denominator=denominator,
        reduction=reduction,
        axes=("dp", "cp"),
        unit=unit,
        meaning=meaning,
        first_screen=first_screen,
    )


_EVALUATION = (
    _metric(
        "eval/{set}/nll",
        _HELD_OUT,
        "sum l",
        "valid targets",
        "nats",
        "Mean loss over all held-out valid targets, not a mean of batch means.",
    ),
    _metric(
        "eval/{set}/ppl",
        _HELD_OUT,
        "exp(nll)",
        None,
        "1",
        "Perplexity without a silent cap; compares only under one tokenizer and normalisation.",
    ),
    _metric(
        "eval/{set}/bpb",
        "held-out valid targets that cover bytes",
        "sum l",
        "UTF-8 bytes covered * ln 2",
        "bits/byte",
        "Bits per byte: the default between runs, whatever their tokenizers.",
        first_screen=13,
    ),
    _metric(
        "eval/{task}/accuracy",
        "choices scored by NLL normalised by bytes",
        "sum of credit: 1 for right, 1/k for right among k tied",
        "questions",
        "1",
        "Share of right choices; a tie of k choices earns 1/k.",
    ),
    _metric(
        "eval/{task}/greedy",
        "generation at temperature 0",
        "sum of scores",
        "items",
        "1",
        "Score of greedy generation: shows failures that scoring by likelihood cannot.",
    ),
    _metric(
        "eval/{task}/media_gain",
        "the task with and without media",
        "score with media - score without",
        None,
        "1",
        "What the media adds; about 0 means that the model answers from text alone.",
    ),
    _metric(
        "eval/{task}/pass_at_k",
        "n samples a problem, c of them right",
        "sum over problems of 1 - C(n-c, k) / C(n, k)",
        "problems",
        "1",
        "Chance that at least one of k samples is right, mean over problems.",
        priority=Priority.P1,
    ),
    _metric(
        "eval/{task}/iou",
        "predicted and reference boxes",
        "sum of intersection area / union area",
        "items",
        "1",
        "Overlap of predicted and reference boxes; the main signal where grounding is the aim.",
        priority=Priority.P1,
    ),
)

METRICS = (
    *_EVALUATION,
    *(
        replace(
            spec,
            tag=f"{spec.tag}/{weights}",
            priority=Priority.P1,
            observed=f"{spec.observed}; {weights} weights",
            first_screen=None,
        )
        for spec in _EVALUATION
        for weights in ("raw", "averaged")
    ),
)
