"""Which probes can observe in this run, and why another cannot."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal

from megatron_probes.adapters.megatron_lm.routers import why_no_margin, why_padding
from megatron_probes.catalog import Priority
from megatron_probes.config import ProbeConfig
from megatron_probes.probes.loss import PER_RANK_LIMIT

Status = Literal["bound", "degraded", "off"]


@dataclass(frozen=True)
class Binding:
    """One probe family's state in this run; ``reason`` is empty where it is simply bound."""

    family: str
    status: Status
    reason: str = ""


FAMILIES = (
    "loss",
    "sources",
    "gradient",
    "recovery",
    "stability",
    "system",
    "tensors",
    "experts",
    "evaluation",
)


def decide_bindings(config: ProbeConfig, args: argparse.Namespace) -> dict[str, Binding]:
    """What the configuration and Megatron's arguments allow, by family.

    A number that cannot be right is not shown: a mode in which a probe cannot see its tensor switches
    the family off by name.
    """
    bindings = {family: Binding(family, "bound") for family in FAMILIES}

    def off(family: str, reason: str) -> None:
        if bindings[family].status != "off":
            bindings[family] = Binding(family, "off", reason)

    for family in ("loss", "gradient", "stability", "system", "tensors", "experts"):
        if not getattr(config, family).enabled:
            off(family, f"{family}.enabled is false")
    if not config.held_out.enabled:
        off("evaluation", "held_out.enabled is false")
    if not config.sources:
        off("sources", "the config lists no sources")
    graph, hidden = _cuda_graph(args)
    for family in hidden:
        off(family, f"{graph}: captured code runs no hooks")
    if getattr(args, "optimizer_cuda_graph", False):
        off("gradient", "--optimizer-cuda-graph: the captured optimizer step runs no hooks")
    for option in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"):
        if getattr(args, option, False):
            off("gradient", f"--{option.replace('_', '-')}: its parameter shards are not followed yet")
    if (getattr(args, "gtp_weight_remat_size", 1) or 1) > 1:
        off("gradient", "--gtp-weight-remat-size > 1: its parameter shards are not followed yet")
    if getattr(args, "cross_entropy_fusion_impl", None) == "linear":
        off("tensors", "--cross-entropy-fusion-impl linear never forms the logits")
    if not getattr(args, "num_experts", None):
        off("experts", "the model has no MoE layer")
    if bindings["loss"].status == "off" and bindings["gradient"].status == "off":
        off("stability", "neither the loss nor the gradient probe is on")
    if logs_memory(args):
        reason = "Megatron's own memory logging reads the peak counters: memory peaks are of the whole run"
        degrade(bindings, "system", reason)
    if bindings["experts"].status != "off":
        if padding := why_padding(args):
            reason = f"{padding}: padding is counted where the script gives the model no padding_mask"
            degrade(bindings, "experts", reason)
        if config.experts.forensics and (hidden_margin := why_no_margin(args)):
            degrade(bindings, "experts", f"no topk_margin: {hidden_margin}")
    if config.loss.per_rank:
        data_ranks = args.data_parallel_size * args.context_parallel_size
        if data_ranks > PER_RANK_LIMIT:
            reason = f"no loss/rank_mean: {data_ranks} data ranks, more than {PER_RANK_LIMIT}"
            degrade(bindings, "loss", reason)
    return bindings


def degrade(bindings: dict[str, Binding], family: str, reason: str) -> None:
    """Notes what a family that is on cannot show, beside what was noted before."""
    binding = bindings[family]
    if binding.status != "off":
        reasons = "; ".join(filter(None, (binding.reason, reason)))
        bindings[family] = Binding(family, "degraded", reasons)


def _cuda_graph(args: argparse.Namespace) -> tuple[str, tuple[str, ...]]:
    """The option that captures CUDA graphs, and the families whose tensors its graphs hide."""
    implementation = getattr(args, "cuda_graph_impl", None) or "none"
    option = f"--cuda-graph-impl {implementation}"
    for older in ("enable_cuda_graph", "external_cuda_graph"):
        if getattr(args, older, False):
            option, implementation = f"--{older.replace('_', '-')}", "layers"
    if implementation == "none":
        return "", ()
    # Core 0.17 names the whole iteration as a scope, later versions as an implementation.
    scopes = str(getattr(args, "cuda_graph_scope", None) or "")
    if implementation == "full_iteration" or "full_iteration" in scopes:
        return option, ("loss", "sources", "tensors", "experts", "evaluation")
    return option, ("experts",)


def logs_memory(args: argparse.Namespace) -> bool:
    """Whether Megatron itself reports memory peaks, which resetting the counters would change."""
    return bool(
        getattr(args, "log_memory_to_tensorboard", False)
        or getattr(args, "log_memory_interval", None)
        or getattr(args, "log_device_memory_used", False)
    )


def self_check(
    bindings: dict[str, Binding],
    *,
    versions: dict[str, str],
    layout: dict[str, Any],
    payload_bytes: dict[Priority, int],
    collectives: int,
    elements: tuple[int, int] | None,
    resume: str,
    output_dir: str,
) -> str:
    """The report that rank 0 prints before the first step."""
    counted = "-" if elements is None else f"{elements[0]:,} of {elements[1]:,} gradient elements"
    lines = [
        "megatron_probes self-check",
        "  versions     " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "  layout       " + ", ".join(f"{name}={value}" for name, value in layout.items()),
        f"  each step    {payload_bytes[Priority.P0]} bytes in {collectives} collectives; "
        f"sampled steps {payload_bytes[Priority.P1]} bytes in as many",
        f"  counted      {counted}",
        f"  history      {resume}",
        f"  output       {output_dir}",
    ]
    for binding in bindings.values():
        reason = f"  ({binding.reason})" if binding.reason else ""
        lines.append(f"  {binding.family:<12} {binding.status}{reason}")
    return "\n".join(lines)
