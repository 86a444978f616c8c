"""The chance that one of k samples is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_probes.evaluation.documents import Item
from megatron_probes.evaluation.generation import sampler
from megatron_probes.evaluation.suite import PassAtKTask
from megatron_probes.evaluation.tasks.base import Context, Outcome, Summary, total
from megatron_probes.evaluation.tasks.generative import Generation, Prompt
from megatron_probes.evaluation.user_scorer import UserScorer
from megatron_probes.formulas.evaluation import mean_pass_at_k


class PassAtK:
    """n samples a problem; sample i of the problem on line j is seeded by (seed, j, i)."""

    score_name = "pass_at_k"

    def __init__(self, spec: PassAtKTask, context: Context, values: dict[str, Any] | None = None) -> None:
        self._spec = spec
        self._context = context
        self._generation = Generation(spec, context, values)
        self._scorer = UserScorer(
            spec.scorer,
            allowed=context.run_code,
            time_limit_s=spec.time_limit_s,
            memory_limit_mb=spec.memory_limit_mb,
        )

    def prepare(self, item: Item) -> Prompt:
        return self._generation.prompt(item)

    def score(self, prepared: Sequence[Prompt]) -> list[Outcome]:
        n = self._spec.samples
        repeated = [prompt for prompt in prepared for _ in range(n)]
        seeds = [(self._spec.seed, prompt.item.line, i) for prompt in prepared for i in range(n)]
        choose = sampler(seeds, self._spec.temperature, self._spec.top_p)
        generated = self._generation.continuations(repeated, choose)
        calls = [(prompt.item, out.text) for prompt, out in zip(repeated, generated, strict=True)]
        scorer = self._context.scorer
        verdicts = scorer.share(self._scorer.scores(calls) if scorer.is_writer else None)
        assert verdicts is not None
        outcomes = []
        for j, prompt in enumerate(prepared):
            own = range(j * n, (j + 1) * n)
            outcomes.append(
                {
                    "line": prompt.item.line,
                    "texts": [generated[i].text for i in own],
                    "right": sum(verdicts[i].score >= 1.0 for i in own),
                    "samples": n,
                    "scorer_failed": sum(verdicts[i].problem is not None for i in own),
                    "problems": sorted({p for i in own if (p := verdicts[i].problem)}),
                    "prompts_cut": int(prompt.cut),
                }
            )
        return outcomes

    def summarize(self, outcomes: Sequence[Outcome]) -> Summary:
        counts = [(outcome["samples"], outcome["right"]) for outcome in outcomes]
        values: dict[str, float | int | None] = {"pass_at_k": mean_pass_at_k(counts, self._spec.k[0])}
        values |= {f"pass_at_{k}": mean_pass_at_k(counts, k) for k in self._spec.k}
        return Summary(
            values,
            {
                "problems": len(outcomes),
                "samples": total(outcomes, "samples"),
                "scorer_failed": total(outcomes, "scorer_failed"),
                "prompts_cut": total(outcomes, "prompts_cut"),
            },
        )
