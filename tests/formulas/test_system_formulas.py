import pytest

from megatron_probes.formulas import system


@pytest.mark.parametrize(
    ("work_s", "flagged"),
    [
        ([1.00, 1.01, 0.99, 1.00, 1.00, 1.01, 0.99, 1.30], (7,)),
        ([1.00] * 7 + [1.02], ()),
        ([1.0, 2.0], (1,)),
        ([1.0], ()),
        ([60.0] * 8, ()),
    ],
    ids="abcde",
)
def test_pc33_flags_by_the_median_of_the_other_ranks(work_s, flagged):
    assert system.stragglers(work_s).flagged == flagged


def test_straggler_score_is_that_of_the_worst_stage():
    work_s = [1.0, 1.0, 1.0, 8.0, 8.0, 10.0]
    found = system.stragglers(work_s, stages=[0, 0, 0, 1, 1, 1])
    # Stages differ in work by design: only ranks of one stage are compared.
    assert found.score == pytest.approx(1.25, rel=1e-9)
    assert (found.slowest, found.flagged) == (5, (5,))
    assert system.stragglers([1.0, 1.0]).score == pytest.approx(1.0, rel=1e-9)


def test_pc36_a_active_and_wall_rates():
    rates = system.IntervalRates()
    for seconds in (60, 1, 1, 1):
        rates.add_step(1000, seconds)
    rates.add_pause(10)
    rates.add_step(1000, 1)
    taken = rates.take()
    assert taken.active == 1000.0
    assert taken.wall == pytest.approx(67.5675676, rel=1e-8)
    rates.add_step(500, 2)
    assert rates.take() == system.Rates(250.0, 250.0)
    assert rates.take() == system.Rates(None, None)


def test_first_step_alone_has_no_active_rate():
    rates = system.IntervalRates()
    rates.add_step(1000, 60)
    assert rates.take() == system.Rates(None, pytest.approx(1000 / 60))


def test_pc36_b_rate_per_device_and_utilization():
    rate = system.flops_per_device(3.6864e15, 2 * 2 * 2, 2.0)
    assert rate == pytest.approx(230.4e12, rel=1e-12)
    assert system.model_flops_utilization(rate, 989.4e12) == pytest.approx(0.232868405, rel=1e-8)


def test_throughput_counts_global_tokens():
    assert system.tokens_per_second(4096, 0.5) == 8192.0


def test_exposed_wait_is_a_ratio_of_sums():
    wait = system.exposed_wait([1.0, 0.0], [2.0, 6.0])
    assert wait == system.ExposedWait(fraction=0.125, max_fraction=0.5)
