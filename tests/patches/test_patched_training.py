"""A patched Megatron trains with probes and without the launcher, and without megatron_probes as before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_releases import RELEASES, copy_release
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from megatron_probes.cli import app
from megatron_probes.config import ConfigError, load_config
from megatron_probes.cpu import PRETRAIN_SCRIPT
from megatron_probes.sinks import read_records

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

STEPS = 3
MODEL = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --lr 1e-3 --log-interval 1
    --eval-iters 0 --eval-interval 1000 --mock-data --num-workers 0 --tokenizer-type NullTokenizer
    --vocab-size 127 --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion
    --no-rope-fusion
""".split()

WITHOUT_ADAPTER = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("megatron_probes.adapters"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def patched(release: str, folder: Path) -> Path:
    root = copy_release(release, folder)
    assert CliRunner().invoke(app, ["patch", str(root)]).exit_code == 0
    return root


def run(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module`; the output of all ranks is in `stdout`."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )


def trained_steps(output: str) -> list[str]:
    """The iterations that Megatron logged on the console."""
    return re.findall(r"iteration +(\d+)/.*lm loss: ", output)


def logged_losses(tensorboard: Path) -> list[float]:
    """Megatron's own losses by step; on the console the second is the mean of the first two."""
    events = EventAccumulator(str(tensorboard)).Reload()
    return [event.value for event in events.Scalars("lm loss")]


def config_for(folder: Path, text: str = "") -> tuple[Path, Path]:
    config, output = folder / "probes.yaml", folder / "output"
    config.write_text(f"output_dir: {output}\nstrict: true\n{text}")
    return config, output


def assert_recorded(output: Path, tensorboard: Path) -> None:
    """The records hold every step once, with the loss that Megatron logged in single precision."""
    records = read_records(output)
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert [record.values["loss/global"] for record in records] == pytest.approx(
        logged_losses(tensorboard), rel=1e-6
    )
    assert all("grad/norm" in record.values for record in records)


@pytest.mark.parametrize("release", RELEASES)
def test_it_trains_with_probes_and_no_launcher(tmp_path: Path, release: str) -> None:
    root = patched(release, tmp_path)
    config, output = config_for(tmp_path)
    done = run(
        "megatron_probes.cpu.fork",
        *("-n", 2, "--root", root, PRETRAIN_SCRIPT, *MODEL),
        *("--tensor-model-parallel-size", 2, "--tensorboard-dir", tmp_path / "tensorboard"),
        *("--probe-config", config),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"megatron-core {release}" in done.stdout
    assert_recorded(output, tmp_path / "tensorboard")


@pytest.mark.parametrize("release", RELEASES)
def test_it_trains_where_megatron_probes_is_not_installed(tmp_path: Path, release: str) -> None:
    root = patched(release, tmp_path)
    script = tmp_path / "without_adapter.py"
    script.write_text(WITHOUT_ADAPTER)
    done = run("megatron_probes.cpu.fork", "--root", root, script, PRETRAIN_SCRIPT, *MODEL)
    assert done.returncode == 0, done.stdout[-4000:]
    assert trained_steps(done.stdout) == ["1", "2", "3"]
    assert "self-check" not in done.stdout


def test_without_the_option_nothing_is_attached(tmp_path: Path) -> None:
    root = patched("0.19.2", tmp_path)
    done = run("megatron_probes.cpu.fork", "--root", root, PRETRAIN_SCRIPT, *MODEL)
    assert done.returncode == 0, done.stdout[-4000:]
    assert trained_steps(done.stdout) == ["1", "2", "3"]
    assert "self-check" not in done.stdout


def test_a_patched_megatron_may_be_launched_too(tmp_path: Path) -> None:
    """Both roads attach; the second finds the probes running."""
    root = patched("0.19.2", tmp_path)
    config, output = config_for(tmp_path)
    done = run(
        "torch.distributed.run",
        *("--standalone", "--nproc-per-node", 1, "-m", "megatron_probes.launch"),
        *("--cpu", "--megatron", root, PRETRAIN_SCRIPT, *MODEL),
        *("--tensorboard-dir", tmp_path / "tensorboard", "--probe-config", config),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("megatron_probes self-check") == 1
    assert_recorded(output, tmp_path / "tensorboard")


def test_a_bad_file_is_refused_before_the_model_is_built(tmp_path: Path) -> None:
    root = patched("0.19.2", tmp_path)
    config, output = config_for(tmp_path, "sample_every: 0\n")
    with pytest.raises(ConfigError) as refused:
        load_config(config)
    logs = tmp_path / "logs"
    done = run(
        "megatron_probes.cpu.fork",
        *("-n", 2, "--root", root, "--log-dir", logs, PRETRAIN_SCRIPT, *MODEL, "--probe-config", config),
    )
    assert done.returncode == 2
    said = [(logs / f"rank{rank}.log").read_text() for rank in range(2)]
    assert f"--probe-config: {refused.value}" in said[0]
    assert str(refused.value) not in said[1]
    assert all("Traceback" not in text and "building" not in text for text in said)
    assert not output.exists()
