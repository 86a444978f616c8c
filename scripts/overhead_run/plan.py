"""Which step runs in which mode: the same on every rank, from a seed alone."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass


class Mode(enum.Enum):
    """What looks at a step; the value is its name in the table."""

    OFF = "off"
    P0 = "P0"
    P1 = "P0 + P1"
    MEGATRON = "Megatron"
    """--log-params-norm and --log-num-zeros-in-grad."""


class Phase(enum.Enum):
    """What a step is for."""

    WARM_UP = "warm-up"
    COUNTED = "counted"
    SWITCHED = "not measured: the first of a block, with what the mode before left behind"
    TIMED = "timed"


@dataclass(frozen=True)
class Step:
    """`block` numbers the timed blocks of one mode; -1 outside them."""

    mode: Mode
    phase: Phase
    block: int = -1


WARM_UP_ROUNDS = 2


def plan(blocks: int, block_steps: int, seed: int) -> list[Step]:
    """Steps of a whole run: a few of each mode to warm up, one of each counted, then the timed blocks.

    Each of `blocks` rounds holds one block of `block_steps` timed steps of every mode, in random order. The
    last step of all only ends the one before it.
    """
    steps = [Step(mode, Phase.WARM_UP) for _ in range(WARM_UP_ROUNDS) for mode in Mode]
    steps += [Step(mode, Phase.COUNTED) for mode in Mode]
    steps += _timed(blocks, block_steps, random.Random(seed))
    return [*steps, Step(Mode.OFF, Phase.SWITCHED)]


def _timed(blocks: int, block_steps: int, generator: random.Random) -> Iterator[Step]:
    for block in range(blocks):
        for mode in generator.sample(list(Mode), len(Mode)):
            yield Step(mode, Phase.SWITCHED)
            for _ in range(block_steps):
                yield Step(mode, Phase.TIMED, block)
