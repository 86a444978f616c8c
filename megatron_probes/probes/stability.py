"""Robust spike detectors on the reduced loss and gradient norm, and their joint alarm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_probes.config.model import StabilityConfig
from megatron_probes.formulas.stability import JointSpike, SpikeDetector
from megatron_probes.probes.base import Facts, Parts, Probe, Values

_WATCHED = {"loss": "loss/global", "grad_norm": "grad/norm"}


class StabilityProbe(Probe):
    """``stability/*`` (Specification, section 3); reads the values that loss and gradient found."""

    family = "stability"

    def __init__(self, config: StabilityConfig) -> None:
        super().__init__()
        self._detectors = {
            name: SpikeDetector(
                window=config.window,
                min_history=config.min_history,
                threshold=getattr(config, name).threshold,
                d_floor=getattr(config, name).d_floor,
                direction=config.direction,
            )
            for name in _WATCHED
        }
        self._joint = JointSpike()

    def finalize(self, parts: Parts, facts: Facts, values: Values) -> None:
        scores = {
            name: self._detectors[name].push(values[tag]) if tag in values else None
            for name, tag in _WATCHED.items()
        }
        loss, grad_norm = scores["loss"], scores["grad_norm"]
        if loss is not None and grad_norm is not None:
            self._joint.push(loss, grad_norm)
            values["stability/joint_spike"] = self._joint.count
            values["stability/joint_spike_magnitude"] = self._joint.magnitude
        for name, score in scores.items():
            if score is None:
                continue
            shown = {"median": score.median, "mad": score.mad, "z": score.z}
            values.update({f"stability/{name}/{k}": v for k, v in shown.items() if v is not None})
            values[f"stability/{name}/spikes"] = self._detectors[name].spikes
            values[f"stability/{name}/nonfinite_steps"] = self._detectors[name].nonfinite_steps

    def state_dict(self) -> dict[str, Any]:
        return {
            "joint": self._joint.state_dict(),
            **{name: detector.state_dict() for name, detector in self._detectors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._joint.load_state_dict(state["joint"])
        for name, detector in self._detectors.items():
            detector.load_state_dict(state[name])
