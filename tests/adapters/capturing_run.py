"""A small GPT with experts or prediction heads, trained by Megatron's own loop while its tensors are kept.

As a script, `capturing_run.py RUN.json`, it runs what `Run` describes in this rank.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_probes.cpu.fork import fork_ranks
from megatron_probes.sinks import StepRecord, read_records

SEQUENCE = 16
MODEL = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 32
    --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --position-embedding-type rope
    --no-rope-fusion --normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-bias-gelu-fusion
    --no-masked-softmax-fusion --use-cpu-initialization --distributed-backend gloo --calculate-per-token-loss
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 2 --log-interval 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 61 --num-workers 0
    --eval-iters 0 --eval-interval 1000
""".split()


@dataclass(frozen=True)
class Run:
    """Flags beside `MODEL`, the probes' configuration beside `output_dir`, and whether the script gives the
    model a padding mask: True where the loss mask is 0."""

    folder: str
    flags: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    gives_padding_mask: bool = False


@dataclass
class Captured:
    """What one rank saw in the counted forward passes of step 1, a micro-batch an entry."""

    losses: list[list[torch.Tensor]] = field(default_factory=list)
    """Of each micro-batch: per-token losses of the prediction heads, then of the main head."""
    masks: list[torch.Tensor] = field(default_factory=list)
    routing: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """By layer number: logits, bias, padding mask and map of each counted call."""
    biases: dict[int, torch.Tensor] = field(default_factory=dict)
    """Routing bias after the step, by layer number."""


class Capture:
    """Wraps Megatron's classes before the probes wrap their instances."""

    def __init__(self, gives_padding_mask: bool) -> None:
        self.seen = Captured()
        self._open = True
        self._pad_batches()
        self._watch_model(gives_padding_mask)
        self._watch_routers()
        self._watch_steps()

    def _pad_batches(self) -> None:
        """Every sample ends in padding, of a length of its own."""
        from megatron.core.datasets.gpt_dataset import MockGPTDataset

        get = MockGPTDataset.__getitem__

        def padded(dataset: Any, index: Any) -> dict[str, torch.Tensor]:
            sample = dict(get(dataset, index))
            sample["loss_mask"] = sample["loss_mask"].clone()
            sample["loss_mask"][SEQUENCE - 1 - (index or 0) % 5 :] = 0.0
            return sample

        MockGPTDataset.__getitem__ = padded

    def _watch_model(self, gives_padding_mask: bool) -> None:
        from megatron.core.models.gpt import GPTModel

        forward, compute, seen = GPTModel.forward, GPTModel.compute_language_model_loss, self.seen

        def watched_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            mask = kwargs.get("loss_mask")
            if gives_padding_mask and mask is not None:
                kwargs["padding_mask"] = mask == 0
            if self._open and mask is not None and model.post_process:
                seen.masks.append(mask.clone())
                seen.losses.append([])
            return forward(model, *args, **kwargs)

        def watched_compute(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            losses = compute(model, *args, **kwargs)
            if self._open:
                seen.losses[-1].append(losses.detach().clone())
            return losses

        GPTModel.forward, GPTModel.compute_language_model_loss = watched_forward, watched_compute

    def _watch_routers(self) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        routing = TopKRouter.routing

        def watched(router: Any, logits: torch.Tensor, padding_mask: Any = None, **kwargs: Any) -> Any:
            probs, chosen = routing(router, logits, padding_mask=padding_mask, **kwargs)
            if self._open and torch.is_grad_enabled():
                self.seen.routing.setdefault(router.layer_number, []).append(
                    {
                        "logits": logits.detach().clone().view(-1, logits.size(-1)),
                        "bias": None if router.expert_bias is None else router.expert_bias.clone(),
                        "padding": None if padding_mask is None else padding_mask.reshape(-1).clone(),
                        "chosen": chosen.clone(),
                    }
                )
            return probs, chosen

        TopKRouter.routing = watched

    def _watch_steps(self) -> None:
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.training import training

        train_step = training.train_step
        signature = inspect.signature(train_step)

        @functools.wraps(train_step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            outcome = train_step(*args, **kwargs)
            if self._open:
                self._open = False
                for chunk in signature.bind(*args, **kwargs).arguments["model"]:
                    for module in chunk.modules():
                        if isinstance(module, TopKRouter) and module.expert_bias is not None:
                            self.seen.biases[module.layer_number] = module.expert_bias.clone()
            return outcome

        training.train_step = watched


def run_rank(rank: int, run: Run) -> None:
    """Trains and leaves what this rank saw in `captured{rank}.pt`."""
    from megatron_probes.adapters import megatron_lm
    from megatron_probes.cpu import pretrain_gpt as script

    folder = Path(run.folder)
    torch.manual_seed(0)
    sys.argv = ["pretrain_gpt.py", *MODEL, *run.flags, "--probe-config", str(folder / "probes.yaml")]
    megatron_lm.install()
    capture = Capture(run.gives_padding_mask)
    script.main()
    torch.save(asdict(capture.seen), folder / f"captured{rank}.pt")


def prepare(run: Run) -> None:
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "output_dir": str(folder / "probes"),
        "strict": True,
        "sample_every": 1,
        "record": {"parts": True},
    }
    (folder / "probes.yaml").write_text(yaml.safe_dump(config | run.config))


def results(run: Run, ranks: int) -> tuple[list[StepRecord], list[Captured]]:
    folder = Path(run.folder)
    captured = [Captured(**torch.load(folder / f"captured{rank}.pt")) for rank in range(ranks)]
    return read_records(folder / "probes"), captured


def train(run: Run, ranks: int) -> tuple[list[StepRecord], list[Captured]]:
    """The steps' records, and what each rank saw at the first."""
    prepare(run)
    fork_ranks(_Rank(run), ranks, timeout_s=300, log_dir=Path(run.folder) / "logs", preloaded=True)
    return results(run, ranks)


def train_older(run: Run, root: Path) -> tuple[list[StepRecord], list[Captured]]:
    """The same on one rank with the Megatron in `root`."""
    prepare(run)
    description = Path(run.folder) / "run.json"
    description.write_text(json.dumps(asdict(run)))
    command = ["-m", "megatron_probes.cpu.fork", "--root", root, __file__, description]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"megatron-core {root.name}" in done.stdout
    return results(run, 1)


@dataclass(frozen=True)
class _Rank:
    run: Run

    def __call__(self, rank: int) -> None:
        run_rank(rank, self.run)


def printed(run: Run) -> str:
    """The output of all ranks."""
    return "\n".join(path.read_text() for path in sorted((Path(run.folder) / "logs").iterdir()))


def experts(*more: str) -> Sequence[str]:
    """Flags of a model with experts."""
    flags = """--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16
        --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"""
    return [*flags.split(), *more]


if __name__ == "__main__":
    run_rank(int(os.environ["RANK"]), Run(**json.loads(Path(sys.argv[1]).read_text())))
