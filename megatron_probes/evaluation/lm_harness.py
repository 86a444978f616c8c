"""lm-evaluation-harness on a scorer: its tasks run on Megatron checkpoints in any layout.

Every rank runs the harness on all requests, in step; the scorer spreads the work. Needs the `eval` extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_probes.evaluation.generation import Choose, cut_context, generate, greedy, sampler
from megatron_probes.evaluation.scoring import Row, Scorer, sum_nll
from megatron_probes.evaluation.suite import HarnessTask, SuiteError
from megatron_probes.evaluation.tokenization import Tokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

DEFAULT_NEW_TOKENS = 256


class HarnessModel(TemplateLM):
    """The harness's view of a scorer and a tokenizer. Texts get no special tokens but its prefix token."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._scorer = scorer
        self._text = tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._text.end_of_document

    @property
    def prefix_token_id(self) -> int:
        begin = self._text.begin_of_document
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """Tokens that the model can be given."""
        return self._scorer.context_length

    @property
    def tokenizer_name(self) -> str:
        return str(self._text.identity)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self._text.encode(string).ids)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for (_context, text), context, continuation in requests:
            if len(continuation) > self.max_length:
                raise SuiteError(
                    f"lm-eval: {text[:40]!r}... alone is longer than the context of {self.max_length} tokens"
                )
            ids = tuple([*context, *continuation][-(self.max_length + 1) :])
            rows.append(Row(ids, len(ids) - len(continuation)))
        return [(-sum_nll(score), bool(score.greedy_N.all())) for score in self._scorer.score(rows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        rows: list[Row] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            for context, continuation in map(make_disjoint_window, windows):
                rows.append(Row((*context, *continuation), len(context)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._scorer.score(rows), strict=True):
            totals[owner] -= sum_nll(score)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        alike: dict[_Decoding, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(_Decoding.of(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for decoding, members in alike.items():
            room = self.max_length - decoding.max_new_tokens + 1
            if room < 1:
                raise SuiteError(
                    f"lm-eval: max_gen_toks {decoding.max_new_tokens} fills the context of {self.max_length} "
                    "tokens; lower it in the task's generation_kwargs"
                )
            prompts = [self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in members]
            done = generate(
                self._scorer,
                self._text,
                [cut_context(prompt, room)[0] for prompt in prompts],
                max_new_tokens=decoding.max_new_tokens,
                stop=decoding.stop,
                choose=decoding.choose(members),
            )
            for i, out in zip(members, done, strict=True):
                texts[i] = out.text
        return texts


@dataclass(frozen=True)
class _Decoding:
    """How a request is generated; requests of one kind go together."""

    stop: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    top_p: float

    @staticmethod
    def of(options: Mapping[str, Any]) -> _Decoding:
        until = options.get("until") or ()
        return _Decoding(
            stop=(until,) if isinstance(until, str) else tuple(until),
            max_new_tokens=int(
                options.get("max_gen_toks", options.get("max_new_tokens", DEFAULT_NEW_TOKENS))
            ),
            temperature=float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
            top_p=float(options.get("top_p", 1.0)),
        )

    def choose(self, members: Sequence[int]) -> Choose:
        """Greedy at temperature 0; else a sample that depends on the request's place alone."""
        return (
            sampler([(0, i) for i in members], self.temperature, self.top_p) if self.temperature else greedy
        )


def run_harness(spec: HarnessTask, scorer: Scorer, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the metrics of the harness's tasks as ``<task>/<metric>``, without its standard errors.

    Raises ``SuiteError`` for a task that it doesn't know.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    path = None if spec.include_path is None else str(spec.include_path)
    manager = TaskManager(include_path=path, include_defaults=path is None)
    if not set(spec.tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=path)  # reads the thousands of files that come with the harness
    unknown = [name for name in spec.tasks if name not in manager.all_tasks]
    if unknown:
        raise SuiteError(f"tasks.{spec.name}.tasks: lm-eval knows no task {unknown[0]!r}")
    # None on all ranks but the first of each node
    found: Any = lm_eval.simple_evaluate(
        model=HarnessModel(scorer, tokenizer),
        tasks=list(spec.tasks),
        num_fewshot=spec.num_fewshot,
        limit=spec.limit,
        bootstrap_iters=0,
        log_samples=False,
        task_manager=manager,
        random_seed=0,
        numpy_random_seed=0,
        torch_random_seed=0,
        fewshot_random_seed=0,
    )
    results = scorer.share(found["results"] if scorer.is_writer else None)
    assert results is not None
    return {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in sorted(results.items())
        for metric, value in sorted(metrics.items())
        if isinstance(value, int | float) and "_stderr" not in metric and "," in metric
    }
