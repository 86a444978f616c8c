"""Where reduced values go: the exact record, TensorBoard and alarms, behind one queue and one thread."""

from megatron_probes.sinks.pipeline import Item, Pipeline
from megatron_probes.sinks.record import Manifest, Sink, StepRecord
from megatron_probes.sinks.record_file import RecordFileSink
from megatron_probes.sinks.record_log import RecordLog, next_attempt, read_records, read_series

__all__ = [
    "Item",
    "Manifest",
    "Pipeline",
    "RecordFileSink",
    "RecordLog",
    "Sink",
    "StepRecord",
    "next_attempt",
    "read_records",
    "read_series",
]
