"""Forked ranks: results, places, failures, time-outs, logs, and the command line."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_probes.cpu.fork import RankError, RankTimeout, fork_ranks, gloo_process_group

TIMEOUT_S = 60.0


def environment(rank: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "MARK")
    return {name: os.environ[name] for name in names}


def test_results_come_in_the_order_of_ranks() -> None:
    offset = torch.tensor(10)  # a closure's cell: functions needn't be picklable
    assert fork_ranks(lambda rank: rank + int(offset), 4, timeout_s=TIMEOUT_S) == [10, 11, 12, 13]


def test_places_are_torchruns() -> None:
    places = fork_ranks(environment, 2, timeout_s=TIMEOUT_S, env={"MARK": "here"})
    for rank, place in enumerate(places):
        assert place == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "MARK": "here",
        }
    assert "MARK" not in os.environ


def test_one_process_serves_many_layouts() -> None:
    def total(rank: int) -> int:
        with gloo_process_group():
            value = torch.tensor(rank + 1)
            dist.all_reduce(value)
            assert torch.get_num_threads() == 1
            return int(value)

    for world_size in (1, 3, 2, 4):
        expected = world_size * (world_size + 1) // 2
        assert fork_ranks(total, world_size, timeout_s=TIMEOUT_S) == [expected] * world_size
    assert not dist.is_initialized()


def test_a_large_result_comes_whole() -> None:
    (result,) = fork_ranks(lambda rank: torch.arange(1_000_000), 1, timeout_s=TIMEOUT_S)
    assert torch.equal(result, torch.arange(1_000_000))


def test_a_failure_names_the_rank_and_stops_the_others() -> None:
    def fail_on_rank_1(rank: int) -> None:
        with gloo_process_group():
            if rank == 1:
                raise ValueError("a bad value")
            dist.barrier()

    before = psutil.Process().children()
    with pytest.raises(RankError, match="a bad value") as error:
        fork_ranks(fail_on_rank_1, 3, timeout_s=TIMEOUT_S)
    assert error.value.rank == 1
    assert error.value.exitcode == 1
    assert "in fail_on_rank_1" in error.value.reason
    assert psutil.Process().children() == before


def test_exit_codes_are_kept() -> None:
    with pytest.raises(RankError) as error:
        fork_ranks(lambda rank: sys.exit(2), 1, timeout_s=TIMEOUT_S)
    assert error.value.exitcode == 2


def test_an_exit_without_an_error_is_a_result() -> None:
    assert fork_ranks(lambda rank: sys.exit(0), 2, timeout_s=TIMEOUT_S) == [None, None]


def test_a_killed_rank_is_the_one_that_failed() -> None:
    def kill_rank_2(rank: int) -> None:
        with gloo_process_group():
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()  # fails on the others as soon as rank 2 is gone

    with pytest.raises(RankError, match="killed by SIGKILL") as error:
        fork_ranks(kill_rank_2, 3, timeout_s=TIMEOUT_S)
    assert (error.value.rank, error.value.exitcode) == (2, -signal.SIGKILL)


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(RankError, match="pickle"):
        fork_ranks(lambda rank: lambda: None, 1, timeout_s=TIMEOUT_S)


def test_hung_ranks_time_out_with_their_stacks_in_the_logs(tmp_path: Path) -> None:
    def hang_on_rank_0(rank: int) -> None:
        if rank == 0:
            time.sleep(1000)

    before, start = psutil.Process().children(), time.monotonic()
    with pytest.raises(RankTimeout, match=r"ranks \[0\] still ran after 2"):
        fork_ranks(hang_on_rank_0, 2, timeout_s=2, log_dir=tmp_path)
    assert time.monotonic() - start < 20
    assert "in hang_on_rank_0" in (tmp_path / "rank0.log").read_text()
    assert psutil.Process().children() == before


def test_output_goes_to_the_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def speak(rank: int) -> None:
        print(f"python {rank}")
        print(f"error {rank}", file=sys.stderr)
        os.system(f"echo child {rank}")
        if rank == 1:
            raise ValueError("said last")

    with pytest.raises(RankError):
        fork_ranks(speak, 2, timeout_s=TIMEOUT_S, log_dir=tmp_path / "logs")
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(2)]
    for rank, log in enumerate(logs):
        assert {f"python {rank}", f"error {rank}", f"child {rank}"} <= set(log.splitlines())
    assert "ValueError: said last" in logs[1]
    assert capfd.readouterr() == ("", "")


def test_exit_handlers_of_the_rank_run_and_the_parents_dont(tmp_path: Path) -> None:
    def note(text: str) -> None:
        with open(tmp_path / "handlers", "a") as file:
            file.write(text)

    atexit.register(note, "parent")
    try:
        fork_ranks(lambda rank: atexit.register(note, "rank") and None, 1, timeout_s=TIMEOUT_S)
    finally:
        atexit.unregister(note)
    assert (tmp_path / "handlers").read_text() == "rank"


def test_a_process_group_in_the_parent_is_refused(tmp_path: Path) -> None:
    def fork_with_a_group(rank: int) -> NoReturn:
        with gloo_process_group():
            fork_ranks(environment, 1, timeout_s=TIMEOUT_S)
        raise AssertionError("not reached")

    with pytest.raises(RankError, match="this process holds a process group"):
        fork_ranks(fork_with_a_group, 1, timeout_s=TIMEOUT_S)


def runtime_is_installed(rank: int) -> bool:
    return torch.cuda.is_available() and "megatron.training" in sys.modules


@pytest.mark.megatron
@pytest.mark.slow
def test_preloaded_ranks_leave_this_process_alone() -> None:
    torch_before = torch.zeros, torch.cuda.is_available, "megatron.training" in sys.modules
    assert fork_ranks(runtime_is_installed, 2, timeout_s=TIMEOUT_S, preloaded=True) == [True, True]
    assert (torch.zeros, torch.cuda.is_available, "megatron.training" in sys.modules) == torch_before


# ------------------------------------------------------------- command line


def launch(*args: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_probes.cpu.fork", *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


@pytest.mark.megatron
@pytest.mark.slow
def test_the_exit_code_is_that_of_the_rank_which_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "print('started', os.environ['RANK'], *sys.argv[1:], flush=True)\n"
        f"other = {str(tmp_path / 'other')!r}\n"
        "if os.environ['RANK'] == '0':\n"
        "    open(other, 'w').close()\n"
        "    time.sleep(1000)\n"
        "while not os.path.exists(other):\n"
        "    time.sleep(0.05)\n"
        "sys.exit(7)\n"
    )
    process = launch("-n", 2, "--log-dir", tmp_path / "logs", script, "--flag", "value")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 7
    for rank in range(2):
        log = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert log == f"started {rank} --flag value\n"
    assert "rank 1 failed first, with exit code 7; the others were stopped" in err
    assert "Traceback" not in err


@pytest.mark.megatron
@pytest.mark.slow
def test_ranks_die_with_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)\n")
    process = launch("-n", 2, script)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", "script.py"], "-n 0: give at least 1 rank"),
        (["nowhere.py"], "no script at nowhere.py; give the path of a Python file"),
        (
            ["--root", "nowhere", __file__],
            "--root nowhere: no megatron/core there; give a Megatron-LM checkout",
        ),
    ],
)
def test_mistakes_are_named(args: list[str], message: str) -> None:
    process = launch(*args)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert message in err
    assert "Traceback" not in err
