"""Megatron's own pretrain() on the CPU runtime: layouts, data, resuming, host reads, starting ranks."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_probes.cpu import PRETRAIN_SCRIPT, run_script
from megatron_probes.cpu.fork import fork_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 400
STEPS = 4

MODEL = (
    "--num-layers=2",
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--seq-length=32",
    "--max-position-embeddings=32",
    "--tokenizer-type=NullTokenizer",
    "--vocab-size=255",
    "--transformer-impl=local",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-gradient-accumulation-fusion",
    "--attention-dropout=0",
    "--hidden-dropout=0",
    "--use-cpu-initialization",
    "--distributed-backend=gloo",
    "--micro-batch-size=2",
    "--global-batch-size=8",
    "--lr=1e-3",
    "--log-interval=1",
    "--eval-iters=0",
    "--eval-interval=1000",
    "--num-workers=0",
)
EXPERTS = (
    "--num-experts=4",
    "--moe-router-topk=2",
    "--moe-router-load-balancing-type=aux_loss",
    "--moe-aux-loss-coeff=1e-2",
    "--moe-token-dispatcher-type=alltoall",
    "--disable-bias-linear",
    "--swiglu",
)
SPLIT_WEIGHTS = ("--tensor-model-parallel-size=2", "--sequence-parallel")
STAGES = ("--pipeline-model-parallel-size=2",)
CONTEXT = ("--context-parallel-size=2",)
EXPERT_RANKS = ("--expert-model-parallel-size=2", "--expert-tensor-parallel-size=1")
DISTRIBUTED_OPTIMIZER = (
    "--bf16",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)
PREDICTION = ("--mtp-num-layers=1", "--position-embedding-type=rope", "--no-rope-fusion")


def train_on(rank: int, flags: list[str]) -> None:
    run_script(PRETRAIN_SCRIPT, flags)


def train(ranks: int, folder: Path, *flags: str, steps: int = STEPS) -> list[float]:
    """Trains in `folder` and returns the loss of each step that was run, as TensorBoard holds it."""
    events = folder / "events"
    all_flags = [*MODEL, "--mock-data", *flags, f"--train-iters={steps}", f"--tensorboard-dir={events}"]
    fork_ranks(
        partial(train_on, flags=all_flags),
        ranks,
        timeout_s=TIMEOUT_S,
        log_dir=folder / "logs",
        preloaded=True,
    )
    return logged(events)


def logged(events: Path) -> list[float]:
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    return [event.value for event in accumulator.Scalars("lm loss")]


def assert_learns(losses: list[float], steps: int = STEPS) -> None:
    assert len(losses) == steps
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)  # an untrained model knows nothing
    assert losses[-1] < losses[0] - 0.02


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(1, tmp_path_factory.mktemp("one_rank"))


def test_one_rank_learns(one_rank: list[float]) -> None:
    assert_learns(one_rank)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, (), id="DP2"),
        pytest.param(2, CONTEXT, id="CP2"),
        pytest.param(2, SPLIT_WEIGHTS, id="TP2-SP"),
        pytest.param(4, (*SPLIT_WEIGHTS, *CONTEXT), id="TP2-SP-CP2"),
        pytest.param(1, ("--recompute-granularity=selective",), id="recompute"),
    ],
)
def test_layouts_that_start_alike_train_alike(
    ranks: int, flags: tuple[str, ...], one_rank: list[float], tmp_path: Path
) -> None:
    assert train(ranks, tmp_path, *flags) == pytest.approx(one_rank, rel=1e-6)


def test_pipelines_train_alike(tmp_path: Path) -> None:
    """Megatron seeds a stage by its place in the pipeline, so pipelines of 2 start alike."""
    losses = train(2, tmp_path / "PP2", *STAGES)
    assert_learns(losses)
    assert train(8, tmp_path / "all", *STAGES, *SPLIT_WEIGHTS) == pytest.approx(losses, rel=1e-6)


def test_virtual_pipeline_stages(tmp_path: Path) -> None:
    flags = [*STAGES, "--num-layers=4", "--num-virtual-stages-per-pipeline-rank=2"]
    assert_learns(train(2, tmp_path, *flags))


def test_experts_train_alike(tmp_path: Path) -> None:
    losses = train(2, tmp_path / "EP2", *EXPERTS, *EXPERT_RANKS)
    assert_learns(losses)
    flags = [*EXPERTS, *EXPERT_RANKS, *SPLIT_WEIGHTS]
    assert train(4, tmp_path / "TP2-EP2", *flags) == pytest.approx(losses, rel=1e-6)


def test_multi_token_prediction_trains_alike(tmp_path: Path) -> None:
    losses = train(1, tmp_path / "one", *PREDICTION)
    assert_learns(losses)
    assert train(2, tmp_path / "TP2-SP", *PREDICTION, *SPLIT_WEIGHTS) == pytest.approx(losses, rel=1e-6)
    assert_learns(train(2, tmp_path / "PP2", *PREDICTION, *STAGES))


def test_the_distributed_optimizer_resumes_bitwise(tmp_path: Path) -> None:
    checkpoints = f"--save={tmp_path / 'checkpoints'}"
    whole = train(2, tmp_path / "whole", *DISTRIBUTED_OPTIMIZER, steps=2 * STEPS)
    saving = [checkpoints, f"--save-interval={STEPS}", f"--exit-interval={STEPS}"]
    first = train(2, tmp_path / "first", *DISTRIBUTED_OPTIMIZER, *saving, steps=2 * STEPS)
    loading = f"--load={tmp_path / 'checkpoints'}"
    second = train(2, tmp_path / "second", *DISTRIBUTED_OPTIMIZER, loading, steps=2 * STEPS)
    assert_learns(whole, 2 * STEPS)
    assert first + second == whole


# --------------------------------------------------------------------- data


def write_dataset(rank: int, prefix: str, low: int, high: int) -> None:
    """Writes documents of tokens from [low, high) as Megatron's indexed dataset."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    draw = np.random.default_rng(low)
    for length in draw.integers(20, 60, 100):
        builder.add_document(draw.integers(low, high, length), [length])
    builder.finalize(prefix + ".idx")


def train_and_watch(rank: int, flags: list[str]) -> list[int]:
    from megatron_probes.cpu import pretrain_gpt

    tokens: list[int] = []
    get_batch = pretrain_gpt.get_batch

    def watched(*args: Any) -> dict[str, Any]:
        batch = get_batch(*args)
        tokens.extend(batch["tokens"].flatten().tolist())
        return batch

    pretrain_gpt.get_batch = watched
    sys.argv = ["pretrain_gpt.py", *flags]
    pretrain_gpt.main()
    return tokens


def test_blended_indexed_data(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in ("low", "high")]
    for prefix, low in zip(prefixes, (0, 100), strict=True):
        write = partial(write_dataset, prefix=prefix, low=low, high=low + 100)
        fork_ranks(write, 1, timeout_s=TIMEOUT_S, preloaded=True)
    blend = ["--data-path", "0.75", prefixes[0], "0.25", prefixes[1], f"--data-cache-path={tmp_path}/cache"]
    flags = [*MODEL, *SPLIT_WEIGHTS, *blend, "--split=100,0,0"]
    ranks = fork_ranks(
        partial(train_and_watch, flags=[*flags, "--train-iters=5"]),
        2,
        timeout_s=TIMEOUT_S,
        log_dir=tmp_path / "logs",
        preloaded=True,
    )
    assert ranks[0] == ranks[1]  # tensor-parallel ranks see one batch
    samples = np.array(ranks[0]).reshape(5 * 8, 32)
    of_low, of_high = (samples < 100).all(1), ((samples >= 100) & (samples < 200)).all(1)
    assert (of_low | of_high).all()
    assert of_high.mean() == pytest.approx(0.25, abs=0.05)


# --------------------------------------------------------------- host reads


def train_and_count(rank: int, flags: list[str], events: str) -> list[tuple[int, int, int]]:
    """For each step the host reads of the training thread: all, Megatron's, and the package's."""
    import megatron.core
    from megatron.training import training

    from megatron_probes.cpu.host_reads import count_host_reads

    counts: list[tuple[int, int, int]] = []
    train_step = training.train_step
    megatron_root = Path(next(iter(megatron.core.__path__))).parent

    def counted(*args: Any, **kwargs: Any) -> Any:
        with count_host_reads() as reads:
            result = train_step(*args, **kwargs)
        counts.append((reads.total, reads.under(megatron_root), reads.under(REPOSITORY / "megatron_probes")))
        return result

    training.train_step = counted
    run_script(PRETRAIN_SCRIPT, [*flags, f"--tensorboard-dir={events}"])
    return counts


def test_host_reads_of_a_training_step(tmp_path: Path) -> None:
    flags = [*EXPERTS, *EXPERT_RANKS, *SPLIT_WEIGHTS, *DISTRIBUTED_OPTIMIZER]
    uncounted = train(4, tmp_path / "uncounted", *flags)
    all_flags = [*MODEL, "--mock-data", *flags, f"--train-iters={STEPS}"]
    ranks = fork_ranks(
        partial(train_and_count, flags=all_flags, events=str(tmp_path / "counted")),
        4,
        timeout_s=TIMEOUT_S,
        log_dir=tmp_path / "logs",
        preloaded=True,
    )
    assert logged(tmp_path / "counted") == uncounted  # counting changes no bit
    for counts in ranks:
        assert len(counts) == STEPS
        assert len(set(counts[1:])) == 1  # the first step differs: Megatron checks its own memory
        total, megatrons, ours = counts[-1]
        assert ours == 0
        assert total == megatrons
        assert total > 20


# --------------------------------------------------------- starting the ranks


def started(*command: str, path: Path | None = None) -> str:
    """Output of a command that must succeed, with `path` before the environment's packages."""
    roots = [str(REPOSITORY), *([str(path)] if path else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    run = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_ranks_of_torchrun(one_rank: list[float], tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = [*MODEL, "--mock-data", *SPLIT_WEIGHTS, f"--train-iters={STEPS}", f"--tensorboard-dir={tmp_path}"]
    started(*torchrun, "-m", "megatron_probes.cpu", str(PRETRAIN_SCRIPT), *flags)
    assert logged(tmp_path) == pytest.approx(one_rank, rel=1e-6)


def checkout(folder: Path) -> Path:
    """The installed Megatron laid out as a checkout is: without built dataset helpers."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent
    core = folder / "megatron" / "core"
    for directory, ignored in ((core, "datasets"), (core / "datasets", "helpers_cpp*.so")):
        directory.mkdir(parents=True)
        for entry in (wheel / directory.relative_to(core)).iterdir():
            if not entry.match(ignored):
                (directory / entry.name).symlink_to(entry)
    (folder / "megatron" / "training").symlink_to(wheel.parent / "training")
    return folder


def test_a_checkout_gets_the_wheels_dataset_helpers(one_rank: list[float], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import runpy\n"
        "from megatron.core import datasets\n"
        "print('datasets of', datasets.__file__)\n"
        f"runpy.run_path({str(PRETRAIN_SCRIPT)!r}, run_name='__main__')\n"
    )
    root = checkout(tmp_path / "checkout")
    flags = [*MODEL, "--mock-data", f"--train-iters={STEPS}", f"--tensorboard-dir={tmp_path / 'events'}"]
    output = started("-m", "megatron_probes.cpu.fork", "-n", "2", "--root", str(root), str(script), *flags)
    assert output.count(f"datasets of {root}") == 2
    assert logged(tmp_path / "events") == pytest.approx(one_rank, rel=1e-6)


def test_the_oldest_supported_wheel(tmp_path: Path) -> None:
    wheel = Path(os.environ.get("MEGATRON_CORE_0171", REPOSITORY / ".venv" / "megatron-core-0.17.1"))
    if not wheel.is_dir():
        pytest.skip(f"no megatron-core 0.17.1 in {wheel}: set MEGATRON_CORE_0171")
    flags = [*MODEL, "--mock-data", *SPLIT_WEIGHTS, *DISTRIBUTED_OPTIMIZER, f"--train-iters={STEPS}"]
    launcher = ("-m", "megatron_probes.cpu.fork", "-n", "4", str(PRETRAIN_SCRIPT))
    started(*launcher, *flags, f"--tensorboard-dir={tmp_path}", path=wheel)
    assert_learns(logged(tmp_path))
