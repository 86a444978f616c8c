"""What TensorBoard shows beside curves: the first screen's layout and the manifest as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import yaml
from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.text import metadata as text_metadata

from megatron_probes.catalog import CATALOG, Chart
from megatron_probes.sinks.record import Manifest

CATEGORY = "First screen"
_METRIC_COLUMNS = ("tag", "priority", "unit", "meaning", "reads high", "reads low")
_SPECS = {spec.tag: spec for spec in CATALOG}


def layout_summary(charts: Collection[Chart]) -> summary_pb2.Summary:
    """Return the Custom Scalars layout that holds these charts.

    TensorBoard shows the newest layout of a run and merges the runs' layouts, leaving out equal charts; a
    chart here depends on the catalogue alone, so the same chart of two runs is shown once.
    """
    category = layout_pb2.Category(
        title=CATEGORY,
        chart=[
            layout_pb2.Chart(
                title=chart.title,
                multiline=layout_pb2.MultilineChartContent(
                    # TensorBoard matches only the beginning of a tag.
                    tag=[f"^{_SPECS[template].pattern.pattern}$" for template in chart.tags]
                ),
            )
            for chart in charts
        ],
    )
    content = layout_pb2.Layout(category=[category]).SerializeToString()
    metadata = layout_metadata.create_summary_metadata()
    metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
    return _string_summary({layout_metadata.CONFIG_SUMMARY_TAG: content}, metadata)


def manifest_summary(manifest: Manifest) -> summary_pb2.Summary:
    """Return the run's manifest as Markdown under `manifest/*` in the Text tab."""
    run = {
        "run": manifest.run_id,
        "started (Unix seconds)": manifest.started,
        "attempt": manifest.attempt,
        "first step": manifest.start_step,
        "tokens before": manifest.tokens_at_start,
        "configuration fingerprint": manifest.config_fingerprint,
        "FLOP convention": manifest.flop_convention,
    }
    config = yaml.safe_dump(dict(manifest.config), sort_keys=False, allow_unicode=True)
    metrics = [
        (f"`{spec.tag}`", spec.priority.name, spec.unit, spec.meaning, spec.reads_high, spec.reads_low)
        for spec in manifest.metrics
    ]
    texts = {
        "manifest/run": _table(("", ""), run.items()),
        "manifest/config": f"```yaml\n{config}```",
        "manifest/layout": _table(("axis", "size"), manifest.layout.items()),
        "manifest/versions": _table(("package", "version"), manifest.versions.items()),
        "manifest/metrics": _table(
            ("tag", "priority", "unit", "meaning", "reads high", "reads low"), metrics
        ),
    }
    metadata = text_metadata.create_summary_metadata(display_name="", description="")
    metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
    return _string_summary({tag: text.encode() for tag, text in texts.items()}, metadata)


def _table(head: tuple[str, ...], rows: Collection[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(content: Any) -> str:
    return " ".join(str(content).replace("|", "\\|").split())


def _string_summary(
    contents: Mapping[str, bytes], metadata: summary_pb2.SummaryMetadata
) -> summary_pb2.Summary:
    return summary_pb2.Summary(
        value=[
            summary_pb2.Summary.Value(
                tag=tag,
                metadata=metadata,
                tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[content]),
            )
            for tag, content in contents.items()
        ]
    )
