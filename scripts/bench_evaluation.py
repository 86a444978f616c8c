"""Scoring throughput of an evaluated checkpoint: length-bucketed batches against a loop of single forwards.

    python scripts/bench_evaluation.py --checkpoint runs/demo/checkpoint [--tp 2] [--pp 2]

Documents of 16 to 64 tokens; the loop is what a first script would write: one forward a document, at its own
length, then log-softmax and gather. Both run in this one process group, in turns, on the same documents. With
one rank, which has one thread, time is the processor's, so that other work on the machine doesn't count.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

from megatron_probes.cpu.fork import fork_ranks, gloo_process_group
from megatron_probes.evaluation import Row


def documents(count: int) -> list[Row]:
    """Pieces of the standard library's source as bytes, of 16 to 64 tokens."""
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    lengths = [16 + (i * 29) % 49 for i in range(count)]
    return [Row(tuple(source[i * 64 : i * 64 + n]), 1) for i, n in enumerate(lengths)]


def single_forwards(model: Any, rows: list[Row]) -> list[float]:
    """NLL of each row from a forward of its own, on one rank."""
    import torch

    sums = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row.ids])
            positions = torch.arange(len(row.ids) - 1)[None]
            logits = model.chunks[0](ids[:, :-1], positions, None)
            log_probs = torch.log_softmax(logits.double(), -1)
            sums.append(-log_probs.gather(2, ids[:, 1:, None]).sum().item())
    return sums


def measure(_: int, *, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of both, the best of `repeats` turns; raises where they don't agree."""
    from megatron_probes.evaluation.megatron import (
        Layout,
        MegatronScorer,
        build_model,
        find_checkpoints,
        initialize,
        load_weights,
    )
    from megatron_probes.evaluation.megatron.scorer import BatchLimits

    rows = documents(options.documents)
    tokens = sum(row.num_inputs for row in rows)
    with gloo_process_group():
        layout = Layout(tp=options.tp, pp=options.pp)
        (checkpoint,) = find_checkpoints(options.checkpoint, "latest")
        initialize(layout, checkpoint)
        model = build_model(checkpoint, layout)
        load_weights(model, checkpoint)
        scorers = {
            rows: MegatronScorer(
                model.chunks, context_length=64, vocab_size=257, limits=BatchLimits(rows=rows)
            )
            for rows in (1, options.batch)
        }
        ways = {f"batches of {n}": partial(_score, scorer, rows) for n, scorer in scorers.items()}
        if layout.ranks == 1:
            ways["plain loop"] = partial(single_forwards, model, rows)
        sums = {name: way() for name, way in ways.items()}  # warm
        clock = time.process_time if layout.ranks == 1 else time.perf_counter
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _turn in range(options.repeats):
            for name, way in ways.items():
                began = clock()
                way()
                seconds[name].append(clock() - began)
    batched = sums[f"batches of {options.batch}"]
    for found in sums.values():
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(batched, found, strict=True))
    rates = {name: tokens / min(taken) for name, taken in seconds.items()}
    base = rates.get("plain loop", rates["batches of 1"])
    return {
        "documents": len(rows),
        "tokens": tokens,
        "tokens_per_second": rates,
        "speed_up": rates[f"batches of {options.batch}"] / base,
    }


def _score(scorer: Any, rows: list[Row]) -> list[float]:
    return [float(score.nll_N.sum()) for score in scorer.score(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/demo/checkpoint"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="rows in a batch")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    ranks = options.tp * options.pp
    found = fork_ranks(partial(measure, options=options), ranks, timeout_s=900, preloaded=True)[0]
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['documents']} documents, {found['tokens']} tokens, {ranks} rank(s)")
    for name, rate in found["tokens_per_second"].items():
        print(f"{name:>16}: {rate:9.0f} tokens/s")
    print(f"{'speed-up':>16}: {found['speed_up']:9.2f}x")


if __name__ == "__main__":
    main()
