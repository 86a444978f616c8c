"""A suite is refused whole, with the key and the fix, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_probes.evaluation import SuiteError, load_suite
from megatron_probes.evaluation.suite import MediaGainTask, PassAtKTask, template_fields


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text("{}\n")
    (tmp_path / "score.py").write_text("def right(item, text): return True\n")
    return tmp_path


def load(folder: Path, tasks: str, top: str = "tokenizer: {kind: bytes}"):
    (folder / "suite.yaml").write_text(f"{top}\ntasks:\n{tasks}\n")
    return load_suite(folder / "suite.yaml")


DOCS = "  - {name: docs, kind: perplexity, data: data.jsonl}"


@pytest.mark.parametrize(
    ("tasks", "top", "expected"),
    [
        ("  - {name: docs, kind: perplexity, data: data.jsonl, strde: 4}", None, "strde: Extra inputs"),
        ("  - {name: docs, kind: perplexity, data: none.jsonl}", None, "tasks.docs.data: there is no file"),
        ("  - {name: Docs, kind: perplexity, data: data.jsonl}", None, "tasks.0.perplexity.name"),
        ("  - {name: docs, kind: riddles, data: data.jsonl}", None, "riddles"),
        (f"{DOCS}\n{DOCS}", None, "the task name 'docs' stands twice"),
        ("  []", None, "tasks"),
        (DOCS, "tokenizer: {kind: bytes, path: x}", "kind bytes takes no path"),
        (DOCS, "tokenizer: {kind: tiktoken}", "kind tiktoken needs a path"),
        (DOCS, "tokenizer: {kind: tiktoken, path: none}", "tokenizer.path: there is no file"),
        (DOCS, "{tokenizer: {kind: bytes}, decision_weights: averaged}", "valid YAML"),
        (DOCS, "tokenizer: {kind: bytes}\ndecision_weights: averaged", "needs an `averaging` section"),
        (
            "  - {name: p, kind: pass_at_k, data: data.jsonl, scorer: 'score.py:right', samples: 4, k: 5}",
            None,
            "must be 1 to samples, 4",
        ),
        (
            "  - {name: p, kind: pass_at_k, data: data.jsonl, scorer: score.py, samples: 4}",
            None,
            "write file.py:function",
        ),
        ("  - {name: g, kind: greedy, data: data.jsonl, match: scorer}", None, "belong together"),
        (
            "  - {name: m, kind: media_gain, data: data.jsonl, score: {kind: greedy, prompt: '{prompt}'}}",
            None,
            "holds no {media}",
        ),
    ],
)
def test_faults_name_the_key(folder: Path, tasks: str, top: str | None, expected: str) -> None:
    with pytest.raises(SuiteError) as error:
        load(folder, tasks, top or "tokenizer: {kind: bytes}")
    assert expected in str(error.value)


def test_paths_start_at_the_suites_folder(folder: Path) -> None:
    suite = load(
        folder,
        "  - {name: p, kind: pass_at_k, data: data.jsonl, scorer: 'score.py:right', samples: 4, k: [1, 4]}\n"
        "  - name: gain\n    kind: media_gain\n    data: data.jsonl\n"
        "    score: {kind: greedy, prompt: '{media}', match: scorer, scorer: 'score.py:right'}",
    )
    sampled, gain = suite.tasks
    assert isinstance(sampled, PassAtKTask)
    assert isinstance(gain, MediaGainTask)
    assert sampled.data == folder / "data.jsonl"
    assert sampled.scorer == gain.score["scorer"] == f"{folder / 'score.py'}:right"
    assert gain.scored.name == "gain"


@pytest.mark.parametrize("template", ["{", "{0}", "{a.b}", "{a!r}", "{a:>4}", "{}"])
def test_templates_hold_plain_fields(template: str) -> None:
    with pytest.raises(SuiteError, match="template"):
        list(template_fields(template))


def test_the_documented_example_is_a_suite() -> None:
    suite = load_suite(Path(__file__).parents[2] / "docs" / "evaluation_example" / "suite.yaml")
    assert {task.kind for task in suite.tasks} == {
        "perplexity",
        "multiple_choice",
        "greedy",
        "pass_at_k",
        "media_gain",
    }
