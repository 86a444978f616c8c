"""What a step's slots should hold: float64 sums over the tensors that all ranks captured, or a reference's.

Gradients of all ranks are put back together into whole parameters by global name, so that a parameter is
counted once whatever the layout; copies that several ranks hold must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from quantities import CLASSES, Kind, Quantities, Quantity, bins, layer_parts, statistics
from rank_capture import RankCapture, Routed, Shard
from sharding import held_elements
from toy_batches import (
    GLOBAL_BATCH,
    NUM_SOURCES,
    SOURCES,
    VOCABULARY,
    find_samples,
    positions,
    source_of,
    valid_length,
)
from toy_gpt import ToyGPT
from toy_reference import Reference

PADS = ("embedding.word_embeddings.weight", "output_layer.weight")


def captured_sums(
    ranks: Sequence[RankCapture], model: ToyGPT, step: int, options: frozenset[str] = frozenset()
) -> Quantities:
    """The quantities of step `step` (from 0) by what the ranks saw.

    `options` name what the run switched on besides: "aux_loss", "capacity".
    """
    found: Quantities = {}
    found.update(_losses(ranks, step))
    found.update(_losses_ahead(ranks, model, step))
    found.update(_gradient_sums(whole_gradients(ranks, model, step, "gradients"), model))
    clipped = whole_gradients(ranks, model, step, "clipped")
    found.update(statistics("grad/clipped", _row(clipped.values())))
    found.update(_logits(_logit_shards(ranks, step)))
    found.update(_experts(ranks, model, step, options))
    return found


def reference_sums(reference: Reference, model: ToyGPT, samples: Sequence[int], clip: float) -> Quantities:
    """The quantities that a plain run of the model gives; zeros and clipping by the same rules."""
    losses, mask = reference.losses_BS, reference.mask_BS
    sources = np.array([source_of(sample) for sample in samples])
    found: Quantities = {
        "loss/sum": Quantity(float((losses * mask).sum())),
        "loss/tokens": Quantity(float(mask.sum()), Kind.COUNT),
    }
    for source in range(NUM_SOURCES):
        rows = sources == source
        cell = min(source, len(SOURCES))
        found[f"loss/source/sum[{cell}]"] = Quantity(float((losses * mask)[rows].sum()))
        found[f"loss/source/tokens[{cell}]"] = Quantity(float(mask[rows].sum()), Kind.COUNT)
    found.update(_gradient_sums(reference.gradients, model))
    norm = np.sqrt(sum(np.square(g).sum() for g in reference.gradients.values()))
    scale = min(1.0, clip / (norm + 1e-6))
    found.update(statistics("grad/clipped", _row(g * scale for g in reference.gradients.values())))
    found.update(_logits([reference.logits_BSV]))
    for layer, routing in reference.routing.items():
        found.update(_counts(layer, routing.sum(axis=0)))
    return found


def whole_gradients(
    ranks: Sequence[RankCapture], model: ToyGPT, step: int, moment: str
) -> dict[str, np.ndarray]:
    """Every parameter's gradient, whole, from the shards of all ranks.

    Raises AssertionError where an element is missing or copies differ by more than rounding.
    """
    shapes = dict(model.shapes())
    whole = {name: np.full(int(np.prod(shape)), np.nan) for name, shape in shapes.items()}
    held = {name: np.zeros(int(np.prod(shape)), bool) for name, shape in shapes.items()}
    for rank in ranks:
        shards: list[Shard] = getattr(rank.steps[step], moment)
        for shard in shards:
            elements = held_elements(shard.name, shapes[shard.name], rank.place, model.gated).reshape(-1)
            elements = elements[shard.start : shard.start + len(shard.values)]
            values, known = shard.values.astype(np.float64), held[shard.name][elements]
            earlier = whole[shard.name][elements]
            scale = np.abs(values).max(initial=0.0)
            assert np.all(~known | (np.abs(values - earlier) <= 1e-5 * scale) | ~np.isfinite(values)), (
                f"ranks hold different gradients of {shard.name}"
            )
            whole[shard.name][elements] = np.where(known, earlier, values)
            held[shard.name][elements] = True
    for name, there in held.items():
        assert there.all(), f"no rank holds {int((~there).sum())} of {there.size} elements of {name}"
    return {name: values.reshape(shapes[name]) for name, values in whole.items()}


def routed_tokens(ranks: Sequence[RankCapture], model: ToyGPT, step: int) -> dict[int, np.ndarray]:
    """Layer -> tokens of each expert before dropping, int64 [experts], over all ranks."""
    counts: dict[int, np.ndarray] = {}
    for rank in _token_holders(ranks):
        for layer, micro_batches in rank.steps[step].routing.items():
            whole = counts.setdefault(layer, np.zeros(model.experts, np.int64))
            whole += sum(_chosen(routed, model.topk).sum(axis=0) for routed in micro_batches)
    return counts


def _token_holders(ranks: Sequence[RankCapture]) -> list[RankCapture]:
    """Without sequence parallelism every tensor-parallel rank routes the same tokens."""
    return [rank for rank in ranks if rank.place.tp[0] == 0 or rank.sequence_parallel]


def _chosen(routed: Routed, topk: int) -> np.ndarray:
    """The map before dropping: where nothing was dropped, the router's own; else the top k of the logits."""
    if (routed.kept.sum(axis=1) == topk).all():
        return routed.kept
    chosen = np.zeros_like(routed.kept)
    np.put_along_axis(chosen, np.argsort(-routed.logits, axis=1)[:, :topk], True, axis=1)
    return chosen


def _experts(ranks: Sequence[RankCapture], model: ToyGPT, step: int, options: frozenset[str]) -> Quantities:
    """Counts of each router; what a capacity dropped; the load-balancing loss where it is on."""
    found: Quantities = {}
    for layer, counts in routed_tokens(ranks, model, step).items():
        found.update(_counts(layer, counts))
        total, micro_batches = _aux_loss(ranks, model, step, layer) if "aux_loss" in options else (0.0, 0.0)
        name = f"moe/layer_{layer:03d}/aux_loss"
        found[f"{name}/sum"] = Quantity(total, free=False)
        found[f"{name}/micro_batches"] = Quantity(micro_batches, Kind.COUNT, free=False)
        if "margin" in options:
            found.update(
                bins(f"moe/layer_{layer:03d}/topk_margin", _margins(ranks, model, step, layer), model)
            )
    if "capacity" in options:
        kept = chosen = 0
        for rank in _token_holders(ranks):
            for routed in (r for rs in rank.steps[step].routing.values() for r in rs):
                kept += int(routed.kept.sum())
                chosen += int(_chosen(routed, model.topk).sum())
        found["moe/dropped[0]"] = Quantity(float(chosen - kept), Kind.COUNT, free=False)
        found["moe/dropped[1]"] = Quantity(float(chosen), Kind.COUNT, free=False)
    return found


def _margins(ranks: Sequence[RankCapture], model: ToyGPT, step: int, layer: int) -> np.ndarray:
    """How many tokens have their k-th and next logit how far apart: by the specification's bins of 1.04."""
    edges = 1e-12 * np.cumprod(np.full(1058, 1.04)) / 1.04
    counts = np.zeros(len(edges) + 1)
    for rank in _token_holders(ranks):
        for routed in rank.steps[step].routing.get(layer, []):
            ranked = -np.sort(-routed.logits, axis=1)
            margins = (ranked[:, model.topk - 1] - ranked[:, model.topk]).astype(np.float64)
            np.add.at(counts, np.searchsorted(edges, margins, side="right"), 1.0)
    return counts


def _aux_loss(ranks: Sequence[RankCapture], model: ToyGPT, step: int, layer: int) -> tuple[float, float]:
    """E sum f_i P_i summed over micro-batches, and their number; tp and cp ranks share a micro-batch."""
    shared: dict[tuple[int, int], list[Routed]] = {}
    for rank in _token_holders(ranks):
        for index, routed in enumerate(rank.steps[step].routing.get(layer, [])):
            shared.setdefault((rank.place.dp, index), []).append(routed)
    total = 0.0
    for pieces in shared.values():
        logits = np.concatenate([piece.logits for piece in pieces]).astype(np.float64)
        counts = np.concatenate([_chosen(piece, model.topk) for piece in pieces]).sum(axis=0)
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        fractions = counts / (model.topk * len(logits))
        total += model.experts * float((fractions * scores.mean(axis=0)).sum())
    return total, float(len(shared))


def _losses(ranks: Sequence[RankCapture], step: int) -> Quantities:
    """Losses of the last stage, each data rank's apart, and by source, from the labels' samples."""
    holders = [rank for rank in ranks if rank.is_last_stage and rank.place.tp[0] == 0]
    cp_size = holders[0].place.cp_size
    sums, tokens = np.zeros(len(holders)), np.zeros(len(holders))
    source_sums, source_tokens = np.zeros(len(SOURCES) + 1), np.zeros(len(SOURCES) + 1)
    batch = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    for rank in holders:
        cell = rank.place.dp * cp_size + rank.place.cp
        for micro_batch in rank.steps[step].micro_batches:
            mask = micro_batch.mask.astype(np.float64)
            masked = micro_batch.losses.astype(np.float64) * mask
            sums[cell] += masked.sum()
            tokens[cell] += mask.sum()
            samples = find_samples(micro_batch.labels, rank.place.cp, cp_size, batch)
            for row, sample in enumerate(samples):
                source = min(source_of(sample), len(SOURCES))
                source_sums[source] += masked[row].sum()
                source_tokens[source] += mask[row].sum()
    found: Quantities = {
        "loss/sum": Quantity(float(sums.sum())),
        "loss/tokens": Quantity(float(tokens.sum()), Kind.COUNT),
    }
    for cell in range(len(holders)):
        found[f"loss/sum[data rank {cell}]"] = Quantity(float(sums[cell]), free=False)
        found[f"loss/tokens[data rank {cell}]"] = Quantity(float(tokens[cell]), Kind.COUNT, free=False)
    for cell in range(len(SOURCES) + 1):
        found[f"loss/source/sum[{cell}]"] = Quantity(float(source_sums[cell]))
        found[f"loss/source/tokens[{cell}]"] = Quantity(float(source_tokens[cell]), Kind.COUNT)
    return found


def _losses_ahead(ranks: Sequence[RankCapture], model: ToyGPT, step: int) -> Quantities:
    """Depth d predicts d + 1 tokens further on: its mask ends that much earlier."""
    sums, tokens = np.zeros(model.heads_ahead), np.zeros(model.heads_ahead)
    batch = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    for rank in ranks:
        if not (rank.is_last_stage and rank.place.tp[0] == 0):
            continue
        held = positions(rank.place.cp, rank.place.cp_size)
        for micro_batch in rank.steps[step].micro_batches:
            samples = find_samples(micro_batch.labels, rank.place.cp, rank.place.cp_size, batch)
            lengths = np.array([valid_length(sample) for sample in samples])
            for depth, losses in enumerate(micro_batch.ahead):
                mask = held[None, :] < lengths[:, None] - (depth + 1)
                sums[depth] += losses.astype(np.float64)[mask].sum()
                tokens[depth] += mask.sum()
    found: Quantities = {}
    for depth in range(model.heads_ahead):
        cell = f"[{depth}]" if model.heads_ahead > 1 else ""
        found[f"loss/mtp/sum{cell}"] = Quantity(float(sums[depth]))
        found[f"loss/mtp/tokens{cell}"] = Quantity(float(tokens[depth]), Kind.COUNT)
    return found


def _logit_shards(ranks: Sequence[RankCapture], step: int) -> list[np.ndarray]:
    """Logits of all ranks without the columns that only pad the vocabulary."""
    shards = []
    for rank in ranks:
        for logits in rank.steps[step].logits:
            width = logits.shape[-1]
            shards.append(logits[..., : max(VOCABULARY - rank.place.tp[0] * width, 0)])
    return shards


def _logits(shards: Sequence[np.ndarray]) -> Quantities:
    found = dict(statistics("act/logits", _row(shards)))
    found["act/logits/absmax"] = Quantity(_abs_max(shards))
    return found


def _counts(layer: int, tokens: np.ndarray) -> Quantities:
    name = f"moe/layer_{layer:03d}/tokens"
    return {f"{name}[{e}]": Quantity(float(count), Kind.COUNT) for e, count in enumerate(tokens)}


def _gradient_sums(gradients: Mapping[str, np.ndarray], model: ToyGPT) -> Quantities:
    """Sums over all elements, by class (padding rows apart), and by layer and part."""
    found = dict(statistics("grad", _row(gradients.values())))
    members: dict[str, list[np.ndarray]] = {name: [] for name in CLASSES}
    members |= {f"{name} padding": [] for name in CLASSES}
    members |= {part: [] for part in layer_parts(model)}
    for name, gradient in gradients.items():
        kind = _class_of(name)
        if name in PADS:
            members[kind].append(gradient[:VOCABULARY])
            members[f"{kind} padding"].append(gradient[VOCABULARY:])
        else:
            members[kind].append(gradient)
        part = _part_of(name)
        if part is not None:
            members[part].append(gradient)
    for name, tensors in members.items():
        found.update(statistics(f"grad/{name}", _row(tensors)))
        found[f"grad/{name}/abs_max"] = Quantity(_abs_max(tensors))
    return found


def _class_of(name: str) -> str:
    if ".experts." in name:
        return "expert"
    return "embedding" if name.startswith("embedding.") else "dense"


def _part_of(name: str) -> str | None:
    """`layer_NNN/<part>` of a parameter inside the layers, `mtp_NNN/<part>` in a prediction head."""
    if not name.startswith(("decoder.layers.", "mtp.layers.")):
        return None
    block = f"{'mtp' if name.startswith('mtp') else 'layer'}_{int(name.split('.')[2]):03d}"
    for piece, part in (
        (".experts.", "experts"),
        ("router", "router"),
        ("norm.", "norm"),
        ("eh_proj", "other"),
        ("linear_qkv", "attention_qkv"),
        ("linear_proj", "attention_proj"),
        ("linear_fc1", "mlp_fc1"),
        ("linear_fc2", "mlp_fc2"),
    ):
        if piece in name:
            return f"{block}/{part}"
    raise ValueError(f"{name}: a parameter of no known part")


def _row(tensors: Iterable[np.ndarray]) -> list[float]:
    """The sums of STATISTICS over all elements of some tensors, in float64."""
    row = np.zeros(6)
    for tensor in tensors:
        values = tensor.astype(np.float64)
        finite = values[np.isfinite(values)]
        row += [
            np.square(finite).sum(),
            np.abs(finite).sum(),
            (finite == 0).sum(),
            values.size - finite.size,
            np.isnan(values).sum(),
            values.size,
        ]
    return row.tolist()


def _abs_max(tensors: Iterable[np.ndarray]) -> float:
    """Largest finite magnitude; -inf, the identity of a maximum, without one."""
    finite = [np.abs(t[np.isfinite(t)]) for t in tensors]
    return float(max((values.max(initial=-np.inf) for values in finite), default=-np.inf))
