"""The user's scorer, in a process of its own for every call, with limits of time and memory.

It guards against mistakes and against code that runs away, such as generated programs. It is no prison: what
must not read the machine's files or its network belongs into a container.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_probes.evaluation.documents import Item
from megatron_probes.evaluation.suite import check_allowed

_CHILD = """
import json, os, resource, runpy, sys
file, function, memory, seconds, result = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
call = json.load(sys.stdin)
score = runpy.run_path(file)[function](call["item"], call["text"])
os.write(result, json.dumps(float(score)).encode())
os.close(result)
"""
_MOST_MESSAGE = 200


@dataclass(frozen=True)
class Verdict:
    """What a scorer said of one text; a call that failed scores 0 and names the problem."""

    score: float
    problem: str | None = None


class UserScorer:
    """``file.py:function(item, text)``, called with the item's fields and the generated text.

    It returns a score from 0 to 1, or a bool. Raises ``SuiteError`` unless ``allowed``.
    """

    def __init__(
        self,
        scorer: str,
        *,
        allowed: bool,
        time_limit_s: float = 10.0,
        memory_limit_mb: int = 1024,
    ) -> None:
        check_allowed(scorer, allowed)
        self._file, _, self._function = scorer.rpartition(":")
        self._time_limit_s = time_limit_s
        self._memory = memory_limit_mb << 20

    def scores(self, calls: Sequence[tuple[Item, str]]) -> list[Verdict]:
        """Verdicts of ``calls``, each an item and the generated text."""
        return [self._verdict(json.dumps({"item": dict(item.fields), "text": text})) for item, text in calls]

    def _verdict(self, call: str) -> Verdict:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)  # a process that escaped may hold the other end
        seconds = math.ceil(self._time_limit_s)
        with (
            os.fdopen(reader, "rb") as results,
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryFile() as errors,
            tempfile.TemporaryFile() as given,
        ):
            given.write(call.encode())
            given.seek(0)
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-c", _CHILD, os.path.abspath(self._file), self._function),
                    *(str(self._memory), str(seconds), str(writer)),
                ],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(writer,),
                cwd=folder,
                env={"PATH": os.defpath},
                start_new_session=True,
            )
            os.close(writer)
            try:
                process.wait(self._time_limit_s)
            except subprocess.TimeoutExpired:
                return Verdict(0.0, f"took longer than {self._time_limit_s:g} s")
            finally:
                with contextlib.suppress(ProcessLookupError):  # what it started may run on
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(0)
            return _read(results.read() or b"", process.returncode, errors.read().decode(errors="replace"))


def _read(result: bytes, returncode: int, errors: str) -> Verdict:
    try:
        score: Any = json.loads(result)
    except ValueError:
        lines = errors.strip().splitlines()
        how = lines[-1] if lines else f"ended with exit status {returncode} and without a score"
        return Verdict(0.0, how[:_MOST_MESSAGE])
    if not isinstance(score, float) or not 0.0 <= score <= 1.0:
        return Verdict(0.0, f"returned {score}: a score must lie from 0 to 1")
    return Verdict(score)
