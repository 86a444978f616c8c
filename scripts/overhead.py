#!/usr/bin/env python
"""What the probes cost: step times with and without them, inside one run of Megatron's own training loop.

Two runs of the same training differ by more than the probes cost. So blocks of steps with and without them
alternate in random order in one run, and each block is compared with its neighbours without.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from overhead_run.counting import Counts
from overhead_run.plan import Mode, Phase, Step, plan
from overhead_run.ratio import Ratio, paired_ratio
from overhead_run.training import LAYOUTS, MODEL, Measured, megatron_flags, run_rank
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_probes.cpu import fork

STEPS = 170
BLOCK_STEPS = 2
MIN_BLOCKS = 3
SEED = 20240229


@dataclass(frozen=True)
class Cost:
    """One mode: its step time against `off`, and what a step adds on one rank (the largest over ranks)."""

    step_s: float
    ratio: Ratio
    added: Counts
    hooks_us: float
    """Of the training thread in the probes' code, without the reduction."""
    reduction_us: float
    """Of the training thread in the probes' collectives; on the CPU it waits there for slower ranks."""


def main() -> int:
    options = _options()
    steps = plan(options.blocks, BLOCK_STEPS, SEED)
    console = Console()
    console.print(f"{options.ranks} ranks, {MODEL}; {len(steps)} steps on the CPU, gloo", soft_wrap=True)
    started = time.monotonic()
    try:
        ranks = _measure(steps, options.ranks)
    except fork.RankError as error:
        print(f"overhead.py: rank {error.rank} failed:\n{error.reason}", file=sys.stderr)
        return 1
    costs = {mode: _cost(mode, steps, ranks) for mode in Mode}
    console.print(_step_times(costs))
    console.print(
        f"Geometric means over {options.blocks} blocks of {BLOCK_STEPS} steps; the ratio is to the blocks",
        "without probes beside them. Megatron: --log-params-norm --log-num-zeros-in-grad.",
        soft_wrap=True,
    )
    console.print(_added(costs))
    console.print(
        "On the rank where it is most. Hooks and reduction: the training thread's time in the probes' code",
        "and in their collectives, where on the CPU it also waits for other ranks.",
        f"\n{time.monotonic() - started:.0f} s.",
        soft_wrap=True,
    )
    if options.json is not None:
        options.json.write_text(
            json.dumps(_document(options, steps, costs), indent=2) + "\n", encoding="utf-8"
        )
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes: 1, 2 or 4 (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    options = parser.parse_args()
    if options.ranks not in LAYOUTS:
        parser.error(f"--ranks {options.ranks}: give one of {', '.join(map(str, LAYOUTS))}")
    overhead, block = len(plan(0, BLOCK_STEPS, SEED)), len(Mode) * (BLOCK_STEPS + 1)
    options.blocks = (options.steps - overhead) // block
    if options.blocks < MIN_BLOCKS:
        least = overhead + MIN_BLOCKS * block
        parser.error(f"--steps {options.steps}: give at least {least}, for {MIN_BLOCKS} blocks of each mode")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}; make it first")
    return options


def _measure(steps: Sequence[Step], ranks: int) -> list[Measured]:
    fork.preload()
    with tempfile.TemporaryDirectory(prefix="megatron_probes_overhead_") as folder:
        out = Path(folder)
        config = out / "probes.yaml"
        config.write_text(json.dumps({"output_dir": str(out)}), encoding="utf-8")
        flags = megatron_flags(ranks, len(steps), config, out)
        return fork.fork_ranks(
            lambda rank: run_rank(steps, flags), ranks, timeout_s=math.inf, log_dir=out / "logs"
        )


def _cost(mode: Mode, steps: Sequence[Step], ranks: Sequence[Measured]) -> Cost:
    times, baseline = (_block_times(which, steps, ranks) for which in (mode, Mode.OFF))
    timed = [i for i, step in enumerate(steps) if step.phase is Phase.TIMED and step.mode is mode]
    hooks = [fmean(rank.hooks_s[i] - rank.reduction_s[i] for i in timed) for rank in ranks]
    reduction = [fmean(rank.reduction_s[i] for i in timed) for rank in ranks]
    added = max((rank.counts[mode] - rank.counts[Mode.OFF] for rank in ranks), key=lambda added: added.ops)
    return Cost(
        step_s=geometric_mean(times),
        ratio=paired_ratio(times, baseline),
        added=added,
        hooks_us=1e6 * max(hooks),
        reduction_us=1e6 * max(reduction),
    )


def _block_times(mode: Mode, steps: Sequence[Step], ranks: Sequence[Measured]) -> list[float]:
    """Step time of each of the mode's blocks, seconds, from one step's begin to the next one's.

    The geometric mean weakens what else the machine does for a moment. All ranks have the same step times but
    for a collective's latency; the last rank, which writes the record, is taken.
    """
    began = ranks[-1].began
    blocks: dict[int, list[float]] = defaultdict(list)
    for i, step in enumerate(steps):
        if step.phase is Phase.TIMED and step.mode is mode:
            blocks[step.block].append(began[i + 1] - began[i])
    return [geometric_mean(blocks[block]) for block in sorted(blocks)]


def _step_times(costs: dict[Mode, Cost]) -> Table:
    table = Table("", title="Step time", box=box.SIMPLE_HEAD)
    for heading in ("seconds", "ratio", "95 % interval"):
        table.add_column(heading, justify="right")
    for mode, cost in costs.items():
        figures = [f"{cost.step_s:.3f}"]
        if mode is not Mode.OFF:
            figures += [f"{cost.ratio.ratio:.3f}", f"{cost.ratio.low:.3f} to {cost.ratio.high:.3f}"]
        table.add_row(mode.value, *figures)
    return table


def _added(costs: dict[Mode, Cost]) -> Table:
    table = Table("", title="What a step adds on one rank", box=box.SIMPLE_HEAD)
    for heading in ("ops", "collectives", "bytes", "host reads", "hooks us", "reduction us"):
        table.add_column(heading, justify="right")
    for mode, cost in costs.items():
        if mode is Mode.OFF:
            continue
        figures = [str(n) for n in astuple(cost.added)]
        if mode is not Mode.MEGATRON:
            figures += [f"{cost.hooks_us:.0f}", f"{cost.reduction_us:.0f}"]
        table.add_row(mode.value, *figures)
    return table


def _document(options: argparse.Namespace, steps: Sequence[Step], costs: dict[Mode, Cost]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "ranks": options.ranks,
        "layout": LAYOUTS[options.ranks],
        "steps": len(steps),
        "blocks": options.blocks,
        "block_steps": BLOCK_STEPS,
        "modes": {mode.value: asdict(cost) for mode, cost in costs.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
