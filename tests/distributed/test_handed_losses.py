"""Small losses and memory peaks on real ranks, by hand: the cases that speak of ranks."""

from functools import partial

import mesh
import pytest
import torch

from megatron_probes.config import ProbeConfig
from megatron_probes.cpu.fork import fork_ranks, gloo_process_group
from megatron_probes.probes import LossProbe, SystemProbe
from megatron_probes.sinks import read_records

pytestmark = pytest.mark.slow

GIB = 1 << 30


def observe_losses(rank, folder, sizes, windows):
    """Each window is a step: for each rank (sum of losses, valid targets), or None without a loss."""
    with gloo_process_group():
        topology = mesh.make_topology(**sizes)
        probe = LossProbe(topology)
        session = mesh.start_session(topology, [probe], folder)

        def show(total, tokens):
            # `tokens` targets that share the sum, and a masked one that must not count.
            losses = torch.full((tokens + 1,), total / max(tokens, 1))
            losses[-1] = float("nan")
            mask = torch.ones(tokens + 1)
            mask[-1] = 0.0
            probe.observe(losses, mask)

        for step, window in enumerate(windows, start=1):
            seen = window[rank]
            mesh.run_step(session, step, (lambda: None) if seen is None else partial(show, *seen))
        session.close()


def losses_of(folder, sizes, *windows):
    ranks = 1
    for size in sizes.values():
        ranks *= size
    fork_ranks(partial(observe_losses, folder=folder, sizes=sizes, windows=windows), ranks, timeout_s=120)
    return [record.values for record in read_records(folder)]


def test_a_rank_or_a_step_without_valid_targets_adds_nothing(tmp_path):  # PC16
    first, empty, third = losses_of(
        tmp_path, {"dp": 3}, [(0, 0), (6, 3), (0, 0)], [(0, 0), (0, 0), (0, 0)], [(4, 2), (0, 0), (0, 0)]
    )
    assert (first["loss/global"], first["data/valid_tokens"]) == (2.0, 3)
    assert first["loss/worst_rank"] == 2.0
    assert first["loss/worst_rank_index"] == 1
    assert empty["data/valid_tokens"] == 0
    assert not [tag for tag in empty if tag.startswith("loss/") and not tag.endswith("_steps")]
    assert (third["loss/global"], third["data/valid_tokens"]) == (2.0, 2)


def test_context_parallel_shards_count_their_own_targets(tmp_path):  # PC18 (a)
    (values,) = losses_of(tmp_path, {"cp": 2}, [(12, 4), (1, 1)])
    assert values["loss/global"] == pytest.approx(2.6)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_one_valid_target_reads_the_same_for_every_cp(tmp_path, cp):  # PC18 (b)
    (values,) = losses_of(tmp_path, {"cp": cp}, [(3.0, 1)] + [(0, 0)] * (cp - 1))
    assert values["loss/global"] == 3.0


@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_the_worst_rank_is_never_below_the_mean(tmp_path, axis):  # PC26
    (values,) = losses_of(tmp_path, {axis: 2}, [(30, 10), (8, 2)])
    assert values["loss/global"] == pytest.approx(3.1666667, rel=1e-6)
    assert values["loss/worst_rank"] == pytest.approx(4.0)
    assert values["loss/worst_rank_index"] == 1


def test_pipeline_ranks_without_a_loss_say_nothing(tmp_path):  # PC42 (b)
    (values,) = losses_of(tmp_path, {"pp": 4, "dp": 2}, [None] * 6 + [(24, 12), (12, 4)])
    assert values["loss/global"] == pytest.approx(2.25)
    assert values["data/valid_tokens"] == 16
    assert values["loss/worst_rank_index"] == 7


def observe_peaks(rank, folder, peaks_gib):
    with gloo_process_group():
        torch.cuda.is_available = lambda: True
        torch.cuda.reset_peak_memory_stats = lambda device=None: None
        torch.cuda.memory_stats = lambda device=None: {
            "allocated_bytes.all.peak": peaks_gib[rank] * GIB,
            "reserved_bytes.all.peak": (peaks_gib[rank] + 1) * GIB,
            "allocated_bytes.all.current": 0,
            "reserved_bytes.all.current": 0,
            "num_alloc_retries": 0,
        }
        topology = mesh.make_topology(pp=4)
        config = ProbeConfig(strict=True)
        probe = SystemProbe(config.system, topology, lifetime_peaks=False, device=torch.device("cpu"))
        session = mesh.start_session(topology, [probe], folder, config)
        mesh.run_step(session, 1, lambda: None)
        session.close()


def test_the_memory_peak_is_the_largest_rank_s_and_named(tmp_path):  # PC10 (a)
    fork_ranks(partial(observe_peaks, folder=tmp_path, peaks_gib=[70, 40, 38, 61]), 4, timeout_s=120)
    (record,) = read_records(tmp_path)
    assert record.values["memory/peak_allocated_bytes"] == 70 * GIB
    assert record.values["memory/peak_reserved_bytes"] == 71 * GIB
    assert record.values["memory/peak_rank_index"] == 0
    assert isinstance(record.values["memory/peak_allocated_bytes"], int)
