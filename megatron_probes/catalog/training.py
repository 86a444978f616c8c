"""Sections 0 to 3: the job, the loss, the gradient and stability."""

from __future__ import annotations

from megatron_probes.catalog.spec import PARAMETER_CLASSES, MetricSpec, Priority, Reduction

_DATA_AXES = ("dp", "cp")
_PARAMETER_AXES = ("tp", "pp", "ep", "expert_tp")
_GRADIENT = "accumulated gradient, unscaled as the optimizer sees it, before clipping"
_STEP_LOSS = "per-token loss of the last pipeline stage, all micro-batches of the step"

_JOB = (
    MetricSpec(
        tag="job/state",
        family="job",
        priority=Priority.P0,
        section=0,
        observed="the training loop, whenever the record is written",
        numerator="0 starting, 1 training, 2 evaluating, 3 saving, 4 stalled, 5 finished, 6 failed",
        reduction=Reduction.HOST,
        unit="state",
        integer=True,
        meaning="What the job is doing. Anything but 1 explains a flat curve before you look at the model.",
        reads_high="4: no step ended for long; 6: the loop was left by an exception.",
        first_screen=1,
    ),
    MetricSpec(
        tag="job/last_step",
        family="job",
        priority=Priority.P0,
        section=0,
        observed="end of the step",
        numerator="number of the last finished step",
        reduction=Reduction.HOST,
        unit="steps",
        integer=True,
        meaning="The last step that ended; together with the wall clock it shows a stall.",
    ),
    MetricSpec(
        tag="job/restarts",
        family="job",
        priority=Priority.P0,
        section=0,
        observed="start of the job",
        numerator="starts of this run after the first",
        reduction=Reduction.HOST,
        unit="1",
        integer=True,
        meaning="How often the run was started again in the same output folder.",
        reads_high="Hardware or a recurring failure is eating the run's time.",
    ),
    MetricSpec(
        tag="probe/disabled",
        family="probe",
        priority=Priority.P0,
        section=0,
        observed="end of the step",
        numerator="metric families switched off after a failed contribution",
        reduction=Reduction.HOST,
        unit="families",
        integer=True,
        meaning="Families whose probe failed on some rank; their metrics are absent from then on.",
        reads_high="Part of the instruments is dark: read the warning in the log.",
    ),
    MetricSpec(
        tag="probe/dropped_points",
        family="probe",
        priority=Priority.P0,
        section=0,
        observed="the writer's queue",
        numerator="points that the full queue gave up",
        reduction=Reduction.HOST,
        unit="points",
        integer=True,
        meaning="Points that were measured but never written because storage was too slow.",
        reads_high="Gaps in the curves come from storage, not from training.",
    ),
)

_LOSS = (
    MetricSpec(
        tag="loss/global",
        family="loss",
        priority=Priority.P0,
        section=1,
        observed=_STEP_LOSS,
        numerator="sum(m * l)",
        denominator="sum(m)",
        reduction=Reduction.RATIO,
        axes=_DATA_AXES,
        unit="nats",
        meaning="Mean negative log-likelihood of the valid targets: the base of every statement on "
        "convergence.",
        reads_high="Divergence, bad data, or a learning rate that is too large.",
        reads_low="Targets leak into the input, or the mask covers the hard tokens.",
        first_screen=2,
    ),
    MetricSpec(
        tag="loss/worst_rank",
        family="loss",
        priority=Priority.P0,
        section=1,
        observed=_STEP_LOSS,
        numerator="a data rank's own sum(m * l) / sum(m); +inf where that is not finite",
        reduction=Reduction.MAX,
        axes=_DATA_AXES,
        unit="nats",
        meaning="Largest mean loss of a data rank. The maximum is over ranks, not over tokens or samples; "
        "it shows a broken worker or data shard that the global mean hides.",
        reads_high="One rank reads bad data or computes wrongly; loss/worst_rank_index names it.",
        layout_dependent=True,
        first_screen=2,
    ),
    MetricSpec(
        tag="loss/worst_rank_index",
        family="loss",
        priority=Priority.P0,
        section=1,
        observed=_STEP_LOSS,
        numerator="lowest global rank of the last stage that holds the worst rank's data",
        reduction=Reduction.ARGMAX,
        axes=_DATA_AXES,
        unit="rank",
        integer=True,
        meaning="The rank behind loss/worst_rank. The same index step after step is a fault; "
        "an index that wanders is noise.",
        layout_dependent=True,
    ),
    *(
        MetricSpec(
            tag=f"loss/{kind}_steps",
            family="loss",
            priority=Priority.P0,
            section=1,
            observed="loss/global of every step",
            numerator=f"steps whose global loss was {name}, since the start of the run",
            reduction=Reduction.HOST,
            unit="steps",
            integer=True,
            meaning=f"Cumulative count of steps with the loss {name}.",
            reads_high="Each rise is a step whose numbers cannot be trusted.",
        )
        for kind, name in (("nan", "NaN"), ("inf", "infinite"))
    ),
    *(
        MetricSpec(
            tag=f"loss/rank_mean/{kind}",
            family="loss",
            priority=Priority.P1,
            section=1,
            observed=_STEP_LOSS,
            numerator=f"{kind} of the data ranks' own sum(m * l) / sum(m)",
            reduction=Reduction.CELLS,
            axes=_DATA_AXES,
            unit="nats",
            meaning=f"The {kind} of the per-rank mean losses; ranks without valid targets are left out.",
            layout_dependent=True,
        )
        for kind in ("min", "median", "max")
    ),
    MetricSpec(
        tag="loss/mtp_{layer}",
        family="loss",
        priority=Priority.P1,
        section=1,
        observed="per-token loss of the multi-token prediction head, all micro-batches of the step",
        numerator="sum(m * l) of the head",
        denominator="sum(m) of the head",
        reduction=Reduction.RATIO,
        axes=_DATA_AXES,
        unit="nats",
        meaning="Mean loss of one multi-token prediction head, without its coefficient; never part "
        "of loss/global.",
        planned=True,
    ),
    MetricSpec(
        tag="loss/source/{source}",
        family="loss",
        priority=Priority.P0,
        section=1,
        observed=_STEP_LOSS,
        numerator="sum(m * l) over the targets of the source or modality",
        denominator="valid targets of the source or modality",
        reduction=Reduction.RATIO,
        axes=_DATA_AXES,
        unit="nats",
        meaning="Mean loss of one data source or modality, to be compared with its own history only, "
        "never with another's.",
        reads_high="That source degrades or its data is broken, even where loss/global stands still.",
        planned=True,
        first_screen=3,
    ),
)

_DATA = (
    MetricSpec(
        tag="data/share/{source}",
        family="data",
        priority=Priority.P0,
        section=1,
        observed="loss mask and source of every target of the step",
        numerator="valid targets of the source or modality",
        denominator="all valid targets",
        reduction=Reduction.RATIO,
        axes=_DATA_AXES,
        unit="1",
        meaning="Share of the step's valid targets; a change of the mix explains a loss that looks like "
        "a worse model.",
        reads_low="A loader lost a shard, or packing drops this source.",
        planned=True,
        first_screen=4,
    ),
    MetricSpec(
        tag="data/valid_tokens",
        family="data",
        priority=Priority.P0,
        section=1,
        observed="loss mask of the step",
        numerator="sum(m)",
        reduction=Reduction.SUM,
        axes=_DATA_AXES,
        unit="tokens",
        integer=True,
        meaning="Valid targets of the step: the weight of every mean on this page.",
        reads_low="More padding or masking than usual.",
    ),
    MetricSpec(
        tag="data/valid_tokens_total",
        family="data",
        priority=Priority.P0,
        section=1,
        observed="loss mask of every step of the run",
        numerator="sum(m) over all steps",
        reduction=Reduction.HOST,
        unit="tokens",
        integer=True,
        meaning="Valid targets since the start of the run: the x axis on which runs are compared.",
    ),
)

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
        planned=True,
    )


_GRADIENT_METRICS = (
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
        planned=True,
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

METRICS = (*_JOB, *_LOSS, *_DATA, *_GRADIENT_METRICS, *_STABILITY, *_RECOVERY)
