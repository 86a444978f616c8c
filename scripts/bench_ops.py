#!/usr/bin/env python
"""Measure the CPU operators against the speed at which this machine reads memory, and against torch.

Every ratio is taken in one process, with the contestants in turn: each round runs all of them once, and the
figure is the median over rounds of that round's ratio, so that other load on the machine hits all alike. The
yardstick reads the same buffers in 8 streams and only xors what it loads. One thread is timed by its own CPU
clock, two by the wall.

    python scripts/bench_ops.py [--rounds 15] [--only NAME] [--json figures.json]
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_probes import ops

DRAM_ELEMENTS = 1 << 26
L3_ELEMENTS = 1_000_000


@dataclass(frozen=True)
class Figure:
    name: str
    threads: int
    unit: str  # "of read": the higher the better; "x": how many times faster
    value: float
    best: float  # the ratio of the fastest rounds: what a quieter machine may show; not held against the bar
    bar: float | None
    gb_per_s: float
    read_gb_per_s: float


def read(*buffers: Tensor) -> Callable[[], None]:
    def run() -> None:
        for x in buffers:
            torch.ops.megatron_probes.read_bandwidth(x)

    return run


def rounds_of(
    contestants: dict[str, Callable[[], object]], rounds: int, repeat: int
) -> dict[str, list[float]]:
    """Seconds a call, contestant by contestant and round by round."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    for _ in range(rounds):
        for name, run in contestants.items():
            start = clock()
            for _ in range(repeat):
                run()
            times[name].append((clock() - start) / repeat)
    return times


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def against_read(
    groups: Sequence[tuple[str, float | None, Callable[[], object]]],
    buffers: list[Tensor],
    yardstick: Callable[[], object],
    rounds: int,
    repeat: int = 1,
) -> list[Figure]:
    times = rounds_of({"read": yardstick, **{name: run for name, _, run in groups}}, rounds, repeat)
    size = sum(x.numel() * x.element_size() for x in buffers)
    return [
        Figure(
            name,
            torch.get_num_threads(),
            "of read",
            median_ratio(times["read"], times[name]),
            min(times["read"]) / min(times[name]),
            bar,
            size / statistics.median(times[name]) / 1e9,
            size / statistics.median(times["read"]) / 1e9,
        )
        for name, bar, _ in groups
    ]


def random_tensor(n: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    x = torch.empty(n, dtype=dtype)
    for chunk in x.split(1 << 22):
        chunk.copy_(torch.randn(chunk.numel()) + mean)
    x[::97] = 0
    return x


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def bench_stats(rounds: int) -> list[Figure]:
    figures = []
    for dtype, moments_bar in ((torch.float32, 0.90), (torch.bfloat16, 0.80), (torch.float16, None)):
        x, shifted = random_tensor(DRAM_ELEMENTS, dtype), random_tensor(DRAM_ELEMENTS // 4, dtype, mean=3.0)
        row, wide = torch.zeros(7, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
        bar = 0.90 if dtype != torch.float16 else None
        for threads in (1, 2):
            torch.set_num_threads(threads)
            name = short(dtype)
            figures += against_read(
                [
                    (f"stats {name} DRAM", bar, partial(ops.tensor_stats, x, row)),
                    (f"moments {name} DRAM", moments_bar, partial(ops.tensor_stats, x, wide)),
                ],
                [x],
                read(x),
                rounds,
            )
            figures += against_read(
                [
                    (
                        f"moments {name} DRAM, mean 3",
                        None,
                        partial(ops.tensor_stats, shifted, wide),
                    )
                ],
                [shifted],
                read(shifted),
                rounds,
            )
    return figures


def bench_l3(rounds: int) -> list[Figure]:
    figures = []
    for dtype in (torch.float32, torch.bfloat16):
        x, row = random_tensor(L3_ELEMENTS, dtype), torch.zeros(7, dtype=torch.float64)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            bar = 0.60 if threads == 1 else None
            group = [(f"stats {short(dtype)} 1e6 (L3)", bar, partial(ops.tensor_stats, x, row))]
            figures += against_read(group, [x], read(x), 3 * rounds, repeat=20)
    return figures


def mixed_sizes() -> list[int]:
    """The 154 parameters of a 12-layer decoder of width 768 and two more like it, at half the vocabulary."""
    layer = [768 * 2304, 2304, 768 * 768, 768, 768 * 3072, 3072, 3072 * 768, 768, 768, 768, 768, 768]
    return [25_000 * 768, 1024 * 768, *layer * 12, 768, 768, *[4_099 * 1031, 65_537, 31, 1, 300_001, 4097]]


def bench_multi_tensor(rounds: int) -> list[Figure]:
    figures = []
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [random_tensor(n, dtype) for n in mixed_sizes()]
        flat, out = (
            random_tensor(sum(mixed_sizes()), dtype),
            torch.zeros(len(tensors), 7, dtype=torch.float64),
        )
        name = f"multi-tensor {short(dtype)}, {len(tensors)} tensors"
        figures += against_read(
            [(name, 0.90, partial(ops.multi_tensor_stats, tensors, out))],
            tensors,
            read(flat),
            rounds,
        )
    return figures


def bench_residual(rounds: int) -> list[Figure]:
    figures = []
    s, b = torch.randn(4096, 4096).bfloat16(), (torch.randn(4096, 4096) * 0.05).bfloat16()
    out = torch.zeros(8, dtype=torch.float64)
    histograms = torch.zeros(6, ops.NUM_BINS, dtype=torch.float64)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        bar = 0.75 if threads == 1 else None
        figures += against_read(
            [
                ("residual bf16 4096x4096", bar, lambda: ops.residual_stats(s, b, out=out)),
                (
                    "residual, with histograms",
                    bar,
                    lambda: ops.residual_stats(s, b, out=out, histograms=histograms),
                ),
            ],
            [s, b],
            read(s, b),
            rounds,
        )
    return figures


def five_statistics(x: Tensor) -> tuple[Tensor, ...]:
    return x.abs().max(), x.pow(2).sum(), x.abs().sum(), (x == 0).sum(), (~torch.isfinite(x)).sum()


def five_statistics_fp32(x: Tensor) -> tuple[Tensor, ...]:
    return five_statistics(x.float())


def keep_heap_warm() -> None:
    """Make malloc keep what torch frees: else the naive contestant measures page faults."""
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)


def bench_torch(rounds: int) -> list[Figure]:
    figures = []
    torch.set_num_threads(1)
    keep_heap_warm()
    for dtype, compile_bar, naive_bar in ((torch.float32, 2.5, 30.0), (torch.bfloat16, 5.0, 60.0)):
        x, row = random_tensor(DRAM_ELEMENTS, dtype), torch.zeros(7, dtype=torch.float64)
        compiled = torch.compile(five_statistics_fp32, dynamic=False)
        times = rounds_of(
            {
                "ours": partial(ops.tensor_stats, x, row),
                "read": read(x),
                "torch.compile": partial(compiled, x),
                "naive torch": partial(five_statistics, x),
            },
            rounds,
            1,
        )
        size = x.numel() * x.element_size()
        for rival, bar in (("torch.compile", compile_bar), ("naive torch", naive_bar)):
            figures.append(
                Figure(
                    f"stats {short(dtype)} DRAM against {rival}",
                    1,
                    "x",
                    median_ratio(times[rival], times["ours"]),
                    min(times[rival]) / min(times["ours"]),
                    bar,
                    size / statistics.median(times["ours"]) / 1e9,
                    size / statistics.median(times["read"]) / 1e9,
                )
            )
    return figures


BENCHES = {
    "stats": bench_stats,
    "l3": bench_l3,
    "multi": bench_multi_tensor,
    "residual": bench_residual,
    "torch": bench_torch,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", choices=BENCHES, action="append", help="run this part only; may be repeated"
    )
    parser.add_argument("--json", metavar="PATH", help="write the figures here")
    arguments = parser.parse_args()
    if "cpu" not in ops.compiled_devices():
        print(
            "bench_ops: the compiled CPU kernels are not loaded; run `pip install --no-build-isolation -e .`"
        )
        return 2
    torch.manual_seed(0)
    figures: list[Figure] = []
    header = f"{'':44} {'threads':>7} {'value':>8} {'best':>6} {'unit':8} {'bar':>5}  {'':7}"
    print(f"{header} {'GB/s':>6} {'read':>6}")
    for name in arguments.only or BENCHES:
        for f in BENCHES[name](arguments.rounds):
            figures.append(f)
            verdict = "" if f.bar is None else "reached" if f.value >= f.bar else "MISSED"
            bar = "" if f.bar is None else f"{f.bar:g}"
            print(
                f"{f.name:44} {f.threads:>7} {f.value:>8.2f} {f.best:>6.2f} {f.unit:8} {bar:>5}  {verdict:7} "
                f"{f.gb_per_s:>6.1f} {f.read_gb_per_s:>6.1f}",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(f) for f in figures], file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
