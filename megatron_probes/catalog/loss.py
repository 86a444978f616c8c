"""Section 1: the loss and the data behind it."""

from __future__ import annotations

from megatron_probes.catalog.spec import MetricSpec, Priority, Reduction

_DATA_AXES = ("dp", "cp")
_STEP_LOSS = "per-token loss of the last pipeline stage, all micro-batches of the step"

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
        tag="loss/rank_mean",
        family="loss",
        priority=Priority.P1,
        section=1,
        observed=_STEP_LOSS,
        numerator="histogram of the data ranks' own sum(m * l) / sum(m)",
        reduction=Reduction.CELLS,
        axes=_DATA_AXES,
        unit="nats",
        meaning="Distribution of the per-rank mean losses, each named in the record by the rank that "
        "loss/worst_rank_index would name; with loss.per_rank and at most 64 data ranks.",
        layout_dependent=True,
    ),
    MetricSpec(
        tag="loss/mtp_{layer}",
        family="loss",
        priority=Priority.P1,
        section=1,
        observed="per-token loss of the multi-token prediction head, all micro-batches of the step",
        numerator="sum(m * l) of the head, m the loss mask moved to the head's own targets",
        denominator="sum(m) of the head",
        reduction=Reduction.RATIO,
        axes=_DATA_AXES,
        unit="nats",
        meaning="Mean loss of one multi-token prediction head, without its coefficient; never part "
        "of loss/global.",
    ),
    MetricSpec(
        tag="loss/source/{source}",
        family="sources",
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
        first_screen=3,
    ),
)

_DATA = (
    MetricSpec(
        tag="data/share/{source}",
        family="sources",
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
        first_screen=4,
    ),
    MetricSpec(
        tag="data/valid_tokens",
        family="loss",
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
        family="loss",
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

METRICS = (*_LOSS, *_DATA)
