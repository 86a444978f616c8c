"""What is looked at on which step; decided before any hook runs, from the step number alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_probes.catalog import Priority


@dataclass(frozen=True)
class Schedule:
    """P0 every step, P1 every ``sample_every``-th step.

    The phase comes from the training iteration, never from a counter of this process, so that a resumed
    run samples the same steps as an uninterrupted one (Specification, section 11).
    """

    sample_every: int

    def due(self, step: int) -> Priority:
        """The lowest priority that is measured at ``step`` (1-based iteration)."""
        return Priority.P1 if step % self.sample_every == 0 else Priority.P0
