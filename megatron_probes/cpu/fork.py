"""Forked ranks: one process imports torch and Megatron once, then forks a rank for each place of a layout.

`fork_ranks` runs a function in every rank and returns its results; one process may call it many times, for
tests that go through many layouts. The command line runs a script in every rank, as torchrun would:

    python -m megatron_probes.cpu.fork -n RANKS [--root CHECKOUT] SCRIPT ARGS...
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_probes.cpu.runtime import install, prepare_path, run_script

T = TypeVar("T")

_POLL_S = 0.2  # how often a rank that died without a word is looked for
_STACKS_S = 0.5  # what hung ranks get to write their stacks


class RankError(RuntimeError):
    """A rank failed: `rank`, its `exitcode` (negative for a signal), the `reason` with the traceback."""

    def __init__(self, rank: int, exitcode: int | None, reason: str) -> None:
        super().__init__(f"rank {rank} failed with exit code {exitcode}: {reason}")
        self.rank = rank
        self.exitcode = exitcode
        self.reason = reason


class RankTimeout(RankError, TimeoutError):
    """Ranks did not end in time; the stacks of all that still ran are in their output."""


def preload() -> None:
    """Install the runtime and make the costly imports, which all ranks forked later share."""
    install()
    importlib.import_module("torch._dynamo")  # every optimizer imports it
    if importlib.util.find_spec("megatron") is not None:
        importlib.import_module("megatron.training")


def fork_ranks(
    fn: Callable[[int], T],
    world_size: int,
    *,
    timeout_s: float,
    log_dir: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    preloaded: bool = False,
) -> list[T]:
    """Results of `fn(rank)`, each from a process of its own forked from this one, in the order of ranks.

    RANK, WORLD_SIZE, MASTER_PORT and the rest are set as torchrun sets them, and `env` over them. No process
    group is made (see `gloo_process_group`). Results must be picklable; `fn` needn't be. (Reading a tensor
    from a rank that holds Megatron imports Megatron: return arrays or lists.) A rank that calls sys.exit(0)
    returns None. With `log_dir`, rank r writes its output to `log_dir/rank{r}.log`.

    With `preloaded`, ranks are forked from a server process on which `preload` ran, started at the first such
    call: the runtime replaces nothing in this process, and `fn` must be picklable too.

    Raises RankError for the rank that failed first, and RankTimeout after `timeout_s`, once all ranks are
    killed; RuntimeError when this process holds a process group.
    """
    logs = None if log_dir is None else Path(log_dir)
    with _Ranks(fn, world_size, logs, dict(env or {}), preloaded) as ranks:
        return ranks.results(timeout_s)


@contextlib.contextmanager
def gloo_process_group() -> Iterator[None]:
    """The default process group on gloo, for a function that `fork_ranks` runs."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()  # not after an error: peers would fail before this rank's own error is known


@dataclass(frozen=True)
class _Outcome:
    """What a rank says when it ends."""

    result: Any = None
    failure: str | None = None
    exitcode: int = 0
    at: float = field(default_factory=time.monotonic)  # one clock for all processes of a machine


class _Ranks:
    """The processes of one layout, and the store at which they meet."""

    def __init__(
        self,
        fn: Callable[[int], Any],
        world_size: int,
        log_dir: Path | None,
        env: dict[str, str],
        preloaded: bool,
    ) -> None:
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            raise RuntimeError("fork_ranks: this process holds a process group; a fork copies no threads")
        torch.set_num_threads(1)
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._processes = []
        self._outcomes: list[Connection] = []
        ports = []
        context: Any = multiprocessing.get_context("forkserver" if preloaded else "fork")
        if preloaded:
            context.set_forkserver_preload(["megatron_probes.cpu.preloaded"])
        _flush()
        for rank in range(world_size):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "TORCHELASTIC_RESTART_COUNT": 0,
            }
            environment = {name: str(value) for name, value in place.items()} | env
            log = None if log_dir is None else log_dir / f"rank{rank}.log"
            port_out, port_in = context.Pipe(duplex=False)
            outcome_out, outcome_in = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(partial(fn, rank), environment, log, port_out, outcome_in)
            )
            process.start()
            port_out.close()
            outcome_in.close()
            self._processes.append(process)
            self._outcomes.append(outcome_out)
            ports.append(port_in)
        # As under torchrun the ranks are clients of a store of this process. It binds a free port itself, so
        # none can be lost between asking and binding. It has a thread, so it comes after the forks.
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for port in ports:
            with contextlib.suppress(BrokenPipeError):  # a rank that died already is reported by `results`
                port.send(self._store.port)
            port.close()

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
        for process, outcome in zip(self._processes, self._outcomes, strict=True):
            process.join()
            process.close()
            outcome.close()
        self._store = None

    def results(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while len(results) < len(self._processes):
            left = deadline - time.monotonic()
            if left <= 0:
                self._time_out(sorted(set(range(len(self._processes))) - set(results)), timeout_s)
            outcomes = self._ended(results, min(left, _POLL_S))
            if any(outcome.failure for outcome in outcomes.values()):
                time.sleep(_POLL_S)  # a rank's death makes its peers fail: hear all before naming the first
                self._fail(outcomes | self._ended(results | outcomes, 0))
            results |= {rank: outcome.result for rank, outcome in outcomes.items()}
        for process in self._processes:
            process.join()
        return [results[rank] for rank in range(len(self._processes))]

    def _ended(self, known: Mapping[int, Any], timeout_s: float) -> dict[int, _Outcome]:
        """Outcomes by rank of the ranks that ended and aren't `known`."""
        pipes = {rank: pipe for rank, pipe in enumerate(self._outcomes) if rank not in known}
        ready = wait(list(pipes.values()), timeout_s)
        return {
            rank: self._outcome(rank)
            for rank, pipe in pipes.items()
            # A rank's own workers may hold its pipe open after it was killed.
            if pipe in ready or not self._processes[rank].is_alive()
        }

    def _outcome(self, rank: int) -> _Outcome:
        pipe, process = self._outcomes[rank], self._processes[rank]
        if pipe.poll():
            with contextlib.suppress(EOFError):
                return pickle.loads(pipe.recv_bytes())
        process.join()
        code = process.exitcode
        assert code is not None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else "it ended without a result"
        return _Outcome(failure=how, exitcode=code)

    def _fail(self, outcomes: Mapping[int, _Outcome]) -> NoReturn:
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.failure}
        # A signal is never the consequence of another rank's failure.
        rank = min(failed, key=lambda rank: (failed[rank].exitcode >= 0, failed[rank].at))
        raise RankError(rank, failed[rank].exitcode, str(failed[rank].failure))

    def _time_out(self, ranks: list[int], timeout_s: float) -> NoReturn:
        for rank in ranks:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)
        where = "their output" if self._log_dir is None else f"their logs in {self._log_dir}"
        raise RankTimeout(
            ranks[0], None, f"ranks {ranks} still ran after {timeout_s} s; their stacks are in {where}"
        )


def _run_rank(
    fn: Callable[[], Any],
    environment: dict[str, str],
    log: Path | None,
    port: Connection,
    outcomes: Connection,
) -> None:
    """Body of a forked rank."""
    import torch

    _die_with_parent()
    atexit._clear()  # what the parent registered is the parent's to run
    if log is not None:
        _redirect_output(log)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # a hung rank's stacks (`_time_out`)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's own name may lead nowhere
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.recv()), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    os.environ.update(environment)
    try:
        # Not by `Connection.send`, which would pass tensors as handles that die with this process.
        outcome = pickle.dumps(_Outcome(result=_result(fn)))
        atexit._run_exitfuncs()
        _flush()
        outcomes.send_bytes(outcome)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        elif isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        _flush()
        outcomes.send_bytes(pickle.dumps(_Outcome(failure=traceback.format_exc(), exitcode=code)))
        sys.exit(code)


def _result(fn: Callable[[], T]) -> T | None:
    try:
        return fn()
    except SystemExit as end:
        if end.code:
            raise
        return None


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _redirect_output(log: Path) -> None:
    """Send the output of this process, Python's and C's, to `log`."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script in every rank; the exit code is that of the rank which failed first, or 0."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_probes.cpu.fork",
        description="Run a Megatron script on the CPU runtime in several ranks, forked after the imports.",
    )
    parser.add_argument("-n", "--ranks", type=int, default=1, help="number of ranks")
    parser.add_argument("--root", help="Megatron checkout to take `megatron` from, instead of the wheel")
    parser.add_argument("--log-dir", help="folder for the ranks' output, as rank{r}.log")
    parser.add_argument("script", help="Python file to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if options.ranks < 1:
        parser.error(f"-n {options.ranks}: give at least 1 rank")

    prepare_path(options.script, options.root)
    preload()
    try:
        fork_ranks(
            lambda rank: run_script(options.script, options.args, options.root),
            options.ranks,
            timeout_s=math.inf,
            log_dir=options.log_dir,
        )
    except RankError as error:
        code = error.exitcode or 1
        print(
            f"rank {error.rank} failed first, with exit code {code}; the others were stopped", file=sys.stderr
        )
        return code if code > 0 else 128 - code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
