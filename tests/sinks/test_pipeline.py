"""The queue and its thread: training never waits, what is lost is counted, one bad sink hurts no other."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest
from sink_records import manifest, record, run_child

from megatron_probes.sinks import Manifest, Pipeline, StepRecord, read_records

WAIT_SECONDS = 30.0


@dataclass
class Step:
    step: int
    p0_bytes: int = 100
    p1_bytes: int = 1000
    p0_points: int = 5
    p1_points: int = 50

    def drop_p1(self) -> None:
        self.p1_bytes = self.p1_points = 0


@dataclass
class ListSink:
    records: list[StepRecord] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def open(self, manifest: Manifest) -> None:
        self.calls.append("open")
        self.threads.add(threading.current_thread().name)

    def write(self, record: StepRecord) -> None:
        self.records.append(record)
        self.threads.add(threading.current_thread().name)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")

    @property
    def steps(self) -> list[int]:
        return [r.step for r in self.records]


@dataclass
class BlockedSink(ListSink):
    """A sink whose storage hangs until it is released."""

    entered: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def write(self, record: StepRecord) -> None:
        self.entered.set()
        assert self.released.wait(WAIT_SECONDS)
        super().write(record)


@dataclass
class RaisingSink(ListSink):
    at: str = "write"

    def _maybe_raise(self, where: str) -> None:
        if where == self.at:
            raise OSError(f"no {where} today")

    def open(self, manifest: Manifest) -> None:
        self._maybe_raise("open")

    def write(self, record: StepRecord) -> None:
        self._maybe_raise("write")

    def flush(self) -> None:
        self._maybe_raise("flush")

    def close(self) -> None:
        self._maybe_raise("close")


def as_record(item: Step) -> StepRecord:
    return record(item.step, p1_points=item.p1_points)


def blocked_at_first(sink: BlockedSink, *, max_items: int, spill_bytes: int = 10**9) -> Pipeline[Step]:
    """A pipeline whose thread hangs in the write of step 0, its queue empty."""
    pipeline: Pipeline[Step] = Pipeline(as_record, [sink], max_items=max_items, spill_bytes=spill_bytes)
    pipeline.submit(Step(0))
    assert sink.entered.wait(WAIT_SECONDS)
    return pipeline


def test_everything_arrives_in_order_on_the_other_thread() -> None:
    sinks = [ListSink(), ListSink()]
    pipeline: Pipeline[Step] = Pipeline(as_record, sinks, max_items=1000)
    pipeline.open(manifest())
    for step in range(200):
        pipeline.submit(Step(step))
    assert pipeline.close(WAIT_SECONDS)
    for sink in sinks:
        assert sink.steps == list(range(200))
        assert sink.calls[0] == "open"
        assert sink.calls[-1] == "close"
        assert threading.current_thread().name not in sink.threads
    assert pipeline.dropped_points == 0


def test_blocked_sink_does_not_slow_the_training_thread() -> None:
    sink = BlockedSink()
    pipeline = blocked_at_first(sink, max_items=100)
    slowest = 0.0
    for step in range(1, 10_001):
        began = time.perf_counter()
        pipeline.submit(Step(step))
        slowest = max(slowest, time.perf_counter() - began)
    assert sink.records == []
    assert slowest < 0.5
    sink.released.set()
    assert pipeline.close(WAIT_SECONDS)
    assert sink.steps == list(range(10_001))


def test_full_queue_drops_p1_first_and_counts_it() -> None:
    sink = BlockedSink()
    pipeline = blocked_at_first(sink, max_items=4)
    for step in range(1, 11):
        pipeline.submit(Step(step))
    assert pipeline.dropped_points == 6 * 50
    sink.released.set()
    assert pipeline.close(WAIT_SECONDS)
    assert sink.steps == list(range(11))
    assert [r.values["p1_points"] for r in sink.records] == [50] * 5 + [0] * 6


def test_full_spill_drops_its_oldest_items_and_counts_them() -> None:
    sink = BlockedSink()
    pipeline = blocked_at_first(sink, max_items=2, spill_bytes=300)
    for step in range(1, 11):
        pipeline.submit(Step(step))
    assert pipeline.dropped_points == 8 * 50 + 5 * 5
    sink.released.set()
    assert pipeline.close(WAIT_SECONDS)
    assert sink.steps == [0, 1, 2, 8, 9, 10]


def test_p1_is_taken_again_once_the_backlog_is_gone() -> None:
    sink = BlockedSink()
    pipeline = blocked_at_first(sink, max_items=2)
    for step in range(1, 6):
        pipeline.submit(Step(step))
    sink.released.set()
    assert pipeline.flush(WAIT_SECONDS)
    pipeline.submit(Step(6))
    assert pipeline.close(WAIT_SECONDS)
    assert [r.values["p1_points"] for r in sink.records] == [50, 50, 50, 0, 0, 0, 50]


def test_calls_keep_their_place_and_are_never_dropped() -> None:
    sink = BlockedSink()
    pipeline = blocked_at_first(sink, max_items=3, spill_bytes=300)
    seen: dict[str, list[int]] = {}
    for step in range(1, 11):
        pipeline.submit(Step(step))
        pipeline.submit_call(lambda step=step: seen.update({f"after {step}": list(sink.steps)}))
    sink.released.set()
    assert pipeline.close(WAIT_SECONDS)
    kept = [0, 1, 2, 8, 9, 10]
    assert sink.steps == kept
    assert seen == {f"after {n}": [step for step in kept if step <= n] for n in range(1, 11)}


def test_failing_call_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink()
    pipeline: Pipeline[Step] = Pipeline(as_record, [sink], max_items=10)
    pipeline.submit_call(lambda: 1 // 0)
    pipeline.submit(Step(1))
    assert pipeline.close(WAIT_SECONDS)
    assert sink.steps == [1]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("at", ["open", "write", "flush", "close"])
def test_raising_sink_is_switched_off_and_the_others_go_on(at: str, caplog: pytest.LogCaptureFixture) -> None:
    good = ListSink()
    pipeline: Pipeline[Step] = Pipeline(as_record, [RaisingSink(at=at), good], max_items=1000)
    pipeline.open(manifest())
    for step in range(100):
        pipeline.submit(Step(step))
    assert pipeline.flush(WAIT_SECONDS)
    assert pipeline.flush(WAIT_SECONDS)
    assert pipeline.close(WAIT_SECONDS)
    assert good.steps == list(range(100))
    assert good.calls[-1] == "close"
    (message,) = caplog.messages
    assert "RaisingSink is switched off" in message
    assert f"no {at} today" in message


def test_step_that_does_not_process_is_counted_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def process(item: Step) -> StepRecord | None:
        if item.step % 2:
            raise RuntimeError("odd")
        return as_record(item) if item.step else None

    sink = ListSink()
    pipeline: Pipeline[Step] = Pipeline(process, [sink], max_items=100)
    for step in range(10):
        pipeline.submit(Step(step))
    assert pipeline.close(WAIT_SECONDS)
    assert sink.steps == [2, 4, 6, 8]
    assert pipeline.dropped_points == 5 * 55
    assert len(caplog.messages) == 1
    assert "RuntimeError: odd" in caplog.text


def test_slow_steps_are_flushed_before_the_next_one() -> None:
    sink = ListSink()
    pipeline: Pipeline[Step] = Pipeline(as_record, [sink], max_items=10)
    pipeline.submit(Step(1))
    deadline = time.monotonic() + WAIT_SECONDS
    while "flush" not in sink.calls and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sink.calls == ["flush"]
    assert pipeline.close(WAIT_SECONDS)


def test_close_gives_up_on_a_sink_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    sink = BlockedSink()
    pipeline = blocked_at_first(sink, max_items=10)
    pipeline.submit(Step(1))
    assert not pipeline.close(0.1)
    assert "1 steps" in caplog.text
    pipeline.submit(Step(2))
    assert pipeline.dropped_points == 55
    sink.released.set()


def test_process_that_ends_without_closing_loses_nothing(tmp_path) -> None:
    child = run_child(
        """
        import sys
        from sink_records import manifest, record
        from megatron_probes.sinks import Pipeline, RecordFileSink
        from test_pipeline import Step
        pipeline = Pipeline(lambda item: record(item.step), [RecordFileSink(sys.argv[1])], max_items=1000)
        pipeline.open(manifest())
        for step in range(1, 501):
            pipeline.submit(Step(step))
        sys.exit(3)
        """,
        tmp_path,
    )
    assert child.returncode == 3, child.stderr
    assert child.stderr == ""
    assert [r.step for r in read_records(tmp_path)] == list(range(1, 501))
