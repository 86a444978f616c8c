"""Loss, gradient, routing and logits against two references that share no code with the package.

The first sums, in float64, what the tests' own hooks captured on all ranks: whatever the probes read, they
must have read all of it once, so the two agree to 1e-9 and counts are equal. The second runs the same model
in float64 on one process from the same weights and batches: it shows that what the probes read is the step
itself. There the float32 forward and backward of Megatron remain: a float32 run of the plain model is off
by 3e-9 in the loss and 6e-8 in the gradient norm, single sums by up to 2e-6.
"""

import functools

import numpy as np
import pytest
from captured_sums import captured_sums, reference_sums, routed_tokens, whole_gradients
from comparison import compare, wrong
from layout_run import CLIP, LayoutRun, run_layout
from layouts import CP2, DP2, EP2, ONE, PP2, TP2_PP2_DP2, TP2_SP, Layout
from quantities import read_parts
from toy_batches import GLOBAL_BATCH, VOCABULARY
from toy_gpt import DENSE_TIED, MOE_UNTIED, ToyGPT
from toy_reference import Reference, run_reference

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

CAPTURED = 1e-9
REFERENCE = 5e-6
ZEROS = 2e-3

CASES = [
    pytest.param(layout, model, id=f"{layout.name}-{model.name}")
    for layout in (ONE, DP2, TP2_SP, PP2, CP2, TP2_PP2_DP2)
    for model in (DENSE_TIED, MOE_UNTIED)
] + [pytest.param(EP2, MOE_UNTIED, id="EP2-moe_untied")]


@functools.cache
def reference_of(model: ToyGPT) -> Reference:
    reference = run_reference(model, range(GLOBAL_BATCH))
    assert reference.margin > 1e-5, "a router's choice hangs on rounding: draw other weights"
    return reference


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run of a layout, made once."""

    @functools.cache
    def run(layout: Layout, model: ToyGPT) -> LayoutRun:
        return run_layout(layout, model, tmp_path_factory.mktemp("layout"))

    return run


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_what_all_ranks_captured_is_what_the_record_holds(trained, layout, model):
    run = trained(layout, model)
    assert [record.step for record in run.records] == [1, 2]
    for step, record in enumerate(run.records):
        found = read_parts(record.parts, model)
        differences = compare(found, captured_sums(run.ranks, model, step))
        assert not wrong(differences, real=CAPTURED, zeros=0.0)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_values_follow_from_what_was_captured(trained, layout, model):
    run = trained(layout, model)
    for step, record in enumerate(run.records):
        for tag, right in captured_values(run, step).items():
            assert record.values[tag] == pytest.approx(right, rel=CAPTURED), f"{tag} at step {record.step}"
        # Megatron sums squares in float32.
        assert record.values["grad/norm"] == pytest.approx(run.ranks[-1].steps[step].grad_norm, rel=1e-6)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_a_float64_run_of_the_same_model_gives_the_same_numbers(trained, layout, model):
    run, reference = trained(layout, model), reference_of(model)
    record = run.records[0]
    for tag, right in reference_values(reference).items():
        assert record.values[tag] == pytest.approx(right, rel=REFERENCE), tag
    found = {name: q for name, q in read_parts(record.parts, model).items() if q.free}
    right = reference_sums(reference, model, range(GLOBAL_BATCH), CLIP)
    assert not wrong(compare(found, right), real=REFERENCE, zeros=ZEROS)


def captured_values(run: LayoutRun, step: int) -> dict[str, float]:
    """The P0 values of a step by the tensors of all ranks."""
    holders = [rank for rank in run.ranks if rank.is_last_stage and rank.place.tp[0] == 0]
    sums = [
        sum((mb.losses.astype(np.float64) * mb.mask).sum() for mb in rank.steps[step].micro_batches)
        for rank in holders
    ]
    tokens = [sum(mb.mask.sum() for mb in rank.steps[step].micro_batches) for rank in holders]
    gradients = whole_gradients(run.ranks, run.model, step, "gradients")
    values = {
        "loss/global": sum(sums) / sum(tokens),
        "loss/worst_rank": max(s / t for s, t in zip(sums, tokens, strict=True)),
        "data/valid_tokens": sum(tokens),
        "grad/norm": np.sqrt(sum(np.square(g).sum() for g in gradients.values())),
        "act/logits/absmax": max(
            np.abs(logits[..., : max(VOCABULARY - rank.place.tp[0] * logits.shape[-1], 0)]).max()
            for rank in run.ranks
            for logits in rank.steps[step].logits
        ),
    }
    return values | max_vio(routed_tokens(run.ranks, run.model, step))


def reference_values(reference: Reference) -> dict[str, float]:
    squares = sum(np.square(gradient).sum() for gradient in reference.gradients.values())
    values = {
        "loss/global": reference.loss,
        "data/valid_tokens": reference.mask_BS.sum(),
        "grad/norm": np.sqrt(squares),
        "act/logits/absmax": np.abs(reference.logits_BSV).max(),
    }
    return values | max_vio({layer: routing.sum(axis=0) for layer, routing in reference.routing.items()})


def max_vio(tokens: dict[int, np.ndarray]) -> dict[str, float]:
    by_layer = {f"moe/layer_{layer:03d}/max_vio": c.max() / c.mean() - 1.0 for layer, c in tokens.items()}
    return by_layer | ({"moe/max_vio": max(by_layer.values())} if by_layer else {})
