"""The configuration tree; the text under each field is its documentation.

``_fix(...)`` on a field is the sentence that follows when its value is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megatron_probes.catalog import snake_case

OTHER_SOURCE = "other"
"""The tag that takes every source that the configuration doesn't list."""


def _fix(text: str) -> dict[str, Any]:
    return {"fix": text}


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys and converts no types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: Any) -> Any:
        return {} if value is None else value


Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
]

Placements = Annotated[
    Mapping[str, Literal["tp_sharded", "replicated"]],
    AfterValidator(lambda value: MappingProxyType(dict(value))),
    PlainSerializer(dict),
]

Threshold = Annotated[
    float,
    Field(
        gt=0,
        description="A step whose robust score z lies above it is a spike.",
        json_schema_extra=_fix("8 suits most runs; calibrate it on a stable stretch."),
    ),
]

SpreadFloor = Annotated[
    float,
    Field(
        gt=0,
        description="Smallest spread of ln(x) that the score divides by: roughly the relative change of x "
        "that is never unusual.",
        json_schema_extra=_fix("Write a relative change such as 1e-3; 0 would flag rounding noise."),
    ),
]

Enabled = Annotated[bool, Field(description="Measure this family.")]

Steps = Annotated[int, Field(ge=1, json_schema_extra=_fix("Write a positive number of steps."))]
Bytes = Annotated[int, Field(ge=1, json_schema_extra=_fix("Write a positive number of bytes."))]
Seconds = Annotated[float, Field(gt=0, json_schema_extra=_fix("Write a positive number of seconds."))]


class LossConfig(Section):
    """The loss and the tokens behind it (Specification, section 1)."""

    enabled: Enabled = True
    per_rank: bool = Field(
        default=False,
        description="Also write a histogram of the per-rank mean losses (at most 64 data ranks).",
    )


class GradientConfig(Section):
    """The gradient (Specification, section 2)."""

    enabled: Enabled = True
    clip_window: Steps = Field(
        default=100, description="Recent steps with a finite norm over which `grad/clip_rate` is taken."
    )
    placement: Placements = Field(
        default_factory=dict,
        description="Placement of parameters that carry no tensor-parallel flag: a glob of parameter names "
        "to `tp_sharded` (each tensor-parallel rank holds its own part) or `replicated` (all hold the same).",
    )


class LossDetectorConfig(Section):
    """The spike detector of `loss/global`."""

    threshold: Threshold = 8.0
    d_floor: SpreadFloor = 1e-3


class GradNormDetectorConfig(Section):
    """The spike detector of `grad/norm`."""

    threshold: Threshold = 8.0
    d_floor: SpreadFloor = 1e-2


class StabilityConfig(Section):
    """Spikes of loss and gradient norm (Specification, section 3)."""

    enabled: Enabled = True
    window: Steps = Field(default=128, description="Previous steps that form the baseline of a step.")
    min_history: Steps = Field(
        default=32, description="Steps that the baseline must hold before a step is scored."
    )
    direction: Literal["up", "both"] = Field(
        default="up", description="`up`: a spike lies above the baseline; `both`: also below it."
    )
    loss: LossDetectorConfig = Field(
        default_factory=LossDetectorConfig, description="Detector of `loss/global`."
    )
    grad_norm: GradNormDetectorConfig = Field(
        default_factory=GradNormDetectorConfig, description="Detector of `grad/norm`."
    )

    @field_validator("min_history")
    @classmethod
    def _fits_into_window(cls, min_history: int, info: ValidationInfo) -> int:
        window = info.data.get("window", min_history)
        if min_history > window:
            raise PydanticCustomError(
                "above_window",
                "must be at most the window, {window}",
                {"window": window, "fix": f"Write min_history: {window} or less, or a longer window."},
            )
        return min_history


class SystemConfig(Section):
    """Step time, throughput and memory (Specification, section 4)."""

    enabled: Enabled = True
    peak_flops_per_device: float | None = Field(
        default=None,
        ge=1e9,
        description="Dense peak of one device in FLOP/s for the number format of the matrix products, "
        "without sparsity. Gives `system/mfu`.",
        json_schema_extra=_fix("The unit is FLOP/s: 989.4 TFLOP/s is 989.4e12."),
    )


class TensorsConfig(Section):
    """Statistics of tensors (Specification, section 5)."""

    enabled: Enabled = True


class ExpertsConfig(Section):
    """The load of the experts (Specification, section 7)."""

    enabled: Enabled = True
    forensics: bool = Field(
        default=False,
        description="On sampled steps also write, by layer, the share of each expert, the routing bias and "
        "the distribution of the top-k margin (P2).",
    )


class HeldOutConfig(Section):
    """The held-out loss inside Megatron's own evaluation (Specification, section 10)."""

    enabled: Enabled = True
    token_bytes: Literal["auto", "bytes", "none"] = Field(
        default="auto",
        description="Where bits per byte take the original bytes of each token from: `auto` the tokenizer's "
        "own file, `bytes` ids below 256 that are bytes of UTF-8, `none` no bits per byte.",
    )


class RecordConfig(Section):
    """The exact record: one JSON line a step, all digits kept."""

    enabled: bool = Field(default=True, description="Write the record.")
    parts: bool = Field(default=False, description="Also write the reduced sums, counts and maxima.")
    rotate_bytes: Bytes = Field(default=64 << 20, description="Size at which a new file is begun.")
    flush_seconds: Seconds = Field(default=1.0, description="Longest time that a line waits in memory.")


class TensorBoardConfig(Section):
    """TensorBoard's event files."""

    enabled: bool = Field(default=True, description="Write the event files.")
    by_tokens: bool = Field(default=True, description="Write a second run with tokens on the x axis.")
    max_series: int = Field(
        default=2000,
        ge=1,
        description="Most tags that are written; the number left out is reported.",
        json_schema_extra=_fix("Write a positive number, or `enabled: false` to write none."),
    )
    flush_seconds: Seconds = Field(default=5.0, description="Longest time that a point waits in memory.")


class AlarmsConfig(Section):
    """Joint spikes, non-finite values and disabled probes as log lines and in `alarms.jsonl`."""

    enabled: bool = Field(default=True, description="Raise alarms.")


class QueueConfig(Section):
    """The bounded queue between training and storage."""

    max_items: int = Field(
        default=256,
        ge=1,
        description="Steps that wait for storage before points are given up, P1 first.",
        json_schema_extra=_fix("Write a positive number of steps."),
    )
    spill_bytes: Bytes = Field(
        default=64 << 20, description="Memory for the P0 points of steps that found the queue full."
    )


class ProbeConfig(Section):
    """The whole configuration; an empty file gives every default."""

    output_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of everything that is written; by default `probes` inside TensorBoard's folder.",
    )
    strict: bool = Field(
        default=False, description="Raise a probe's exception instead of switching the probe off; for tests."
    )
    write_every: Steps = Field(default=1, description="Steps from one written P0 point to the next.")
    sample_every: Steps = Field(
        default=100,
        description="K: steps from one P1 measurement to the next. 1 for small runs, 100 to 200 for "
        "long ones.",
        json_schema_extra=_fix(
            "Write a positive number of steps; to switch P1 off, write one above the run's last step."
        ),
    )
    loss: LossConfig = Field(default_factory=LossConfig, description="The loss.")
    gradient: GradientConfig = Field(default_factory=GradientConfig, description="The gradient.")
    stability: StabilityConfig = Field(default_factory=StabilityConfig, description="Spike detection.")
    system: SystemConfig = Field(
        default_factory=SystemConfig, description="Step time, throughput and memory."
    )
    tensors: TensorsConfig = Field(default_factory=TensorsConfig, description="Statistics of tensors.")
    experts: ExpertsConfig = Field(default_factory=ExpertsConfig, description="The load of the experts.")
    held_out: HeldOutConfig = Field(default_factory=HeldOutConfig, description="The held-out loss.")
    sources: Names = Field(
        default=(),
        description="Names of the data sources in the order of the blend; ids outside the list count as "
        f"`{OTHER_SOURCE}`. In tags they stand in snake_case.",
    )
    source_function: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="`module:function` that is given a batch of the data loader and returns the index into "
        "`sources` of each sample [batch] or token [batch, sequence], for loaders other than Megatron's "
        "blended one.",
        json_schema_extra=_fix("Write it as `module:function`, importable where the training runs."),
    )
    modalities: Names = Field(
        default=(),
        description="Names of the modalities; in tags they stand in snake_case. Planned: no probe reads "
        "them yet.",
    )
    record: RecordConfig = Field(default_factory=RecordConfig, description="The exact record.")
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig, description="TensorBoard.")
    alarms: AlarmsConfig = Field(default_factory=AlarmsConfig, description="Alarms.")
    queue: QueueConfig = Field(
        default_factory=QueueConfig, description="The queue between training and storage."
    )

    @field_validator("sources", "modalities")
    @classmethod
    def _distinct_tags(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        taken = {snake_case(name): name for name in info.data.get("sources", ())}
        for name in names:
            tag = snake_case(name)
            if not tag:
                raise PydanticCustomError(
                    "no_tag",
                    "the name {name} leaves nothing for a tag",
                    {"name": repr(name), "fix": "Use ASCII letters or digits."},
                )
            if tag == OTHER_SOURCE:
                raise PydanticCustomError(
                    "reserved",
                    "the name {name} is reserved for ids outside the list",
                    {"name": repr(name), "fix": "Rename it, or leave it out: it is always there."},
                )
            if tag in taken:
                raise PydanticCustomError(
                    "same_tag",
                    "{name} and {earlier} both become the tag {tag}",
                    {"name": repr(name), "earlier": repr(taken[tag]), "tag": repr(tag), "fix": "Rename one."},
                )
            taken[tag] = name
        return names

    def fingerprint(self) -> str:
        """Return the SHA-256 of the configuration as canonical JSON, in hexadecimal."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
