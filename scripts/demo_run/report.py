"""What the demo says at its end: the first screen's last values, and what the probes made of the anomaly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from megatron_probes.catalog import MetricSpec, first_screen_charts, lookup
from megatron_probes.sinks import StepRecord

JOINT_SPIKES = "stability/joint_spike"
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_READABLE = 1e5  # a number up to here is shown without a prefix


def first_screen(records: Sequence[StepRecord]) -> Table:
    """Table of the first screen's charts with the last value of each tag, in reading order."""
    last: dict[str, int | float] = {}
    for record in records:
        last |= record.values
    specs = {tag: lookup(tag) for tag in last}
    table = Table("chart", "tag", title="First screen, last values", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("value", justify="right", no_wrap=True)
    for chart in first_screen_charts():
        title = chart.title
        for template in chart.tags:
            for tag in sorted(tag for tag, spec in specs.items() if spec.tag == template):
                table.add_row(title, tag, quantity(last[tag], specs[tag]))
                title = ""
    return table


def quantity(value: int | float, spec: MetricSpec) -> str:
    """The value with its unit; a state by its name."""
    if spec.unit == "state":
        names = dict(name.split(" ", 1) for name in spec.numerator.split(", "))
        return names[str(value)]
    unit = {"1": "", "bytes": "B"}.get(spec.unit, spec.unit)
    prefix = ""
    if math.isfinite(value) and abs(value) >= _READABLE:
        scale, prefix = next((scale, prefix) for scale, prefix in _PREFIXES if abs(value) >= scale)
        value = value / scale
    number = str(value) if isinstance(value, int) else f"{value:.4g}"
    return f"{number} {prefix}{unit}".rstrip()


def spike_steps(records: Sequence[StepRecord]) -> list[int]:
    """Steps at which the count of joint spikes rose."""
    counts = [(record.step, record.values.get(JOINT_SPIKES, 0)) for record in records]
    return [
        step for (_, before), (step, count) in zip([(0, 0), *counts], counts, strict=False) if count > before
    ]


def verdict(records: Sequence[StepRecord], anomaly_step: int) -> list[str]:
    """Sentences about the injected anomaly and about every joint spike that the probes counted."""
    by_step = {record.step: record.values for record in records}
    spikes = spike_steps(records)
    if anomaly_step not in by_step:
        return [f"The run ended before step {anomaly_step}, where the demo injects its anomaly."]
    at, before = by_step[anomaly_step], by_step.get(anomaly_step - 1, {})
    lines = [f"Injected anomaly: at step {anomaly_step} the demo gave the model a batch of random bytes."]
    for name, tag in (("loss", "loss/global"), ("grad_norm", "grad/norm")):
        if tag in at and tag in before:
            score = at.get(f"stability/{name}/z")
            shown = "not scored: too little history" if score is None else f"z = {score:.1f}"
            lines.append(f"  {tag}: {before[tag]:.3f} -> {at[tag]:.3f} ({shown})")
    if anomaly_step in spikes:
        lines.append(f"  {JOINT_SPIKES} counted it.")
    else:
        lines.append(f"  {JOINT_SPIKES} did not count it.")
    others = [str(step) for step in spikes if step != anomaly_step]
    if others:
        lines.append(f"  It also counted step {', '.join(others)}, where the demo injected nothing.")
    return lines
