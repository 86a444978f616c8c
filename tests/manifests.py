"""The manifest of a run that a test starts by hand."""

from typing import Any

from megatron_probes.catalog import CATALOG
from megatron_probes.sinks import Manifest


def manifest(**changed: Any) -> Manifest:
    """The first start of a run that begins at step 1, with ``changed`` fields."""
    fields: dict[str, Any] = {
        "run_id": "run",
        "started": 0.0,
        "attempt": 0,
        "start_step": 1,
        "tokens_at_start": 0,
        "config": {},
        "config_fingerprint": "",
        "layout": {},
        "versions": {},
        "flop_convention": "none",
        "metrics": CATALOG,
    }
    return Manifest(**(fields | changed))
