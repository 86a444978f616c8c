"""Section 4: step time, throughput, memory, communication, devices and hosts."""

from __future__ import annotations

from megatron_probes.catalog.spec import MetricSpec, Priority, Reduction

_ALL_RANKS = ("dp", "cp", "tp", "pp")
_STEP = "step begin to step end: data loading, forward, backward, optimizer and synchronisation"

_SYSTEM = (
    MetricSpec(
        tag="system/step_time_s",
        family="system",
        priority=Priority.P0,
        section=4,
        observed=_STEP,
        numerator="max over ranks of the rank's own step time",
        reduction=Reduction.MAX,
        axes=_ALL_RANKS,
        unit="s",
        meaning="Wall time of the step on the slowest rank.",
        reads_high="A stall, a slow rank, slow storage, or a step that evaluated or saved.",
        layout_dependent=True,
        first_screen=8,
    ),
    MetricSpec(
        tag="system/tokens_per_second",
        family="system",
        priority=Priority.P0,
        section=4,
        observed=_STEP,
        numerator="data/valid_tokens",
        denominator="system/step_time_s",
        reduction=Reduction.HOST,
        unit="tokens/s",
        meaning="Valid targets of the whole job per second of the step.",
        reads_low="Most often hardware, heat, the allocator or the network rather than the model.",
        layout_dependent=True,
        first_screen=9,
    ),
    *(
        MetricSpec(
            tag=f"system/tokens_per_second_{kind}",
            family="system",
            priority=Priority.P1,
            section=4,
            observed="the interval since the last point",
            numerator="valid targets of the interval",
            denominator=denominator,
            reduction=Reduction.HOST,
            unit="tokens/s",
            meaning=meaning,
            layout_dependent=True,
            planned=True,
        )
        for kind, denominator, meaning in (
            (
                "active",
                "time in steps, without evaluation, checkpoints and the first step",
                "Rate at which the job trains while it trains.",
            ),
            (
                "wall",
                "time elapsed, with evaluation, checkpoints and the first step",
                "Rate that decides when the run ends; the gap to the active rate is overhead around "
                "the steps.",
            ),
        )
    ),
    MetricSpec(
        tag="system/flops_per_device",
        family="system",
        priority=Priority.P0,
        section=4,
        observed=_STEP,
        numerator="F_step by the convention named in the run's manifest",
        denominator="devices * system/step_time_s",
        reduction=Reduction.HOST,
        unit="FLOP/s",
        meaning="Model FLOPs per second and device; comparable only under the same FLOP convention.",
        reads_low="Devices wait: communication, data, small batches or a slow rank.",
        layout_dependent=True,
    ),
    MetricSpec(
        tag="system/mfu",
        family="system",
        priority=Priority.P0,
        section=4,
        observed=_STEP,
        numerator="system/flops_per_device",
        denominator="dense peak of the device (system.peak_flops_per_device)",
        reduction=Reduction.HOST,
        unit="1",
        meaning="Share of the device's dense peak that the model's own FLOPs use; absent when the peak "
        "isn't given.",
        layout_dependent=True,
    ),
    MetricSpec(
        tag="system/straggler_score",
        family="system",
        priority=Priority.P1,
        section=4,
        observed="a rank's step time less its waiting in collectives, within a pipeline stage",
        numerator="max over the stage's ranks of w",
        denominator="median over the stage's ranks of w, plus eps",
        reduction=Reduction.CELLS,
        axes=_ALL_RANKS,
        unit="1",
        meaning="How much longer the slowest rank works than the median of its stage; largest stage. "
        "About 1 when all keep pace.",
        reads_high="One rank holds the job back; system/slowest_rank_index names it.",
        layout_dependent=True,
        planned=True,
    ),
    MetricSpec(
        tag="system/slowest_rank_index",
        family="system",
        priority=Priority.P1,
        section=4,
        observed="a rank's step time less its waiting in collectives, within a pipeline stage",
        numerator="global rank behind system/straggler_score",
        reduction=Reduction.ARGMAX,
        axes=_ALL_RANKS,
        unit="rank",
        integer=True,
        meaning="The rank behind system/straggler_score.",
        layout_dependent=True,
        planned=True,
    ),
)

_MEMORY = (
    *(
        MetricSpec(
            tag=f"memory/peak_{kind}_bytes",
            family="system",
            priority=Priority.P0,
            section=4,
            observed="the allocator's peak since step begin, where the counter is reset",
            numerator=f"peak {kind} bytes of the rank",
            reduction=Reduction.MAX,
            axes=_ALL_RANKS,
            unit="bytes",
            integer=True,
            meaning=meaning,
            reads_high="The fullest device is close to running out of memory.",
            layout_dependent=True,
            first_screen=10,
        )
        for kind, meaning in (
            ("allocated", "Largest peak of bytes in live tensors over the ranks."),
            ("reserved", "Largest peak of bytes that a rank's allocator held, its cache included."),
        )
    ),
    MetricSpec(
        tag="memory/peak_rank_index",
        family="system",
        priority=Priority.P0,
        section=4,
        observed="the allocator's peak since step begin",
        numerator="global rank with the largest peak of allocated bytes",
        reduction=Reduction.ARGMAX,
        axes=_ALL_RANKS,
        unit="rank",
        integer=True,
        meaning="The rank closest to running out of memory.",
        layout_dependent=True,
    ),
    *(
        MetricSpec(
            tag=f"memory/{kind}",
            family="system",
            priority=Priority.P1,
            section=4,
            observed="the allocator at step end",
            numerator=numerator,
            reduction=Reduction.MAX,
            axes=_ALL_RANKS,
            unit=unit,
            integer=True,
            meaning=meaning,
            layout_dependent=True,
            planned=True,
        )
        for kind, numerator, unit, meaning in (
            ("allocated_bytes", "bytes in live tensors", "bytes", "Bytes in live tensors, largest rank."),
            (
                "reserved_bytes",
                "bytes held by the allocator",
                "bytes",
                "Bytes that the allocator holds, largest rank.",
            ),
            (
                "cached_gap_bytes",
                "reserved - allocated",
                "bytes",
                "Held but unused bytes, largest rank: growth means fragmentation or cache, not a "
                "bigger model.",
            ),
            (
                "alloc_retries",
                "allocations that had to free the cache and try again",
                "1",
                "Allocation retries, largest rank: each one stalls the device.",
            ),
        )
    ),
)

_COMMUNICATION = (
    MetricSpec(
        tag="comm/exposed_wait_fraction",
        family="comm",
        priority=Priority.P1,
        section=4,
        observed="device events on both sides of the real wait",
        numerator="sum over ranks of the wait that no computation hides",
        denominator="sum over ranks of the step time",
        reduction=Reduction.RATIO,
        axes=_ALL_RANKS,
        unit="1",
        meaning="Share of the job's device time that waits in collectives.",
        reads_high="Communication isn't hidden: see comm/calls and comm/bytes for many small calls "
        "or few large ones.",
        layout_dependent=True,
        planned=True,
    ),
    MetricSpec(
        tag="comm/exposed_wait_fraction_max",
        family="comm",
        priority=Priority.P1,
        section=4,
        observed="device events on both sides of the real wait",
        numerator="max over ranks of wait / step time",
        reduction=Reduction.MAX,
        axes=_ALL_RANKS,
        unit="1",
        meaning="Waiting share of the rank that waits most: it is fast, or its partners are slow.",
        layout_dependent=True,
        planned=True,
    ),
    *(
        MetricSpec(
            tag=f"comm/{kind}/{{kind}}",
            family="comm",
            priority=Priority.P1,
            section=4,
            observed="collectives of the step, by kind (all_reduce, all_gather, ...)",
            numerator=numerator,
            reduction=Reduction.SUM,
            axes=_ALL_RANKS,
            unit=unit,
            integer=True,
            meaning=meaning,
            layout_dependent=True,
            planned=True,
        )
        for kind, numerator, unit, meaning in (
            ("calls", "collective calls", "1", "Collective calls of the step: many small ones cost latency."),
            (
                "bytes",
                "bytes of the collectives",
                "bytes",
                "Bytes moved by the step's collectives: bandwidth.",
            ),
        )
    ),
)

_DEVICE = tuple(
    MetricSpec(
        tag=f"device/{kind}",
        family="device",
        priority=Priority.P1,
        section=4,
        observed="the device's own sensors, at the sampled step",
        numerator=numerator,
        reduction=reduction,
        axes=_ALL_RANKS,
        unit=unit,
        meaning=meaning,
        layout_dependent=True,
        planned=True,
    )
    for kind, numerator, reduction, unit, meaning in (
        ("utilization", "share of time with a kernel running", Reduction.MIN, "1", "Least busy device."),
        ("power_w", "power draw", Reduction.MAX, "W", "Largest power draw of a device."),
        (
            "temperature_c",
            "temperature",
            Reduction.MAX,
            "degC",
            "Hottest device: heat comes before throttling.",
        ),
        (
            "sm_clock_mhz",
            "clock of the multiprocessors",
            Reduction.MIN,
            "MHz",
            "Slowest clock: a throttled device.",
        ),
    )
)

_HOST = tuple(
    MetricSpec(
        tag=f"host/{kind}",
        family="host",
        priority=Priority.P1,
        section=4,
        observed=observed,
        numerator=numerator,
        reduction=reduction,
        axes=_ALL_RANKS,
        unit=unit,
        integer=integer,
        meaning=meaning,
        layout_dependent=True,
        planned=True,
    )
    for kind, observed, numerator, reduction, unit, integer, meaning in (
        (
            "rss_bytes",
            "the rank's process",
            "resident bytes",
            Reduction.MAX,
            "bytes",
            True,
            "Largest resident process: steady growth is a leak in the loader or the loop.",
        ),
        (
            "cpu_pressure",
            "once a node",
            "share of time in which tasks waited for a CPU",
            Reduction.MAX,
            "1",
            False,
            "Node whose tasks wait most for a CPU: data loading starves the devices.",
        ),
        (
            "major_page_faults",
            "once a node, difference of readings",
            "page faults served from storage",
            Reduction.SUM,
            "1",
            True,
            "Page faults served from storage, all nodes: memory is short.",
        ),
        (
            "net_rx_bytes",
            "once a node, difference of readings",
            "bytes received",
            Reduction.SUM,
            "bytes",
            True,
            "Bytes received over the network, all nodes; each interface counts once a node.",
        ),
        (
            "net_tx_bytes",
            "once a node, difference of readings",
            "bytes sent",
            Reduction.SUM,
            "bytes",
            True,
            "Bytes sent over the network, all nodes; each interface counts once a node.",
        ),
    )
)

METRICS = (*_SYSTEM, *_MEMORY, *_COMMUNICATION, *_DEVICE, *_HOST)
