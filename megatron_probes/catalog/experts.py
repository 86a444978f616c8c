"""Section 7: the load of the experts."""

from __future__ import annotations

from megatron_probes.catalog.spec import MetricSpec, Priority, Reduction

_TOKEN_AXES = ("dp", "cp")
_COUNTED = "the router's own map before capacity dropping, valid tokens, all micro-batches of the step"

METRICS = (
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
        meaning="Megatron's own micro-batch load-balancing loss without its coefficient, where it balances "
        "the router; a balanced router gives 1.",
        reads_high="Load and router probability pile up on the same experts.",
        layout_dependent=True,
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
            reduction=reduction,
            axes=axes,
            unit="1",
            meaning=meaning,
        )
        for kind, observed, numerator, denominator, reduction, axes, meaning in (
            (
                "load",
                _COUNTED,
                "c_i",
                "sum c",
                Reduction.COUNTS,
                _TOKEN_AXES,
                "Share of each expert, over the experts' numbers; the record names the busiest few.",
            ),
            (
                "bias",
                "the router's bias, after the step",
                "b_i",
                None,
                Reduction.COUNTS,
                (),
                "Distribution of the routing bias over the experts; the record names each expert's.",
            ),
            (
                "topk_margin",
                "the values that the router ranks (logits, or their scores where the score function comes "
                "first, plus the routing bias), valid tokens",
                "score(k) - score(k+1)",
                None,
                Reduction.HISTOGRAM,
                _TOKEN_AXES,
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
    ),
)
