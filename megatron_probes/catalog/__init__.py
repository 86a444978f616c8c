"""The metric catalogue: every metric of the specification, once, as data.

Documentation tables, the dashboard's layout and the checks on what may be written are derived from it.
"""

from __future__ import annotations

import functools

from megatron_probes.catalog import (
    evaluation,
    experts,
    gradient,
    job,
    loss,
    machine,
    optimizer,
    residual,
    stability,
    tensors,
)
from megatron_probes.catalog.first_screen import Chart, charts
from megatron_probes.catalog.spec import MetricSpec, Priority, Reduction, snake_case

__all__ = [
    "CATALOG",
    "Chart",
    "MetricSpec",
    "Priority",
    "Reduction",
    "first_screen_charts",
    "lookup",
    "snake_case",
]

CATALOG: tuple[MetricSpec, ...] = (
    *job.METRICS,
    *loss.METRICS,
    *gradient.METRICS,
    *stability.METRICS,
    *machine.METRICS,
    *tensors.METRICS,
    *optimizer.METRICS,
    *experts.METRICS,
    *residual.METRICS,
    *evaluation.METRICS,
)
"""Every metric in the order of the specification."""

_LITERAL = {spec.tag: spec for spec in CATALOG if not spec.placeholders}
_TEMPLATES = tuple(spec for spec in CATALOG if spec.placeholders)


@functools.lru_cache(maxsize=65536)
def lookup(tag: str) -> MetricSpec:
    """Return the spec of a concrete tag; a literal tag goes before a template.

    Raises ``KeyError`` when the catalogue holds no such metric.
    """
    if tag in _LITERAL:
        return _LITERAL[tag]
    for spec in _TEMPLATES:
        if spec.pattern.fullmatch(tag):
            return spec
    raise KeyError(tag)


def first_screen_charts(*, planned: bool = False) -> tuple[Chart, ...]:
    """Return the charts of the first screen in reading order.

    Metrics without a probe are left out unless ``planned`` is true, and with them charts that would be
    empty. ``loss/source/{source}`` stands for as many curves as the run has sources.
    """
    return charts(spec for spec in CATALOG if planned or not spec.planned)
