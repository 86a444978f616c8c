"""Alarms: each event once, in the file and in the log."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from sink_records import manifest, record

from megatron_probes.sinks import AlarmSink, StepRecord


def alarms(output_dir: Path) -> list[tuple[int, str, str]]:
    lines = (output_dir / "alarms.jsonl").read_text().splitlines()
    return [(line["step"], line["tag"], line["kind"]) for line in map(json.loads, lines)]


def run(output_dir: Path, records: list[StepRecord], start_step: int = 1) -> None:
    sink = AlarmSink(output_dir)
    sink.open(manifest(start_step=start_step))
    for item in records:
        sink.write(item)
    sink.close()


def test_joint_spike_is_reported_when_it_rises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counts = [0, 0, 1, 1, 1]
    run(
        tmp_path,
        [record(s, stability__joint_spike=n, grad__norm=9.5) for s, n in enumerate(counts, start=1)],
    )
    assert alarms(tmp_path) == [(3, "stability/joint_spike", "rise")]
    (message,) = caplog.messages
    assert message == "step 3: loss and gradient norm spike together: loss/global 3, grad/norm 9.5"


def test_spikes_from_before_a_resume_are_not_reported_again(tmp_path: Path) -> None:
    counts = [2, 2, 3]
    run(tmp_path, [record(s, stability__joint_spike=n) for s, n in enumerate(counts, start=51)], 51)
    assert alarms(tmp_path) == [(53, "stability/joint_spike", "rise")]


def test_non_finite_stretch_is_reported_at_both_ends_pc44(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = [2.0, math.nan, math.inf, 4.0, 3.0]
    run(tmp_path, [record(s, loss__global=loss) for s, loss in enumerate(losses)])
    assert alarms(tmp_path) == [(1, "loss/global", "non_finite"), (3, "loss/global", "finite_again")]
    assert caplog.messages == [
        "step 1: loss/global is nan",
        "step 3: loss/global is finite again after 2 steps: 4",
    ]


def test_disabled_probe_is_reported_after_a_resume_too(tmp_path: Path) -> None:
    run(tmp_path, [record(s, probe__disabled=1) for s in (7, 8)], 7)
    assert alarms(tmp_path) == [(7, "probe/disabled", "rise")]


def test_dropped_points_are_reported_once_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, [record(step, probe__dropped_points=10 * step) for step in range(1, 131)])
    assert alarms(tmp_path) == [(step, "probe/dropped_points", "rise") for step in (1, 61, 121)]
    assert caplog.messages[1] == "step 61: storage is too slow: 610 points were given up so far"


def test_log_is_spared_but_the_file_has_every_spike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, [record(step, stability__joint_spike=step) for step in range(1, 71)])
    assert [step for step, _, _ in alarms(tmp_path)] == list(range(1, 71))
    assert len(caplog.messages) == 2
    assert "59 more since the last such message" in caplog.messages[1]


def test_alarm_after_a_cut_off_line_stands_on_its_own(tmp_path: Path) -> None:
    (tmp_path / "alarms.jsonl").write_bytes(b'{"step": 4, "ta')
    run(tmp_path, [record(5, probe__disabled=1)], 5)
    first, second = (tmp_path / "alarms.jsonl").read_text().splitlines()
    assert first == '{"step": 4, "ta'
    assert json.loads(second)["step"] == 5


def test_alarms_wait_for_an_unwritable_folder(tmp_path: Path) -> None:
    blocker = tmp_path / "output"
    blocker.write_text("")
    sink = AlarmSink(blocker)
    sink.open(manifest())
    sink.write(record(1, probe__disabled=1))
    blocker.unlink()
    sink.close()
    assert alarms(blocker) == [(1, "probe/disabled", "rise")]
