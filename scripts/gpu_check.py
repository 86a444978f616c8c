"""The checks of gpu_check.sh: operators against float64, repeatability, speed, graphs, Megatron."""

import argparse
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_probes import ops
from megatron_probes.ops import residual, routing, stats, update

D = torch.float64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUM_TOLERANCE = {torch.float32: 1e-12, torch.bfloat16: 5e-7, torch.float16: 5e-7}
PRETRAIN = Path(__file__).parents[1] / "megatron_probes" / "cpu" / "pretrain_gpt.py"
MEGATRON_FLAGS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --train-iters 30 --lr 1e-4 "
    "--min-lr 1e-5 --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 "
    "--transformer-impl local --bf16 --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --log-interval 1 --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 "
    "--eval-interval 1000 --split 90,5,5"
)


@dataclass(frozen=True)
class Result:
    check: str
    figure: str
    passed: bool | None  # None: a figure without a bar


def adversarial(n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    normal = torch.randn(n, device="cuda")
    non_finite = normal.clone()
    for i, value in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0)):
        non_finite[(i * 7919) % n] = value
    inputs = {
        "normal": normal,
        "mean 1000": normal + 1000,
        "a third": torch.full((n,), 1 / 3, device="cuda"),
        "lognormal": torch.exp(6 * normal),
        "1e30": normal * 1e30,
        "1e-30": normal * 1e-30,
        "subnormal": normal * 1e-39,
        "sparse": torch.where(normal > 1, normal, 0.0),
        "non-finite": non_finite,
        "all NaN": torch.full((n,), math.nan, device="cuda"),
    }
    return {name: x.to(dtype) for name, x in inputs.items()}


def row_error(row: Tensor, x: Tensor) -> float:
    """Relative error of the sums in units of the tolerance; infinite when a count or the maximum is wrong."""
    expected = stats._stats_row(x.reshape(-1))
    if not torch.equal(row[2:7], expected[2:7]):
        return math.inf
    scale = expected[:2].clamp_min(torch.finfo(D).tiny)
    return ((row[:2] - expected[:2]).abs() / scale).max().item() / SUM_TOLERANCE[x.dtype]


def moment_error(row: Tensor, x: Tensor) -> float:
    expected = stats._moment_row(x)
    if row[0] != expected[0]:
        return math.inf
    count = expected[0].clamp_min(1)
    deviation = (expected[2] / count).sqrt()
    scale = torch.stack([deviation**k * count for k in (2, 3, 4)])
    return (
        ((row[2:] - expected[2:]).abs() / torch.maximum(scale, expected[2:].abs()).clamp_min(1e-300))
        .max()
        .item()
    )


def check_stats() -> list[Result]:
    worst, worst_moment = 0.0, 0.0
    for dtype in DTYPES:
        for n in (1, 7, 1000, 4097, 65_537, 3_000_001):
            inputs = adversarial(n, dtype)
            rows = ops.multi_tensor_stats(list(inputs.values()), moments=True)
            for row, x in zip(rows, inputs.values(), strict=True):
                worst = max(worst, row_error(ops.tensor_stats(x), x), row_error(row, x))
                worst_moment = max(worst_moment, moment_error(row[7:], x))
        odd = torch.randn(1001, 70, device="cuda").to(dtype)
        for x in (odd.t(), odd[::2, 1:], odd.flatten()[3:], odd[:0]):
            worst = max(worst, row_error(ops.tensor_stats(x), x))
    many = [torch.randn(1 + 37 * i, device="cuda").to(DTYPES[i % 3]) for i in range(500)]
    rows = ops.multi_tensor_stats(many)
    worst = max([worst, *(row_error(row, x) for row, x in zip(rows, many, strict=True))])
    out = torch.full((7,), 3.0, dtype=D, device="cuda")
    ops.tensor_stats(many[0], out, enabled=torch.zeros(1, device="cuda"))
    return [
        Result("tensor statistics against float64, share of the tolerance", f"{worst:.2g}", worst <= 1),
        Result("moments against float64, relative", f"{worst_moment:.1e}", worst_moment <= 2e-6),
        Result("the flag switches off", str(out[0].item()), bool((out == 3).all())),
    ]


def check_residual() -> list[Result]:
    worst = 0.0
    for dtype in DTYPES:
        for tokens, d, scale in ((257, 4096, 0.05), (100, 1000, 1e-3), (31, 17, 1.0), (64, 2048, 0.0)):
            s = torch.randn(tokens, d, device="cuda").to(dtype)
            b = (torch.randn(tokens, d, device="cuda") * scale).to(dtype)
            s[3, 5], b[7, 0] = math.nan, math.inf
            mask = torch.rand(tokens, device="cuda") > 0.3
            shapes = ((8,), (6, ops.NUM_BINS), (tokens, 5))
            for m, stride in ((None, 1), (mask, 1), (mask, 3)):
                got, want = ([torch.zeros(n, dtype=D, device="cuda") for n in shapes] for _ in range(2))
                ops.residual_stats(s, b, m, stride, out=got[0], histograms=got[1], per_token=got[2])
                residual._residual_reference(s, b, m, stride, want[0], want[1], want[2])
                if not torch.equal(got[0][:2], want[0][:2]) or not torch.equal(got[2][:, 4], want[2][:, 4]):
                    worst = math.inf
                if (got[1].cumsum(1) - want[1].cumsum(1)).abs().max() > 1:
                    worst = math.inf
                worst = max(worst, ((got[0] - want[0]).abs() / want[0].abs().clamp_min(1e-6)).max().item())
    return [Result("residual path against float64, relative", f"{worst:.1e}", worst <= 1e-6)]


def matches(got: Tensor, reference: Callable[..., None], *arguments: object) -> bool:
    want = torch.zeros_like(got)
    reference(*arguments, want)
    return torch.equal(got, want)


def check_counts() -> list[Result]:
    def random_bf16(n: int) -> Tensor:
        bits = torch.randint(-(1 << 15), 1 << 15, (n,), dtype=torch.int16, device="cuda")
        return bits.view(torch.bfloat16)

    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    weight = bits.repeat_interleave(256)
    spacing = torch.randint(-2, 3, weight.shape, device="cuda") / 128 + 1
    near = (weight.float() * 2.0**-8 * spacing).bfloat16()
    noop = all(
        matches(ops.bf16_update_noop(w, u), update._update_reference, w, u)
        for step in (random_bf16(weight.numel()), near)
        for w in (weight, weight.float())
        for u in (step, step.float())
    )
    before, after = weight.float(), weight.float() + near.float()
    noop &= matches(ops.bf16_update_noop_master(before, after), update._master_reference, before, after)
    padding = torch.rand(4096, device="cuda") < 0.2
    routed = all(
        matches(ops.routing_histogram(x, experts, padding), routing._routing_reference, x, padding)
        for experts in (8, 130, 257)
        for x in (
            torch.rand(4096, experts, device="cuda") < 0.3,
            torch.randint(-1, experts + 1, (4096, 4), device="cuda"),
            torch.randint(-1, experts + 1, (4096, 4), device="cuda").int(),
        )
    )
    margins = all(
        matches(ops.topk_margin_histogram(x, k, padding), routing._margin_reference, x, k, padding)
        for x in (torch.rand(4096, 64, device="cuda").to(dtype) for dtype in DTYPES)
        for k in (1, 8)
    )
    return [
        Result("BF16 no-ops, 2^16 x 2^8 pairs, bit for bit", "equal" if noop else "differ", noop),
        Result("routing histograms", "equal" if routed else "differ", routed),
        Result("top-k margins", "equal" if margins else "differ", margins),
    ]


def check_repeatability() -> list[Result]:
    x = torch.exp(4 * torch.randn(50_000_003, device="cuda"))
    s, b = (
        torch.randn(4096, 4096, device="cuda").bfloat16(),
        torch.randn(4096, 4096, device="cuda").bfloat16(),
    )
    runs = [(ops.tensor_stats(x, moments=True), ops.residual_stats(s, b)) for _ in range(10)]
    equal = all(torch.equal(p, q) for run in runs for p, q in zip(run, runs[0], strict=True))
    return [Result("ten runs, bit for bit", "equal" if equal else "differ", equal)]


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def check_speed() -> list[Result]:
    """Bytes read a second, over the bytes that a device copy of 1 GiB reads and writes a second."""
    results = []
    size = 1 << 30
    source = torch.randn(size // 4, device="cuda")
    copy = 2 * size / seconds(partial(torch.empty_like(source).copy_, source))
    results.append(Result("device copy of 1 GiB", f"{copy / 1e9:.0f} GB/s", None))
    for dtype in DTYPES:
        x = source.to(dtype) if dtype == torch.float32 else source.repeat(2).to(dtype)
        for width, what, bar in ((7, "statistics", 0.85), (12, "with moments", None)):
            out = torch.zeros(width, dtype=D, device="cuda")
            share = size / seconds(partial(ops.tensor_stats, x, out)) / copy
            name = f"{what}, {str(dtype)[6:]}, 1 GiB, of copy bandwidth"
            results.append(Result(name, f"{share:.2f}", None if bar is None else share >= bar))
        parts = list(x.split(7_000_003))
        rows = torch.zeros(len(parts), 7, dtype=D, device="cuda")
        share = size / seconds(partial(ops.multi_tensor_stats, parts, rows)) / copy
        results.append(
            Result(f"{len(parts)} tensors, {str(dtype)[6:]}, of copy bandwidth", f"{share:.2f}", None)
        )
    s, b = (torch.randn(32768, 8192, device="cuda").bfloat16() for _ in range(2))
    out, hist = torch.zeros(8, dtype=D, device="cuda"), torch.zeros(6, ops.NUM_BINS, dtype=D, device="cuda")
    share = 2 * s.numel() * 2 / seconds(lambda: ops.residual_stats(s, b, out=out, histograms=hist)) / copy
    results.append(Result("residual path, bf16 32768x8192, of copy bandwidth", f"{share:.2f}", None))
    return results


def check_graph() -> list[Result]:
    """PC38 (b): a forward that routes [5, 3] tokens is captured, the slots reset, the graph replayed."""
    routed = torch.zeros(8, 2, dtype=torch.bool, device="cuda")
    routed[:5, 0] = True
    routed[5:, 1] = True
    x, enabled = torch.ones(1000, device="cuda"), torch.ones(1, device="cuda")
    counts, row = torch.zeros(2, dtype=D, device="cuda"), torch.zeros(7, dtype=D, device="cuda")
    streams = torch.randn(16, 256, device="cuda").bfloat16()
    path, hist = torch.zeros(8, dtype=D, device="cuda"), torch.zeros(6, ops.NUM_BINS, dtype=D, device="cuda")

    def forward() -> None:
        ops.routing_histogram(routed, 2, out=counts, accumulate=True, enabled=enabled)
        ops.multi_tensor_stats([x], row[None], accumulate=True, enabled=enabled)
        ops.residual_stats(streams, streams, out=path, histograms=hist, accumulate=True, enabled=enabled)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for slot in (counts, row, path, hist):
        slot.zero_()
    for _ in range(3):
        graph.replay()
    replayed = counts.tolist() == [15, 9] and row[6].item() == 3000 and path[0].item() == 48
    replayed = replayed and bool((hist.sum(1) == 48).all())
    enabled.zero_()
    graph.replay()
    switched = counts.tolist() == [15, 9] and path[0].item() == 48
    return [
        Result("PC38 (b): graph captured, reset, replayed 3 times", str(counts.tolist()), replayed),
        Result("the same graph with the flag at 0", str(counts.tolist()), switched),
    ]


def train(folder: Path, probes: bool) -> tuple[list[str], float]:
    """Losses as Megatron prints them, and the median milliseconds an iteration."""
    command = [sys.executable, "-m", "megatron_probes.launch", str(PRETRAIN), *MEGATRON_FLAGS.split()]
    if probes:
        config = folder / "probes.yaml"
        config.write_text(f"output: {json.dumps(str(folder / 'run'))}\n")
        command += ["--probe-config", str(config)]
    rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29531",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **rank, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    output = done.stdout + done.stderr
    losses = re.findall(r"lm loss: (\S+)", output)
    times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", output)]
    if done.returncode or len(times) < 20:
        raise RuntimeError(output[-1500:])
    return losses, statistics.median(times[10:])


def check_megatron() -> list[Result]:
    if importlib.util.find_spec("megatron") is None:
        return [Result("Megatron on one GPU, probes on and off", "megatron-core is not installed", None)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            off, off_ms = train(Path(folder), probes=False)
            on, on_ms = train(Path(folder), probes=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return [Result("Megatron on one GPU, probes on and off", str(error), False)]
    return [
        Result("Megatron: losses with probes on and off", "equal" if on == off else "differ", on == off),
        Result(
            "Megatron: iteration, off and on",
            f"{off_ms:.1f} and {on_ms:.1f} ms ({on_ms / off_ms - 1:+.1%})",
            None,
        ),
    ]


CHECKS = {
    "stats": check_stats,
    "residual": check_residual,
    "counts": check_counts,
    "repeat": check_repeatability,
    "speed": check_speed,
    "graph": check_graph,
    "megatron": check_megatron,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=CHECKS, action="append", help="run this check only; may be repeated"
    )
    parser.add_argument("--json", metavar="PATH", help="write the results here")
    arguments = parser.parse_args()
    if "cuda" not in ops.compiled_devices():
        print("gpu_check: the CUDA library is not loaded; run scripts/gpu_check.sh, which builds it")
        return 2
    torch.manual_seed(0)
    results: list[Result] = []
    for name in arguments.only or CHECKS:
        try:
            results += CHECKS[name]()
        except RuntimeError as error:  # a launch that fails must not hide the other figures
            results.append(Result(name, f"raised: {error}", False))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for r in results:
        verdict = "" if r.passed is None else "ok" if r.passed else "FAILED"
        print(f"{r.check:62} {r.figure:>28}  {verdict}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(r) for r in results], indent=1))
    return int(any(r.passed is False for r in results))


if __name__ == "__main__":
    sys.exit(main())
