"""Items for lm-evaluation-harness, and its tasks on them: run in forked ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation_ranks import Place, byte_context

from megatron_probes.cpu.fork import gloo_process_group
from megatron_probes.evaluation.suite import HarnessTask

_ROLLING = """
task: held_out_documents
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: byte_perplexity
  - metric: bits_per_byte
  - metric: word_perplexity
"""
_CHOICE = """
task: held_out_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: prompt
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
  - metric: acc_bytes
"""
_GENERATION = """
task: held_out_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: prompt
doc_to_target: answer
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list:
  - metric: exact_match
"""
TASKS = ("held_out_documents", "held_out_questions", "held_out_generation")


def write_harness_tasks(folder: Path, texts: Sequence[str], answers: Sequence[str]) -> None:
    """Data files and task files in ``folder``; ``answers`` are right for the generation's prompts."""
    words = ["s", "日本語", "import", "é", "    return", "ΣΩ", "naïve café", "e"]
    questions = [
        {
            "prompt": f"{text[:18]}:",
            "choices": [words[(i + 3 * j) % 8] + texts[i - j][: (5 * i + 2 * j) % 7] for j in range(4)],
            "answer": i % 4,
        }
        for i, text in enumerate(texts)
    ]
    prompts = [
        {"prompt": f"{text[:9]}:", "answer": answer} for text, answer in zip(texts, answers, strict=False)
    ]
    data = {
        "documents": [{"text": text} for text in texts],
        "questions": questions,
        "generation": prompts,
    }
    for (name, items), template in zip(data.items(), (_ROLLING, _CHOICE, _GENERATION), strict=True):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        (folder / f"{name}.yaml").write_text(template.format(data=path))


def run_harness_tasks(_: int, *, place: Place, folder: Path) -> dict[str, float]:
    from megatron_probes.evaluation.lm_harness import run_harness

    with gloo_process_group():
        context: Any = byte_context(place.scorer())
        spec = HarnessTask(name="harness", kind="lm_eval", tasks=TASKS, include_path=folder)
        return run_harness(spec, context.scorer, context.tokenizer)
