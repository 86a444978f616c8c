"""Binds the probes to a model and an optimizer that Megatron has built."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import time
import uuid
from pathlib import Path
from typing import Any

import torch

import megatron_probes
from megatron_probes.adapters.megatron_lm import checkpoint, hooks, loop, prediction, routers
from megatron_probes.adapters.megatron_lm.bindings import (
    Binding,
    decide_bindings,
    degrade,
    logs_memory,
    self_check,
)
from megatron_probes.adapters.megatron_lm.flag import refusing_bad_config, requested_config
from megatron_probes.adapters.megatron_lm.held_out import EvaluationWatch, progress_hint, token_bytes
from megatron_probes.adapters.megatron_lm.layout import build_topology
from megatron_probes.adapters.megatron_lm.losses import LossWatch, load_source_function
from megatron_probes.adapters.megatron_lm.model_shape import UncountedModel, model_shape
from megatron_probes.adapters.megatron_lm.observed import ObservedModel, observe_model
from megatron_probes.catalog import CATALOG
from megatron_probes.config import ConfigError, ProbeConfig, load_config
from megatron_probes.formulas.flops import CONVENTION, ModelShape
from megatron_probes.probes import (
    ExpertsProbe,
    Forensics,
    GradientProbe,
    HeldOutProbe,
    LossProbe,
    Probe,
    RecoveryProbe,
    SourcesProbe,
    StabilityProbe,
    SystemProbe,
    TensorsProbe,
)
from megatron_probes.session import ProbeSession
from megatron_probes.sinks import Manifest, next_attempt
from megatron_probes.sinks.build import build_sinks
from megatron_probes.topology import Topology

_session: ProbeSession | None = None


def attach(model: list[Any], optimizer: Any, args: argparse.Namespace) -> ProbeSession | None:
    """Starts the probes that ``--probe-config`` asks for; without the option does nothing.

    ``model`` is Megatron's list of model chunks, ``optimizer`` its top-level optimizer, ``args`` its
    parsed arguments, after the checkpoint was loaded. A second call returns the running session.
    """
    global _session
    path = requested_config(args)
    if path is None or optimizer is None or _session is not None:
        return _session
    config = load_config(path)
    with refusing_bad_config():
        output_dir = _output_dir(config, args)
        source_function = load_source_function(config.source_function)
    device = next(model[0].parameters()).device
    topology = build_topology(model, args, device)
    bindings = decide_bindings(config, args)
    observed = observe_model(model, optimizer, topology, bindings, config.gradient, _vocab_size(args))
    session = ProbeSession(
        config,
        topology,
        device,
        _build_probes(config, topology, bindings, observed, args, device),
        held_out=_build_held_out(config, bindings, args),
        start_step=args.iteration,
    )
    resume = checkpoint.load_sidecar(session, args)
    evaluations = EvaluationWatch(session, args)
    _install_hooks(session, model, optimizer, args, observed, evaluations)
    shape = _shape(args, bindings)
    losses = LossWatch(session, source_function)
    loop.watch_loop(session, args, shape, observed.replication_check, losses, evaluations)
    versions = _versions()
    if args.rank == args.world_size - 1:
        _start_writing(session, config, args, output_dir, versions, shape)
    report = self_check(
        bindings,
        versions=versions,
        layout=topology.describe(),
        payload_bytes=session.payload_bytes,
        collectives=session.collectives,
        elements=observed.elements,
        resume=resume,
        output_dir=str(output_dir),
    )
    if args.rank == 0:
        print(report, flush=True)
    _session = session
    return session


def _build_probes(
    config: ProbeConfig,
    topology: Topology,
    bindings: dict[str, Binding],
    observed: ObservedModel,
    args: argparse.Namespace,
    device: torch.device,
) -> list[Probe]:
    """The probes that are on, each after those whose values it reads."""
    groups = [part.group for part in observed.gradient_slices]
    probes: list[Probe] = [
        LossProbe(topology, per_rank=config.loss.per_rank, mtp_heads=args.mtp_num_layers or 0),
        GradientProbe(config.gradient, observed.layer_parts, groups),
        SourcesProbe(config.sources),
        RecoveryProbe(),
        StabilityProbe(config.stability),
        SystemProbe(config.system, topology, lifetime_peaks=logs_memory(args), device=device),
        TensorsProbe(),
        ExpertsProbe(
            topology,
            observed.moe_layers,
            drops_tokens=getattr(args, "moe_expert_capacity_factor", None) is not None,
            topk=getattr(args, "moe_router_topk", 1),
            forensics=_forensics(config, args),
        ),
    ]
    return [probe for probe in probes if bindings[probe.family].status != "off"]


def _forensics(config: ProbeConfig, args: argparse.Namespace) -> Forensics | None:
    if not (config.experts.forensics and args.num_experts):
        return None
    return Forensics(bias=args.moe_router_enable_expert_bias, margin=not routers.why_no_margin(args))


def _build_held_out(
    config: ProbeConfig, bindings: dict[str, Binding], args: argparse.Namespace
) -> HeldOutProbe | None:
    if bindings["evaluation"].status == "off":
        return None
    lengths, why_none = token_bytes(config.held_out, args, args.padded_vocab_size)
    reason = "; ".join(filter(None, (why_none, progress_hint(args))))
    bindings["evaluation"] = Binding("evaluation", "bound" if lengths else "degraded", reason)
    return HeldOutProbe(lengths)


def _install_hooks(
    session: ProbeSession,
    model: list[Any],
    optimizer: Any,
    args: argparse.Namespace,
    observed: ObservedModel,
    evaluations: EvaluationWatch,
) -> None:
    from megatron.core.utils import unwrap_model

    loss, gradient, tensors, experts = (
        session.probes.get(family) for family in ("loss", "gradient", "tensors", "experts")
    )
    if isinstance(gradient, GradientProbe):
        hooks.watch_gradients(
            session, gradient, optimizer, observed.gradient_slices, observed.replication_check
        )
    for chunk in (unwrap_model(chunk) for chunk in model):
        if getattr(chunk, "post_process", False):
            evaluations.watch_labels(chunk)
            if isinstance(tensors, TensorsProbe):
                hooks.watch_logits(session, tensors, chunk, _vocab_size(args))
            if isinstance(loss, LossProbe) and args.mtp_num_layers:
                prediction.watch_prediction_losses(session, loss, chunk)
    if isinstance(experts, ExpertsProbe):
        routers.watch_routers(session, experts, observed.routers)


def _vocab_size(args: argparse.Namespace) -> int:
    """The tokenizer's vocabulary; Megatron pads the output layer beyond it."""
    from megatron.training.global_vars import get_tokenizer

    return int(getattr(get_tokenizer(), "vocab_size", None) or args.padded_vocab_size)


def _shape(args: argparse.Namespace, bindings: dict[str, Binding]) -> ModelShape | None:
    """The shapes behind ``system/flops_per_device``, or None, with the reason in the self-check."""
    try:
        return model_shape(args, _vocab_size(args))
    except UncountedModel as reason:
        degrade(bindings, "system", f"no FLOP rate: {reason}")
        return None


def _output_dir(config: ProbeConfig, args: argparse.Namespace) -> Path:
    if config.output_dir is not None:
        return Path(config.output_dir)
    if getattr(args, "tensorboard_dir", None):
        return Path(args.tensorboard_dir) / "probes"
    raise ConfigError(
        [
            "output_dir: not set, and Megatron has no --tensorboard-dir to put the probes' output under. "
            "Set output_dir in the file or pass --tensorboard-dir."
        ]
    )


def _start_writing(
    session: ProbeSession,
    config: ProbeConfig,
    args: argparse.Namespace,
    output_dir: Path,
    versions: dict[str, str],
    shape: ModelShape | None,
) -> None:
    manifest = Manifest(
        run_id=uuid.uuid4().hex,
        started=time.time(),
        attempt=next_attempt(output_dir),
        start_step=args.iteration + 1,
        tokens_at_start=session.tokens_total,
        config=config.model_dump(mode="json"),
        config_fingerprint=config.fingerprint(),
        layout=session.topology.describe(),
        versions=versions,
        flop_convention=shape.convention if shape is not None else f"{CONVENTION}, not counted",
        metrics=tuple(spec for spec in CATALOG if not spec.planned),
    )
    session.write_to(build_sinks(config, output_dir), manifest)


def _versions() -> dict[str, str]:
    versions = {"megatron_probes": megatron_probes.__version__}
    for name in ("megatron-core", "torch", "transformer-engine"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    # A checkout has no distribution metadata, or stands before the wheel that has.
    from megatron.core import package_info

    versions["megatron-core"] = package_info.__version__
    versions["python"] = platform.python_version()
    return versions
