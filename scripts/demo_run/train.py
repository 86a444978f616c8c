"""The demo's training: builds the text's datasets, then runs Megatron's own training script on 4 ranks.

`demo.py` starts this file as a process of its own and watches the record that the probes write.
"""

from __future__ import annotations

import argparse
import math
import runpy
import sys
from pathlib import Path

from demo_run.anomaly import corrupt_batch
from demo_run.corpus import SOURCES, VOCAB_SIZE, write_indexed_dataset
from megatron_probes.cpu import fork, runtime

RANKS = 4
BATCH_SIZE = 8
BLEND = {"code": 0.7, "prose": 0.3}
WHEEL_SCRIPT = Path(runtime.__file__).with_name("pretrain_gpt.py")


def megatron_flags(out: Path, steps: int) -> list[str]:
    """Command line of Megatron's training script: an MoE GPT, TP2 with sequence parallelism x DP2, EP2."""
    blend = " ".join(f"{weight} {out / 'data' / source}" for source, weight in BLEND.items())
    return f"""
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128
        --max-position-embeddings 128 --position-embedding-type rope --no-rope-fusion
        --normalization RMSNorm --swiglu --ffn-hidden-size 128 --disable-bias-linear
        --attention-dropout 0 --hidden-dropout 0
        --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
        --tensor-model-parallel-size 2 --sequence-parallel
        --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --use-distributed-optimizer
        --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
        --no-masked-softmax-fusion --distributed-backend gloo
        --micro-batch-size 4 --global-batch-size {BATCH_SIZE} --train-iters {steps}
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05
        --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95 --seed 1234
        --data-path {blend} --split 90,5,5 --data-cache-path {out / "data" / "cache"} --num-workers 0
        --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 36
        --log-interval 1 --eval-interval {math.ceil(steps / 2)} --eval-iters 2
        --save {out / "checkpoint"} --save-interval {steps}
        --probe-config {out / "probes.yaml"}
    """.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--anomaly-step", type=int, required=True)
    parser.add_argument("--megatron", type=Path)
    options = parser.parse_args()
    script = WHEEL_SCRIPT if options.megatron is None else options.megatron / "pretrain_gpt.py"
    runtime.prepare_path(script, options.megatron)
    fork.preload()
    from megatron_probes.adapters import megatron_lm  # before the fork, so that all ranks share the import

    for source, documents in SOURCES.items():
        write_indexed_dataset(options.out / "data" / source, documents())

    def train(rank: int) -> None:
        megatron_lm.install()
        corrupt_batch(options.anomaly_step, BATCH_SIZE)
        sys.argv = [str(script), *megatron_flags(options.out, options.steps)]
        runpy.run_path(str(script), run_name="__main__")

    try:
        fork.fork_ranks(train, RANKS, timeout_s=math.inf, log_dir=options.out / "logs")
    except fork.RankError as error:
        sys.exit(f"rank {error.rank} failed first:\n{error.reason}")


if __name__ == "__main__":
    main()
