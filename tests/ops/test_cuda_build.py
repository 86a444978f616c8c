"""What can be said of the CUDA kernels without a device: registers, spills, hot loops, architectures."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_probes import ops

ROOT = Path(ops.__file__).parents[2]
LIBRARY = ROOT / "megatron_probes" / "_ops_cuda.so"


def toolkit() -> Path | None:
    homes = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    return next((home for home in homes if (home / "bin/nvcc").exists()), None)


def cuobjdump() -> str | None:
    """From the toolkit, or from triton, which brings its own."""
    if (home := toolkit()) and (home / "bin/cuobjdump").exists() and (home / "bin/nvdisasm").exists():
        return str(home / "bin/cuobjdump")
    if (triton := importlib.util.find_spec("triton")) and triton.submodule_search_locations:
        bundled = Path(triton.submodule_search_locations[0], "backends/nvidia/bin/cuobjdump")
        if bundled.exists():
            return str(bundled)
    return shutil.which("cuobjdump")


def dump(*arguments: str) -> str:
    tool = cuobjdump()
    if tool is None or not LIBRARY.exists():
        pytest.skip("needs the built CUDA library and cuobjdump")
    return subprocess.run([tool, *arguments, str(LIBRARY)], capture_output=True, text=True, check=True).stdout


def functions(sass: str) -> dict[str, list[tuple[int, str]]]:
    """Instructions by function: (address, text)."""
    found = {}
    for body in sass.split("Function : ")[1:]:
        name, _, text = body.partition("\n")
        lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)
        found[name.strip()] = [(int(address, 16), instruction) for address, instruction in lines]
    return found


def innermost_hot_loop(instructions: list[tuple[int, str]]) -> list[str]:
    """The shortest loop with at least four 16-byte loads."""
    loops = []
    for address, text in instructions:
        if (branch := re.search(r"BRA\S*.* 0x([0-9a-f]+)", text)) and (start := int(branch[1], 16)) < address:
            body = [t for a, t in instructions if start <= a <= address]
            if sum("LDG" in t and ".128" in t for t in body) >= 4:
                loops.append(body)
    return min(loops, key=len)


def test_the_library_serves_every_architecture() -> None:
    elf, ptx = dump("-lelf"), dump("-lptx")
    assert {"sm_80", "sm_90", "sm_100"} <= set(re.findall(r"sm_\d+", elf))
    assert "sm_100" in ptx


@pytest.mark.parametrize("kernel", ["stats_kernel", "token_kernel"])
def test_the_slow_path_is_off_the_hot_loop(kernel: str) -> None:
    """Sums stay in registers, and the loop only calls out of line, behind a branch, for what it can't sum."""
    for name, instructions in functions(dump("-sass", "-arch", "sm_90")).items():
        if kernel not in name or "per_token" in name:
            continue
        loop = innermost_hot_loop(instructions)
        assert not [t for t in loop if "LDL" in t or "STL" in t], name
        assert len(loop) < 500, name


@pytest.mark.slow
@pytest.mark.parametrize("source", ["stats", "residual", "counts"])
def test_no_register_spills(source: str, tmp_path: Path) -> None:
    home = toolkit()
    if home is None:
        pytest.skip("needs nvcc")
    command = [str(home / "bin/nvcc"), "-std=c++20", "-O3", "-Xptxas=-v", "-arch=sm_90", "--cubin"]
    command += [str(ROOT / f"csrc/cuda/{source}.cu"), "-o", str(tmp_path / "out.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert spills
    assert set(spills) == {("0", "0")}
    assert max(registers) <= 64  # four blocks of 256 threads an SM
