"""What is evaluated: the suite's file, validated whole before anything is loaded."""

from __future__ import annotations

import os
import string
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator


class SuiteError(ValueError):
    """A suite, a data file or a checkpoint that can't be used; the message names it and the fix."""


class Part(BaseModel):
    """A frozen part of the suite that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Texts = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
Numbers = Annotated[
    tuple[int, ...], BeforeValidator(lambda value: (value,) if isinstance(value, int) else value)
]
Prefix = Annotated[
    Literal["eod", "bos", "none"],
    Field(description="Token before each text. A first token without one has no context and isn't scored."),
]


class TokenizerSpec(Part):
    """The tokenizer that the model was trained with."""

    kind: Literal["bytes", "sentencepiece", "tiktoken", "huggingface"] = Field(
        description="`bytes`: a token is a byte of UTF-8; the others are read from `path`."
    )
    path: Path | None = Field(
        default=None,
        description="SentencePiece model, tiktoken vocabulary (`.tiktoken`, or Megatron's `.json`) or "
        "`tokenizer.json`.",
    )
    end_of_document: int | None = Field(
        default=None, ge=0, description="Id of the end-of-document token; by default the tokenizer's own."
    )
    begin_of_document: int | None = Field(
        default=None, ge=0, description="Id of the begin-of-document token; by default the tokenizer's own."
    )
    pattern: Literal["v1", "v2"] | str = Field(
        default="v2", description="tiktoken: the pattern that splits text; `v1` and `v2` are Megatron's."
    )
    special_tokens: int = Field(
        default=0, ge=0, description="tiktoken: ids below the first text token (Megatron's default is 1000)."
    )

    @model_validator(mode="after")
    def _has_file(self) -> TokenizerSpec:
        if (self.path is None) != (self.kind == "bytes"):
            need = "takes no path: remove it" if self.kind == "bytes" else "needs a path to its file"
            raise ValueError(f"kind {self.kind} {need}")
        return self


class NamedPart(Part):
    """What every task has."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_]*$", description="Stands in the tags: eval/<name>/...")


class DataPart(NamedPart):
    """What tasks on the user's data have: a JSON-lines file."""

    data: Path = Field(description="JSON-lines file; a relative path starts at the suite's folder.")
    limit: int | None = Field(default=None, ge=1, description="Only the first so many lines.")


class PerplexityTask(DataPart):
    """NLL, perplexity and bits per byte of held-out documents."""

    kind: Literal["perplexity"]
    text_field: str = "text"
    context: str = Field(default="", description="Template of a text before the document, not scored.")
    prefix: Prefix = "eod"
    score_end: bool = Field(default=True, description="Score the end-of-document token as a target too.")
    stride: int | None = Field(
        default=None,
        ge=1,
        description="Tokens from one window of a long document to the next; half the context by default.",
    )


class ChoiceTask(DataPart):
    """Multiple choice by the likelihood of the answers."""

    kind: Literal["multiple_choice"]
    prompt: str = Field(default="{prompt}", description="Template: {field} is replaced by the item's field.")
    choice: str = Field(default=" {choice}", description="Template of what follows the prompt.")
    choices_field: str = "choices"
    answer_field: str = Field(default="answer", description="Field with the right choice's position from 0.")
    prefix: Prefix = "eod"


class GenerationPart(DataPart):
    """What tasks that generate have in common."""

    prompt: str = "{prompt}"
    prefix: Prefix = "eod"
    stop: Texts = Field(default=(), description="Generation ends before the first of these strings.")
    max_new_tokens: int = Field(default=64, ge=1)


class GreedyTask(GenerationPart):
    """Generation at temperature 0, scored."""

    kind: Literal["greedy"]
    match: Literal["exact", "contains", "scorer"] = Field(
        default="exact",
        description="`exact`: equals an answer but for white space at its ends; `contains`: an answer "
        "occurs; `scorer`: the user's function.",
    )
    answer_field: str = Field(default="answer", description="Field with the answer, or a list of them.")
    scorer: str | None = Field(default=None, description="`file.py:function(item, text)`, a score in 0..1.")

    @model_validator(mode="after")
    def _names_scorer(self) -> GreedyTask:
        if (self.scorer is None) == (self.match == "scorer"):
            raise ValueError("`match: scorer` and `scorer: file.py:function` belong together")
        return self


class PassAtKTask(GenerationPart):
    """The chance that one of k samples is right."""

    kind: Literal["pass_at_k"]
    scorer: str = Field(description="`file.py:function(item, text)`: true where the sample is right.")
    samples: int = Field(ge=1, description="n: samples drawn a problem.")
    k: Numbers = Field(default=(1,), min_length=1, description="The first is eval/<name>/pass_at_k.")
    temperature: float = Field(default=0.8, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)
    time_limit_s: float = Field(default=10.0, gt=0, description="Of one call of the scorer.")
    memory_limit_mb: int = Field(default=1024, ge=64, description="Of the scorer's process.")

    @model_validator(mode="after")
    def _enough_samples(self) -> PassAtKTask:
        if not 1 <= min(self.k) <= max(self.k) <= self.samples:
            raise ValueError(f"k {list(self.k)}: must be 1 to samples, {self.samples}")
        return self


class GroundingTask(GenerationPart):
    """Overlap of the generated box with the reference."""

    kind: Literal["grounding"]
    box_field: str = Field(default="box", description="Field with [left, top, right, bottom].")


ScoredTask = Annotated[ChoiceTask | GreedyTask | PassAtKTask | GroundingTask, Field(discriminator="kind")]


class MediaGainTask(DataPart):
    """The score of another task with the media less its score without."""

    kind: Literal["media_gain"]
    score: dict[str, Any] = Field(
        description="The scored task without name and data; its prompt holds {media}."
    )
    media_field: str = Field(default="media", description="Field with a text or a list of token ids.")
    without: str = Field(default="", description="What stands in the place of the media that is left out.")

    @model_validator(mode="after")
    def _scored_task(self) -> MediaGainTask:
        task = self.scored
        if "{media}" not in task.prompt:
            raise ValueError(f"score.prompt {task.prompt!r} holds no {{media}}: say where the media goes")
        return self

    @property
    def scored(self) -> ChoiceTask | GreedyTask | PassAtKTask | GroundingTask:
        """The task that is scored twice."""
        shared = {"name": self.name, "data": self.data, "limit": self.limit}
        return _Scored.model_validate({"task": {**self.score, **shared}}).task


class _Scored(Part):
    task: ScoredTask


class HarnessTask(NamedPart):
    """Tasks of lm-evaluation-harness."""

    kind: Literal["lm_eval"]
    tasks: Texts = Field(min_length=1, description="Their names in the harness.")
    include_path: Path | None = Field(default=None, description="Folder with task files of one's own.")
    num_fewshot: int | None = Field(default=None, ge=0)
    limit: int | None = Field(default=None, ge=1, description="Only the first so many items of each.")


ItemTask = PerplexityTask | ChoiceTask | GreedyTask | PassAtKTask | GroundingTask | MediaGainTask
"""A task that is scored item by item."""

TaskSpec = Annotated[ItemTask | HarnessTask, Field(discriminator="kind")]


class Averaging(Part):
    """How the averaged weights are made from the checkpoints up to the evaluated one."""

    method: Literal["uniform", "ema"] = "uniform"
    decay: float = Field(default=0.9, gt=0, lt=1, description="ema: share of the average that is kept.")
    last: int | None = Field(default=None, ge=1, description="Only the last so many checkpoints.")


class Suite(Part):
    """A whole suite."""

    tokenizer: TokenizerSpec
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    averaging: Averaging | None = Field(
        default=None, description="Evaluate averaged weights beside the raw ones."
    )
    decision_weights: Literal["raw", "averaged"] = Field(
        default="raw", description="The weights whose score stands under the plain tag."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Suite:
        twice = [name for name, n in Counter(task.name for task in self.tasks).items() if n > 1]
        if twice:
            raise ValueError(f"the task name {twice[0]!r} stands twice: rename one")
        if self.decision_weights == "averaged" and self.averaging is None:
            raise ValueError("decision_weights: averaged needs an `averaging` section")
        return self

    def check_scorers(self, *, allowed: bool) -> None:
        """Raises ``SuiteError`` where a task runs the user's code and that isn't ``allowed``."""
        for task in self.tasks:
            score = task.scored if isinstance(task, MediaGainTask) else task
            if scorer := getattr(score, "scorer", None):
                check_allowed(scorer, allowed)


def check_allowed(scorer: str, allowed: bool) -> None:
    """Raises ``SuiteError`` where the user's scorer may not run."""
    if not allowed:
        raise SuiteError(
            f"scorer {scorer}: the suite runs code, and may run what the model wrote; "
            "if that is what you want give --run-scorers"
        )


def load_suite(path: str | os.PathLike[str]) -> Suite:
    """Return the suite in the YAML file ``path``; relative paths in it start at its folder.

    Raises ``SuiteError`` with one line a fault.
    """
    path = Path(path)
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"--suite {path}: can't be read ({error}); give the path of a YAML file") from None
    except yaml.YAMLError as error:
        raise SuiteError(f"--suite {path}: not valid YAML: {error}") from None
    if not isinstance(value, dict):
        raise SuiteError(f"--suite {path}: must hold the keys `tokenizer` and `tasks`")
    try:
        suite = Suite.model_validate(value)
    except ValidationError as error:
        raise SuiteError("\n".join(f"--suite {path}: {fault}" for fault in _faults(error))) from None
    return _rooted(suite, path.parent)


def _rooted(suite: Suite, folder: Path) -> Suite:
    """The suite with its relative paths resolved against ``folder``; raises where a file is missing."""
    tokenizer = suite.tokenizer
    if tokenizer.path is not None:
        tokenizer = tokenizer.model_copy(
            update={"path": _existing(folder / tokenizer.path, "tokenizer.path")}
        )
    tasks = tuple(_rooted_task(task, folder) for task in suite.tasks)
    return suite.model_copy(update={"tokenizer": tokenizer, "tasks": tasks})


def _rooted_task(task: Any, folder: Path) -> Any:
    if isinstance(task, HarnessTask):
        path = task.include_path
        return task if path is None else task.model_copy(update={"include_path": folder / path})
    update: dict[str, Any] = {"data": _existing(folder / task.data, f"tasks.{task.name}.data")}
    if isinstance(task, MediaGainTask):
        if scorer := task.score.get("scorer"):
            update["score"] = task.score | {"scorer": _rooted_scorer(scorer, folder, task.name)}
    elif getattr(task, "scorer", None):
        update["scorer"] = _rooted_scorer(task.scorer, folder, task.name)
    return task.model_copy(update=update)


def _rooted_scorer(scorer: str, folder: Path, task: str) -> str:
    file, _, function = scorer.rpartition(":")
    if not file or not function.isidentifier():
        raise SuiteError(f"tasks.{task}.scorer {scorer!r}: write file.py:function")
    return f"{_existing(folder / file, f'tasks.{task}.scorer')}:{function}"


def _existing(path: Path, key: str) -> Path:
    if not path.is_file():
        raise SuiteError(f"{key}: there is no file {path}; give a path relative to the suite's folder")
    return path


def _faults(error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        where = ".".join(str(part) for part in fault["loc"])
        what = fault["msg"].removeprefix("Value error, ")
        given = f" (value {fault['input']!r})" if not isinstance(fault["input"], dict) else ""
        yield f"{where}: {what}{given}" if where else f"{what}"


def template_fields(template: str) -> Iterable[str]:
    """The names in braces of ``template``; raises ``SuiteError`` where it isn't a plain template."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise SuiteError(f"template {template!r}: {error}; write {{field}}, and {{{{ for a brace") from None
    for _, field, form, conversion in parts:
        if field is None:
            continue
        if not field.isidentifier() or form or conversion:
            raise SuiteError(f"template {template!r}: {{{field}}} must be the plain name of a field")
        yield field
