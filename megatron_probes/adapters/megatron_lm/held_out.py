"""Megatron's own ``evaluate``, shown to the held-out probe."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_probes.adapters.megatron_lm.losses import loss_mask
from megatron_probes.catalog import snake_case
from megatron_probes.config.model import HeldOutConfig
from megatron_probes.evaluation.suite import SuiteError, TokenizerSpec
from megatron_probes.evaluation.tokenization import build_tokenizer
from megatron_probes.probes import HeldOutProbe
from megatron_probes.session import ProbeSession

_TOKENIZER_KINDS = {
    "SentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
    "HuggingFaceTokenizer": "huggingface",
}
PROGRESS_LOWEST, PROGRESS_HIGHEST = 0.005, 0.02


def token_bytes(
    config: HeldOutConfig, args: argparse.Namespace, vocab_size: int
) -> tuple[list[int] | None, str]:
    """Original bytes that each token id covers, and a phrase that says why there are none."""
    if config.token_bytes == "none":
        return None, "held_out.token_bytes is none: no BPB"
    try:
        spec = _tokenizer_spec(config, args)
        lengths = build_tokenizer(spec).token_bytes()
    except SuiteError as error:
        return None, f"no BPB: {error}"
    return (lengths + [0] * vocab_size)[: max(vocab_size, len(lengths))], ""


def _tokenizer_spec(config: HeldOutConfig, args: argparse.Namespace) -> TokenizerSpec:
    if config.token_bytes == "bytes":
        return TokenizerSpec(kind="bytes")
    kind = _TOKENIZER_KINDS.get(args.tokenizer_type)
    if kind is None:
        raise SuiteError(
            f"the bytes of --tokenizer-type {args.tokenizer_type} are not known; for a byte-level vocabulary "
            "write held_out.token_bytes: bytes"
        )
    path = Path(args.tokenizer_model)
    if kind == "huggingface" and path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise SuiteError(f"--tokenizer-model {args.tokenizer_model} is no local file")
    end = 0 if kind in ("huggingface", "tiktoken") else None
    special = getattr(args, "tiktoken_num_special_tokens", 0) if kind == "tiktoken" else 0
    return TokenizerSpec.model_validate(
        {"kind": kind, "path": path, "end_of_document": end, "special_tokens": special or 0}
    )


def progress_hint(args: argparse.Namespace) -> str:
    """Says when evaluation runs more or less often than every 0.5 to 2 % of progress."""
    interval, total = getattr(args, "eval_interval", None), getattr(args, "train_iters", None)
    if not interval or not total:
        return ""
    share = interval / total
    if PROGRESS_LOWEST <= share <= PROGRESS_HIGHEST:
        return ""
    low, high = max(1, round(total * PROGRESS_LOWEST)), max(1, round(total * PROGRESS_HIGHEST))
    return (
        f"held-out evaluation every {100 * share:.3g} % of progress; 0.5 to 2 % is --eval-interval {low} "
        f"to {high}"
    )


class EvaluationWatch:
    """Wraps ``evaluate`` and its caller: the caller knows the set's name, ``evaluate`` runs the set."""

    def __init__(self, session: ProbeSession, args: argparse.Namespace) -> None:
        self._session = session
        self._args = args
        self._probe = session.held_out
        self._labels: torch.Tensor | None = None
        self._set = "validation"
        self._index = 0

    def watch_labels(self, model: Any) -> None:
        """Remembers the target ids of the micro-batch whose loss is computed next."""
        probe, compute = self._probe, model.compute_language_model_loss
        if probe is None:
            return

        @functools.wraps(compute)
        def watched(labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if probe.gate.open:
                self._labels = labels
            return compute(labels, *args, **kwargs)

        model.compute_language_model_loss = watched

    def watch_caller(self, evaluate_and_print_results: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(evaluate_and_print_results)

        @functools.wraps(evaluate_and_print_results)
        def watched(*args: Any, **kwargs: Any) -> Any:
            prefix = str(signature.bind(*args, **kwargs).arguments["prefix"])
            self._set = "test" if prefix.endswith("test set") else "validation"
            self._index = 0
            return evaluate_and_print_results(*args, **kwargs)

        return watched

    def watch_evaluate(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        probe = self._probe
        if probe is None:
            return evaluate
        signature = inspect.signature(evaluate)

        @functools.wraps(evaluate)
        def watched(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            forward_step = bound.arguments["forward_step_func"]
            bound.arguments["forward_step_func"] = self._watch_forward(probe, forward_step)
            name = self._next_name()
            self._session.evaluation_begin()
            outcome = evaluate(*bound.args, **bound.kwargs)
            timed_out = bool(outcome[2])
            self._session.evaluation_end(None if timed_out else name)
            return outcome

        return watched

    def _watch_forward(self, probe: HeldOutProbe, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        observe = self._session.guard(probe, self._observe)

        @functools.wraps(forward_step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            output, loss_func = forward_step(*args, **kwargs)
            labels, self._labels = self._labels, None

            def observed_loss(losses: Any, *rest: Any, **named: Any) -> Any:
                if probe.gate.open:
                    observe(probe, losses, loss_func, labels)
                return loss_func(losses, *rest, **named)

            return output, observed_loss

        return watched

    @staticmethod
    def _observe(
        probe: HeldOutProbe, losses: torch.Tensor, loss_func: Callable[..., Any], labels: torch.Tensor | None
    ) -> None:
        probe.observe(losses, loss_mask(loss_func, losses), labels)

    def _next_name(self) -> str:
        """``validation`` or ``test``, and which of several validation sets."""
        index, self._index = self._index, self._index + 1
        if not getattr(self._args, "multiple_validation_sets", False):
            return self._set
        names = getattr(self._args, "validation_set_names", None)
        return f"{self._set}_{snake_case(names[index]) if names else index}"
