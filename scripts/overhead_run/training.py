"""One rank's training, in which every step runs in the mode that the plan says."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_probes.catalog import Priority
from overhead_run.counting import Counts, Stopwatch, count
from overhead_run.plan import Mode, Phase, Step

MODEL = "4 layers, hidden size 256, 4 experts (top 2) of 512, sequence 256, vocabulary 4096"

LAYOUTS = {
    1: "",
    2: "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    " --expert-tensor-parallel-size 1",
    4: "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    " --expert-tensor-parallel-size 1",
}
"""Number of ranks -> Megatron's flags."""


def megatron_flags(ranks: int, steps: int, probe_config: Path, out: Path) -> list[str]:
    """Command line of Megatron's training script."""
    return f"""
        --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256
        --max-position-embeddings 256 --position-embedding-type rope --no-rope-fusion
        --normalization RMSNorm --swiglu --ffn-hidden-size 512 --disable-bias-linear
        --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
        {LAYOUTS[ranks]} --use-distributed-optimizer
        --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
        --no-masked-softmax-fusion --distributed-backend gloo
        --micro-batch-size 2 --global-batch-size 4 --train-iters {steps}
        --lr 1e-4 --min-lr 1e-4 --clip-grad 1.0 --seed 1234
        --mock-data --split 98,1,1 --data-cache-path {out} --num-workers 0
        --tokenizer-type NullTokenizer --vocab-size 4095
        --log-interval 1 --eval-interval {steps + 1} --eval-iters 0
        --probe-config {probe_config}
    """.split()


@dataclass
class Measured:
    """What one rank saw, by step in the order of the plan."""

    began: list[float] = field(default_factory=list)
    """`time.perf_counter()` when the step began."""
    hooks_s: list[float] = field(default_factory=list)
    """In the probes' code on the training thread, the reduction included."""
    reduction_s: list[float] = field(default_factory=list)
    """In the probes' collectives, waiting for other ranks included."""
    counts: dict[Mode, Counts] = field(default_factory=dict)


def run_rank(plan: Sequence[Step], flags: Sequence[str]) -> Measured:
    """Train through the plan; in a process of its own."""
    from megatron.training import training

    from megatron_probes.adapters import megatron_lm
    from megatron_probes.cpu import pretrain_gpt
    from megatron_probes.schedule import Schedule
    from megatron_probes.session import ProbeSession

    switch = _Switch(plan, training.train_step)
    Schedule.due = lambda self, step: switch.due(step)  # type: ignore[method-assign]
    guard = ProbeSession.guard
    ProbeSession.guard = lambda self, probe, call: switch.hooks.wrap(guard(self, probe, call))  # type: ignore[method-assign]
    megatron_lm.install()
    setup = training.setup_model_and_optimizer

    @functools.wraps(setup)
    def setup_with_switch(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **kwargs)  # attaches the probes
        session = megatron_lm.attach(model, optimizer, training.get_args())
        for name in ("step_begin", "pass_begin", "step_end"):
            setattr(session, name, switch.hooks.wrap(getattr(session, name)))
        session.ledger.reduce = switch.reduction.wrap(session.ledger.reduce)
        switch.watched = training.train_step
        training.train_step = functools.partial(switch.train_step, optimizer, training.get_args())
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = setup_with_switch
    sys.argv = ["pretrain_gpt.py", *flags]
    pretrain_gpt.main()
    return switch.measured


class _Switch:
    """Runs each step with or without what is measured.

    Off, the probes' hooks are there with their gates closed, and neither the step's begin nor its end
    reaches the session: nothing is reduced.
    """

    def __init__(self, plan: Sequence[Step], plain: Callable[..., Any]) -> None:
        self._plan = plan
        self._plain = plain
        self.watched: Callable[..., Any] = plain
        self.hooks = Stopwatch()
        self.reduction = Stopwatch()
        self.measured = Measured()

    def due(self, step: int) -> Priority:
        """In place of `Schedule.due`: the plan says what is measured at `step` (1-based)."""
        return Priority.P1 if self._plan[step - 1].mode is Mode.P1 else Priority.P0

    def train_step(self, optimizer: Any, args: argparse.Namespace, *call: Any, **named: Any) -> Any:
        measured = self.measured
        step = self._plan[len(measured.began)]
        measured.began.append(time.perf_counter())
        args.log_params_norm = args.log_num_zeros_in_grad = step.mode is Mode.MEGATRON
        for part in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
            part.config.log_num_zeros_in_grad = step.mode is Mode.MEGATRON
        probed = step.mode in (Mode.P0, Mode.P1)
        run = functools.partial(self.watched if probed else self._plain, *call, **named)
        if step.phase is Phase.COUNTED:
            outcome, measured.counts[step.mode] = count(run)
        else:
            outcome = run()
        measured.hooks_s.append(self.hooks.take())
        measured.reduction_s.append(self.reduction.take())
        return outcome
