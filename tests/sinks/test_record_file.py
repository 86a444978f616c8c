"""The exact record: nothing is lost on the way to the file and back."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sink_records import manifest, record, run_child

from megatron_probes.formulas.histogram import Histogram
from megatron_probes.sinks import (
    RecordFileSink,
    RecordLog,
    StepRecord,
    next_attempt,
    read_records,
    read_series,
)
from megatron_probes.sinks.record_file import decode_line, encode_line, plain_number, record_files
from megatron_probes.sinks.record_log import as_record, join_records


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write(output_dir: Path, steps: range, attempt: int = 0, shift: int = 0, **options: int) -> None:
    sink = RecordFileSink(output_dir, **options)
    sink.open(manifest(attempt, steps.start))
    for step in steps:
        sink.write(record(step, attempt, loss__global=float(shift + step)))
    sink.close()


def refuse_constant(name: str) -> None:
    raise AssertionError(f"bare {name} isn't JSON")


def strict_lines(output_dir: Path) -> list[dict]:
    return [
        json.loads(line, parse_constant=refuse_constant)
        for path in record_files(output_dir)
        for line in path.read_text().splitlines()
    ]


@given(st.floats(allow_nan=False), st.integers(-(2**200), 2**200))
def test_numbers_survive_unchanged(real: float, count: int) -> None:
    line = decode_line(encode_line({"values": {"real": real, "count": count}}))
    assert line is not None
    found = {tag: plain_number(value) for tag, value in line["values"].items()}
    assert found == {"real": real, "count": count}
    assert math.copysign(1.0, found["real"]) == math.copysign(1.0, real)
    assert type(found["real"]) is float
    assert type(found["count"]) is int


def test_large_counters_stay_exact_pc12(tmp_path: Path) -> None:
    sink = RecordFileSink(tmp_path)
    sink.open(manifest())
    for step, (tokens, big) in enumerate([(16777217, 1e39), (16777219, 2**63 + 1)], start=1):
        sink.write(record(step, data__valid_tokens_total=tokens, grad__norm=big))
    sink.close()
    assert read_series(tmp_path, "data/valid_tokens_total") == ([1, 2], [16777217, 16777219])
    assert read_series(tmp_path, "grad/norm") == ([1, 2], [1e39, 2**63 + 1])


def test_record_comes_back_whole(tmp_path: Path) -> None:
    written = StepRecord(
        step=3,
        attempt=0,
        time=1700000000.123456,
        tokens=2**53 + 1,
        values={"loss/global": 0.1 + 0.2, "loss/nan_steps": 0},
        context={"context/learning_rate": 5e-324},
        histograms={
            "moe/layer_003/load": Histogram((0.0, 1.0, 2.0), (1 / 3, 2 / 3), ((1, 2 / 3),)),
            "moe/layer_003/topk_margin": Histogram((0.0, 5e-324, math.inf), (2.0**53, 1.0)),
        },
        parts={"loss/sum": [1 / 3, -math.inf]},
    )
    sink = RecordFileSink(tmp_path)
    sink.open(manifest(start_step=3))
    sink.write(written)
    sink.close()
    assert read_records(tmp_path) == [written]


def test_histograms_are_strict_json_and_absent_without_one(tmp_path: Path) -> None:
    margin = Histogram((0.0, 1e-12, math.inf), (3.0, 1.0), ((0, math.nan),))
    sink = RecordFileSink(tmp_path)
    sink.open(manifest())
    sink.write(record(1))
    sink.write(dataclasses.replace(record(2), histograms={"moe/layer_000/topk_margin": margin}))
    sink.close()
    without, with_one = strict_lines(tmp_path)[1:]
    assert "histograms" not in without
    assert with_one["histograms"] == {
        "moe/layer_000/topk_margin": {
            "edges": [0.0, 1e-12, "Infinity"],
            "counts": [3.0, 1.0],
            "named": [[0, "NaN"]],
        }
    }


def test_late_values_leave_the_step_its_histograms(tmp_path: Path) -> None:
    load = Histogram((0.0, 1.0), (1.0,))
    sink = RecordFileSink(tmp_path)
    sink.open(manifest())
    sink.write(dataclasses.replace(record(1), histograms={"moe/layer_000/load": load}))
    sink.write(dataclasses.replace(record(1, job__state=5), late=True))
    sink.close()
    (joined,) = read_records(tmp_path)
    assert joined.histograms == {"moe/layer_000/load": load}
    assert joined.values["job/state"] == 5


def test_non_finite_values_are_strings_under_their_key_pc44(tmp_path: Path) -> None:
    losses = [2.0, 2.0, math.nan, math.nan]
    norms = [1.0, math.nan, math.inf, -math.inf]
    sink = RecordFileSink(tmp_path)
    sink.open(manifest())
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        sink.write(record(step, loss__global=loss, grad__norm=norm))
    sink.close()

    lines = strict_lines(tmp_path)[1:]
    assert [line["values"]["loss/global"] for line in lines] == [2.0, 2.0, "NaN", "NaN"]
    assert [line["values"]["grad/norm"] for line in lines] == [1.0, "NaN", "Infinity", "-Infinity"]
    steps, values = read_series(tmp_path, "grad/norm")
    assert steps == [1, 2, 3, 4]
    assert str(values) == "[1.0, nan, inf, -inf]"


def test_each_attempt_has_its_header_and_its_own_files(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 0
    write(tmp_path, range(1, 4))
    assert next_attempt(tmp_path) == 1
    before = record_files(tmp_path)[0].read_bytes()
    write(tmp_path, range(4, 6), attempt=1)
    assert next_attempt(tmp_path) == 2

    assert [path.name for path in record_files(tmp_path)] == ["record-00000.jsonl", "record-00001.jsonl"]
    assert record_files(tmp_path)[0].read_bytes() == before
    log = RecordLog(tmp_path, as_record, join_records)
    assert log.start_steps == {0: 1, 1: 4}
    assert log.headers[1]["config_fingerprint"] == "0123abcd"
    assert log.headers[1]["metrics"]["loss/global"]["priority"] == "P0"
    assert [r.attempt for r in read_records(tmp_path)] == [0, 0, 0, 1, 1]


def test_cut_off_tail_and_restart_pc46(tmp_path: Path) -> None:
    write(tmp_path, range(0, 10))
    (old,) = record_files(tmp_path)
    os.truncate(old, old.stat().st_size - 7)
    assert [r.step for r in read_records(tmp_path)] == list(range(9))

    write(tmp_path, range(9, 12), attempt=next_attempt(tmp_path), shift=100)
    assert read_series(tmp_path, "loss/global") == (
        list(range(12)),
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 109.0, 110.0, 111.0],
    )
    assert RecordLog(tmp_path, as_record, join_records).damaged_lines == 1


@pytest.mark.parametrize("kept_bytes", [0, 1, 30])
def test_file_without_a_whole_line_is_skipped(tmp_path: Path, kept_bytes: int) -> None:
    write(tmp_path, range(1, 3))
    write(tmp_path, range(3, 5), attempt=1)
    os.truncate(record_files(tmp_path)[1], kept_bytes)
    assert next_attempt(tmp_path) == 1
    assert [r.step for r in read_records(tmp_path)] == [1, 2]


def test_rolled_back_steps_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, range(1, 21))
    write(tmp_path, range(6, 9), attempt=1, shift=100)
    records = read_records(tmp_path)
    assert [(r.step, r.attempt) for r in records] == [(s, 0) for s in range(1, 6)] + [
        (s, 1) for s in range(6, 9)
    ]
    # A third start from a checkpoint before the second: of the second nothing counts.
    write(tmp_path, range(4, 6), attempt=2)
    assert [(r.step, r.attempt) for r in read_records(tmp_path)] == [
        (1, 0), (2, 0), (3, 0), (4, 2), (5, 2),
    ]  # fmt: skip


def test_start_without_a_step_rolls_back_too(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9))
    sink = RecordFileSink(tmp_path)
    sink.open(manifest(attempt=1, start_step=5))
    sink.close()
    assert [r.step for r in read_records(tmp_path)] == [1, 2, 3, 4]


def test_abandoned_start_erases_nothing(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    write(tmp_path, range(1, 3), attempt=1, shift=500)  # a wrong --load, stopped at once
    write(tmp_path, range(11, 13), attempt=2)
    assert read_series(tmp_path, "loss/global") == (list(range(1, 13)), [float(s) for s in range(1, 13)])


def test_step_run_twice_counts_as_run_last(tmp_path: Path) -> None:
    sink = RecordFileSink(tmp_path)
    sink.open(manifest())
    for step, loss in [(1, 1.0), (2, 2.0), (2, 2.5), (3, 3.0)]:
        sink.write(record(step, loss__global=loss))
    sink.close()
    assert read_series(tmp_path, "loss/global") == ([1, 2, 3], [1.0, 2.5, 3.0])


def test_absent_is_not_zero(tmp_path: Path) -> None:
    sink = RecordFileSink(tmp_path)
    sink.open(manifest())
    sink.write(record(1, grad__norm=2.0))
    sink.write(record(2))
    sink.close()
    assert read_series(tmp_path, "grad/norm") == ([1], [2.0])
    assert read_series(tmp_path, "context/learning_rate") == ([1, 2], [1e-3, 1e-3])


def test_rotation_by_size(tmp_path: Path) -> None:
    header_bytes = len(encode_line({"header": manifest().as_json(), "attempt": 0, "start_step": 1}))
    limit = header_bytes + 1000
    write(tmp_path, range(1, 31), rotate_bytes=limit)
    files = record_files(tmp_path)
    assert len(files) > 3
    assert all(path.stat().st_size <= limit for path in files)
    assert all("header" in json.loads(path.read_text().splitlines()[0]) for path in files)
    assert [r.step for r in read_records(tmp_path)] == list(range(1, 31))


def test_flush_by_time_and_at_anomalies(tmp_path: Path) -> None:
    clock = Clock()
    sink = RecordFileSink(tmp_path, flush_seconds=10.0, clock=clock)
    sink.open(manifest())

    def on_disk() -> int:
        return len(read_records(tmp_path))

    sink.write(record(1, stability__joint_spike=0))
    assert on_disk() == 0
    clock.now = 10.0
    sink.write(record(2, stability__joint_spike=0))
    assert on_disk() == 2
    sink.write(record(3, stability__joint_spike=1))
    assert on_disk() == 3
    sink.write(record(4, stability__joint_spike=1))
    assert on_disk() == 3
    sink.write(record(5, loss__global=math.nan))
    assert on_disk() == 5


def test_unwritable_folder_then_writable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    blocker = tmp_path / "output"
    blocker.write_text("a regular file where the folder should be")
    sink = RecordFileSink(blocker, clock=clock)
    sink.open(manifest())
    for step in range(1, 6):
        clock.now += 100.0
        sink.write(record(step))
        sink.flush()
    assert len(caplog.records) == 1
    assert str(blocker / "records") in caplog.text
    assert read_records(blocker) == []

    blocker.unlink()
    clock.now += 100.0
    sink.flush()
    assert len(caplog.records) == 2
    assert "again" in caplog.messages[1]
    sink.write(record(6))
    sink.close()
    assert [r.step for r in read_records(blocker)] == [1, 2, 3, 4, 5, 6]
    assert len(record_files(blocker)) == 1


def test_retries_wait_longer_each_time(tmp_path: Path) -> None:
    clock = Clock()
    blocker = tmp_path / "output"
    blocker.write_text("")
    sink = RecordFileSink(blocker, clock=clock)
    sink.open(manifest())
    sink.write(record(1))
    blocker.unlink()
    clock.now = 0.5
    sink.flush()
    assert read_records(blocker) == []
    clock.now = 1.0
    sink.flush()
    assert [r.step for r in read_records(blocker)] == [1]


def test_memory_is_bounded_and_the_newest_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    blocker = tmp_path / "output"
    blocker.write_text("")
    line_bytes = len(encode_line({"step": 10}))
    sink = RecordFileSink(blocker, memory_bytes=2000, clock=clock)
    sink.open(manifest())
    for step in range(10, 100):
        sink.write(record(step))
    assert sink.dropped_records > 0
    blocker.unlink()
    sink.close()
    kept = [r.step for r in read_records(blocker)]
    assert kept == list(range(100 - len(kept), 100))
    assert len(kept) + sink.dropped_records == 90
    assert 2000 // (line_bytes + 300) <= len(kept) < 20
    assert f"{sink.dropped_records} entries were lost" in caplog.text


def test_deleted_folder_begins_a_new_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_dir = tmp_path / "output"
    sink = RecordFileSink(write_dir)
    sink.open(manifest())
    sink.write(record(1))
    sink.flush()
    shutil.rmtree(write_dir)
    sink.write(record(2))
    sink.close()
    assert [r.step for r in read_records(write_dir)] == [2]
    assert RecordLog(write_dir, as_record, join_records).headers.keys() == {0}
    assert "deleted" in caplog.text


def test_write_limit_of_the_system_tears_no_line(tmp_path: Path) -> None:
    """A limit on the file's size makes the system write a line in part, then refuse: EFBIG."""
    child = run_child(
        """
        import resource, sys
        from sink_records import manifest, record
        from megatron_probes.sinks import RecordFileSink, read_records
        now = 0.0
        sink = RecordFileSink(sys.argv[1], clock=lambda: now)
        sink.open(manifest())
        header = sink._lines._size
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (header + 1000, hard))
        for step in range(1, 21):
            now += 100.0
            sink.write(record(step))
        whole = [r.step for r in read_records(sys.argv[1])]
        assert 0 < len(whole) < 20, whole
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        sink.close()
        """,
        tmp_path,
    )
    assert child.returncode == 0, child.stderr
    assert "File too large" in child.stderr
    assert child.stderr.count("can't be written") == 1
    assert child.stderr.count("written again") == 1
    assert [r.step for r in read_records(tmp_path)] == list(range(1, 21))
    assert RecordLog(tmp_path, as_record, join_records).damaged_lines == 0
    assert len(strict_lines(tmp_path)) == 21


def _private_mounts() -> tuple[str, ...] | None:
    """The prefix that gives a command its own mounts, or None where the system doesn't permit it."""
    for prefix in (("unshare", "-m"), ("unshare", "-rm")):
        probe = "mount -t tmpfs -o size=64k none /mnt"
        if (
            shutil.which("unshare")
            and not subprocess.run([*prefix, "sh", "-c", probe], capture_output=True).returncode
        ):
            return prefix
    return None


def test_full_disk(tmp_path: Path) -> None:
    prefix = _private_mounts()
    if prefix is None:
        pytest.skip("the system permits no private tmpfs")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    child = run_child(
        """
        import os, shutil, subprocess, sys
        from sink_records import manifest, record
        from megatron_probes.sinks import RecordFileSink, read_records
        disk, copy = sys.argv[1:]
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=True)
        now = 0.0
        sink = RecordFileSink(disk, clock=lambda: now)
        sink.open(manifest())
        ballast = os.path.join(disk, "ballast")
        with open(ballast, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1024))
            except OSError:
                pass
        for step in range(1, 101):
            now += 100.0
            sink.write(record(step))
        assert len(read_records(disk)) < 100
        os.unlink(ballast)
        now += 100.0
        sink.flush()
        sink.write(record(101))
        sink.close()
        shutil.copytree(disk, copy)
        """,
        disk,
        copy,
        wrapper=prefix,
    )
    assert child.returncode == 0, child.stderr
    assert "No space left on device" in child.stderr
    assert child.stderr.count("can't be written") == 1
    assert child.stderr.count("written again") == 1
    assert [r.step for r in read_records(copy)] == list(range(1, 102))
    assert RecordLog(copy, as_record, join_records).damaged_lines == 0


def test_killed_process_leaves_what_was_flushed(tmp_path: Path) -> None:
    child = run_child(
        """
        import os, signal, sys
        from sink_records import manifest, record
        from megatron_probes.sinks import RecordFileSink
        sink = RecordFileSink(sys.argv[1], flush_seconds=3600.0)
        sink.open(manifest())
        for step in range(1, 8):
            sink.write(record(step))
            if step == 5:
                sink.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert child.returncode == -signal.SIGKILL
    assert [r.step for r in read_records(tmp_path)] == [1, 2, 3, 4, 5]
    assert next_attempt(tmp_path) == 1


@pytest.mark.parametrize("tag", ["", " "])
def test_empty_names_are_refused_pc28(tag: str) -> None:
    with pytest.raises(ValueError, match="tag is empty"):
        StepRecord(step=1, attempt=0, time=0.0, tokens=0, values={tag: 1.0}, context={})
