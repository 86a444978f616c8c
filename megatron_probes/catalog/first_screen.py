"""The first screen: which metrics share a chart, and in which order (Specification, section 11)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_probes.catalog.spec import MetricSpec

TITLES = {
    1: "Job state",
    2: "Loss: global and worst rank",
    3: "Loss by source",
    4: "Share of targets by source",
    5: "Gradient norm",
    6: "Clip rate",
    7: "Joint spikes",
    8: "Step time",
    9: "Throughput",
    10: "Memory peak",
    11: "Expert MaxVio",
    12: "Output absmax",
    13: "Held-out bits per byte",
}
"""Position on the first screen -> title of its chart."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart of the first screen."""

    title: str
    tags: tuple[str, ...]
    """Tag templates of the curves, in the order of the catalogue."""
    order: int


def charts(specs: Iterable[MetricSpec]) -> tuple[Chart, ...]:
    """Return the charts of the first screen that hold at least one of ``specs``, in reading order."""
    tags: dict[int, list[str]] = {}
    for spec in specs:
        if spec.first_screen is not None:
            tags.setdefault(spec.first_screen, []).append(spec.tag)
    return tuple(Chart(title=TITLES[n], tags=tuple(tags[n]), order=n) for n in sorted(tags))
