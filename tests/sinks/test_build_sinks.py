"""A configuration's sinks, from the queue to the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from sink_records import manifest, record

from megatron_probes.config import ProbeConfig
from megatron_probes.sinks import Pipeline, read_records
from megatron_probes.sinks.build import build_sinks

FILES = {"record": "records", "tensorboard": "by_step", "alarms": "alarms.jsonl"}


def run(output_dir: Path, config: ProbeConfig) -> set[str]:
    pipeline = Pipeline(lambda item: item, build_sinks(config, output_dir), max_items=config.queue.max_items)
    pipeline.open(manifest())
    for step in range(1, 6):
        pipeline.submit(record(step))
    assert pipeline.close(30.0)
    return {path.name for path in output_dir.iterdir()}


def test_all_sinks_share_one_pipeline(tmp_path: Path) -> None:
    assert run(tmp_path, ProbeConfig()) == {"records", "by_step", "by_tokens", "alarms.jsonl"}
    assert [r.step for r in read_records(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("section", FILES)
def test_each_sink_can_be_switched_off(tmp_path: Path, section: str) -> None:
    names = run(tmp_path, ProbeConfig.model_validate({section: {"enabled": False}}))
    assert names & set(FILES.values()) == set(FILES.values()) - {FILES[section]}


def test_token_axis_can_be_switched_off(tmp_path: Path) -> None:
    config = ProbeConfig.model_validate({"tensorboard": {"by_tokens": False}})
    assert run(tmp_path, config) == {"records", "by_step", "alarms.jsonl"}
