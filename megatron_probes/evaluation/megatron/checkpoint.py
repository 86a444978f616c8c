"""Megatron checkpoints on disk: which there are, how they were saved, and what training was then."""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_probes.evaluation.megatron.safe_pickle import check_index, load_safely
from megatron_probes.evaluation.results import CheckpointIdentity
from megatron_probes.evaluation.suite import SuiteError

_ITERATION = re.compile(r"iter_(\d{7,})")
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class SavedLayout:
    """The ranks that a legacy checkpoint was saved by."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class Checkpoint:
    """One saved iteration: `<dir>/iter_0000100`."""

    folder: Path
    iteration: int

    @functools.cached_property
    def format(self) -> Literal["torch_dist", "torch"]:
        """`torch_dist` can be loaded into any layout, `torch` (legacy) into its own.

        Raises ``SuiteError`` for another format.
        """
        if (self.folder / "metadata.json").is_file():
            backend = json.loads((self.folder / "metadata.json").read_text()).get("sharded_backend")
            if backend == "torch_dist":
                return "torch_dist"
            raise SuiteError(
                f"--checkpoint: {self.folder} is saved as {backend}, which isn't read; save it with "
                "--ckpt-format torch_dist"
            )
        if any(self.rank_folders()):
            return "torch"
        raise SuiteError(
            f"--checkpoint: {self.folder} holds neither a torch_dist checkpoint (metadata.json) nor a legacy "
            "one (mp_rank_00/model_optim_rng.pt); save with --ckpt-format torch_dist"
        )

    def rank_folders(self) -> list[Path]:
        """Folders of the ranks of a legacy checkpoint."""
        return sorted(folder for folder in self.folder.iterdir() if _RANK_FOLDER.fullmatch(folder.name))

    @functools.cached_property
    def common(self) -> dict[str, Any]:
        """What isn't sharded: `args`, `iteration` and more, read safely."""
        if self.format == "torch":
            file = self.rank_folders()[0] / "model_optim_rng.pt"
            return load_safely(file, str(file))
        check_index(self.folder / ".metadata")
        if (self.folder / "common.pt").is_file():
            return load_safely(self.folder / "common.pt", str(self.folder / "common.pt"))
        return _common_state(self.folder)

    @property
    def args(self) -> argparse.Namespace:
        """Megatron's arguments of the run that saved it; raises ``SuiteError`` where it has none."""
        args = self.common.get("args")
        if not isinstance(args, argparse.Namespace):
            raise SuiteError(
                f"--checkpoint: {self.folder} holds no arguments, so the model's shape is unknown; save it "
                "by Megatron's own save_checkpoint"
            )
        return args

    @functools.cached_property
    def saved_layout(self) -> SavedLayout:
        """The layout of a legacy checkpoint, from the names of its folders."""
        args = self.args
        return SavedLayout(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            getattr(args, "expert_model_parallel_size", 1) or 1,
        )

    @property
    def tokens(self) -> int:
        """Valid targets seen: the probes' own count where it was saved, else samples times their length."""
        sidecar = self.folder / "megatron_probes" / "state.json"
        if sidecar.is_file():
            loss = json.loads(sidecar.read_text()).get("probes", {}).get("loss", {})
            if "tokens_total" in loss:
                return int(loss["tokens_total"])
        args = self.args
        return int(getattr(args, "consumed_train_samples", 0) or 0) * int(args.seq_length)

    def identity(self) -> CheckpointIdentity:
        """What results are filed under."""
        return CheckpointIdentity(
            path=str(self.folder), iteration=self.iteration, tokens=self.tokens, digest=self.digest
        )

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the names and sizes of all files and of the bytes at both ends of each."""
        digest = hashlib.sha256()
        for file in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            name = file.relative_to(self.folder)
            if name.parts[0] == "megatron_probes":
                continue
            size = file.stat().st_size
            digest.update(f"{name}\0{size}\0".encode())
            with file.open("rb") as content:
                digest.update(content.read(_SAMPLE_BYTES))
                content.seek(max(size - _SAMPLE_BYTES, 0))
                digest.update(content.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def _common_state(folder: Path) -> dict[str, Any]:
    """The object that holds what isn't sharded, as Megatron 0.19 and later keep it."""
    import torch.distributed.checkpoint as dcp
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    found = io.BytesIO()

    class Bytes(dcp.DefaultLoadPlanner):
        """Takes the object as the bytes that it is."""

        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            found.write(value.getvalue())

    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    reader = dcp.FileSystemReader(folder)
    dcp.load({key: io.BytesIO()}, storage_reader=reader, planner=Bytes(), no_dist=True)
    found.seek(0)
    return load_safely(found, f"{folder} (common state)")[0]


def find_checkpoints(folder: Path, iterations: Sequence[int] | Literal["all", "latest"]) -> list[Checkpoint]:
    """Return the checkpoints of ``iterations`` in the folder that Megatron saved to.

    ``folder`` may also be that of one iteration. Raises ``SuiteError`` naming those that aren't there.
    """
    if match := _ITERATION.fullmatch(folder.name):
        return [Checkpoint(folder, int(match[1]))]
    if not folder.is_dir():
        raise SuiteError(f"--checkpoint {folder}: there is no such folder; give Megatron's --save folder")
    saved = {
        int(match[1]): Checkpoint(path, int(match[1]))
        for path in sorted(folder.iterdir())
        if (match := _ITERATION.fullmatch(path.name))
    }
    if not saved:
        raise SuiteError(f"--checkpoint {folder}: holds no iter_NNNNNNN; give Megatron's --save folder")
    if iterations == "all":
        return list(saved.values())
    if iterations == "latest":
        # The newest folder may be half written: the tracker names the last that was finished.
        tracker = folder / "latest_checkpointed_iteration.txt"
        named = tracker.read_text().strip() if tracker.is_file() else ""
        iterations = [int(named) if named.isdigit() else max(saved)]
    missing = [iteration for iteration in iterations if iteration not in saved]
    if missing:
        raise SuiteError(
            f"--iteration {missing[0]}: {folder} holds {', '.join(map(str, saved))}; give one of these"
        )
    return [saved[iteration] for iteration in iterations]
