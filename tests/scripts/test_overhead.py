from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from overhead_run.counting import Counts, Stopwatch, count
from overhead_run.plan import Mode, Phase, plan
from overhead_run.ratio import paired_ratio

OVERHEAD = Path(__file__).parents[2] / "scripts" / "overhead.py"


def test_each_round_holds_a_block_of_every_mode_in_an_order_of_its_own():
    steps = plan(blocks=6, block_steps=3, seed=1)
    orders = set()
    for block in range(6):
        modes = [step.mode for step in steps if step.phase is Phase.TIMED and step.block == block]
        assert Counter(modes) == dict.fromkeys(Mode, 3)
        assert modes[::3] == modes[1::3] == modes[2::3], "the steps of a block follow each other"
        orders.add(tuple(modes[::3]))
    assert len(orders) > 1
    assert Counter(step.mode for step in steps if step.phase is Phase.COUNTED) == dict.fromkeys(Mode, 1)


def test_a_timed_block_begins_after_a_step_of_its_own_mode():
    steps = plan(blocks=6, block_steps=3, seed=1)
    for before, step in pairwise(steps):
        if step.phase is Phase.TIMED:
            assert before.mode is step.mode
            assert before.phase in (Phase.SWITCHED, Phase.TIMED)


def test_the_plan_depends_on_the_seed_alone():
    assert plan(8, 2, seed=3) == plan(8, 2, seed=3)
    assert plan(8, 2, seed=3) != plan(8, 2, seed=4)


def test_the_interval_is_students_t_on_the_logarithms():
    # Logarithms of the ratios: 0, ln 2, ln 4; mean ln 2, standard deviation ln 2; t(0.975, 2) = 4.302653.
    found = paired_ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert found.ratio == pytest.approx(2.0)
    assert math.log(found.high / 2) == pytest.approx(4.302653 * math.log(2) / math.sqrt(3), rel=1e-6)
    assert found.low * found.high == pytest.approx(4.0)


def test_a_drift_of_the_machine_cancels():
    baseline = [1.0, 3.0, 2.0, 10.0]
    found = paired_ratio([1.05 * time_s for time_s in baseline], baseline)
    assert (found.ratio, found.low, found.high) == pytest.approx((1.05, 1.05, 1.05))


def test_operators_and_host_reads_are_counted():
    x = torch.ones(3)
    result, counts = count(lambda: float((x * 2 + 1).sum()))
    assert result == 9.0
    assert counts == Counts(ops=4, collectives=0, bytes=0, host_reads=1)  # mul, add, sum, reading the scalar


def test_nested_calls_count_once():
    watch = Stopwatch()
    inner = watch.wrap(lambda: time.sleep(0.02))
    outer = watch.wrap(lambda: [inner(), inner()])
    started = time.perf_counter()
    outer()
    inner()
    elapsed = time.perf_counter() - started
    assert 0.06 <= watch.take() <= elapsed
    assert watch.take() == 0.0


def test_time_is_counted_when_a_call_raises():
    watch = Stopwatch()
    with pytest.raises(ZeroDivisionError):
        watch.wrap(lambda: 1 / 0)()
    assert watch.take() > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "20"], "--steps 20: give at least 49"),
        (["--ranks", "3"], "--ranks 3: give one of 1, 2, 4"),
        (["--json", "no/such/folder/out.json"], "there is no folder no/such/folder"),
    ],
)
def test_a_mistake_names_the_option_and_the_fix(options, said):
    run = subprocess.run([sys.executable, OVERHEAD, *options], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert said in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


@pytest.mark.megatron
@pytest.mark.slow
def test_the_counted_cost(tmp_path):
    out = tmp_path / "overhead.json"
    run = subprocess.run(
        [sys.executable, OVERHEAD, "--steps", "49", "--json", out],
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    document = json.loads(out.read_text())
    assert document["blocks"] == 3
    off, p0, p1, megatron = (document["modes"][mode.value] for mode in Mode)
    assert off["ratio"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    for probed in (p0, p1):
        assert probed["added"]["host_reads"] == 0
        assert 1 <= probed["added"]["collectives"] <= 4
        assert probed["hooks_us"] > 0
        assert probed["ratio"]["low"] < probed["ratio"]["ratio"] < probed["ratio"]["high"]
    assert 0 < p0["added"]["ops"] < p1["added"]["ops"]
    assert 0 < p0["added"]["bytes"] < p1["added"]["bytes"] < 100_000
    assert megatron["added"]["host_reads"] > 0
    assert megatron["hooks_us"] == 0
