"""torch.cuda on the runtime: presence, streams and events, random numbers, and the process's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_probes.cpu.cuda_api import Event, Stream
from megatron_probes.cpu.fork import fork_ranks

MIB = 1 << 20


def on_runtime(fn: Callable[[int], Any], ranks: int = 1) -> list[Any]:
    """Results of `fn` in processes on the CPU runtime."""
    return fork_ranks(fn, ranks, timeout_s=120, preloaded=True)


def test_events_tell_milliseconds() -> None:
    start, end = Event(enable_timing=True), Event(enable_timing=True)
    start.record()
    before = time.perf_counter()
    time.sleep(0.02)
    after = time.perf_counter()
    end.record(Stream())
    assert end.query()
    assert start.elapsed_time(end) >= (after - before) * 1e3
    assert start.elapsed_time(end) < (after - before) * 1e3 + 1e3
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_an_event_must_be_recorded() -> None:
    recorded = Stream().record_event()
    with pytest.raises(RuntimeError, match="recorded"):
        recorded.elapsed_time(Event())


def presence(rank: int) -> list[Any]:
    torch.cuda.set_device(torch.cuda.current_device())
    return [torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device()]


@pytest.mark.megatron
@pytest.mark.slow
def test_there_is_a_device_for_each_local_rank() -> None:
    assert on_runtime(presence, 2) == [[True, 2, 0], [True, 2, 1]]


def streams(rank: int) -> list[bool]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), stream:
        x = torch.ones(2, device="cuda")
        x.record_stream(stream)
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(stream.record_event())
    stream.synchronize()
    torch.cuda.synchronize()
    torch.cuda.set_stream(stream)
    return [torch.cuda.current_stream() is stream, stream.query(), isinstance(stream, torch.cuda.Stream)]


@pytest.mark.megatron
@pytest.mark.slow
def test_streams_are_taken_everywhere() -> None:
    assert on_runtime(streams) == [[True, True, True]]


def random_numbers(rank: int) -> list[bool]:
    torch.cuda.manual_seed(11)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    second = torch.rand(4)
    torch.cuda.manual_seed_all(11)
    torch.cuda.random.set_rng_state_all(torch.cuda.random.get_rng_state_all())
    third = torch.rand(4, device="cuda")
    return [torch.equal(first, second), torch.equal(first, third), torch.cuda.initial_seed() == 11]


@pytest.mark.megatron
@pytest.mark.slow
def test_both_devices_have_one_generator() -> None:
    assert on_runtime(random_numbers) == [[True, True, True]]


def peaks_around_a_tensor(rank: int) -> dict[str, int]:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    tensor = torch.ones(100 * MIB, dtype=torch.uint8, device="cuda")  # large enough to be mapped and unmapped
    held = torch.cuda.memory_allocated()
    stats = torch.cuda.memory_stats()
    del tensor
    freed = torch.cuda.memory_allocated()
    kept = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats(torch.cuda.current_device())
    return {
        "before": before,
        "held": held,
        "stats held": stats["allocated_bytes.all.current"],
        "stats peak": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "freed": freed,
        "kept": kept,
        "reset": torch.cuda.max_memory_reserved(),
    }


@pytest.mark.megatron
@pytest.mark.slow
def test_memory_is_the_processs_own() -> None:
    (seen,) = on_runtime(peaks_around_a_tensor)
    slack = 5 * MIB
    rise = 100 * MIB - slack
    assert seen["held"] - seen["before"] >= rise
    assert abs(seen["stats held"] - seen["held"]) < slack
    assert seen["stats peak"] >= seen["stats held"]
    assert seen["reserved"] == seen["stats peak"]
    assert seen["held"] - seen["freed"] >= rise
    assert seen["kept"] - seen["before"] >= rise  # the peak stays when the tensor goes
    assert seen["kept"] - seen["reset"] >= rise  # and falls at the reset
    assert seen["retries"] == 0


def machine_memory(rank: int) -> tuple[int, int, int]:
    free, total = torch.cuda.mem_get_info()
    return free, total, torch.cuda.get_device_properties(0).total_memory


@pytest.mark.megatron
@pytest.mark.slow
def test_the_device_has_the_machines_memory() -> None:
    ((free, total, of_device),) = on_runtime(machine_memory)
    assert 0 < free < total
    assert total == of_device == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
