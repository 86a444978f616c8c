"""The matrix of layouts and variants: what runs, what it is compared with, how far it may be apart.

Every row trains the same weights on the same batches. Its slots are compared with float64 sums over what
its own ranks captured. A row that keeps the conditions under which a layout must not change a number
(Specification, "Layouts must not change a number") is also compared with one rank, slot by slot and value by
value, and with a float64 run of the model; a row that breaks one has a reference of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from captured_sums import captured_sums, reference_sums
from captured_values import compare_values
from comparison import ZERO_FLIPS, Difference, compare, wrong
from layout_run import CLIP, PER_TOKEN_LOSS, Hook, LayoutRun, run_layout
from layouts import CP2, DP2, EP2, ONE, PP2, TP2_PP2_DP2, TP2_SP, Layout
from quantities import Kind, Quantities, Quantity, read_parts
from toy_batches import GLOBAL_BATCH, SEQUENCE, positions, valid_length
from toy_gpt import DENSE_TIED, MOE_UNTIED, PREDICTING, ToyGPT
from toy_reference import run_reference

from megatron_probes.catalog import CATALOG, MetricSpec, lookup

CAPTURED = 1e-9
LAYOUTS = 2e-6
REFERENCE = 5e-6
"""Largest relative error against captured tensors, against one rank, against a float64 run (fp32)."""

HALF_SUMS = 32 * 2.0**-24
"""The same for captured half types: 32 products are added in float32, then in float64."""

UNSHARED = ("job", "probe", "system", "memory", "comm", "device", "host")
"""Families of what a process or a device did."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout and a variant of training, on one model.

    `free`: the layout must not change a number. `options` name what is on besides (`captured_sums`).
    `reference` gives the quantities that a plain run of the model has, None where a plain run says nothing;
    `tolerance` their largest relative error, by quantity where it is a function.
    """

    layout: Layout
    model: ToyGPT
    variant: str = ""
    flags: tuple[str, ...] = PER_TOKEN_LOSS
    free: bool = True
    options: frozenset[str] = frozenset()
    low_precision: bool = False

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.layout.name, self.variant)))


def _layout(name: str, ranks: int, **axes: object) -> Layout:
    return Layout(name=name, ranks=ranks, **axes)


_SP = ("--sequence-parallel",)
_ETP1, _ETP2 = (("--sequence-parallel", f"--expert-tensor-parallel-size={n}") for n in (1, 2))
_DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")

BOTH_MODELS = (
    ONE,
    DP2,
    _layout("DP2 distributed optimizer, overlaps", 2, flags=_DISTRIBUTED),
    _layout(
        "DP4 two optimizer instances",
        4,
        flags=("--use-distributed-optimizer", "--num-distributed-optimizer-instances=2"),
    ),
    TP2_SP,
    _layout("TP4+SP, 2 query groups", 4, tp=4, flags=_SP),
    PP2,
    _layout("PP2, 2 virtual stages", 2, pp=2, flags=("--num-layers-per-virtual-pipeline-stage=1",)),
    CP2,
    TP2_PP2_DP2,
    _layout("CP2xTP2xPP2", 8, cp=2, tp=2, pp=2, flags=_SP),
)
DENSE_ONLY = (_layout("TP2", 2, tp=2),)
EXPERTS_ONLY = (
    EP2,
    _layout("EP2 allgather", 2, ep=2, flags=("--moe-token-dispatcher-type=allgather",)),
    _layout("TP2 EP2 ETP1", 2, tp=2, ep=2, flags=_ETP1),
    _layout("TP2 EP2 ETP2", 4, tp=2, ep=2, flags=_ETP2),
)

LAYOUT_ROWS = [
    *(Row(layout=layout, model=model) for layout in BOTH_MODELS for model in (DENSE_TIED, MOE_UNTIED)),
    *(Row(layout=layout, model=DENSE_TIED) for layout in DENSE_ONLY),
    *(Row(layout=layout, model=MOE_UNTIED) for layout in EXPERTS_ONLY),
]


def _variants() -> list[Row]:
    full = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
    selective = ("--recompute-granularity=selective", "--recompute-modules", "core_attn", "moe")
    rows = []
    for layout in (ONE, DP2):
        small, large = (
            Layout(**{**layout.__dict__, "micro_batch": size, "name": f"{layout.name}, micro-batch {size}"})
            for size in (1, 4)
        )
        rows += [
            Row(layout=layout, model=MOE_UNTIED, variant="full recompute", flags=(*PER_TOKEN_LOSS, *full)),
            Row(
                layout=layout,
                model=MOE_UNTIED,
                variant="selective recompute",
                flags=(*PER_TOKEN_LOSS, *selective),
            ),
            Row(layout=small, model=MOE_UNTIED),
            Row(layout=large, model=MOE_UNTIED),
            Row(
                layout=layout,
                model=DENSE_TIED,
                variant="bf16",
                flags=(*PER_TOKEN_LOSS, "--bf16"),
                low_precision=True,
            ),
            Row(
                layout=layout,
                model=MOE_UNTIED,
                variant="fp16 with loss scale",
                flags=(*PER_TOKEN_LOSS, "--fp16", "--initial-loss-scale=1024"),
                low_precision=True,
            ),
        ]
    # Megatron weighs a head's loss by a micro-batch's own ratio of the main targets to the head's: how the
    # batch is cut changes the gradient.
    rows += [Row(layout=layout, model=PREDICTING, free=layout != CP2) for layout in (ONE, PP2, TP2_SP, CP2)]
    for layout in (ONE, CP2):
        rows.append(Row(layout=layout, model=DENSE_TIED, variant="mean of local means", flags=(), free=False))
    for layout in (ONE, EP2):
        rows += [
            Row(
                layout=layout,
                model=MOE_UNTIED,
                variant="auxiliary loss",
                flags=(
                    *PER_TOKEN_LOSS,
                    "--moe-router-load-balancing-type=aux_loss",
                    "--moe-aux-loss-coeff=1e-2",
                ),
                free=False,
                options=frozenset({"aux_loss"}),
            ),
            Row(
                layout=layout,
                model=MOE_UNTIED,
                variant="capacity",
                flags=(*PER_TOKEN_LOSS, "--moe-expert-capacity-factor=0.8"),
                free=False,
                options=frozenset({"capacity"}),
            ),
        ]
    return rows


VARIANT_ROWS = _variants()
ROWS = [*LAYOUT_ROWS, *VARIANT_ROWS]


@dataclass
class Outcome:
    """What a row's comparisons gave; `missing` names what could not be compared at all."""

    row: Row
    seconds: float = 0.0
    captured: list[Difference] = field(default_factory=list)
    one_rank: list[Difference] = field(default_factory=list)
    values: list[Difference] = field(default_factory=list)
    reference: list[Difference] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)


CONFIG = {
    "experts": {"forensics": True},
    "loss": {"per_rank": True},
    "stability": {"window": 4, "min_history": 1},
    "held_out": {"token_bytes": "bytes"},
}
HELD_OUT = ("--eval-iters=1",)
"""Two steps are enough for a score; one held-out batch is evaluated after them."""


def run_row(row: Row, folder: Path, before: Hook | None = None, **options: Any) -> LayoutRun:
    flags = (*row.flags, *HELD_OUT)
    return run_layout(row.layout, row.model, folder, flags=flags, config=CONFIG, before=before, **options)


def judge(row: Row, run: LayoutRun, one_rank: LayoutRun | None) -> Outcome:
    """All comparisons of a row; `one_rank` is the same model's plain run."""
    outcome = Outcome(
        row, tags=set().union(*({*record.values, *record.histograms} for record in run.records))
    )

    def fail(against: str, bad: Sequence[Difference]) -> None:
        outcome.wrong += [f"against {against}: {difference}" for difference in bad]

    for step, record in enumerate(run.records):
        found = read_parts(record.parts, row.model)
        differences = compare(found, captured_sums(run.ranks, row.model, step, row.options | {"margin"}))
        bad = [
            bad
            for difference in differences
            for bad in wrong([difference], real=_captured_tolerance(row, difference.name), zeros=0.0)
        ]
        fail(f"captured tensors, step {record.step}", bad)
        outcome.captured += differences
        outcome.values += (differences := compare_values(run, step))
        fail(f"captured values, step {record.step}", wrong(differences, real=CAPTURED, zeros=0.0))
    first = read_parts(run.records[0].parts, row.model)
    if row.free and not row.low_precision and one_rank is not None:
        outcome.one_rank = compare(first, read_parts(one_rank.records[0].parts, row.model), free_only=True)
        fail("one rank", wrong(outcome.one_rank, real=LAYOUTS, zeros=ZERO_FLIPS))
        shared = compare(_shared_values(run), _shared_values(one_rank))
        outcome.one_rank += shared
        fail("one rank's values", wrong(shared, real=LAYOUTS, zeros=ZERO_FLIPS))
    reference = reference_of(row)
    if reference is not None:
        free = {name: q for name, q in first.items() if q.free and name in reference}
        outcome.reference = compare(free, {name: reference[name] for name in free})
        if row.low_precision:
            bad = outside_envelope(free, reference, row.model)
        else:
            bad = wrong(outcome.reference, real=REFERENCE, zeros=ZERO_FLIPS)
        fail("a float64 run", bad)
    return outcome


def _captured_tolerance(row: Row, name: str) -> float:
    if name.endswith("aux_loss/sum"):
        # The probes sum what Megatron computed in float32; this is computed from the logits, in float64.
        return REFERENCE
    return HALF_SUMS if row.low_precision and name.startswith("act/") else CAPTURED


def _shared_values(run: LayoutRun) -> Quantities:
    """The first record's values that no layout may change, by tag."""
    found: Quantities = {}
    for tag, value in run.records[0].values.items():
        spec = lookup(tag)
        if spec.family in UNSHARED or spec.layout_dependent:
            continue
        found[tag] = Quantity(float(value), _kind(spec), of=1.0)
    return found


def _kind(spec: MetricSpec) -> Kind:
    if spec.tag.endswith("zero_fraction"):
        return Kind.ZEROS
    return Kind.COUNT if spec.integer else Kind.REAL


@functools.cache
def _plain_sums(model: ToyGPT) -> Quantities:
    reference = run_reference(model, range(GLOBAL_BATCH))
    assert reference.margin > 1e-5, "a router's choice hangs on rounding: draw other weights"
    return reference_sums(reference, model, range(GLOBAL_BATCH), CLIP)


def reference_of(row: Row) -> Quantities | None:
    """What a plain float64 run gives for a row: None where it says nothing."""
    if row.options or row.model.heads_ahead:
        return None
    if not row.free:
        weights = local_mean_weights(row.layout)
        reference = run_reference(row.model, range(GLOBAL_BATCH), token_weights_BS=weights)
        return reference_sums(reference, row.model, range(GLOBAL_BATCH), CLIP)
    return _plain_sums(row.model)


def local_mean_weights(layout: Layout) -> np.ndarray:
    """Weight of each target in the mean over micro-batches and data ranks of their own token means."""
    mask = np.stack([np.arange(SEQUENCE) < valid_length(sample) for sample in range(GLOBAL_BATCH)])
    weights = np.zeros(mask.shape)
    pieces = [positions(cp, layout.cp) for cp in range(layout.cp)] if layout.cp > 1 else [np.arange(SEQUENCE)]
    for start in range(0, GLOBAL_BATCH, layout.micro_batch):
        rows = np.arange(start, start + layout.micro_batch)[:, None]
        for piece in pieces:
            local = mask[rows, piece]
            weights[rows, piece] = local / max(local.sum(), 1)
    return weights / (GLOBAL_BATCH // layout.micro_batch * layout.cp)


@functools.cache
def _envelope(model: ToyGPT) -> dict[str, float]:
    """How far bf16-sized changes of the weights move each quantity of the float64 run."""
    generator = np.random.default_rng(0)
    right = _plain_sums(model)
    widest = dict.fromkeys(right, 0.0)
    for _ in range(8):
        moved = run_reference(
            model,
            range(GLOBAL_BATCH),
            perturb=lambda values: values * (1 + generator.uniform(-(2**-8), 2**-8, values.shape)),
        )
        for name, quantity in reference_sums(moved, model, range(GLOBAL_BATCH), CLIP).items():
            widest[name] = max(widest[name], abs(quantity.value - right[name].value))
    return widest


ROUNDED_ALSO = 4.0
"""Activations and gradients are rounded to bf16 as well as weights, several times a layer."""


def outside_envelope(found: Quantities, right: Quantities, model: ToyGPT) -> list[Difference]:
    """What a bf16 perturbation of the reference does not explain."""
    widest = _envelope(model)
    bad = []
    for difference in compare(found, right):
        if difference.kind is Kind.ZEROS:
            continue
        allowed = max(ROUNDED_ALSO * widest[difference.name], REFERENCE * abs(difference.right))
        if abs(difference.found - difference.right) > allowed:
            bad.append(difference)
    return bad


def uncovered(tags: set[str]) -> list[str]:
    """Metrics that have a probe and that no row of the matrix wrote or compared."""
    written = {lookup(tag).tag for tag in tags}
    return sorted(
        spec.tag
        for spec in CATALOG
        if not spec.planned
        and spec.family not in UNSHARED
        and spec.tag not in written
        and spec.tag not in ELSEWHERE
    )


_CHECKPOINTS = "an evaluation of checkpoints, in every layout: tests/evaluation"

ELSEWHERE: Mapping[str, str] = {
    "moe/layer_{layer}/bias": "a copy of what the router holds: tests/adapters/test_routers.py",
    **{
        f"eval/{{set}}/{metric}{weights}": _CHECKPOINTS
        for metric in ("nll", "ppl", "bpb")
        for weights in ("/raw", "/averaged")
    },
    **{
        f"eval/{{task}}/{metric}{weights}": _CHECKPOINTS
        for metric in ("accuracy", "greedy", "media_gain", "pass_at_k", "iou")
        for weights in ("", "/raw", "/averaged")
    },
}
"""Metrics that two steps of training cannot show -> why, and where they are tested."""
