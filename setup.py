"""Builds the compiled kernels: C++, and CUDA as a second library where nvcc and a CUDA torch are.

The package works without either, so nothing here fails an installation: what can't be built is said in one
warning. Both libraries use torch's stable ABI and no Python symbol, so one file serves every CPython.

MEGATRON_PROBES_CUDA     auto (default): build the CUDA part if it can be built; 0: don't; 1: fail if it can't
MEGATRON_PROBES_NO_EXT   1: build neither part
TORCH_CUDA_ARCH_LIST     default 8.0;9.0;10.0+PTX (10.0 needs CUDA 12.8); no GPU is asked for
CXX, CXXFLAGS, LDFLAGS   compiler (default g++, clang++ or c++) and additional flags
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
STABLE_ABI = (
    "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10, the first with parallel_for in the stable ABI
)
MINIMUM_TORCH = (2, 10)
DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"


class NotBuilt(Exception):
    """Why a part can't be built here."""


def find_torch() -> Path:
    """The folder of the installed torch, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise NotBuilt(
            "torch is not visible to this build (pip isolates builds); "
            "to compile the kernels, install torch and run `pip install --no-build-isolation .`"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if torch_version(folder) < MINIMUM_TORCH:
        raise NotBuilt("torch is older than 2.10, the first with the stable ABI that the kernels use")
    return folder


def torch_version(torch: Path) -> tuple[int, int]:
    match = re.search(r"__version__ = '(\d+)\.(\d+)", (torch / "version.py").read_text())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def torch_cuda_version(torch: Path) -> str | None:
    match = re.search(r"^cuda[^=]*= '([\d.]+)'", (torch / "version.py").read_text(), re.MULTILINE)
    return match[1] if match else None


def find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if shutil.which(name.split()[0]):
            return name
    raise NotBuilt("no C++ compiler was found; set CXX")


def find_cuda_home() -> Path:
    """The toolkit with both bin/nvcc and headers: an nvcc on PATH may be a wrapper script elsewhere."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    candidates += ["/usr/local/cuda", *map(str, sorted(Path("/usr/local").glob("cuda-*"), reverse=True))]
    for home in map(Path, filter(None, candidates)):
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home
    raise NotBuilt("no CUDA toolkit with bin/nvcc and include/cuda_runtime.h was found; set CUDA_HOME")


def architecture_flags() -> list[str]:
    """TORCH_CUDA_ARCH_LIST in nvcc's words."""
    flags = []
    for entry in re.split(r"[; ,]+", os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHITECTURES):
        number = entry.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if entry.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def run_all(commands: Iterable[list[str]]) -> None:
    """Run independent commands, two at a time."""

    def run(command: list[str]) -> None:
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        print(" ".join(command), done.stdout, done.stderr, sep="\n", flush=True)
        if done.returncode:
            raise NotBuilt(f"{command[0]} failed:\n{done.stderr.strip()[-4000:]}")

    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(run, commands))


class BuildKernels(build_ext):
    """Builds plain shared libraries into the package, not Python extension modules."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        required = ext.name.endswith("_cuda") and os.environ.get("MEGATRON_PROBES_CUDA") == "1"
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        objects = ROOT / self.build_temp / ext.name
        target.parent.mkdir(parents=True, exist_ok=True)
        objects.mkdir(parents=True, exist_ok=True)
        try:
            (build_cuda if ext.name.endswith("_cuda") else build_cpu)(target, objects)
        except NotBuilt as reason:
            if required:
                raise SystemExit(f"MEGATRON_PROBES_CUDA=1: {reason}") from reason
            print(
                f"WARNING: {ext.name} is not built, the plain-torch references serve: {reason}",
                file=sys.stderr,
            )

    def get_outputs(self) -> list[str]:
        return [output for output in super().get_outputs() if Path(output).exists()]

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            if built.exists():
                self.copy_file(str(built), str(ROOT / self.get_ext_filename(ext.name)))


class Wheel(bdist_wheel):
    """No Python symbol is used, so one wheel serves every CPython of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def words(variable: str) -> list[str]:
    return os.environ.get(variable, "").split()


def compile_flags(torch: Path) -> list[str]:
    optimise = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math"]
    link = ["-fPIC", "-fvisibility=hidden", STABLE_ABI, f"-isystem{torch / 'include'}"]
    return [*optimise, *link, "-Wall", *words("CXXFLAGS")]


def link_flags(torch: Path, *libraries: str) -> list[str]:
    return ["-shared", f"-L{torch / 'lib'}", *(f"-l{name}" for name in libraries), *words("LDFLAGS")]


def build_cpu(target: Path, objects: Path) -> None:
    torch, compiler = find_torch(), find_compiler().split()
    sources = sorted((CSRC / "cpu").glob("*.cpp"))
    outputs = [objects / f"{source.stem}.o" for source in sources]
    flags = compile_flags(torch)
    run_all([*compiler, *flags, "-c", str(s), "-o", str(o)] for s, o in zip(sources, outputs, strict=True))
    run_all([[*compiler, *map(str, outputs), *link_flags(torch, "torch", "torch_cpu"), "-o", str(target)]])


def build_cuda(target: Path, objects: Path) -> None:
    torch = find_torch()
    toolkit = torch_cuda_version(torch)
    if toolkit is None:
        raise NotBuilt("this torch has no CUDA")
    compiler, home = find_compiler().split(), find_cuda_home()
    kernels, bindings = sorted((CSRC / "cuda").glob("*.cu")), sorted((CSRC / "cuda").glob("*.cpp"))
    outputs = {source: objects / f"{source.stem}.o" for source in (*kernels, *bindings)}
    nvcc = [str(home / "bin/nvcc"), "-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    nvcc += ["-Xptxas=-v", "--threads=2", *architecture_flags()]
    cxx = [*compiler, *compile_flags(torch), "-DUSE_CUDA", f"-isystem{home / 'include'}"]
    commands = [[*nvcc, "-c", str(s), "-o", str(outputs[s])] for s in kernels]
    commands += [[*cxx, "-c", str(s), "-o", str(outputs[s])] for s in bindings]
    run_all(commands)
    link = [*link_flags(torch, "torch", "torch_cpu", "torch_cuda"), f"-L{home / 'lib64'}", "-lcudart_static"]
    run_all([[*compiler, *map(str, outputs.values()), *link, "-ldl", "-lrt", "-lpthread", "-o", str(target)]])


def extensions() -> list[Extension]:
    if os.environ.get("MEGATRON_PROBES_NO_EXT", "0") not in ("", "0"):
        return []
    names = ["_ops_cpu"] + (["_ops_cuda"] if os.environ.get("MEGATRON_PROBES_CUDA", "auto") != "0" else [])
    return [Extension(f"megatron_probes.{name}", sources=[]) for name in names]


class BuildPackage(build_py):
    """Puts patches/ into the package, where `megatron-probes patch` of an installation looks for it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("patches", str(Path(self.build_lib, "megatron_probes", "patches")))


setup(
    ext_modules=extensions(),
    cmdclass={"bdist_wheel": Wheel, "build_ext": BuildKernels, "build_py": BuildPackage},
)
