"""Every way of naming a CUDA device, sent to the CPU: factories, methods, generators, loads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def to_cpu(device: Any) -> Any:
    """The CPU for any name of a CUDA device ("cuda", "cuda:1", 1, torch.device); else `device` itself."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    if isinstance(device, str):
        return "cpu" if device.split(":")[0] == "cuda" else device
    if getattr(device, "type", None) == "cuda":
        return "cpu"
    return device


def keyword_on_cpu(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its `device=` sent to the CPU and its `pin_memory=` dropped."""

    @functools.wraps(fn)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = to_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return fn(*args, **kwargs)

    return on_cpu


def first_on_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to` or `Module.to` with its device, the first argument or a keyword, sent to the CPU."""

    @functools.wraps(to)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        if args and not isinstance(args[0], (torch.Tensor, torch.dtype)):
            args = (to_cpu(args[0]), *args[1:])
        return to(self, *args, **kwargs)

    return on_cpu


def load_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` with its `map_location` sent to the CPU."""

    @functools.wraps(load)
    def on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, to_cpu(map_location), *args, **kwargs)

    return on_cpu


def generator_on_cpu(generator: type) -> type:
    """`torch.Generator` for which a generator on any device is a CPU generator."""

    class OfAnyDevice(type):
        def __call__(cls, device: Any = "cpu") -> Any:
            return generator(to_cpu(device))

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, generator)

    return OfAnyDevice("Generator", (), {"__doc__": generator.__doc__})


def same_tensor(_: Callable[..., Any]) -> Callable[..., Any]:
    """A method that returns its tensor or module: it is on its device already."""
    return lambda self, *args, **kwargs: self


def asked_by_megatron() -> bool:
    """Whether the caller's caller is Megatron's own code.

    Two questions tell Megatron whether a tensor is on its device: the optimizers sort parameters by names
    such as 'torch.cuda.FloatTensor', and the MoE dispatcher turns split sizes into arrays only if `is_cuda`.
    All other callers, torch's and the probes' above all, must see the truth.
    """
    asker = sys._getframe(2).f_globals.get("__name__", "")
    return asker == "megatron" or asker.startswith("megatron.")


def type_name(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, which names the CUDA type to Megatron and takes either name."""

    @functools.wraps(tensor_type)
    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        if dtype is not None:
            return tensor_type(self, dtype, *args, **kwargs)
        name = tensor_type(self)
        return name.replace("torch.", "torch.cuda.", 1) if asked_by_megatron() else name

    return cuda_type


def is_cuda(original: Any) -> property:
    """`Tensor.is_cuda`, true to Megatron."""
    return property(lambda self: asked_by_megatron() or original.__get__(self))


def loader_with_own_generator(init: Callable[..., None]) -> Callable[..., None]:
    """`DataLoader.__init__` which gives every loader a generator of its own.

    A loader draws its base seed from the CPU generator, which here is the "CUDA" one too. Megatron builds
    loaders on tensor-parallel rank 0 only, so the draw would give the ranks of a group different dropout.
    """

    @functools.wraps(init)
    def own_generator(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch._C.Generator("cpu").manual_seed(torch.initial_seed())
        init(self, *args, **kwargs)

    return own_generator


def uncompiled(_: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` as the identity, called with the function or as a decorator with options."""

    def compile(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda fn: fn

    return compile
