from __future__ import annotations

import io
import math

import pytest
from demo_run.report import first_screen, quantity, spike_steps, verdict
from rich.console import Console

from megatron_probes.catalog import first_screen_charts, lookup
from megatron_probes.sinks import StepRecord


def record(step, **values):
    values = {tag.replace("__", "/"): value for tag, value in values.items()}
    return StepRecord(step=step, attempt=0, time=float(step), tokens=step, values=values, context={})


def rendered(table):
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("tag", "value", "shown"),
    [
        ("job/state", 5, "finished"),
        ("loss/global", 2.34567, "2.346 nats"),
        ("loss/global", math.inf, "inf nats"),
        ("grad/norm", 0.5, "0.5"),
        ("memory/peak_allocated_bytes", 533_400_000, "533.4 MB"),
        ("memory/peak_allocated_bytes", 512, "512 B"),
        ("system/tokens_per_second", 2275.4, "2275 tokens/s"),
        ("system/flops_per_device", 1.25e12, "1.25 TFLOP/s"),
        ("stability/joint_spike", 1, "1 steps"),
    ],
)
def test_values_are_shown_with_their_unit(tag, value, shown):
    assert quantity(value, lookup(tag)) == shown


def test_the_table_keeps_the_last_value_and_the_reading_order():
    text = rendered(
        first_screen(
            [
                record(1, loss__global=5.0, grad__norm=2.0, job__state=1),
                record(2, loss__global=4.0, loss__worst_rank=4.5, job__state=5),
            ]
        )
    )
    places = [text.index(shown) for shown in ("finished", "4 nats", "4.5 nats", "Gradient norm")]
    assert places == sorted(places)
    assert "5 nats" not in text.replace("4.5 nats", "")
    assert "Memory peak" not in text, "a chart without data is left out"


def test_no_tag_of_the_first_screen_is_cut_off_in_80_columns():
    tags = [tag for chart in first_screen_charts() for tag in chart.tags if "{" not in tag]
    text = rendered(
        first_screen([record(1, **{tag.replace("/", "__"): 1234.5 for tag in tags} | {"job/state": 1})])
    )
    assert "1234 tokens/s" in text
    assert [tag for tag in tags if tag not in text] == []


def test_spikes_are_the_steps_at_which_the_count_rose():
    counts = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}
    records = [record(step, stability__joint_spike=count) for step, count in counts.items()]
    assert spike_steps(records) == [3, 5]
    assert spike_steps([record(1), record(2)]) == []


def anomaly_run(counted_at):
    spiky = {"stability/loss/z": 20.0, "stability/grad_norm/z": 12.0}
    for step in range(1, 6):
        values = {"loss/global": 2.0, "grad/norm": 0.5, "stability/joint_spike": int(step >= counted_at)}
        if step == 4:
            values |= {"loss/global": 9.0, "grad/norm": 6.0} | spiky
        yield StepRecord(step=step, attempt=0, time=0.0, tokens=0, values=values, context={})


def test_the_verdict_names_the_anomaly_and_that_it_was_counted():
    text = "\n".join(verdict([*anomaly_run(counted_at=4)], 4))
    assert "step 4" in text
    assert "loss/global: 2.000 -> 9.000 (z = 20.0)" in text
    assert "grad/norm: 0.500 -> 6.000 (z = 12.0)" in text
    assert "stability/joint_spike counted it." in text
    assert "also" not in text


def test_the_verdict_tells_of_a_missed_anomaly_and_of_a_false_alarm():
    text = "\n".join(verdict([*anomaly_run(counted_at=2)], 4))
    assert "did not count it" in text
    assert "also counted step 2" in text


def test_the_verdict_of_a_run_that_was_stopped_early():
    assert verdict([record(1)], 270) == ["The run ended before step 270, where the demo injects its anomaly."]
