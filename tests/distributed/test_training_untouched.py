"""Training with probes is, bit for bit, training without them."""

import functools
import hashlib
import random

import numpy as np
import pytest
import torch
from layout_run import PER_TOKEN_LOSS, probe_config, train, training_flags
from layouts import ONE, Layout
from toy_gpt import DENSE_TIED, MOE_UNTIED

from megatron_probes.cpu.fork import fork_ranks
from megatron_probes.sinks import read_records

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

STEPS = 20
FOUR_RANKS = Layout(
    name="TP2 x DP2, EP2",
    ranks=4,
    tp=2,
    ep=2,
    flags=(
        "--sequence-parallel",
        "--expert-tensor-parallel-size=1",
        "--bf16",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ),
)
DROPOUT = ("--hidden-dropout=0.1", "--attention-dropout=0.1")
BALANCED = ("--moe-router-load-balancing-type=aux_loss", "--moe-aux-loss-coeff=1e-2")


def train_and_digest(rank: int, flags: list[str]) -> dict[str, object]:
    """What is left of a run on a rank: its weights, its random generators, Megatron's losses."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.training import training

    left: dict[str, object] = {"losses": []}
    setup, log = training.setup_model_and_optimizer, training.training_log

    def watched_setup(*args, **kwargs):
        left["model"], left["optimizer"], scheduler = setup(*args, **kwargs)
        return left["model"], left["optimizer"], scheduler

    @functools.wraps(log)
    def watched_log(loss_dict, *args, **kwargs):
        left["losses"].append({name: value.tolist() for name, value in loss_dict.items()})
        return log(loss_dict, *args, **kwargs)

    training.setup_model_and_optimizer, training.training_log = watched_setup, watched_log
    train(flags)
    model, optimizer = left.pop("model"), left.pop("optimizer")
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    weights = [p for chunk in model for p in chunk.parameters()]
    states = [
        torch.get_rng_state(),
        torch.cuda.get_rng_state(),
        *get_cuda_rng_tracker().get_states().values(),
    ]
    return left | {
        "weights": digest(weights),
        "master weights": digest(masters),
        "torch, cuda and tracked generators": digest(states),
        "numpy": repr(np.random.get_state()),
        "python": repr(random.getstate()),
    }


def digest(tensors) -> str:
    """SHA-256 of the bytes of some tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize(
    ("layout", "model", "flags"),
    [
        pytest.param(ONE, DENSE_TIED, DROPOUT, id="fp32-1-rank"),
        pytest.param(FOUR_RANKS, MOE_UNTIED, DROPOUT + BALANCED, id="bf16-distributed-optimizer-moe-4-ranks"),
    ],
)
def test_probes_on_or_off_give_equal_bits(tmp_path, layout, model, flags):
    left = {}
    for probes in (False, True):
        folder = tmp_path / ("on" if probes else "off")
        config = probe_config(folder, sample_every=3) if probes else None
        all_flags = training_flags(
            layout, model, folder, steps=STEPS, config=config, flags=(*PER_TOKEN_LOSS, *flags)
        )
        left[probes] = fork_ranks(
            functools.partial(train_and_digest, flags=all_flags),
            layout.ranks,
            timeout_s=400,
            log_dir=folder / "logs",
            preloaded=True,
        )
    assert [record.step for record in read_records(tmp_path / "on" / "probes")] == list(range(1, STEPS + 1))
    assert len(left[True][-1]["losses"]) == STEPS
    assert left[True][-1]["losses"][0], "Megatron logged no loss on the last rank"
    for on, off in zip(left[True], left[False], strict=True):
        for what in off:
            assert on[what] == off[what], what
