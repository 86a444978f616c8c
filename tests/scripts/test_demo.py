from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_probes.catalog import first_screen_charts
from megatron_probes.sinks import read_records, read_series

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"


def refused(*options):
    run = subprocess.run([sys.executable, DEMO, *options], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    return " ".join(run.stderr.split())


@pytest.mark.megatron
@pytest.mark.slow
class TestRun:
    def test_the_loss_falls(self, demo_run):
        steps, loss = read_series(demo_run.folder, "loss/global")
        assert steps == [*range(1, demo_run.steps + 1)]
        assert loss[0] > 5
        assert sum(loss[-5:]) / 5 < 3

    def test_the_joint_spike_rises_by_the_anomaly_and_by_nothing_else(self, demo_run):
        steps, counts = read_series(demo_run.folder, "stability/joint_spike")
        expected = [int(step >= demo_run.anomaly_step) for step in steps]
        assert counts == expected
        assert f"at step {demo_run.anomaly_step} the demo gave" in demo_run.output
        assert "counted it" in demo_run.output
        assert "also counted" not in demo_run.output

    def test_each_source_has_its_share_of_the_blend(self, demo_run):
        shares = {name: read_series(demo_run.folder, f"data/share/{name}")[1] for name in ("code", "prose")}
        assert sum(shares["code"]) / demo_run.steps == pytest.approx(0.7, abs=0.01)
        assert sum(shares["prose"]) / demo_run.steps == pytest.approx(0.3, abs=0.01)

    def test_the_table_shows_each_chart_that_has_data(self, demo_run):
        recorded = {tag for record in read_records(demo_run.folder) for tag in record.values}
        for chart in first_screen_charts():
            has_data = any(_is_recorded(template, recorded) for template in chart.tags)
            assert (chart.title in demo_run.output) == has_data, chart.title

    def test_the_command_that_opens_the_run_is_printed(self, demo_run):
        output = " ".join(demo_run.output.split())
        assert f"tensorboard --logdir {demo_run.folder / 'by_step'} --samples_per_plugin scalars=" in output

    def test_progress_and_logs_can_be_followed(self, demo_run):
        assert re.search(r"step \d+ of 200: loss \d\.\d{3}", demo_run.output)
        for rank in range(4):
            assert (demo_run.folder / "logs" / f"rank{rank}.log").stat().st_size > 0

    def test_it_leaves_a_checkpoint_and_was_evaluated_on_the_way(self, demo_run):
        assert (demo_run.folder / "checkpoint" / "iter_0000200" / "megatron_probes" / "state.json").is_file()
        log = (demo_run.folder / "logs" / "rank3.log").read_text()
        assert "validation loss at iteration 100" in log

    def test_the_older_run_was_replaced(self, demo_run):
        assert {record.attempt for record in read_records(demo_run.folder)} == {0}

    def test_the_probes_were_configured_by_demo_yaml(self, demo_run):
        used = yaml.safe_load((demo_run.folder / "probes.yaml").read_text())
        assert used == yaml.safe_load(DEMO.with_suffix(".yaml").read_text()) | {
            "output_dir": str(demo_run.folder)
        }


def _is_recorded(template, recorded):
    pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template))
    return any(re.fullmatch(pattern, tag) for tag in recorded)


@pytest.mark.megatron
@pytest.mark.slow
def test_ctrl_c_stops_the_ranks_and_keeps_the_record(tmp_path):
    out = tmp_path / "run"
    demo = subprocess.Popen(
        [sys.executable, DEMO, "--steps", "5000", "--out", out],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not (out / "records").exists() or not read_records(out):
            assert demo.poll() is None, demo.stdout.read()
            assert time.monotonic() < deadline, (out / "logs" / "train.log").read_text()
            time.sleep(0.5)
        demo.send_signal(signal.SIGINT)
        output = demo.communicate(timeout=60)[0]
    finally:
        demo.kill()
    assert demo.returncode == 128 + signal.SIGINT
    assert "Traceback" not in output
    assert "Stopped" in output
    assert "First screen, last values" in output
    assert read_records(out)
    assert _processes_with(str(out)) == []


def _processes_with(argument):
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", process, "cmdline").read_text()
        except OSError:
            continue
        if argument in command:
            found.append(command)
    return found


def test_too_few_steps_are_refused():
    assert "--steps 1: give at least 2" in refused("--steps", "1")


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    assert f"--megatron {tmp_path}: no pretrain_gpt.py there" in refused("--megatron", tmp_path)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    assert f"--out {tmp_path}: it holds other files" in refused("--out", tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_place_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "it holds other files" in refused("--out", tmp_path / "file")
    assert "cannot be written" in refused("--out", tmp_path / "file" / "run")
