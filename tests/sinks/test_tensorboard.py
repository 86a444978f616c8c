"""TensorBoard's event files as its own readers see them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sink_records import TOKENS_PER_STEP, manifest, record, run_child
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from megatron_probes.catalog import Priority, lookup
from megatron_probes.formulas.histogram import Histogram
from megatron_probes.sinks import SHOW_EVERY_POINT, StepRecord, TensorBoardSink

LOADERS = ("--load_fast=false", "--load_fast=true")
START_SECONDS = 60.0


def write(output_dir: Path, records: list[StepRecord], attempt: int = 0, **options: Any) -> TensorBoardSink:
    sink = TensorBoardSink(output_dir, **options)
    sink.open(manifest(attempt, records[0].step))
    for item in records:
        sink.write(item)
    sink.close()
    return sink


def accumulator(run: Path) -> EventAccumulator:
    """A run as TensorBoard's own server loads it.

    Its older twin in `event_accumulator` ignores restarts for everything but `simple_value` summaries.
    """
    found = EventAccumulator(str(run), size_guidance={"tensors": 0})
    found.Reload()
    return found


def points(run: Path, tag: str) -> list[tuple[int, float]]:
    return [
        (event.step, tensor_util.make_ndarray(event.tensor_proto).item())
        for event in accumulator(run).Tensors(tag)
    ]


class Server:
    """A running TensorBoard."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, plugin: str, route: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/data/plugin/{plugin}/{route}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    def points(self, run: str, tag: str) -> list[tuple[int, Any]]:
        return [(step, value) for _, step, value in self.get("scalars", "scalars", run=run, tag=tag)]


@contextmanager
def served(logdir: Path, loader: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1"]
    once = ["--reload_interval=0"] + ["--reload_task=blocking"] * (loader == "--load_fast=false")
    process = subprocess.Popen(
        [*command, "--port", str(port), loader, *once, *SHOW_EVERY_POINT.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = Server(port)
    try:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if {"by_step", "by_tokens"} <= server.get("scalars", "tags").keys():
                    break
            except OSError:
                pass
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(START_SECONDS)


@pytest.mark.slow
def test_counts_and_large_values_are_not_rounded_pc12(tmp_path: Path) -> None:
    counts = [16777217, 16777219, 2**53]
    norms = [1e39, 1e-42, 0.1]
    write(
        tmp_path,
        [
            record(step, data__valid_tokens_total=count, grad__norm=norm)
            for step, (count, norm) in enumerate(zip(counts, norms, strict=True), start=1)
        ],
    )
    by_step = tmp_path / "by_step"
    assert points(by_step, "data/valid_tokens_total") == [(1, 16777217), (2, 16777219), (3, 2**53)]
    found = [value for _, value in points(by_step, "grad/norm")]
    assert found[:2] == [1e39, 1e-42]
    assert found[2] == pytest.approx(0.1, rel=2**-24)
    with served(tmp_path, "--load_fast=false") as server:
        assert server.points("by_step", "data/valid_tokens_total") == [
            (1, 16777217),
            (2, 16777219),
            (3, 2**53),
        ]
        assert [value for _, value in server.points("by_step", "grad/norm")][:2] == [1e39, 1e-42]


@pytest.mark.slow
def test_default_loader_shows_every_value_that_it_can_show_right(tmp_path: Path) -> None:
    """TensorBoard's data server skips float64; what it shows of a count is exact."""
    counts = [7, 16777217, 3 * 2**30]
    write(tmp_path, [record(s, data__valid_tokens_total=n) for s, n in enumerate(counts, start=1)])
    with served(tmp_path, "--load_fast=true") as server:
        assert server.points("by_step", "data/valid_tokens_total") == [(1, 7.0), (3, 3.0 * 2**30)]
        assert server.points("by_step", "loss/global") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_non_finite_values_are_written_as_they_are(tmp_path: Path) -> None:
    losses = [2.0, math.nan, math.inf, -math.inf]
    write(tmp_path, [record(step, loss__global=loss) for step, loss in enumerate(losses, start=1)])
    assert str(points(tmp_path / "by_step", "loss/global")) == "[(1, 2.0), (2, nan), (3, inf), (4, -inf)]"


HISTOGRAMS = {
    "moe/layer_000/load": Histogram((0.0, 1.0, 2.0), (1 / 3, 2 / 3), ((1, 2 / 3),)),
    "moe/layer_000/bias": Histogram((-0.5, -0.5), (4.0,)),
    "moe/layer_000/topk_margin": Histogram((0.25, 1e6, math.inf), (2.0**53, 1.0)),
}
ROWS = {
    "moe/layer_000/load": [[0.0, 1.0, 1 / 3], [1.0, 2.0, 2 / 3]],
    "moe/layer_000/bias": [[-0.5, -0.5, 4.0]],
    "moe/layer_000/topk_margin": [[0.25, 1e6, 2.0**53], [1e6, 1e6, 1.0]],
}
"""What the plugin shows of them: [left, right, count], an infinite edge drawn at its finite one."""


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_histogram_plugin_shows_distributions(tmp_path: Path, loader: str) -> None:
    write(tmp_path, [record(1), dataclasses.replace(record(2), histograms=HISTOGRAMS)])
    with served(tmp_path, loader) as server:
        tags = server.get("histograms", "tags")
        assert tags["by_step"].keys() == tags["by_tokens"].keys() == ROWS.keys()
        assert "Share of each expert" in tags["by_step"]["moe/layer_000/load"]["description"]
        for run, x in (("by_step", 2), ("by_tokens", 2 * TOKENS_PER_STEP)):
            for tag, rows in ROWS.items():
                ((_, step, shown),) = server.get("histograms", "histograms", run=run, tag=tag)
                assert (step, shown) == (x, rows)


def test_distributions_count_as_series(tmp_path: Path) -> None:
    sink = write(tmp_path, [dataclasses.replace(record(1), histograms=HISTOGRAMS)], max_series=5)
    found = accumulator(tmp_path / "by_step").Tags()["tensors"]
    assert len(ROWS.keys() & set(found)) == 2
    assert sink.left_out == 1


def test_both_axes_and_the_context(tmp_path: Path) -> None:
    write(tmp_path, [record(step) for step in range(1, 4)])
    assert points(tmp_path / "by_step", "loss/global") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert points(tmp_path / "by_tokens", "loss/global") == [
        (step * TOKENS_PER_STEP, float(step)) for step in range(1, 4)
    ]
    assert points(tmp_path / "by_step", "context/consumed_samples") == [(1, 8), (2, 16), (3, 24)]


def test_token_axis_can_be_switched_off(tmp_path: Path) -> None:
    write(tmp_path, [record(1)], by_tokens=False)
    assert [path.name for path in tmp_path.iterdir()] == ["by_step"]


def assert_resumed_run(tmp_path: Path, loss_of: dict[int, float]) -> None:
    """The loss over both axes, as both loaders of a real server and the event accumulator show it."""
    over_tokens = [(step * TOKENS_PER_STEP, loss) for step, loss in loss_of.items()]
    assert points(tmp_path / "by_step", "loss/global") == list(loss_of.items())
    assert points(tmp_path / "by_tokens", "loss/global") == over_tokens
    for loader in LOADERS:
        with served(tmp_path, loader) as server:
            assert server.points("by_step", "loss/global") == list(loss_of.items()), loader
            assert server.points("by_tokens", "loss/global") == over_tokens, loader


@pytest.mark.slow
def test_resume_shows_no_step_twice_and_misses_none(tmp_path: Path) -> None:
    write(tmp_path, [record(step) for step in range(1, 11)])
    write(tmp_path, [record(s, 1, loss__global=100.0 + s) for s in range(6, 13)], attempt=1)
    write(tmp_path, [record(s, 2, loss__global=200.0 + s) for s in range(12, 15)], attempt=2)
    assert_resumed_run(
        tmp_path,
        {
            **{step: float(step) for step in range(1, 6)},
            **{step: 100.0 + step for step in range(6, 12)},
            **{step: 200.0 + step for step in range(12, 15)},
        },
    )


@pytest.mark.slow
def test_rolled_back_steps_are_hidden_before_they_are_run_again(tmp_path: Path) -> None:
    write(tmp_path, [record(step) for step in range(1, 11)])
    write(tmp_path, [record(6, 1, loss__global=106.0)], attempt=1)
    expected = [*((step, float(step)) for step in range(1, 6)), (6, 106.0)]
    assert points(tmp_path / "by_step", "loss/global") == expected
    with served(tmp_path, "--load_fast=false") as server:
        assert server.points("by_step", "loss/global") == expected


@pytest.mark.slow
def test_cut_off_tail_and_restart_pc46(tmp_path: Path) -> None:
    write(tmp_path, [record(step) for step in range(0, 10)])
    for run in ("by_step", "by_tokens"):
        (old,) = (tmp_path / run).iterdir()
        os.truncate(old, old.stat().st_size - 7)
    write(tmp_path, [record(s, 1, loss__global=100.0 + s) for s in range(9, 12)], attempt=1)
    assert all(len(list((tmp_path / run).iterdir())) == 2 for run in ("by_step", "by_tokens"))
    assert_resumed_run(
        tmp_path,
        {**{step: float(step) for step in range(9)}, **{step: 100.0 + step for step in range(9, 12)}},
    )


def test_files_sort_after_older_ones_whatever_the_clock_says(tmp_path: Path) -> None:
    write(tmp_path, [record(step) for step in range(1, 4)])
    (old,) = (tmp_path / "by_step").iterdir()
    ahead = old.with_name(old.name.replace(old.name.split(".")[3], f"{int(time.time()) + 10**6:010d}"))
    old.rename(ahead)
    write(tmp_path, [record(s, 1, loss__global=100.0 + s) for s in range(3, 5)], attempt=1)
    assert points(tmp_path / "by_step", "loss/global") == [(1, 1.0), (2, 2.0), (3, 103.0), (4, 104.0)]


@pytest.mark.slow
def test_killed_process_leaves_what_was_flushed(tmp_path: Path) -> None:
    child = run_child(
        """
        import os, signal, sys
        from sink_records import manifest, record
        from megatron_probes.sinks import TensorBoardSink
        sink = TensorBoardSink(sys.argv[1], flush_seconds=3600.0)
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
    assert [step for step, _ in points(tmp_path / "by_step", "loss/global")] == [1, 2, 3, 4, 5]
    write(tmp_path, [record(step, 1) for step in range(5, 9)], attempt=1)
    assert_resumed_run(tmp_path, {step: float(step) for step in range(1, 9)})


def test_unwritable_folder_then_writable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocker = tmp_path / "output"
    blocker.write_text("")
    sink = TensorBoardSink(blocker)
    sink.open(manifest())
    for step in range(1, 6):
        sink.write(record(step))
        sink.flush()
    blocker.unlink()
    sink.close()
    assert [step for step, _ in points(blocker / "by_step", "loss/global")] == [1, 2, 3, 4, 5]
    assert len([message for message in caplog.messages if "can't be written" in message]) == 2


def test_system_limit_tears_no_event(tmp_path: Path) -> None:
    child = run_child(
        """
        import resource, sys
        from pathlib import Path
        from sink_records import manifest, record
        from megatron_probes.sinks import TensorBoardSink
        now = 0.0
        sink = TensorBoardSink(sys.argv[1], by_tokens=False, clock=lambda: now)
        sink.open(manifest())
        (file,) = Path(sys.argv[1], "by_step").iterdir()
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 2000, hard))
        for step in range(1, 41):
            now += 100.0
            sink.write(record(step))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        sink.close()
        """,
        tmp_path,
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr.count("can't be written") == 1
    assert [step for step, _ in points(tmp_path / "by_step", "loss/global")] == list(range(1, 41))


def test_anomaly_is_on_disk_at_once(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, flush_seconds=3600.0)
    sink.open(manifest())
    sink.write(record(1, stability__joint_spike=0))
    assert "loss/global" not in accumulator(tmp_path / "by_step").Tags()["tensors"]
    sink.write(record(2, stability__joint_spike=1))
    assert [step for step, _ in points(tmp_path / "by_step", "loss/global")] == [1, 2]
    sink.close()


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_server_shows_first_screen_text_and_descriptions(tmp_path: Path, loader: str) -> None:
    write(
        tmp_path,
        [
            record(1),
            record(2, loss__source__code=0.5, moe__layer_007__max_vio=0.5),
            record(3, loss__source__text=0.25, grad__norm=1.0, loss__worst_rank=3.5),
        ],
    )
    with served(tmp_path, loader) as server:
        (category,) = server.get("custom_scalars", "layout")["category"]
        assert category["title"] == "First screen"
        assert not category.get("closed", False)
        charts = {chart["title"]: chart["multiline"]["tag"] for chart in category["chart"]}
        assert list(charts) == ["Loss: global and worst rank", "Loss by source", "Gradient norm"]

        shown = {}
        for title, patterns in charts.items():
            for pattern in patterns:
                found = server.get("custom_scalars", "scalars", run="by_step", tag=pattern)
                assert found["regex_valid"]
                shown |= {tag: (title, len(series)) for tag, series in found["tag_to_events"].items()}
        assert shown == {
            "loss/global": ("Loss: global and worst rank", 3),
            "loss/worst_rank": ("Loss: global and worst rank", 1),
            "loss/source/code": ("Loss by source", 1),
            "loss/source/text": ("Loss by source", 1),
            "grad/norm": ("Gradient norm", 1),
        }

        texts = server.get("text", "tags")["by_step"]
        assert sorted(texts) == [
            f"manifest/{name}" for name in ("config", "layout", "metrics", "run", "versions")
        ]
        html = {tag: server.get("text", "text", run="by_step", tag=tag)[0]["text"] for tag in texts}
        assert "sample_every: 100" in html["manifest/config"]
        assert "<code" in html["manifest/config"]
        assert "megatron/1" in html["manifest/run"]
        assert "0.19.2" in html["manifest/versions"]
        assert "<td>tp</td>" in html["manifest/layout"]
        assert "<code>loss/global</code>" in html["manifest/metrics"]

        description = server.get("scalars", "tags")["by_step"]["loss/global"]["description"]
        assert lookup("loss/global").meaning.split(".")[0] in description


@pytest.mark.slow
def test_layout_grows_with_the_data_and_survives_a_resume(tmp_path: Path) -> None:
    def titles() -> list[str]:
        with served(tmp_path, "--load_fast=false") as server:
            (category,) = server.get("custom_scalars", "layout")["category"]
            return [chart["title"] for chart in category["chart"]]

    write(tmp_path, [record(1), record(2)])
    assert titles() == ["Loss: global and worst rank"]
    write(tmp_path, [record(2, 1, grad__norm=1.0), record(3, 1, grad__norm=1.0)], attempt=1)
    assert titles() == ["Loss: global and worst rank", "Gradient norm"]


def test_manifest_of_the_newest_attempt_replaces_that_of_a_rolled_back_one(tmp_path: Path) -> None:
    write(tmp_path, [record(step) for step in range(1, 11)])
    write(tmp_path, [record(step, 1) for step in range(6, 8)], attempt=1)
    write(tmp_path, [record(step, 2) for step in range(6, 8)], attempt=2)
    events = accumulator(tmp_path / "by_step").Tensors("manifest/run")
    texts = [tensor_util.make_ndarray(event.tensor_proto).item().decode() for event in events]
    assert [event.step for event in events] == [1, 6]
    assert ["| attempt | 0 |" in texts[0], "| attempt | 2 |" in texts[1]] == [True, True]


PC28_TAGS = ["loss", "loss/reg", "loss reg", "loss:reg", "loss_reg", "/loss"]


@pytest.mark.slow
def test_distinct_names_stay_distinct_pc28(tmp_path: Path) -> None:
    values = {tag: float(place) for place, tag in enumerate(PC28_TAGS)}
    item = StepRecord(step=1, attempt=0, time=1.7e9, tokens=10, values=values, context={})
    write(tmp_path, [item])
    found = accumulator(tmp_path / "by_step").Tags()["tensors"]
    assert sorted(set(found) & set(PC28_TAGS)) == sorted(PC28_TAGS)
    assert {tag: points(tmp_path / "by_step", tag)[0][1] for tag in PC28_TAGS} == values
    with served(tmp_path, "--load_fast=false") as server:
        assert server.get("scalars", "tags")["by_step"].keys() == set(PC28_TAGS)


def test_series_are_capped_and_the_rest_reported_pc28(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {f"moe/layer_{i:03d}/expert_{j:03d}": 1.0 for i in range(48) for j in range(128)}
    item = StepRecord(step=1, attempt=0, time=1.7e9, tokens=10, values=values, context={})
    again = StepRecord(step=2, attempt=0, time=1.7e9, tokens=20, values=values, context={})
    sink = write(tmp_path, [item, again], max_series=64)
    written = [tag for tag in accumulator(tmp_path / "by_step").Tags()["tensors"] if tag in values]
    assert sorted(written) == list(values)[:64]
    assert sink.left_out == 6144 - 64
    (message,) = [text for text in caplog.messages if "left out" in text]
    assert "6080" in message
    assert "tensorboard.max_series = 64" in message


def test_cap_never_gives_up_an_alarm_for_a_diagnosis(tmp_path: Path) -> None:
    diagnoses = {f"moe/layer_{i:03d}/entropy": 1.0 for i in range(10)}
    assert {lookup(tag).priority for tag in diagnoses} == {Priority.P1}
    alarms = {"loss/global": 2.0, "grad/norm": 1.0}
    both = {**diagnoses, **alarms}
    first = StepRecord(step=1, attempt=0, time=1.7e9, tokens=10, values=both, context={})
    late = StepRecord(step=2, attempt=0, time=1.7e9, tokens=20, values={"loss/worst_rank": 2.5}, context={})
    sink = write(tmp_path, [first, late], max_series=5)
    found = set(accumulator(tmp_path / "by_step").Tags()["tensors"])
    assert {"loss/global", "grad/norm", "loss/worst_rank"} <= found
    assert len(found & diagnoses.keys()) == 3
    assert sink.left_out == 7
