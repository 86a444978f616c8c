import json
import os
import re
from pathlib import Path

import pydantic
import pytest
import yaml

from megatron_probes.config import ConfigError, ProbeConfig, describe_config, load_config

DEFAULTS = {
    "output_dir": None,
    "strict": False,
    "write_every": 1,
    "sample_every": 100,
    "loss": {"enabled": True, "per_rank": False},
    "gradient": {"enabled": True, "clip_window": 100, "placement": {}},
    "stability": {
        "enabled": True,
        "window": 128,
        "min_history": 32,
        "direction": "up",
        "loss": {"threshold": 8.0, "d_floor": 1e-3},
        "grad_norm": {"threshold": 8.0, "d_floor": 1e-2},
    },
    "system": {"enabled": True, "peak_flops_per_device": None},
    "tensors": {"enabled": True},
    "experts": {"enabled": True, "forensics": False},
    "held_out": {"enabled": True, "token_bytes": "auto"},
    "sources": [],
    "source_function": None,
    "modalities": [],
    "record": {"enabled": True, "parts": False, "rotate_bytes": 67108864, "flush_seconds": 1.0},
    "tensorboard": {"enabled": True, "by_tokens": True, "max_series": 2000, "flush_seconds": 5.0},
    "alarms": {"enabled": True},
    "queue": {"max_items": 256, "spill_bytes": 67108864},
}


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text):
        Path("probes.yaml").write_text(text, encoding="utf-8")
        return load_config("probes.yaml")

    return load


@pytest.fixture
def faults(load):
    def faults(text):
        with pytest.raises(ConfigError) as caught:
            load(text)
        assert str(caught.value) == "\n".join(caught.value.faults)
        return list(caught.value.faults)

    return faults


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n", "loss:\nstability:\n  loss:\n"])
def test_an_empty_file_gives_the_defaults(load, text):
    assert load(text).model_dump(mode="json") == DEFAULTS


def test_all_defaults_written_out_give_the_defaults(load):
    config = load(yaml.safe_dump(DEFAULTS))
    assert config == ProbeConfig()
    assert config.fingerprint() == ProbeConfig().fingerprint()


def test_every_value_arrives(load):
    config = load(
        """
        sample_every: 1_000
        gradient: {placement: {"*.bias": tp_sharded, "decoder.*": replicated}}
        stability: {window: 64, direction: both, loss: {threshold: 6}, grad_norm: {d_floor: 1e-1}}
        system: {peak_flops_per_device: 989.4e12}
        sources: [web, Common Crawl, no]
        modalities: [image]
        """
    )
    assert config.sample_every == 1000
    assert dict(config.gradient.placement) == {"*.bias": "tp_sharded", "decoder.*": "replicated"}
    assert (config.stability.window, config.stability.direction) == (64, "both")
    assert (config.stability.loss.threshold, config.stability.loss.d_floor) == (6.0, 1e-3)
    assert (config.stability.grad_norm.threshold, config.stability.grad_norm.d_floor) == (8.0, 0.1)
    assert config.system.peak_flops_per_device == 989.4e12
    assert config.sources == ("web", "Common Crawl", "no")
    assert config.modalities == ("image",)


def test_the_configuration_cannot_be_changed():
    config = ProbeConfig()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.strict = True
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.stability.loss.threshold = 1.0
    with pytest.raises(TypeError):
        config.gradient.placement["*"] = "replicated"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stability: {windw: 64}", "stability.windw: unknown key (value 64). Did you mean 'window'?"),
        ("window: 64", "window: unknown key (value 64). Did you mean 'stability.window'?"),
        (
            "record: {zzz: a}",
            "record.zzz: unknown key (value 'a'). "
            "Valid keys here: enabled, parts, rotate_bytes, flush_seconds.",
        ),
        (
            "sample_every: 0",
            "sample_every: must be at least 1 (value 0). Write a positive number of steps; to switch P1 off, "
            "write one above the run's last step.",
        ),
        ("write_every: -3", "write_every: must be at least 1 (value -3). Write a positive number of steps."),
        (
            "write_every: true",
            "write_every: must be a whole number (value true). Write a positive number of steps.",
        ),
        (
            "write_every: 1.0",
            "write_every: must be a whole number (value 1.0). Write a positive number of steps.",
        ),
        (
            "write_every:",
            "write_every: must be a whole number (value null). Write a positive number of steps.",
        ),
        ("strict: 1", "strict: must be true or false (value 1)."),
        ("strict: yes", "strict: must be true or false (value 'yes')."),
        ("output_dir: 3", "output_dir: must be text (value 3)."),
        ("output_dir: ''", "output_dir: must not be empty (value '')."),
        ("loss: true", "loss: must be a mapping of keys to values (value true)."),
        ("loss: [enabled]", "loss: must be a mapping of keys to values (value ['enabled'])."),
        (
            "stability: {direction: down}",
            "stability.direction: must be 'up' or 'both' (value 'down').",
        ),
        (
            "stability: {loss: {threshold: 0}}",
            "stability.loss.threshold: must be above 0 (value 0). "
            "8 suits most runs; calibrate it on a stable stretch.",
        ),
        (
            "stability: {grad_norm: {d_floor: .nan}}",
            "stability.grad_norm.d_floor: must be a finite number (value nan). "
            "Write a relative change such as 1e-3; 0 would flag rounding noise.",
        ),
        (
            "stability: {window: 16}",
            "stability.min_history: must be at most the window, 16 (value 32). "
            "Write min_history: 16 or less, or a longer window.",
        ),
        (
            "system: {peak_flops_per_device: 989}",
            "system.peak_flops_per_device: must be at least 1e+09 (value 989). "
            "The unit is FLOP/s: 989.4 TFLOP/s is 989.4e12.",
        ),
        (
            "gradient: {placement: {'*.bias': sharded}}",
            "gradient.placement['*.bias']: must be 'tp_sharded' or 'replicated' (value 'sharded').",
        ),
        (
            "gradient: {placement: [a]}",
            "gradient.placement: must be a mapping of keys to values (value ['a']).",
        ),
        (
            "sources: web",
            "sources: must be a list of names, such as [web, code] (value 'web').",
        ),
        ("sources: [web, 3]", "sources[1]: must be text (value 3)."),
        (
            "sources: [web, Web]",
            "sources: 'Web' and 'web' both become the tag 'web' (value ['web', 'Web']). Rename one.",
        ),
        (
            "sources: [Other]",
            "sources: the name 'Other' is reserved for ids outside the list (value ['Other']). "
            "Rename it, or leave it out: it is always there.",
        ),
        (
            "sources: [日本]",
            "sources: the name '日本' leaves nothing for a tag (value ['日本']). "
            "Use ASCII letters or digits.",
        ),
        (
            "sources: [image]\nmodalities: [Image]",
            "modalities: 'Image' and 'image' both become the tag 'image' (value ['Image']). Rename one.",
        ),
        (
            "queue: {spill_bytes: 0}",
            "queue.spill_bytes: must be at least 1 (value 0). Write a positive number of bytes.",
        ),
        (
            "tensorboard: {flush_seconds: 0}",
            "tensorboard.flush_seconds: must be above 0 (value 0). Write a positive number of seconds.",
        ),
    ],
)
def test_a_fault_names_key_value_and_fix(faults, text, message):
    assert faults(text) == [f"probes.yaml: {message}"]


def test_all_faults_are_reported_at_once(faults):
    found = faults("sample_every: 0\nstrict: 1\nstability: {windw: 64, loss: {threshold: -1}}")
    assert [fault.split(": ")[1] for fault in found] == [
        "strict",
        "sample_every",
        "stability.loss.threshold",
        "stability.windw",
    ]


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("loss: [\n", "line 2, column 1", "not valid YAML"),
        ("strict: true\n\tloss: 1\n", "line 2, column 1", "not valid YAML"),
        (
            "strict: true\nstrict: false\n",
            "line 2, column 1",
            "'strict' stands twice (first on line 1): keep one",
        ),
        (
            "stability:\n  window: 64\n  window: 65\n",
            "line 3, column 3",
            "'window' stands twice (first on line 2): keep one",
        ),
        ("1: 2\n", "line 1, column 1", "a key must be text"),
        ("a: b\n---\nc: d\n", "line 2, column 1", "another document"),
        ("strict: !!python/object/apply:os.getcwd []\n", "line 1, column 9", "not valid YAML"),
        ("strict: true\nloss: \x01\n", "line 2", "the character '\\x01' isn't allowed"),
        ("loss: *nothing\n", "line 1, column 7", "undefined alias"),
    ],
)
def test_bad_yaml_is_refused_with_its_place(faults, text, where, problem):
    (fault,) = faults(text)
    assert fault.startswith(f"probes.yaml: {where}: ")
    assert problem in fault


def test_nesting_without_end_is_refused(faults):
    assert faults("[" * 20_000) == ["probes.yaml: not valid YAML: nested too deeply."]


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "a list"), ("3\n", "the single value 3")])
def test_a_file_without_keys_is_refused(faults, text, kind):
    assert faults(text) == [
        f"probes.yaml: must hold keys and values, such as `sample_every: 100`, not {kind}."
    ]


def test_files_that_cannot_be_read_are_refused(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"loss: \xff\xfe")
    for path, reason in (
        (tmp_path / "absent.yaml", "no such file. Check the path."),
        (tmp_path, "is a directory. Give the path of a YAML file."),
        (
            tmp_path / "binary.yaml" / "x",
            "cannot be read: Not a directory. Check the path and its permissions.",
        ),
        (binary, "is not UTF-8 text (byte 6). Save it as UTF-8."),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"{path}: {reason}")):
            load_config(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    path = tmp_path / "probes.yaml"
    path.touch(mode=0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load_config(path)


def test_a_byte_order_mark_is_no_key(tmp_path):
    path = tmp_path / "probes.yaml"
    path.write_bytes(b"\xef\xbb\xbfstrict: true\n")
    assert load_config(path).strict is True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E+3", 1e3),
        (".5", 0.5),
        ("5.", 5.0),
        ("7", 7),
        ("+7", 7),
        ("1_000", 1000),
        ("1.5e3", 1500.0),
    ],
)
def test_numbers_are_those_of_yaml_1_2(load, text, value):
    threshold = load(f"stability: {{loss: {{threshold: {text}}}}}").stability.loss.threshold
    assert (threshold, type(threshold)) == (float(value), float)


@pytest.mark.parametrize("text", ["010", "0x10", "1:30", "2024-01-01", "1e", "_1"])
def test_what_only_yaml_1_1_calls_a_number_is_text(faults, text):
    (fault,) = faults(f"write_every: {text}")
    assert f"(value '{text}')" in fault


def test_the_fingerprint_follows_the_values_and_not_the_text(load):
    plain = load("sample_every: 50\nloss: {per_rank: true}").fingerprint()
    reordered = load("loss:\n  per_rank: true  # histogram\nsample_every: 50\nstrict: false").fingerprint()
    assert plain == reordered
    assert re.fullmatch("[0-9a-f]{64}", plain)
    assert load("sample_every: 51\nloss: {per_rank: true}").fingerprint() != plain
    assert load("gradient: {placement: {a: replicated}}").fingerprint() != ProbeConfig().fingerprint()


def test_every_key_is_described():
    described = {field.path: field for field in describe_config()}

    def paths(tree, prefix=""):
        for key, value in tree.items():
            yield prefix + key, value
            if isinstance(value, dict) and value:
                yield from paths(value, f"{prefix}{key}.")

    expected = dict(paths(DEFAULTS))
    assert set(described) == set(expected)
    for path, field in described.items():
        assert field.text.endswith("."), path
        if field.accepts == "section":
            assert field.default == "", path
        else:
            assert json.loads(field.default) == expected[path], path
    assert described["sample_every"].accepts == "whole number, at least 1"
    assert described["stability.direction"].accepts == "`up` or `both`"
    assert described["output_dir"].accepts == "text or null"
