"""The sinks that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from megatron_probes.config import ProbeConfig
from megatron_probes.sinks.alarms import AlarmSink
from megatron_probes.sinks.record import Sink
from megatron_probes.sinks.record_file import RecordFileSink
from megatron_probes.sinks.tensorboard import TensorBoardSink


def build_sinks(config: ProbeConfig, output_dir: Path) -> list[Sink]:
    """The record file, TensorBoard and alarms under ``output_dir``, as far as they are switched on."""
    sinks: list[Sink] = []
    if config.record.enabled:
        sinks.append(
            RecordFileSink(
                output_dir,
                rotate_bytes=config.record.rotate_bytes,
                flush_seconds=config.record.flush_seconds,
                memory_bytes=config.queue.spill_bytes,
            )
        )
    if config.tensorboard.enabled:
        sinks.append(
            TensorBoardSink(
                output_dir,
                by_tokens=config.tensorboard.by_tokens,
                max_series=config.tensorboard.max_series,
                flush_seconds=config.tensorboard.flush_seconds,
            )
        )
    if config.alarms.enabled:
        sinks.append(AlarmSink(output_dir))
    return sinks
