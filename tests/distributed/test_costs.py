"""What the probes add to a step, counted: collectives, host reads, operators."""

import functools
import itertools
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_run import PER_TOKEN_LOSS, probe_config, train, training_flags
from layouts import ONE, Layout
from torch.utils._python_dispatch import TorchDispatchMode
from toy_gpt import MOE_UNTIED, ToyGPT

import megatron_probes
from megatron_probes.cpu.fork import fork_ranks
from megatron_probes.cpu.host_reads import count_host_reads

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

PACKAGE = Path(megatron_probes.__file__).parent
CPU_RUNTIME = PACKAGE / "cpu"
SCRIPT = CPU_RUNTIME / "pretrain_gpt.py"
TORCH = Path(torch.__file__).parent
STEPS = 4
FOUR_RANKS = Layout(name="TP2 x PP2", ranks=4, tp=2, pp=2)
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list"),
    *("gather", "gather_object", "monitored_barrier", "recv", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "send"),
)


def asked_by_package() -> bool:
    """Whether the package, and not torch, Megatron or the CPU runtime, made the call that runs now."""
    frame = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file == SCRIPT:
            return False
        if not (file.is_relative_to(TORCH) or file.is_relative_to(CPU_RUNTIME) or file == Path(__file__)):
            return file.is_relative_to(PACKAGE)
        frame = frame.f_back
    return False


def collectives_of_steps(rank: int, flags: list[str]) -> list[int]:
    """Collectives that the package issues from one step's start to the next one's, for each step but the
    first, which also compares the ranks' replicated gradients once."""
    from megatron.training import training

    issued, at_start = [0], []

    def counted(collective):
        @functools.wraps(collective)
        def call(*args, **kwargs):
            issued[0] += asked_by_package()
            return collective(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(getattr(dist, name)))
    train_step = training.train_step

    @functools.wraps(train_step)
    def watched(*args, **kwargs):
        at_start.append(issued[0])
        return train_step(*args, **kwargs)

    training.train_step = watched
    train(flags)
    return [after - before for before, after in itertools.pairwise(at_start[1:])]


def run(body, layout: Layout, model: ToyGPT, folder: Path, **config):
    flags = training_flags(
        layout.of_experts(),
        model,
        folder,
        steps=STEPS,
        config=probe_config(folder, **config),
        flags=PER_TOKEN_LOSS,
    )
    return fork_ranks(
        partial(body, flags=flags), layout.ranks, timeout_s=300, log_dir=folder / "logs", preloaded=True
    )


@pytest.mark.parametrize("sample_every", [100, 1], ids=["P0", "P0 and P1"])
def test_a_step_adds_four_collectives_whatever_the_depth(tmp_path, sample_every):
    counts = {}
    for layers in (2, 6):
        model = ToyGPT(**{**MOE_UNTIED.__dict__, "layers": layers})
        folder = tmp_path / str(layers)
        counts[layers] = run(collectives_of_steps, FOUR_RANKS, model, folder, sample_every=sample_every)
    assert counts[2] == counts[6]
    assert {count for rank in counts[2] for count in rank} == {4}


def reads_of_training(rank: int, flags: list[str]) -> tuple[Counter[str], int]:
    """Host reads on the training thread during the training loop: the package's by place, all others."""
    from megatron.training import training

    loop = training.train
    counted: list = []

    @functools.wraps(loop)
    def watched(*args, **kwargs):
        with count_host_reads() as reads:
            counted.append(reads)
            return loop(*args, **kwargs)

    training.train = watched
    train(flags)
    (reads,) = counted
    ours = Counter({site: n for site, n in reads.by_site.items() if site.startswith(f"{PACKAGE}/")})
    return ours, reads.total - ours.total()


@pytest.mark.parametrize("sample_every", [100, 2], ids=["P0", "P0 and P1"])
def test_the_training_thread_reads_nothing_from_the_device_for_us(tmp_path, sample_every):
    for ours, others in run(reads_of_training, FOUR_RANKS, MOE_UNTIED, tmp_path, sample_every=sample_every):
        assert not ours
        assert others > 0, "the counter sees nothing at all"


class PackageOperators(TorchDispatchMode):
    """Operators that the package dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if asked_by_package():
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def observed(rank: int, flags: list[str]) -> dict[str, list[Counter[str]]]:
    """Calls of the probes' observations, and operators that the package dispatches: in the steps of the
    loop, and last in one more step with all hooks in place that the session knows nothing of."""
    from megatron.training import training

    from megatron_probes import probes

    calls: Counter[str] = Counter()

    def counted(name, observe):
        @functools.wraps(observe)
        def call(*args, **kwargs):
            calls[name] += 1
            return observe(*args, **kwargs)

        return call

    for probe in {vars(probes)[name] for name in probes.__all__ if name.endswith("Probe")}:
        for name in [name for name in vars(probe) if name.startswith("observe")]:
            setattr(probe, name, counted(f"{probe.__name__}.{name}", getattr(probe, name)))

    found: dict[str, list[Counter[str]]] = {"calls": [], "operators": []}
    train_step, loop, last = training.train_step, training.train, {}

    @functools.wraps(train_step)
    def watched_step(*args, **kwargs):
        last["call"] = args, kwargs
        return measure(lambda: train_step(*args, **kwargs))

    def measure(step):
        calls.clear()
        with PackageOperators() as operators:
            outcome = step()
        found["calls"].append(Counter(calls))
        found["operators"].append(operators.seen)
        return outcome

    @functools.wraps(loop)
    def watched_loop(*args, **kwargs):
        result = loop(*args, **kwargs)
        (forward, batches, model, optimizer, scheduler, config, run_pass, *rest), named = last["call"]
        measure(
            lambda: train_step(
                forward, batches, model, optimizer, scheduler, config, run_pass.__wrapped__, *rest, **named
            )
        )
        return result

    training.train_step, training.train = watched_step, watched_loop
    train(flags)
    return found


def test_outside_a_training_step_hooks_do_nothing(tmp_path):
    (found,) = run(observed, ONE, MOE_UNTIED, tmp_path, sample_every=2)
    *inside, outside = found["operators"]
    assert all(inside), "the operators of the package go unseen"
    assert not outside
    *inside, outside = found["calls"]
    assert all(inside)
    assert not outside


def test_a_step_without_p1_calls_nothing_of_it(tmp_path):
    (found,) = run(observed, ONE, MOE_UNTIED, tmp_path, sample_every=2)
    p0_only, sampled = found["calls"][0], found["calls"][1]
    added = {name: sampled[name] - p0_only[name] for name in sampled if sampled[name] != p0_only[name]}
    assert added == {"GradientProbe.observe_clipped": 1}
    more = sum(found["operators"][1].values()) - sum(found["operators"][0].values())
    assert more > 0, "P1 looks at nothing"
    assert found["operators"][0] == found["operators"][2]
