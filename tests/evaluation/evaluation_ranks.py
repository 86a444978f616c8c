"""What the evaluation's tests run in forked ranks; functions are pickled, so they live in a module."""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_probes.cpu import PRETRAIN_SCRIPT
from megatron_probes.cpu.fork import fork_ranks, gloo_process_group
from megatron_probes.evaluation import Context, Row, RowScore, TaskResult, build_tokenizer, load_suite
from megatron_probes.evaluation.suite import Averaging, TokenizerSpec

T = TypeVar("T")

SEQ_LENGTH = 64
END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
STEPS = (12, 24)


def run_on_ranks(fn: Callable[[int], T], ranks: int) -> list[T]:
    return fork_ranks(fn, ranks, timeout_s=300.0, preloaded=True)


def write_dataset(_: int, *, prefix: Path) -> None:
    """Modules of the standard library as Megatron's indexed dataset of bytes."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]:
        document = torch.tensor([*path.read_bytes()[:20000], END_OF_DOCUMENT], dtype=torch.int32)
        builder.add_document(document, [document.numel()])
    builder.finalize(f"{prefix}.idx")


def flags(folder: Path, *more: str, tp: int = 2, experts: bool = True) -> list[str]:
    moe = """--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
        --moe-ffn-hidden-size 64 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"""
    text = f"""
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128
        --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}
        --position-embedding-type rope --no-rope-fusion --normalization RMSNorm --swiglu
        --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 {moe if experts else ""}
        --tensor-model-parallel-size {tp} {"--sequence-parallel" if tp > 1 else ""}
        --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
        --no-masked-softmax-fusion --use-cpu-initialization --distributed-backend gloo
        --micro-batch-size 8 --global-batch-size 8 --train-iters {STEPS[-1]} --lr 5e-3 --min-lr 5e-3
        --lr-warmup-iters 2 --seed 1 --data-path {folder / "text"} --split 100,0,0 --num-workers 0
        --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 36
        --save {folder / "checkpoint"} --save-interval {STEPS[0]} --ckpt-format torch_dist
        --eval-iters 0 --eval-interval 1000 --log-interval 4
    """
    return [*text.split(), *more]


def train(rank: int, *, flags: Sequence[str], logs: Path) -> None:
    """Run Megatron's training with ``flags``; its output goes to ``logs``."""
    logs.mkdir(parents=True, exist_ok=True)
    log = os.open(logs / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [str(PRETRAIN_SCRIPT), *flags]
    runpy.run_path(str(PRETRAIN_SCRIPT), run_name="__main__")


@dataclass(frozen=True)
class Place:
    """A checkpoint in a layout."""

    checkpoints: Path
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    iteration: int = STEPS[-1]
    padding_side: str = "right"
    rows: int = 16

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def scorer(self) -> Any:
        """The model as a scorer, within a process group."""
        from megatron_probes.evaluation.megatron import (
            Layout,
            MegatronScorer,
            build_model,
            find_checkpoints,
            initialize,
            load_weights,
        )
        from megatron_probes.evaluation.megatron.scorer import BatchLimits

        layout = Layout(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep)
        (checkpoint,) = find_checkpoints(self.checkpoints, [self.iteration])
        initialize(layout, checkpoint)
        model = build_model(checkpoint, layout)
        load_weights(model, checkpoint)
        return MegatronScorer(
            model.chunks,
            context_length=SEQ_LENGTH,
            vocab_size=VOCAB_SIZE,
            limits=BatchLimits(rows=self.rows),
            padding_side=self.padding_side,  # type: ignore[arg-type]
        )


def score_rows(_: int, *, place: Place, rows: Sequence[Row]) -> list[RowScore]:
    with gloo_process_group():
        return place.scorer().score(rows)


def run_tasks(
    _: int, *, place: Place, suite: Path, out: Path, keep_items: bool = True, new_series: bool = False
) -> list[TaskResult]:
    """The suite on the checkpoint, as the command runs it."""
    from megatron_probes.evaluation.megatron import Layout, evaluate_checkpoints, find_checkpoints
    from megatron_probes.evaluation.megatron.scorer import BatchLimits

    with gloo_process_group():
        results, _ = evaluate_checkpoints(
            find_checkpoints(place.checkpoints, [place.iteration]),
            load_suite(suite),
            out,
            layout=Layout(tp=place.tp, pp=place.pp, dp=place.dp, ep=place.ep),
            limits=BatchLimits(rows=place.rows),
            keep_items=keep_items,
            new_series=new_series,
        )
        return results


def byte_context(scorer: Any) -> Context:
    return Context(scorer, build_tokenizer(TokenizerSpec(kind="bytes")))


def read_weights(_: int, *, folder: Path) -> dict[str, np.ndarray]:
    """The model's tensors in a torch_dist checkpoint, whole, by Megatron's own reader."""
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    with gloo_process_group():
        tensors = load_plain_tensors(str(folder))
    keep = ("embedding.", "decoder.", "output_layer.")
    return {k: v.double().numpy() for k, v in tensors.items() if k.startswith(keep)}


def average_weights(_: int, *, place: Place, averaging: Averaging) -> dict[str, np.ndarray]:
    """All weights of the model after `load_average` over the two saved steps."""
    from megatron_probes.evaluation.megatron import Layout, build_model, find_checkpoints, initialize
    from megatron_probes.evaluation.megatron.averaging import averaged_over, load_average

    with gloo_process_group():
        saved = find_checkpoints(place.checkpoints, "all")
        initialize(Layout(), saved[-1])
        model = build_model(saved[-1], Layout())
        used = averaged_over(averaging, saved, saved[-1])
        load_average(model, used, averaging)
        return {name: tensor.numpy() for name, tensor in model.named_tensors()}


class Malicious:
    """Touches ``proof`` when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.proof,))


def poison(_: int, *, folder: Path, kind: str, proof: Path) -> None:
    """Put something malicious into a pickle of the checkpoint in ``folder``."""
    import torch
    import torch.distributed.checkpoint as dcp

    value = Malicious(proof)
    match kind:
        case "index":
            metadata = dcp.FileSystemReader(folder).read_metadata()
            metadata.planner_data = value
            (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        case "object":
            dcp.save({"common_state/shard_0_1": [value]}, checkpoint_id=folder, no_dist=True)
        case "common.pt":  # where Megatron kept it before 0.19
            torch.save({"args": value}, folder / "common.pt")
        case "legacy":
            file = next(folder.rglob("model_optim_rng.pt"))
            torch.save({"args": value}, file)
