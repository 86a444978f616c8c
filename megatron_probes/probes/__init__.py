"""One file a family of metrics: its slots, what it adds to them, and how the sums become values."""

from megatron_probes.probes.base import Facts, Gate, Parts, Probe
from megatron_probes.probes.experts import ExpertsProbe, Forensics, MoELayer
from megatron_probes.probes.gradient import GradientGroup, GradientProbe
from megatron_probes.probes.held_out import HeldOutProbe
from megatron_probes.probes.loss import LossProbe
from megatron_probes.probes.recovery import RecoveryProbe
from megatron_probes.probes.sources import SourcesProbe
from megatron_probes.probes.stability import StabilityProbe
from megatron_probes.probes.system import SystemProbe
from megatron_probes.probes.tensors import TensorsProbe

__all__ = [
    "ExpertsProbe",
    "Facts",
    "Forensics",
    "Gate",
    "GradientGroup",
    "GradientProbe",
    "HeldOutProbe",
    "LossProbe",
    "MoELayer",
    "Parts",
    "Probe",
    "RecoveryProbe",
    "SourcesProbe",
    "StabilityProbe",
    "SystemProbe",
    "TensorsProbe",
]
