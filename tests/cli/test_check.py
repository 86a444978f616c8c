from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megatron_probes.cli import app
from megatron_probes.config import ConfigError, load_config

FULL = """\
output_dir: 'runs/é: #1'
sample_every: 50
sources: [web, "no", code]
gradient:
  clip_window: 10
  placement: {"*.router.weight": replicated}
stability:
  loss: {d_floor: 1e-5}
system: {peak_flops_per_device: 989.4e12}
record: {rotate_bytes: 1_000_000}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "probes.yaml"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


@pytest.mark.parametrize("text", ["", FULL])
def test_the_output_is_the_whole_configuration(config: Path, tmp_path: Path, text: str) -> None:
    config.write_text(text, encoding="utf-8")
    result = run(config)
    assert result.exit_code == 0, result.output
    assert f"{config} is valid" in result.stdout.splitlines()[0]
    effective = tmp_path / "effective.yaml"
    effective.write_text(result.stdout, encoding="utf-8")
    assert load_config(effective) == load_config(config)


def test_what_differs_from_the_default_names_the_default(config: Path) -> None:
    config.write_text("sample_every: 50\nstability:\n  window: 64\n")
    marked = [line.strip() for line in run(config).stdout.splitlines() if "# default" in line]
    assert marked == ["sample_every: 50  # default: 100", "window: 64  # default: 128"]


@pytest.mark.parametrize(
    "text",
    [
        "sample_evry: 1",
        "sample_every: 0",
        "write_every: soon\nstability: {window: 1, min_history: 2}",
        "sources: [web, Web]",
        "a: [",
        "- 1",
        None,
    ],
)
def test_a_bad_file_is_refused_as_training_refuses_it(config: Path, text: str | None) -> None:
    if text is not None:
        config.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(config)
    result = run(config)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"{refused.value}\n"


def test_bad_usage() -> None:
    result = run()
    assert result.exit_code == 2
    assert "Missing argument 'CONFIG'" in result.stderr


def test_the_command_line_needs_no_torch(config: Path) -> None:
    """It answers at once, also on a login node."""
    config.write_text("sample_every: 1\n")
    program = (
        "import sys; from megatron_probes.cli import main; sys.argv.insert(1, 'check')\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program, config], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "sample_every: 1" in run.stdout
