#!/usr/bin/env python
"""The whole product in one command: trains a small MoE GPT on 4 processes and shows what the probes see.

Megatron's own training loop runs on the CPU, with tensor, sequence, data and expert parallelism, on text
that comes with Python. Late in the run one batch is replaced by random bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml
from demo_run import report
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from megatron_probes.sinks import SHOW_EVERY_POINT, StepRecord, read_records

ROOT = Path(__file__).resolve().parents[1]
STEPS = 300
ANOMALY_AT = 0.9  # of the run
POLL_S = 0.5
STOP_S = 10.0
PLAIN_LINES = 10  # progress lines where the output is no terminal
MARKER = ".megatron_probes_demo"


def main() -> int:
    options = _options()
    out: Path = options.out.resolve()
    console = Console()
    _prepare(out)
    anomaly_step = max(1, round(ANOMALY_AT * options.steps))
    started = time.monotonic()
    try:
        with _training(out, options.steps, anomaly_step, options.megatron) as training:
            _watch(training, out, options.steps, console)
        code = training.returncode
    except KeyboardInterrupt:
        console.print(f"\nStopped. What was recorded stays in {_short(out)}.")
        code = 128 + signal.SIGINT
    else:
        if code:
            _explain_failure(out, code, console)
    records = read_records(out)
    if records:
        console.print()
        console.print(report.first_screen(records))
        console.print()
        for line in report.verdict(records, anomaly_step):
            console.print(line, highlight=False)
        console.print(
            f"\n{len(records)} steps in {time.monotonic() - started:.0f} s.\n"
            f"TensorBoard folder: {_short(out)}. The first screen is the tab Custom Scalars of\n"
            f"  tensorboard --logdir {_short(out / 'by_step')} {SHOW_EVERY_POINT}",
            highlight=False,
            soft_wrap=True,
        )
    return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "demo",
        help="folder of the run; an earlier run there is replaced",
    )
    parser.add_argument(
        "--megatron", type=Path, metavar="PATH", help="run the pretrain_gpt.py of this Megatron-LM checkout"
    )
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: give at least 2 (and about 60 for the anomaly to be scored)")
    if options.megatron is not None:
        for part in ("pretrain_gpt.py", "megatron/training"):
            if not (options.megatron / part).exists():
                parser.error(f"--megatron {options.megatron}: no {part} there; give a Megatron-LM checkout")
        options.megatron = options.megatron.resolve()
    elif importlib.util.find_spec("megatron") is None:
        parser.error(
            "Megatron is not installed: pip install 'megatron-core', or give a checkout with --megatron PATH"
        )
    return options


def _prepare(out: Path) -> None:
    """Make `out` an empty folder of the demo, with the probes' configuration in it."""
    if out.exists() and not (out / MARKER).is_file() and (not out.is_dir() or any(out.iterdir())):
        _refuse(
            f"--out {out}: it holds other files, which a run of the demo would replace; give a new folder"
        )
    try:
        shutil.rmtree(out, ignore_errors=True)
        (out / "logs").mkdir(parents=True)
        (out / MARKER).touch()
        config = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
        (out / "probes.yaml").write_text(yaml.safe_dump(config | {"output_dir": str(out)}), encoding="utf-8")
    except OSError as error:
        _refuse(f"--out {out}: cannot be written ({error.strerror}); give another folder")


def _refuse(message: str) -> NoReturn:
    print(f"demo.py: {message}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def _training(
    out: Path, steps: int, anomaly_step: int, megatron: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """The training process; it has ended, or is stopped, when the block ends."""
    command = [sys.executable, "-m", "demo_run.train", out]
    command += ["--steps", str(steps), "--anomaly-step", str(anomaly_step)]
    if megatron is not None:
        command += ["--megatron", megatron]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with open(out / "logs" / "train.log", "wb") as log:
        # In a session of its own: Ctrl-C reaches this process alone, which then stops that one.
        training = subprocess.Popen(
            command,
            cwd=ROOT / "scripts",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield training
        finally:
            if training.poll() is None:
                training.send_signal(signal.SIGINT)
                try:
                    training.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    training.kill()
                    training.wait()


def _watch(training: subprocess.Popen[bytes], out: Path, steps: int, console: Console) -> None:
    """Show the progress until the training process ends."""
    columns: list[Any] = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    ]
    console.print(
        f"4 processes: TP 2 with sequence parallelism x DP 2, EP 2. Logs: {_short(out / 'logs')}",
        soft_wrap=True,
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("importing Megatron", total=steps, loss="")
        reported = 0
        while training.poll() is None:
            time.sleep(POLL_S)
            records = read_records(out)
            if records:
                loss = _loss(records[-1])
                progress.update(
                    bar, description=_phase(records[-1].step, steps), completed=len(records), loss=loss
                )
                if not console.is_terminal and len(records) * PLAIN_LINES // steps > reported:
                    reported = len(records) * PLAIN_LINES // steps
                    console.print(f"step {records[-1].step} of {steps}: {loss}", highlight=False)


def _phase(step: int, steps: int) -> str:
    return "training" if step < steps else "saving the checkpoint"


def _loss(record: StepRecord) -> str:
    loss = record.values.get("loss/global")
    return "" if loss is None else f"loss {loss:.3f}"


def _explain_failure(out: Path, code: int, console: Console) -> None:
    log = (out / "logs" / "train.log").read_text(encoding="utf-8", errors="replace").splitlines()
    console.print(
        f"\nThe training process failed with exit code {code}; the end of {_short(out / 'logs/train.log')}:"
    )
    console.print("\n".join(log[-20:]), markup=False, highlight=False)


def _short(path: Path) -> Path:
    """The path as a person would type it here."""
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


if __name__ == "__main__":
    sys.exit(main())
