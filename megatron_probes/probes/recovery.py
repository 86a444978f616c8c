"""Updates that were dropped, by cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_probes.probes.base import Facts, Parts, Probe, Values

CAUSES = ("overflow", "threshold")


class RecoveryProbe(Probe):
    """``recovery/skipped_steps/*`` (Specification, section 3)."""

    family = "recovery"

    def __init__(self) -> None:
        super().__init__()
        self._skipped = dict.fromkeys(CAUSES, 0)

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        if facts.skipped is not None:
            self._skipped[facts.skipped] += 1
        values.update({f"recovery/skipped_steps/{cause}": n for cause, n in self._skipped.items()})

    def state_dict(self) -> dict[str, Any]:
        return dict(self._skipped)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._skipped = {cause: int(state[cause]) for cause in CAUSES}
