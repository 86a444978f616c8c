"""What counts as a host read, by which thread, and from which place."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_probes.cpu.host_reads import HostReads, count_host_reads

HERE = Path(__file__).parent


def scalar() -> torch.Tensor:
    return torch.tensor(2)


def vector() -> torch.Tensor:
    return torch.arange(6.0)


def mask() -> torch.Tensor:
    return vector() > 2


def counted(call: Callable[[], Any]) -> HostReads:
    with count_host_reads() as reads:
        call()
    return reads


READS: dict[str, tuple[Callable[[], Any], str]] = {
    "item": (lambda: scalar().item(), "Tensor.item"),
    "float": (lambda: float(scalar()), "Tensor.__float__"),
    "int": (lambda: int(scalar()), "Tensor.__int__"),
    "bool": (lambda: bool(scalar()), "Tensor.__bool__"),
    "complex": (lambda: complex(scalar()), "Tensor.__complex__"),
    "condition": (lambda: 1 if scalar() > 1 else 0, "Tensor.__bool__"),
    "index of a list": (lambda: [1, 2, 3][scalar()], "Tensor.__index__"),
    "range": (lambda: range(scalar()), "Tensor.__index__"),
    "math": (lambda: math.log(scalar()), "Tensor.__float__"),
    "tolist": (lambda: vector().tolist(), "Tensor.tolist"),
    "numpy": (lambda: vector().numpy(), "Tensor.numpy"),
    "asarray": (lambda: np.asarray(vector()), "Tensor.numpy"),
    "numpy function": (lambda: np.median(vector()), "Tensor.numpy"),
    "cpu": (lambda: vector().cpu(), "Tensor.cpu"),
    "to a name": (lambda: vector().to("cpu"), "Tensor.to"),
    "to a device": (lambda: vector().to(dtype=torch.float64, device=torch.device("cpu")), "Tensor.to"),
    "f-string": (lambda: f"{scalar()}", "Tensor.__format__"),
    "format specification": (lambda: f"{torch.tensor(2.0):.3f}", "Tensor.__format__"),
    "f-string of a vector": (lambda: f"{vector()}", "Tensor.__format__"),
    "str": (lambda: str(vector()), "Tensor.__repr__"),
    "percent": (lambda: "%s" % vector(), "Tensor.__repr__"),  # noqa: UP031 (is what's tested)
    "pickle": (lambda: pickle.dumps(vector()), "Tensor.__reduce_ex__"),
    "nonzero": (lambda: vector().nonzero(), "aten.nonzero"),
    "where without values": (lambda: torch.where(mask()), "aten.nonzero"),
    "boolean index": (lambda: vector()[mask()], "aten.index"),
    "boolean index of a matrix": (lambda: torch.ones(6, 2)[mask(), 0], "aten.index"),
    "boolean assignment": (lambda: vector().__setitem__(mask(), torch.zeros(3)), "aten.index_put_"),
    "masked_select": (lambda: vector().masked_select(mask()), "aten.masked_select"),
    "unique": (lambda: torch.unique(vector()), "aten._unique2"),
    "unique_consecutive": (lambda: torch.unique_consecutive(vector()), "aten.unique_consecutive"),
    "bincount": (lambda: torch.bincount(torch.tensor([1, 2])), "aten.bincount"),
    "equal": (lambda: torch.equal(vector(), vector()), "aten.equal"),
    "repeats": (lambda: vector().repeat_interleave(torch.ones(6).long()), "aten.repeat_interleave"),
    "scalar argument": (lambda: vector().add(vector(), alpha=scalar()), "aten._local_scalar_dense"),
    "slice": (lambda: vector()[: scalar()], "Tensor.__index__"),
    "select": (lambda: vector()[scalar()], "aten._local_scalar_dense"),
    "fill value": (lambda: torch.full((2,), scalar()), "aten._local_scalar_dense"),
    "tensor of tensors": (lambda: torch.tensor([scalar()]), "Tensor.__index__"),
    "contains": (lambda: scalar() in vector(), "Tensor.item"),
}

NO_READS: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: (vector() * 2 + scalar()).sum(),
    "cast": lambda: vector().to(torch.float64).double(),
    "copy without waiting": lambda: vector().to("cpu", non_blocking=True),
    "where with values": lambda: torch.where(mask(), vector(), 0.0),
    "fill by a mask": lambda: vector().__setitem__(mask(), 0.0),
    "masked_fill": lambda: vector().masked_fill(mask(), 0.0),
    "integer index": lambda: vector()[torch.tensor([1, 2])],
    "repeats of known size": lambda: vector().repeat_interleave(torch.ones(6).long(), output_size=6),
    "deepcopy": lambda: copy.deepcopy(vector()),
    "shape": lambda: (len(vector()), vector().shape, vector().numel()),
    "clipping": lambda: torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(vector())], 1.0),
    "backward": lambda: torch.ones(3, requires_grad=True).square().sum().backward(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_counts_once(name: str) -> None:
    call, kind = READS[name]
    assert dict(counted(call).by_kind) == {kind: 1}


@pytest.mark.parametrize("name", NO_READS)
def test_work_on_the_device_is_no_read(name: str) -> None:
    assert counted(NO_READS[name]).total == 0


def test_a_read_in_backward_counts() -> None:
    class ReadsGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * grad.sum().item()

    x = torch.ones(3, requires_grad=True)
    reads = counted(lambda: ReadsGradient.apply(x).sum().backward())
    assert dict(reads.by_kind) == {"Tensor.item": 1}
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


def test_the_place_is_the_caller_outside_of_libraries() -> None:
    with count_host_reads() as reads:
        for _ in range(3):
            np.median(vector())
        torch.nn.functional.one_hot(torch.tensor([0, 2]))
    places = {place.rpartition(":")[0] for place in reads.by_site}
    assert places == {__file__}
    first, second = sorted(reads.by_site, key=lambda place: int(place.rpartition(":")[2]))
    assert reads.by_site[first] == 3
    assert reads.total == 3 + reads.by_site[second]
    assert reads.under(HERE) == reads.total
    assert reads.under(HERE / "elsewhere") == 0


def test_only_the_thread_that_entered_is_counted() -> None:
    others: list[HostReads] = []
    entered, read_by_other = threading.Event(), threading.Event()

    def uncounted() -> None:
        entered.wait()
        scalar().item()
        vector().nonzero()
        others.append(counted(lambda: vector().tolist()))
        read_by_other.set()

    thread = threading.Thread(target=uncounted)
    thread.start()
    with count_host_reads() as mine:
        entered.set()
        read_by_other.wait()
        float(scalar())
    thread.join()
    assert dict(mine.by_kind) == {"Tensor.__float__": 1}
    assert dict(others[0].by_kind) == {"Tensor.tolist": 1}


def test_blocks_nest() -> None:
    with count_host_reads() as outer:
        scalar().item()
        with count_host_reads() as inner:
            vector().nonzero()
        vector().tolist()
    assert dict(inner.by_kind) == {"aten.nonzero": 1}
    assert dict(outer.by_kind) == {"Tensor.item": 1, "aten.nonzero": 1, "Tensor.tolist": 1}


def test_nothing_stays_wrapped() -> None:
    before = dict(torch.Tensor.__dict__), torch.cuda.synchronize, dict(torch.cuda.Event.__dict__)
    with pytest.raises(RuntimeError, match="inside"), count_host_reads():
        raise RuntimeError("inside")
    assert (dict(torch.Tensor.__dict__), torch.cuda.synchronize, dict(torch.cuda.Event.__dict__)) == before


def test_values_are_those_without_counting() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(1))
    with count_host_reads():
        seen = x.tolist(), float(x[3]), x[x > 0].sum().item(), f"{x[0]:.4f}", x.numpy().copy()
    assert seen[:4] == (x.tolist(), float(x[3]), x[x > 0].sum().item(), f"{x[0]:.4f}")
    assert np.array_equal(seen[4], x.numpy())
