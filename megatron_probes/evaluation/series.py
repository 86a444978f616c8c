"""A series on disk: results of one suite on one checkpoint after another, comparable by construction.

<out>/series_001/definition.json                               fingerprints of its tasks, by their parts
<out>/series_001/results/iter_0000040/raw/<task>.json          one finished task
<out>/series_001/results/iter_0000040/raw/<task>.partial.jsonl outcomes of one that was interrupted
<out>/series_001/results/iter_0000040/raw/<task>.items.jsonl   outcomes of a finished one, if asked for
<out>/series_001/tensorboard/{by_step,by_tokens}/
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_probes.evaluation.fingerprint import Parts, differences, fingerprint
from megatron_probes.evaluation.results import CheckpointIdentity, TaskResult, Weights, write_tensorboard
from megatron_probes.evaluation.suite import SuiteError
from megatron_probes.evaluation.tasks import Outcome
from megatron_probes.sinks.record_file import decode_line, encode_line


class Store(Protocol):
    """Where a runner keeps what it has done."""

    def finished(self, task: str) -> TaskResult | None:
        """The result of a task that was run before."""

    def partial(self, task: str) -> list[Outcome]:
        """Outcomes of the first items of a task that was interrupted."""

    def append(self, task: str, outcomes: Sequence[Outcome]) -> None:
        """Keep outcomes of the next items."""

    def finish(self, result: TaskResult) -> None:
        """Keep a result; its outcomes aren't needed any more."""


class MemoryStore:
    """Keeps nothing: for evaluation inside training."""

    def finished(self, task: str) -> None:
        return None

    def partial(self, task: str) -> list[Outcome]:
        return []

    def append(self, task: str, outcomes: Sequence[Outcome]) -> None:
        pass

    def finish(self, result: TaskResult) -> None:
        pass


class Series:
    """Refuses to go on with other tasks under the names of old ones; new and missing tasks are fine."""

    def __init__(
        self, out: Path, parts: Mapping[str, Parts], *, new: bool = False, keep_items: bool = False
    ) -> None:
        """Open the newest series in ``out``; a ``new`` one, or the first, is begun.

        With ``keep_items`` the outcomes of single items, generated texts among them, stay on disk, in files
        that only the owner can read.

        Raises ``SuiteError`` naming the task and what changed in it.
        """
        self._keep_items = keep_items
        numbers = [int(folder.name.removeprefix("series_")) for folder in out.glob("series_[0-9]*")]
        newest = max(numbers, default=0)
        self.folder = out / f"series_{newest + (new or not numbers):03d}"
        self._path = self.folder / "definition.json"
        known: dict[str, Parts] = json.loads(self._path.read_text()) if self._path.is_file() else {}
        # As it will be read back, so that both compare equal.
        given: dict[str, Parts] = json.loads(json.dumps(parts))
        for name, task in given.items():
            if name in known and (changes := differences(known[name], task)):
                raise SuiteError(
                    f"task {name}: not the same as in {self.folder} ({'; '.join(changes)}). Its scores "
                    "don't compare with those before: undo the change, rename the task, or begin a series of "
                    "its own with --new-series"
                )
        self.definition = known | given
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self._path, json.dumps(self.definition, indent=1).encode())

    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each task of the series."""
        return {name: fingerprint(parts) for name, parts in self.definition.items()}

    def store(self, checkpoint: CheckpointIdentity, weights: Weights) -> SeriesStore:
        """Where results of ``checkpoint`` go."""
        folder = self.folder / "results" / f"iter_{checkpoint.iteration:07d}" / weights
        folder.mkdir(parents=True, exist_ok=True)
        return SeriesStore(folder, checkpoint, self.fingerprints(), keep_items=self._keep_items)

    def results(self) -> list[TaskResult]:
        """All finished results, by step."""
        files = sorted((self.folder / "results").glob("iter_*/*/*.json"))
        return [TaskResult.from_json(json.loads(file.read_text())) for file in files]

    def write_tensorboard(self, decision_weights: Weights) -> Path:
        """Write all results of the series for TensorBoard; returns the folder."""
        folder = self.folder / "tensorboard"
        definition = {"fingerprint": fingerprint(self.definition), "tasks": self.definition}
        write_tensorboard(folder, self.results(), decision_weights, definition)
        return folder


class SeriesStore:
    """Results of one checkpoint's raw or averaged weights.

    What another checkpoint of the same step left, or the task before it changed, is not taken up.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: CheckpointIdentity,
        fingerprints: Mapping[str, str],
        *,
        keep_items: bool = False,
    ) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._fingerprints = fingerprints
        self._keep_items = keep_items

    def finished(self, task: str) -> TaskResult | None:
        path = self._folder / f"{task}.json"
        if not path.is_file():
            return None
        result = TaskResult.from_json(json.loads(path.read_text()))
        same = result.checkpoint.digest == self._checkpoint.digest
        return result if same and result.fingerprint == self._fingerprints[task] else None

    def partial(self, task: str) -> list[Outcome]:
        path = self._partial(task)
        if not path.is_file():
            return []
        # A line that was cut off when the process died is scored again.
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        found = [decoded for line in whole if (decoded := decode_line(line)) is not None]
        if not found or found[0] != self._header(task):
            path.unlink()
            return []
        _replace(path, b"".join(encode_line(line) for line in found))
        return found[1:]

    def append(self, task: str, outcomes: Sequence[Outcome]) -> None:
        path = self._partial(task)
        lines = [] if path.is_file() else [self._header(task)]
        with open(path, "ab", opener=_owner_only) as file:
            file.write(b"".join(encode_line(line) for line in [*lines, *outcomes]))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, result: TaskResult) -> None:
        _replace(self._folder / f"{result.task}.json", encode_line(result.as_json()))
        partial = self._partial(result.task)
        if self._keep_items and partial.is_file():
            os.replace(partial, self._folder / f"{result.task}.items.jsonl")
        else:
            partial.unlink(missing_ok=True)

    def _partial(self, task: str) -> Path:
        return self._folder / f"{task}.partial.jsonl"

    def _header(self, task: str) -> dict[str, Any]:
        return {"fingerprint": self._fingerprints[task], "digest": self._checkpoint.digest}


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _replace(path: Path, content: bytes) -> None:
    """Write ``path`` whole or not at all."""
    partial = path.with_name(f"{path.name}.writing")
    with open(partial, "wb", opener=_owner_only if path.suffix == ".jsonl" else None) as file:
        file.write(content)
    os.replace(partial, path)
