"""How operators are registered, loaded and chosen."""

import os
import subprocess
import sys

import pytest
import torch

from megatron_probes import ops

D = torch.float64


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def cases() -> list[tuple[str, tuple[object, ...]]]:
    x, w = torch.randn(40, 30).bfloat16(), torch.randn(100, requires_grad=True)
    b, flag, padding = torch.randn(40, 30).bfloat16(), torch.ones(1), torch.zeros(40, dtype=torch.bool)
    hist, tokens = torch.zeros(6, ops.NUM_BINS, dtype=D), torch.zeros(40, 5, dtype=D)
    return [
        ("tensor_stats", (w, torch.zeros(7, dtype=D), True, flag)),
        ("tensor_stats", (x.t(), torch.zeros(12, dtype=D))),
        ("multi_tensor_stats", ([x, w, x[:, ::2]], torch.zeros(3, 12, dtype=D), True, flag)),
        ("residual_stats", (x, b, None, 1, torch.zeros(8, dtype=D))),
        ("residual_stats", (x, b, ~padding, 3, torch.zeros(8, dtype=D), hist, tokens, True, flag)),
        ("bf16_update_noop", (w, torch.randn(100), torch.zeros(2, dtype=D))),
        ("bf16_update_noop_master", (w, torch.randn(100), torch.zeros(2, dtype=D), True, flag)),
        ("routing_histogram", (torch.rand(40, 8) > 0.5, padding, torch.zeros(8, dtype=D))),
        ("routing_histogram", (torch.randint(0, 8, (40, 2)), None, torch.zeros(8, dtype=D), True, flag)),
        ("topk_margin_histogram", (torch.rand(40, 8), 2, padding, torch.zeros(ops.NUM_BINS, dtype=D))),
    ]


@pytest.mark.parametrize(("name", "arguments"), cases())
def test_opcheck(name: str, arguments: tuple[object, ...]) -> None:
    torch.library.opcheck(getattr(torch.ops.megatron_probes, name).default, arguments)


def test_autograd_records_nothing() -> None:
    w = torch.randn(10, requires_grad=True)
    assert not ops.tensor_stats(w).requires_grad
    assert not ops.tensor_stats(w.double()).requires_grad


def test_in_a_compiled_block_the_flag_switches_without_recompiling() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def block(x: torch.Tensor, out: torch.Tensor, enabled: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ops.tensor_stats(y, out, accumulate=True, enabled=enabled)
        return y

    out, enabled = torch.zeros(7, dtype=D), torch.ones(1)
    for flag in (1.0, 0.0, 1.0):
        enabled.fill_(flag)
        block(torch.ones(5), out, enabled)
    assert out[6] == 10
    assert len(graphs) == 1


def test_importing_initialises_no_device() -> None:
    code = "import torch, megatron_probes.ops; assert not torch.cuda.is_initialized(); print('fine')"
    assert run(code).stdout == "fine\n"


def test_without_compiled_kernels_the_references_serve() -> None:
    code = (
        "import torch; from megatron_probes import ops\n"
        "assert not ops.compiled_devices()\n"
        "print(ops.tensor_stats(torch.tensor([3.0, 4.0])).tolist())"
    )
    done = run(code, MEGATRON_PROBES_NO_EXT="1")
    assert (done.stdout, done.stderr) == ("[25.0, 7.0, 4.0, 0.0, 0.0, 0.0, 2.0]\n", "")


def test_a_missing_library_is_said_once_and_only_when_an_operator_is_used() -> None:
    code = (
        "import sys, torch; from megatron_probes.ops import library\n"
        "library._FILES = {'cpu': 'no_such_library.so'}\n"
        "from megatron_probes import ops; library._loaded.clear(); ops.load()\n"
        "print('imported', file=sys.stderr)\n"
        "for _ in range(3): ops.tensor_stats(torch.ones(2)); ops.topk_margin_histogram(torch.ones(2, 2), 1)"
    )
    errors = run(code).stderr
    assert errors.index("imported") < errors.index("no compiled kernels for cpu (it was not built)")
    assert errors.count("no compiled kernels") == 1


@pytest.mark.skipif("cpu" not in ops.compiled_devices(), reason="the compiled kernels are not built")
@pytest.mark.slow
def test_a_processor_without_avx2_gets_the_same_numbers() -> None:
    """The whole of the operator tests with the plainest dispatch forced."""
    folder = os.path.dirname(__file__)
    files = [f"{folder}/test_{name}.py" for name in ("stats", "residual", "update", "routing", "bins")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files],
        env={**os.environ, "MEGATRON_PROBES_CPU": "baseline"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
