"""What a sink is given: one `StepRecord` a step, after one `Manifest` a start of the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_probes.catalog import MetricSpec
from megatron_probes.formulas.histogram import Histogram


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Everything that is known of one training step, reduced over all ranks.

    A tag without data at this step is absent from `values`; it is never 0 (Specification, general rules).
    Non-finite values stay as they are.

    Raises:
        ValueError: a tag is empty.
    """

    step: int
    """1-based iteration, as Megatron logs it."""
    attempt: int
    """Which start of the job wrote it; 0 is the first."""
    time: float
    """Unix seconds."""
    tokens: int
    """`data/valid_tokens_total` after this step."""
    values: Mapping[str, int | float]
    """Metric values by tag; a count is an `int`."""
    context: Mapping[str, int | float]
    """What the framework says of the step: `context/learning_rate`, `context/loss_scale`, ..."""
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """Metrics that are distributions, by tag."""
    parts: Mapping[str, list[float]] | None = None
    """Reduced sums, counts and maxima by slot name, when they were asked for."""
    late: bool = False
    """Whether these values became known after the step's own record and join it: the held-out loss at this
    step, or what the job went on to do."""

    def __post_init__(self) -> None:
        for tag in (*self.values, *self.context, *self.histograms):
            if not tag.strip():
                raise ValueError(f"step {self.step}: a metric's tag is empty ({tag!r}); give it a name")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What must be known of a run to read its numbers; written once at each start of the job."""

    run_id: str
    started: float
    """Unix seconds."""
    attempt: int
    """0 for the first start in this output folder (`record_file.next_attempt`)."""
    start_step: int
    """The first step that this start will record; what older attempts wrote from here on was rolled back."""
    tokens_at_start: int
    """`data/valid_tokens_total` before `start_step`."""
    config: Mapping[str, Any]
    config_fingerprint: str
    layout: Mapping[str, Any]
    """Sizes of the mesh axes and what else decides where data lies (tp, pp, cp, dp, ep, ...)."""
    versions: Mapping[str, str]
    flop_convention: str
    """Name and version of the convention behind `system/flops_per_device`."""
    metrics: tuple[MetricSpec, ...]
    """The catalogue's entries that this run can write."""

    def as_json(self) -> dict[str, Any]:
        """The manifest as plain data for strict JSON; enumerations by name."""
        return {
            "run_id": self.run_id,
            "started": self.started,
            "attempt": self.attempt,
            "start_step": self.start_step,
            "tokens_at_start": self.tokens_at_start,
            "config": dict(self.config),
            "config_fingerprint": self.config_fingerprint,
            "layout": dict(self.layout),
            "versions": dict(self.versions),
            "flop_convention": self.flop_convention,
            "metrics": {
                spec.tag: {"unit": spec.unit, "priority": spec.priority.name, "meaning": spec.meaning}
                for spec in self.metrics
            },
        }


class Sink(Protocol):
    """Where records go. All four calls come from the pipeline's thread, in this order."""

    def open(self, manifest: Manifest) -> None:
        """Begin an attempt."""

    def write(self, record: StepRecord) -> None:
        """Take one step's record."""

    def flush(self) -> None:
        """Hand everything taken so far to the operating system."""

    def close(self) -> None:
        """Flush and release; nothing is written afterwards."""
