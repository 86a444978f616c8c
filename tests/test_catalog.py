"""The catalogue against the specification's own tables, and the documentation generated from it."""

import dataclasses
import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_probes.catalog import (
    CATALOG,
    Priority,
    Reduction,
    first_screen_charts,
    lookup,
    snake_case,
)
from megatron_probes.catalog.spec import LAYER_POINTS

ROOT = Path(__file__).resolve().parent.parent
SPECIFICATION = ROOT / "docs" / "specification.md"

PREFIXES = {spec.tag.split("/")[0] for spec in CATALOG}

EXAMPLES = {
    "layer": 7,
    "class": "expert",
    "part": "attention_qkv",
    "point": "layer_007.query_normed",
    "tensor": "layer_007.mlp_fc1",
    "branch": "attention",
    "gate": "media_adapter",
    "kind": "all_reduce",
    "modality": "image",
    "set": "books_heldout",
    "source": "web",
    "task": "arc_easy",
}


def example(spec):
    return spec.render(**{name: EXAMPLES[name] for name in spec.placeholders})


def anonymous(tag):
    """The tag with nameless placeholders: the specification names them as it suits the sentence."""
    return re.sub(r"\{\w+\}", "{}", tag)


def table_rows(text):
    """Yield section number, first cell and last cell of every row of the tables of sections 0 to 10."""
    section = None
    for line in text.splitlines():
        if heading := re.match(r"## (\d+)\.", line):
            section = int(heading.group(1))
        elif line.startswith("## "):
            section = None
        elif section is not None and line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            if not set(cells[0]) <= set("- "):
                yield section, cells[0], cells[-1]


def alternatives(tag):
    """Expand ``{a,b}``."""
    pieces = [piece.split(",") for piece in re.split(r"\{([^}]*,[^}]*)\}", tag)]
    return ["".join(choice) for choice in itertools.product(*pieces)]


def templates(tag):
    """Translate one name of the specification into tags with nameless placeholders."""
    tag = tag.replace("NNN", "{}").replace("[/<class or layer part>]", "[/...]")
    scopes = ("", "/{}", "/layer_{}/{}")
    if tag.endswith("[/...]"):
        expanded = [tag.removesuffix("[/...]") + scope for scope in scopes]
    elif tag.startswith("optim/chain/"):
        link = tag.removesuffix("/...")
        expanded = [f"{link}{scope}/{{rms,absmax}}" for scope in (scopes[0], scopes[2])]
    else:
        expanded = [tag]
    return {re.sub(r"<\w+>", "{}", alternative) for whole in expanded for alternative in alternatives(whole)}


def specified_tags():
    tags = set()
    for section, first, last in table_rows(SPECIFICATION.read_text(encoding="utf-8")):
        names = re.findall(r"`([^`]+)`", first)
        if section == 5:
            for suffix in names:
                places = ("weight/{}",) if suffix == "kurtosis" else ("act/{}", "act_grad/{}")
                tags |= {f"{place}/{suffix}" for place in places}
                # "nonfinite: as absmax", so at the model's output it is measured every step too.
                tags |= {f"act/logits/{suffix}"} if suffix in ("absmax", "nonfinite") else set()
            continue
        if names == ["/raw", "/averaged"]:
            tags |= {tag + end for tag in tags if tag.startswith("eval/") for end in names}
            continue
        directory = ""
        if "also a histogram" in last:
            names.append(names[0].rsplit("/", 1)[0])
        for name in names:
            if name.startswith((".../", "/")):
                name = directory + name[name.index("/") :]
            directory = name.rsplit("/", 1)[0]
            tags |= templates(name)
        for name in re.findall(r"`([a-z_]+/[^`]+)`", last):
            if name.split("/")[0] in PREFIXES:
                tags |= templates(name)
    return tags


def test_the_catalogue_holds_the_tags_of_the_specification():
    specified, held = specified_tags(), {anonymous(spec.tag) for spec in CATALOG}
    assert len(specified) > 150
    assert held - specified == set(), "in the catalogue, not in the specification"
    assert specified - held == set(), "in the specification, not in the catalogue"


def test_every_metric_stands_in_the_section_that_defines_it():
    prefixes = {
        0: {"job", "probe"},
        1: {"loss", "data"},
        2: {"grad"},
        3: {"stability", "recovery"},
        4: {"system", "memory", "comm", "device", "host"},
        5: {"act", "act_grad", "weight"},
        6: {"optim"},
        7: {"moe"},
        8: {"residual", "gate"},
        9: {"modality"},
        10: {"eval"},
    }
    for spec in CATALOG:
        assert spec.tag.split("/")[0] in prefixes[spec.section], spec.tag


def test_priorities_are_those_of_the_specification():
    priorities = {}
    for line in SPECIFICATION.read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| (`[^|]+) \| (P\d) ?\|", line):
            for name in re.findall(r"`([a-z_]+/[^`]+)`", row.group(1)):
                priorities |= dict.fromkeys(templates(name), Priority[row.group(2)])
    checked = [spec for spec in CATALOG if anonymous(spec.tag) in priorities]
    assert len(checked) > 100
    for spec in checked:
        assert spec.priority is priorities[anonymous(spec.tag)], spec.tag


def test_every_probe_is_a_family_of_the_catalogue():
    probes = pytest.importorskip("megatron_probes.probes")
    families = {p.family for p in vars(probes).values() if isinstance(p, type) and hasattr(p, "family")}
    measured = {spec.family for spec in CATALOG if not spec.planned}
    assert families
    assert measured == families | {"job", "probe"}


def test_tags_are_distinct_and_well_formed():
    assert len({spec.tag for spec in CATALOG}) == len(CATALOG)
    for spec in CATALOG:
        assert re.fullmatch(r"[a-z_]+(/[a-z0-9_.]+)+", example(spec)), spec.tag


@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.tag)
def test_a_concrete_tag_leads_back_to_its_metric(spec):
    assert lookup(example(spec)) is spec


def test_layers_have_three_digits_and_prediction_heads_their_own_name():
    spec = lookup("moe/layer_003/max_vio")
    assert spec is lookup("moe/mtp_000/max_vio") is lookup("moe/layer_1234/max_vio")
    assert spec.render(layer=3) == "moe/layer_003/max_vio"
    assert spec.render(mtp=0) == "moe/mtp_000/max_vio"
    assert lookup("loss/mtp_001").render(layer=1) == "loss/mtp_001"
    for point in LAYER_POINTS:
        assert lookup(f"act/layer_012.{point}/rms").section == 5


@pytest.mark.parametrize(
    "tag",
    [
        "loss",
        "loss/globa",
        "loss/global/extra",
        "moe/layer_3/max_vio",
        "grad/layer_003/wq/rms",
        "act/layer_003.nowhere/rms",
        "loss/source/Web Pages",
        "optim/update_ratio/unknown",
        "",
    ],
)
def test_unknown_tags_are_refused(tag):
    with pytest.raises(KeyError):
        lookup(tag)


def test_rendering_needs_every_placeholder():
    with pytest.raises(ValueError, match="give layer, part"):
        lookup("grad/layer_003/norm/rms").render(layer=3)
    with pytest.raises(ValueError, match="no tag of"):
        lookup("loss/source/web").render(source="Web Pages")


def test_literal_tags_go_before_templates():
    assert lookup("act/logits/absmax").tag == "act/logits/absmax"
    assert lookup("act/logits/rms").tag == "act/{point}/rms"
    assert lookup("grad/expert/norm").tag == "grad/expert/norm"


def test_layout_dependent_metrics_are_those_that_the_specification_names():
    expected = {"loss/worst_rank", "loss/worst_rank_index", "moe/shard_max_vio", "moe/dropped_fraction"}
    for spec in CATALOG:
        by_name = (
            spec.tag in expected
            or spec.tag.startswith("loss/rank_mean")
            or spec.tag.endswith("/aux_loss")
            or spec.family in ("system", "memory", "comm", "device", "host")
        )
        assert spec.layout_dependent == by_name, spec.tag


def test_counts_and_indices_are_integers():
    for spec in CATALOG:
        if spec.unit in ("steps", "rank", "bytes", "elements", "tokens"):
            assert spec.integer, spec.tag
        if spec.reduction in (Reduction.RATIO, Reduction.ROOT_RATIO, Reduction.ROOT_SUM):
            assert not spec.integer, spec.tag


def test_ratios_have_a_denominator_and_sums_have_none():
    for spec in CATALOG:
        if spec.reduction is Reduction.RATIO:
            # The evaluation's derived scores are formulas of what was reduced.
            assert spec.denominator or spec.family == "evaluation", spec.tag
        if spec.reduction in (Reduction.SUM, Reduction.MAX, Reduction.ROOT_SUM, Reduction.ARGMAX):
            assert spec.denominator is None, spec.tag


def test_every_text_is_a_sentence():
    for spec in CATALOG:
        assert spec.observed, spec.tag
        assert spec.numerator, spec.tag
        for text in filter(None, (spec.meaning, spec.reads_high, spec.reads_low)):
            assert text.endswith("."), spec.tag


def test_specs_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CATALOG[0].tag = "other"


def test_the_first_screen_follows_the_order_of_the_specification():
    charts = first_screen_charts(planned=True)
    assert [chart.tags for chart in charts] == [
        ("job/state",),
        ("loss/global", "loss/worst_rank"),
        ("loss/source/{source}",),
        ("data/share/{source}",),
        ("grad/norm",),
        ("grad/clip_rate",),
        ("stability/joint_spike", "stability/joint_spike_magnitude"),
        ("system/step_time_s",),
        ("system/tokens_per_second",),
        ("memory/peak_allocated_bytes", "memory/peak_reserved_bytes"),
        ("moe/max_vio", "moe/shard_max_vio"),
        ("act/logits/absmax",),
        ("eval/{set}/bpb",),
    ]
    assert [chart.order for chart in charts] == sorted(chart.order for chart in charts)
    assert len({chart.title for chart in charts}) == len(charts)
    assert all(spec.priority is Priority.P0 for spec in CATALOG if spec.first_screen)


def test_the_first_screen_has_no_chart_without_a_probe():
    planned = {spec.tag for spec in CATALOG if spec.planned}
    charts = first_screen_charts()
    assert charts
    assert not planned & {tag for chart in charts for tag in chart.tags}


@pytest.mark.parametrize(
    ("name", "tag"),
    [("web", "web"), ("Common Crawl", "common_crawl"), ("wiki-en/2024", "wiki_en_2024"), ("日本", "")],
)
def test_snake_case(name, tag):
    assert snake_case(name) == tag


def test_importing_needs_no_torch():
    code = (
        "import sys, importlib, pkgutil, megatron_probes.catalog, megatron_probes.config, "
        "megatron_probes.formulas as f\n"
        "for m in pkgutil.iter_modules(f.__path__): importlib.import_module(f'{f.__name__}.{m.name}')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["metrics.md", "configuration.md"])
def test_generated_pages_are_current(name):
    page = generator().PAGES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page, "run scripts/generate_docs.py"


def test_the_reference_claims_no_planned_metric():
    measured, planned = generator().metrics_page().split("## Planned")
    for spec in CATALOG:
        assert (f"| `{spec.tag}` |" in measured) != spec.planned, spec.tag
        assert (f"| `{spec.tag}` |" in planned) == spec.planned, spec.tag
