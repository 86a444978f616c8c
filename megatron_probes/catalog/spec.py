"""What one metric is: its name, priority, observation point, reduction and meaning.

Templates name the parts of a tag that vary with the run in braces: ``moe/layer_{layer}/max_vio``.
``layer_{layer}`` stands for one block: ``layer_007`` in the decoder, ``mtp_000`` in a multi-token
prediction head. All other placeholders are listed in ``PLACEHOLDERS``.
"""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass

GRADIENT_PARTS = (
    "attention_qkv",
    "attention_proj",
    "mlp_fc1",
    "mlp_fc2",
    "norm",
    "router",
    "experts",
    "shared_experts",
    "mamba",
    "embedding",
    "output",
    "other",
)
"""Parts of a layer by which parameters are grouped (Specification, section 2)."""

PARAMETER_CLASSES = ("embedding", "expert", "dense")
"""Parameter classes; an untied output layer is dense (Specification, section 2)."""

LAYER_POINTS = (
    "query",
    "key",
    "value",
    "query_normed",
    "key_normed",
    "attention_output",
    "ffn_activation",
    "residual_after_attention",
    "residual_after_ffn",
    "expert_input",
    "expert_output",
)
"""Observation points inside a layer, written ``layer_NNN.<name>`` (Specification, section 5)."""

MODEL_POINTS = ("embedding", "logits")
"""Observation points outside the layers (Specification, section 5)."""

_NAME = r"[a-z0-9][a-z0-9_]*"
_BLOCK = r"(?:layer|mtp)_\d{3,}"


def _one_of(names: tuple[str, ...]) -> str:
    return "(?:" + "|".join(names) + ")"


PLACEHOLDERS = {
    "layer": r"\d{3,}",
    "class": _one_of(PARAMETER_CLASSES),
    "part": _one_of(GRADIENT_PARTS),
    "point": f"(?:{_one_of(MODEL_POINTS)}|{_BLOCK}\\.{_one_of(LAYER_POINTS)})",
    "tensor": f"(?:{_one_of(GRADIENT_PARTS)}|{_BLOCK}\\.{_one_of(GRADIENT_PARTS)})",
    "branch": _NAME,
    "gate": _NAME,
    "kind": _NAME,
    "modality": _NAME,
    "set": _NAME,
    "source": _NAME,
    "task": _NAME,
}
"""Placeholder name -> the regular expression of what may stand in its place."""


class Priority(enum.IntEnum):
    """How urgent a metric is, and with it how often it is measured."""

    P0 = 0
    """Alarm: every step."""
    P1 = 1
    """Diagnosis: every K-th step."""
    P2 = 2
    """Forensics: when asked for."""


class Reduction(enum.Enum):
    """How the parts of a metric combine over ranks and micro-batches; the value is its description."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    ARGMAX = "rank that holds the maximum"
    RATIO = "sum / sum"
    ROOT_RATIO = "sqrt(sum / sum)"
    ROOT_SUM = "sqrt(sum)"
    COUNTS = "sum of a vector of counts, then the formula"
    HISTOGRAM = "sum of fixed bins, then the quantile"
    CELLS = "one cell a rank, then the formula"
    HOST = "derived, not reduced"


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric of the specification."""

    tag: str
    """Name in the dashboard and the record; a template when it holds placeholders in braces."""
    family: str
    """The family that is switched off as one when its probe fails."""
    priority: Priority
    section: int
    """Section of the specification that defines it."""
    observed: str
    """Observation point and moment."""
    numerator: str
    """What is summed or maximised."""
    denominator: str | None = None
    reduction: Reduction
    axes: tuple[str, ...] = ()
    """Mesh axes over which the data is distinct (tp joins for token data under sequence parallelism); empty
    for what isn't reduced."""
    unit: str
    meaning: str
    reads_high: str = ""
    reads_low: str = ""
    layout_dependent: bool = False
    """True when the definition itself depends on the parallel layout."""
    integer: bool = False
    """A count or an index: exact in the record, double precision in TensorBoard."""
    planned: bool = False
    """Defined, but no probe measures it yet."""
    first_screen: int | None = None
    """The chart of the first screen that shows it; metrics with the same number share a chart."""

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the placeholders in the order of the tag."""
        return tuple(re.findall(r"\{(\w+)\}", self.tag))

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The regular expression that a concrete tag of this metric matches whole."""
        text = self.tag.replace("layer_{layer}", "{block}")
        pieces = re.split(r"\{(\w+)\}", text)
        known = PLACEHOLDERS | {"block": _BLOCK}
        return re.compile("".join(known[p] if i % 2 else re.escape(p) for i, p in enumerate(pieces)))

    def render(self, **values: str | int) -> str:
        """Return the concrete tag with the placeholders filled in.

        ``layer`` and ``mtp`` take a number: ``render(layer=3)`` gives ``layer_003`` and, for a block of
        a multi-token prediction head, ``render(mtp=0)`` gives ``mtp_000``.
        Raises ``ValueError`` when the result isn't a tag of this metric.
        """
        tag = self.tag
        if "mtp" in values:
            tag = tag.replace("layer_{layer}", f"mtp_{values['mtp']:03d}")
        for name, value in values.items():
            tag = tag.replace(f"{{{name}}}", f"{value:03d}" if name == "layer" else str(value))
        if not self.pattern.fullmatch(tag):
            raise ValueError(f"{tag!r} is no tag of {self.tag!r}: give {', '.join(self.placeholders)}")
        return tag


def snake_case(name: str) -> str:
    """Return ``name`` as it stands in a tag: lower-case ASCII letters and digits joined by ``_``.

    The result is empty when the name holds no such character; distinct names may collide, and whoever
    takes names from a user refuses that.
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
