"""The operator library: schemas, references as the default kernels, and the compiled libraries on top of
them.

A reference is registered for every device (CompositeExplicitAutograd); a compiled library registers its
kernels for one device and so takes precedence there. Nothing else chooses between them.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

NAMESPACE = "megatron_probes"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_FILES = {"cpu": "_ops_cpu.so", "cuda": "_ops_cuda.so"}
_DISABLED = os.environ.get("MEGATRON_PROBES_NO_EXT", "0") not in ("", "0")

_loaded: set[str] = set()
_reasons: dict[str, str] = {}


def define(schema: str, reference: Callable[..., None]) -> None:
    """Define an operator that writes into its ``out`` arguments, with ``reference`` as its kernel on any
    device.

    The operators measure: autograd passes through them and records nothing.
    """
    name = _LIBRARY.define(schema).partition("(")[0].rpartition("::")[2]
    _LIBRARY.impl(name, torch.no_grad()(reference), "CompositeExplicitAutograd")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args, **kwargs: None, lib=_LIBRARY)


def load() -> None:
    """Load the compiled libraries installed beside the package; without one its reference serves."""
    for device, name in _FILES.items():
        path = Path(__file__).parent.parent / name
        if _DISABLED:
            continue
        if not path.exists():
            _reasons[device] = "it was not built"
            continue
        try:
            torch.ops.load_library(path)
        except OSError as error:
            _reasons[device] = f"it could not be loaded: {error}"
        else:
            _loaded.add(device)


def compiled_devices() -> frozenset[str]:
    """Return the device types ("cpu", "cuda") for which compiled kernels are loaded."""
    return frozenset(_loaded)


def notice(x: Tensor) -> None:
    """Warn, once a device type, that a fused operator runs as its plain-torch reference."""
    reason = _reasons.get(x.device.type)
    if reason is None or torch.compiler.is_compiling():
        return
    del _reasons[x.device.type]
    warnings.warn(
        f"megatron_probes: no compiled kernels for {x.device.type} ({reason}); the plain-torch references "
        "serve, right but slower. Install with `pip install --no-build-isolation .` where a compiler is, or "
        "set MEGATRON_PROBES_NO_EXT=1 to silence this.",
        stacklevel=3,
    )


def slot(out: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``out`` if it is float64 of ``shape``, zeros if it is None; raise ValueError otherwise."""
    if out is None:
        return torch.zeros(shape, dtype=torch.float64, device=device)
    if out.dtype != torch.float64 or out.shape != shape:
        raise ValueError(f"out: got {out.dtype} {list(out.shape)}; use float64 {list(shape)}")
    return out


def write(out: Tensor, value: Tensor, enabled: Tensor | None) -> None:
    """Write ``value`` into ``out``, unless the one-element ``enabled`` is 0 (decided on the device)."""
    if enabled is not None:
        value = torch.where(enabled.reshape(()) != 0, value, out)
    out.copy_(value)
