"""On the runtime every way of naming a CUDA device means the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from megatron_probes.cpu.devices import to_cpu
from megatron_probes.cpu.fork import fork_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


def on_runtime(fn: Callable[[int], Any]) -> Any:
    """Result of `fn(0)` in a process on the CPU runtime."""
    return fork_ranks(fn, 1, timeout_s=120, preloaded=True)[0]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, 3, torch.device("cuda"), torch.device("cuda", 1)])
def test_cuda_devices_become_the_cpu(device: Any) -> None:
    assert to_cpu(device) == "cpu"


@pytest.mark.parametrize("device", ["cpu", "meta", None, torch.device("meta")])
def test_other_devices_stay(device: Any) -> None:
    assert to_cpu(device) is device


def devices_of_new_tensors(rank: int) -> list[str]:
    x = torch.ones(2, 2)
    tensors = [
        torch.zeros(3, device="cuda"),
        torch.empty(3, device=torch.cuda.current_device(), pin_memory=True),
        torch.arange(3, device=torch.device("cuda", 0)),
        torch.tensor([1.0], device="cuda:0"),
        torch.rand_like(x, device="cuda"),
        x.new_zeros(2, device="cuda"),
        x.to("cuda"),
        x.to(0, torch.float64),
        x.to(device="cuda", non_blocking=True),
        x.cuda(non_blocking=True).pin_memory(),
        torch.nn.Linear(2, 2).to("cuda").weight,
        torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
        torch.nn.Linear(2, 2).cuda().weight,
        torch.randn(2, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda"),
    ]
    return [str(tensor.device) for tensor in tensors]


def test_tensors_are_on_the_cpu() -> None:
    assert set(on_runtime(devices_of_new_tensors)) == {"cpu"}


def meta_stays(rank: int) -> tuple[str, str]:
    return str(torch.empty(2, device="meta").device), str(torch.nn.Linear(2, 2).to("meta").weight.device)


def test_the_meta_device_stays() -> None:
    assert on_runtime(meta_stays) == ("meta", "meta")


def dtypes_stay(rank: int) -> list[torch.dtype]:
    x = torch.ones(2)
    like = torch.zeros(1, dtype=torch.int32)
    return [x.to(torch.float64).dtype, x.to(like).dtype, x.to("cuda", torch.half).dtype]


def test_casts_stay_casts() -> None:
    assert on_runtime(dtypes_stay) == [torch.float64, torch.int32, torch.half]


def asked_from(module: str, question: Callable[[torch.Tensor], Any]) -> Any:
    """Answer to `question` when code of `module` asks it."""
    asker = FunctionType(question.__code__, {"__name__": module})
    return asker(torch.ones(2))


def types_by_asker(rank: int) -> dict[str, tuple[str, bool]]:
    askers = ("megatron", "megatron.core.optimizer", "megatron_probes.ops", "torch.nn", "__main__")
    return {
        asker: (asked_from(asker, lambda x: x.type()), asked_from(asker, lambda x: x.is_cuda))
        for asker in askers
    }


def test_only_megatron_is_told_of_cuda_tensors() -> None:
    answers = on_runtime(types_by_asker)
    assert answers.pop("megatron") == ("torch.cuda.FloatTensor", True)
    assert answers.pop("megatron.core.optimizer") == ("torch.cuda.FloatTensor", True)
    assert set(answers.values()) == {("torch.FloatTensor", False)}


def typed(rank: int) -> tuple[torch.dtype, bool]:
    return torch.ones(2).type("torch.cuda.HalfTensor").dtype, torch.ones(2).is_pinned()


def test_types_by_name() -> None:
    assert on_runtime(typed) == (torch.half, False)


def generators(rank: int) -> list[Any]:
    own = torch.Generator(device="cuda")
    return [
        isinstance(own, torch.Generator),
        isinstance(torch.default_generator, torch.Generator),
        isinstance("cuda", torch.Generator),
        torch.rand(1, generator=own.manual_seed(5)).item(),
        torch.rand(1, generator=torch.Generator().manual_seed(5)).item(),
    ]


def test_generators_of_any_device_are_cpu_generators() -> None:
    is_own, is_default, is_text, drawn, expected = on_runtime(generators)
    assert (is_own, is_default, is_text) == (True, True, False)
    assert drawn == expected


def saved_and_loaded(rank: int) -> bool:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tensor.pt")
        torch.save({"x": torch.arange(3)}, file)
        places = ("cuda", "cuda:0", torch.device("cuda"), None)
        loads = [torch.load(file, map_location=place)["x"] for place in places]
    return all(x.device.type == "cpu" and x.tolist() == [0, 1, 2] for x in loads)


def test_loads_go_to_the_cpu() -> None:
    assert on_runtime(saved_and_loaded)


def draw_around_a_loader(rank: int) -> tuple[float, float, list[list[int]]]:
    dataset = list(range(6))
    torch.manual_seed(3)
    without = torch.rand(1).item()
    torch.manual_seed(3)
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, pin_memory=True)
    batches = [batch.tolist() for batch in loader]
    return without, torch.rand(1).item(), batches


def test_a_loader_draws_nothing_from_the_shared_generator() -> None:
    without, with_loader, batches = on_runtime(draw_around_a_loader)
    assert with_loader == without
    assert batches == [[0, 1, 2], [3, 4, 5]]


def compiled(rank: int) -> list[bool]:
    def fn(x: int) -> int:
        return x

    decorator = torch.compile(mode="default")
    return [torch.compile(fn) is fn, torch.compile(fn, dynamic=True) is fn, decorator(fn) is fn]


def test_nothing_is_compiled() -> None:
    assert on_runtime(compiled) == [True, True, True]
