"""``megatron-probes evaluate``: a suite on one checkpoint or a series of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from megatron_probes.evaluation import TaskResult
    from megatron_probes.evaluation.megatron import Layout
    from megatron_probes.evaluation.runner import Progress


def evaluate(
    checkpoint: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that Megatron saved to, or one iter_NNNNNNN in it.")
    ],
    suite: Annotated[Path, typer.Option(metavar="YAML", help="What to evaluate (docs/evaluation.md).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the results; a second run continues.")],
    iteration: Annotated[
        list[str] | None,
        typer.Option(metavar="N", help="Iteration to evaluate; repeat it for a series, or give `all`."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Copies of the model, which share the work.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that share the experts.")] = 1,
    device: Annotated[
        str, typer.Option(metavar="auto|cuda|cpu", help="auto is cuda where there is one.")
    ] = "auto",
    batch_rows: Annotated[int, typer.Option(min=1, help="Most sequences in a batch, on each copy.")] = 16,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens in a batch with padding, on each copy.")
    ] = 16384,
    new_series: Annotated[
        bool, typer.Option("--new-series", help="Begin a series of its own, for tasks that changed.")
    ] = False,
    keep_items: Annotated[
        bool, typer.Option("--keep-items", help="Keep each item's outcome and generated text, owner-only.")
    ] = False,
    run_scorers: Annotated[
        bool,
        typer.Option("--run-scorers", help="Allow the suite's Python scorers, which may run generated code."),
    ] = False,
) -> None:
    """Score checkpoints of Megatron on held-out data and tasks, in float32.

    On the CPU all ranks are started here; for several GPUs start it by `torchrun --no-python`.
    What is finished isn't run again; an interrupted task goes on where it was.
    """
    from megatron_probes.evaluation import SuiteError

    try:
        if device not in ("auto", "cuda", "cpu"):
            raise SuiteError(f"--device {device}: must be auto, cuda or cpu")
        job = _Job(
            checkpoint=checkpoint,
            suite=suite,
            out=out,
            iterations=_iterations(iteration),
            ranks=(tp, pp, dp, ep),
            batch=(batch_rows, batch_tokens),
            new_series=new_series,
            keep_items=keep_items,
            run_scorers=run_scorers,
        )
        job.check()
        on_cpu = device == "cpu" or (device == "auto" and not _has_cuda())
        outcome = _run_on_cpu(job) if on_cpu else _run_on_gpu(job)
        if outcome.fault is not None:
            raise SuiteError(outcome.fault)
        _report(outcome)
    except SuiteError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _iterations(given: Sequence[str] | None) -> list[int] | Literal["all", "latest"]:
    from megatron_probes.evaluation import SuiteError

    if not given:
        return "latest"
    if list(given) == ["all"]:
        return "all"
    wrong = [text for text in given if not text.isdigit()]
    if wrong:
        raise SuiteError(f"--iteration {wrong[0]}: must be a number, or `all` alone")
    return sorted({int(text) for text in given})


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@dataclass(frozen=True)
class _Job:
    """What was asked for; every rank runs it."""

    checkpoint: Path
    suite: Path
    out: Path
    iterations: list[int] | Literal["all", "latest"]
    ranks: tuple[int, int, int, int]
    batch: tuple[int, int]
    new_series: bool
    keep_items: bool
    run_scorers: bool

    @property
    def layout(self) -> Layout:
        from megatron_probes.evaluation.megatron.layout import Layout

        tp, pp, dp, ep = self.ranks
        return Layout(tp=tp, pp=pp, dp=dp, ep=ep)

    def check(self) -> None:
        """Raises ``SuiteError`` for what can be known to be wrong before a rank is started."""
        from megatron_probes.evaluation import build_tokenizer, load_suite
        from megatron_probes.evaluation.megatron.checkpoint import find_checkpoints

        suite = load_suite(self.suite)
        suite.check_scorers(allowed=self.run_scorers)
        build_tokenizer(suite.tokenizer)
        find_checkpoints(self.checkpoint, self.iterations)

    def run(self) -> _Outcome:
        """Evaluate as one rank of the layout; the fault, if any, is the same on all ranks."""
        import torch.distributed as dist

        from megatron_probes.evaluation import SuiteError, load_suite
        from megatron_probes.evaluation.megatron import evaluate_checkpoints, find_checkpoints
        from megatron_probes.evaluation.megatron.scorer import BatchLimits

        with _progress_bar(visible=dist.get_rank() == 0) as announce:
            try:
                results, folder = evaluate_checkpoints(
                    find_checkpoints(self.checkpoint, self.iterations),
                    load_suite(self.suite),
                    self.out,
                    layout=self.layout,
                    limits=BatchLimits(*self.batch),
                    new_series=self.new_series,
                    keep_items=self.keep_items,
                    run_code=self.run_scorers,
                    announce=announce,
                )
            except SuiteError as error:
                return _Outcome(fault=str(error))
        return _Outcome(results=results, folder=folder)


@dataclass(frozen=True)
class _Outcome:
    """What one rank has to say at the end."""

    fault: str | None = None
    results: Sequence[TaskResult] = ()
    folder: Path | None = None
    """Only on the rank that wrote."""


def _run_on_cpu(job: _Job) -> _Outcome:
    from megatron_probes.cpu.fork import fork_ranks

    return fork_ranks(partial(_cpu_rank, job=job), job.layout.ranks, timeout_s=math.inf, preloaded=True)[0]


def _cpu_rank(_: int, *, job: _Job) -> _Outcome:
    from megatron_probes.cpu.fork import gloo_process_group

    with gloo_process_group():
        return job.run()


def _run_on_gpu(job: _Job) -> _Outcome:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        return job.run()
    finally:
        dist.destroy_process_group()


@contextmanager
def _progress_bar(visible: bool) -> Iterator[Callable[[str], Progress]]:
    """A bar for each task of what is announced; on one rank only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bars:

        def announce(what: str) -> Callable[[str, int, int], None]:
            shown = {}

            def progress(task: str, done: int, total: int) -> None:
                if task not in shown:
                    shown[task] = bars.add_task(f"{what}: {task}", total=total)
                bars.update(shown[task], completed=done, total=total)

            return progress

        yield announce


def _report(outcome: _Outcome) -> None:
    from rich.console import Console

    from megatron_probes.evaluation.results import table
    from megatron_probes.sinks import SHOW_EVERY_POINT

    if outcome.folder is None:
        return
    Console().print(table(outcome.results))
    examples = (f"{result.task}, {text}" for result in outcome.results for text in result.fault_examples)
    for line in dict.fromkeys(examples):
        typer.echo(f"left out: {line}", err=True)
    typer.echo(f"Results: {outcome.folder / 'results'}")
    typer.echo(f"tensorboard --logdir {outcome.folder / 'tensorboard' / 'by_step'} {SHOW_EVERY_POINT}")
