"""Where reduced values go: the exact record, TensorBoard and alarms, behind one queue and one thread."""

from megatron_probes.sinks.alarms import AlarmSink
from megatron_probes.sinks.pipeline import Item, Pipeline
from megatron_probes.sinks.record import Manifest, Sink, StepRecord
from megatron_probes.sinks.record_file import RecordFileSink
from megatron_probes.sinks.record_log import RecordLog, next_attempt, read_records, read_series
from megatron_probes.sinks.tensorboard import SHOW_EVERY_POINT, TensorBoardSink

__all__ = [
    "AlarmSink",
    "Item",
    "Manifest",
    "Pipeline",
    "RecordFileSink",
    "RecordLog",
    "SHOW_EVERY_POINT",
    "Sink",
    "StepRecord",
    "TensorBoardSink",
    "next_attempt",
    "read_records",
    "read_series",
]
