"""Section 3: spikes of loss and gradient norm, and updates that were dropped or replayed."""

from __future__ import annotations

from megatron_probes.catalog.spec import MetricSpec, Priority, Reduction

_SIDES = (("loss", "loss/global"), ("grad_norm", "grad/norm"))

_STABILITY = (
    *(
        MetricSpec(
            tag=f"stability/{side}/{kind}",
            family="stability",
            priority=Priority.P1,
            section=3,
            observed=f"u = ln({source} + eps) against the window before the step",
            numerator=numerator,
            reduction=Reduction.HOST,
            unit=unit,
            meaning=meaning,
        )
        for side, source in _SIDES
        for kind, numerator, unit, meaning in (
            ("median", "q = median(W)", "ln", f"Baseline of {source}: the median of the recent logarithms."),
            (
                "mad",
                "D = median|u - q| over W",
                "ln",
                f"Spread of {source} that single spikes don't widen; raw, before the floor.",
            ),
            (
                "z",
                "0.6745 |u - q| / (max(D, d_floor) + eps)",
                "1",
                f"How far {source} lies from its recent history, two-sided, in robust standard deviations.",
            ),
        )
    ),
    MetricSpec(
        tag="stability/joint_spike",
        family="stability",
        priority=Priority.P0,
        section=3,
        observed="loss/global and grad/norm of the same step",
        numerator="steps on which both spiked or were non-finite, since the start of the run",
        reduction=Reduction.HOST,
        unit="steps",
        integer=True,
        meaning="Cumulative count of steps on which loss and gradient norm spiked together: the one "
        "to page on.",
        reads_high="Each rise is an incident; look at the batch and the layers of that step.",
        first_screen=7,
    ),
    MetricSpec(
        tag="stability/joint_spike_magnitude",
        family="stability",
        priority=Priority.P0,
        section=3,
        observed="loss/global and grad/norm of the same step",
        numerator="sum over joint spikes of min(z_loss, z_grad); a non-finite side adds 0",
        reduction=Reduction.HOST,
        unit="1",
        meaning="Cumulative size of the joint spikes: one large and many small incidents read differently.",
        first_screen=7,
    ),
    *(
        MetricSpec(
            tag=f"stability/{side}/{kind}",
            family="stability",
            priority=Priority.P1,
            section=3,
            observed=f"{source} of every step",
            numerator=f"{numerator}, since the start of the run",
            reduction=Reduction.HOST,
            unit="steps",
            integer=True,
            meaning=f"Cumulative count of {numerator}.",
        )
        for side, source in _SIDES
        for kind, numerator in (
            ("spikes", f"steps on which {source} spiked"),
            ("nonfinite_steps", f"steps on which {source} was NaN or infinite"),
        )
    ),
)

_RECOVERY = (
    *(
        MetricSpec(
            tag=f"recovery/skipped_steps/{cause}",
            family="recovery",
            priority=Priority.P1,
            section=3,
            observed="the optimizer's decision on every step",
            numerator=f"updates dropped {why}, since the start of the run",
            reduction=Reduction.HOST,
            unit="steps",
            integer=True,
            meaning=f"Cumulative count of updates dropped {why}.",
            planned=cause == "guard",
        )
        for cause, why in (
            ("guard", "by a spike guard"),
            ("overflow", "because a gradient overflowed under the loss scale"),
            ("threshold", "because the gradient norm passed a skip threshold"),
        )
    ),
    MetricSpec(
        tag="recovery/replayed_steps",
        family="recovery",
        priority=Priority.P1,
        section=3,
        observed="the training loop's re-run of a step",
        numerator="steps replayed, since the start of the run",
        reduction=Reduction.HOST,
        unit="steps",
        integer=True,
        meaning="Cumulative count of steps that were run again on the same input.",
        planned=True,
    ),
    MetricSpec(
        tag="recovery/replay_mismatches",
        family="recovery",
        priority=Priority.P1,
        section=3,
        observed="the training loop's re-run of a step",
        numerator="replays whose loss differs from the original's, since the start of the run",
        reduction=Reduction.HOST,
        unit="steps",
        integer=True,
        meaning="Cumulative count of replays that didn't give the same loss: same input, other loss "
        "is hardware.",
        reads_high="A device computes wrongly: find it before training on.",
        planned=True,
    ),
)

METRICS = (*_STABILITY, *_RECOVERY)
