"""Megatron's training loop seen from outside: where a step begins and ends, and what the job is doing.

The functions are looked up in ``megatron.training.training`` at call time in all supported versions, so
rebinding the module's names is enough.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

from megatron_probes.adapters.megatron_lm import checkpoint
from megatron_probes.adapters.megatron_lm.gradients import ReplicationCheck
from megatron_probes.adapters.megatron_lm.held_out import EvaluationWatch
from megatron_probes.adapters.megatron_lm.losses import LossWatch
from megatron_probes.adapters.megatron_lm.model_shape import flops_of_batch
from megatron_probes.formulas.flops import ModelShape
from megatron_probes.probes import Facts
from megatron_probes.session import JobState, ProbeSession


def watch_loop(
    session: ProbeSession,
    args: argparse.Namespace,
    shape: ModelShape | None,
    check: ReplicationCheck | None,
    losses: LossWatch,
    evaluations: EvaluationWatch,
) -> None:
    """Rebinds the loop's functions to ones that tell the session; once per process.

    ``shape`` is None where no FLOP convention covers the model.
    """
    from megatron.training import training

    loop = _Loop(session, args, shape, check, losses)
    training.train_step = loop.watch_train_step(training.train_step)
    training.training_log = loop.watch_training_log(training.training_log)
    training.evaluate = loop.watch_state(evaluations.watch_evaluate(training.evaluate), JobState.EVALUATING)
    training.evaluate_and_print_results = evaluations.watch_caller(training.evaluate_and_print_results)
    training.save_checkpoint = loop.watch_save(training.save_checkpoint)
    training.train = loop.watch_train(training.train)
    atexit.register(session.close)


class _Loop:
    def __init__(
        self,
        session: ProbeSession,
        args: argparse.Namespace,
        shape: ModelShape | None,
        check: ReplicationCheck | None,
        losses: LossWatch,
    ) -> None:
        self._session = session
        self._losses = losses
        self._check = check
        self._args = args
        self._shape = shape
        self._loss_scale: float | None = None
        self._done = False

    def watch_train_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        session, signature = self._session, inspect.signature(train_step)

        @functools.wraps(train_step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            call = bound.arguments
            step = call["iteration"] + 1
            learning_rate = _learning_rate(call["optimizer"])
            call["forward_step_func"] = self._losses.wrap(call["forward_step_func"])
            call["forward_backward_func"] = self._watch_pass(call["forward_backward_func"])
            if self._check is not None:
                self._check.report()
            session.step_begin(step)
            outcome = train_step(*bound.args, **bound.kwargs)
            session.step_end(self._facts(step, learning_rate, call["optimizer"], outcome))
            return outcome

        return watched

    def _watch_pass(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's rerun machine may run the pass of one step again: the last run counts."""

        @functools.wraps(forward_backward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._session.pass_begin()
            return forward_backward(*args, **kwargs)

        return watched

    def _facts(self, step: int, learning_rate: float | None, optimizer: Any, outcome: Any) -> Facts:
        _, skipped_iter, _, should_exit, _, grad_norm, *_ = outcome
        skipped = None
        if skipped_iter and not should_exit:
            skipped = "overflow" if grad_norm is None else "threshold"
        sequences = self._sequences_of_step()
        context: dict[str, int | float] = {
            "context/consumed_samples": int(self._args.consumed_train_samples) + sequences
        }
        if learning_rate is not None:
            context["context/learning_rate"] = learning_rate
        if self._loss_scale is not None:
            context["context/loss_scale"] = self._loss_scale
        clip = optimizer.config.clip_grad
        return Facts(
            step=step,
            time=time.time(),
            step_time_s=0.0,
            skipped=skipped,
            clip_threshold=clip if clip > 0 else None,
            flops=None if self._shape is None else flops_of_batch(self._shape, self._args, sequences),
            context=context,
        )

    def _sequences_of_step(self) -> int:
        """The global batch; Megatron adds it to its own count only after ``train_step`` returned."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        return get_num_microbatches() * self._args.micro_batch_size * self._session.topology.size("dp")

    def watch_training_log(self, training_log: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron reads the loss scale for its log anyway: it is the scale of the next step."""
        signature = inspect.signature(training_log)

        @functools.wraps(training_log)
        def watched(*args: Any, **kwargs: Any) -> Any:
            loss_scale = signature.bind(*args, **kwargs).arguments["loss_scale"]
            self._loss_scale = float(loss_scale) if isinstance(loss_scale, (int, float)) else None
            return training_log(*args, **kwargs)

        return watched

    def watch_state(self, call: Callable[..., Any], state: JobState) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._done:
                self._session.enter(state)
            try:
                return call(*args, **kwargs)
            finally:
                if not self._done:
                    self._session.enter(JobState.TRAINING)

        return watched

    def watch_save(self, save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        save = self.watch_state(save_checkpoint, JobState.SAVING)
        signature = inspect.signature(save_checkpoint)

        @functools.wraps(save_checkpoint)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = save(*args, **kwargs)
            call = signature.bind(*args, **kwargs).arguments
            if not call.get("non_persistent_ckpt", False):
                checkpoint.save_sidecar(self._session, self._args.save, call["iteration"])
            return result

        return watched

    def watch_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                result = train(*args, **kwargs)
            except SystemExit as exit_:
                self._finish(JobState.FINISHED if exit_.code in (None, 0) else JobState.FAILED)
                raise
            except BaseException:
                self._finish(JobState.FAILED)
                raise
            self._finish(JobState.FINISHED)
            return result

        return watched

    def _finish(self, state: JobState) -> None:
        self._done = True
        self._session.finish(state)


def _learning_rate(optimizer: Any) -> float | None:
    """The rate that this step will use; a host number in all of Megatron's schedulers."""
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    return float(rate) if isinstance(rate, (int, float)) else None
