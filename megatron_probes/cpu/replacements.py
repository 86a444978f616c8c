"""The list of what the CPU runtime replaces: one table of names, how each is made, and why."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_probes.cpu import (
    collectives,
    cuda_api,
    device_memory,
    devices,
    megatron_parts,
    optimizer_state,
)
from megatron_probes.cpu.cuda_api import calling, no_context, returning


@dataclass(frozen=True)
class Replacement:
    """One replaced name: `owner.name` becomes `make(original)`."""

    owner: str  # a module, or a class in one: "torch.Tensor"
    name: str
    make: Callable[[Any], Any]
    why: str

    @property
    def part(self) -> Literal["torch", "megatron"]:
        return "torch" if self.owner.split(".")[0] == "torch" else "megatron"


@dataclass(frozen=True)
class Addition:
    """What is added to Megatron without replacing a name."""

    name: str
    add: Callable[[], None]
    why: str


def _each(owner: str, names: str, make: Callable[[Any], Any], why: str) -> Iterator[Replacement]:
    return (Replacement(owner, name, make, why) for name in names.split())


def _value(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


_FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted empty_quantized"
    " empty_strided eye full full_like hamming_window hann_window kaiser_window linspace logspace ones"
    " ones_like rand rand_like randint randint_like randn randn_like randperm range scalar_tensor"
    " sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor"
    " sparse_csr_tensor tensor tril_indices triu_indices zeros zeros_like"
)
_NEW = "new_tensor new_empty new_zeros new_ones new_full new_empty_strided"

TABLE: tuple[Replacement, ...] = (
    # torch, outside torch.cuda
    *_each("torch", _FACTORIES, devices.keyword_on_cpu, "device= may name CUDA"),
    Replacement("torch", "Generator", devices.generator_on_cpu, "its device may be CUDA"),
    Replacement("torch", "load", devices.load_on_cpu, "map_location may name CUDA"),
    Replacement("torch", "compile", devices.uncompiled, "jit_fuser compiles with it: minutes of g++ a rank"),
    Replacement("torch.accelerator", "is_available", returning(False), "DataLoader pins memory through it"),
    *_each("torch.Tensor", _NEW, devices.keyword_on_cpu, "device= may name CUDA"),
    Replacement("torch.Tensor", "to", devices.first_on_cpu, "its device may be CUDA"),
    *_each("torch.Tensor", "cuda pin_memory", devices.same_tensor, "every tensor is on the device"),
    Replacement("torch.Tensor", "is_pinned", returning(False), "asks CUDA"),
    Replacement("torch.Tensor", "record_stream", returning(), "there is one stream"),
    Replacement("torch.Tensor", "type", devices.type_name, "optimizers compare it with CUDA type names"),
    Replacement("torch.Tensor", "is_cuda", devices.is_cuda, "the MoE dispatcher asks it"),
    Replacement("torch.nn.Module", "cuda", devices.same_tensor, "every module is on the device"),
    *_each("torch.nn.Module", "to to_empty", devices.first_on_cpu, "the device may be CUDA"),
    Replacement(
        "torch.utils.data.DataLoader",
        "__init__",
        devices.loader_with_own_generator,
        "a draw for a loader's seed would shift dropout between tensor-parallel ranks",
    ),
    # torch.cuda: presence
    *_each(
        "torch.cuda", "is_available is_initialized is_bf16_supported", returning(True), "a GPU is claimed"
    ),
    *_each("torch.cuda", "init _lazy_init set_device check_error", returning(), "there is no CUDA context"),
    Replacement("torch.cuda", "_lazy_call", _value(cuda_api.call_now), "there is no CUDA context"),
    Replacement("torch.cuda", "device_count", _value(cuda_api.device_count), "one device a local rank"),
    Replacement("torch.cuda", "current_device", _value(cuda_api.current_device), "the local rank's"),
    *_each("torch.cuda", "device", no_context, "devices need no switching"),
    Replacement("torch.cuda", "get_device_name", returning(cuda_api.PROPERTIES.name), "asks CUDA"),
    Replacement(
        "torch.cuda",
        "get_device_capability",
        returning((cuda_api.PROPERTIES.major, cuda_api.PROPERTIES.minor)),
        "asks CUDA",
    ),
    Replacement("torch.cuda", "get_device_properties", returning(cuda_api.PROPERTIES), "asks CUDA"),
    *_each("torch.cuda", "utilization temperature power_draw clock_rate", returning(0), "asks NVML"),
    Replacement("torch.cuda", "cudart", _value(cuda_api.cudart), "Megatron switches the profiler with it"),
    # torch.cuda: streams and events
    *_each("torch.cuda", "Stream ExternalStream", _value(cuda_api.Stream), "work runs in program order"),
    Replacement("torch.cuda", "Event", _value(cuda_api.Event), "events record the host's clock"),
    Replacement("torch.cuda", "stream", no_context, "work runs in program order"),
    *_each("torch.cuda", "current_stream default_stream", calling(cuda_api.current_stream), "one stream"),
    Replacement("torch.cuda", "set_stream", _value(cuda_api.set_stream), "work runs in program order"),
    Replacement("torch.cuda", "synchronize", returning(), "work is done when it is issued"),
    Replacement("torch.cuda", "is_current_stream_capturing", returning(False), "there are no graphs"),
    *_each("torch.cuda.nvtx", "range_push range_pop mark", returning(), "there is no NVTX"),
    Replacement("torch.cuda.nvtx", "range", no_context, "there is no NVTX"),
    # torch.cuda: random numbers
    Replacement(
        "torch.cuda", "default_generators", _value((torch.default_generator,) * 64), "one generator for both"
    ),
    *(
        Replacement(owner, name, _value(getattr(cuda_api, name)), "one generator for both devices")
        for owner in ("torch.cuda", "torch.cuda.random")
        for name in (
            "get_rng_state",
            "set_rng_state",
            "get_rng_state_all",
            "set_rng_state_all",
            "manual_seed",
            "initial_seed",
        )
    ),
    *_each("torch.cuda", "manual_seed_all", calling(cuda_api.manual_seed), "one generator for both devices"),
    *_each(
        "torch.cuda.random",
        "manual_seed_all",
        calling(cuda_api.manual_seed),
        "one generator for both devices",
    ),
    # torch.cuda: memory
    *(
        replacement
        for owner in ("torch.cuda", "torch.cuda.memory")
        for replacement in (
            Replacement(
                owner, "memory_stats", _value(device_memory.memory_stats), "the process's own memory"
            ),
            *_each(
                owner,
                "memory_allocated memory_reserved device_memory_used",
                calling(device_memory.resident_bytes),
                "the process's resident bytes",
            ),
            *_each(
                owner,
                "max_memory_allocated max_memory_reserved",
                calling(device_memory.peak_resident_bytes),
                "the process's peak resident bytes",
            ),
            *_each(
                owner,
                "reset_peak_memory_stats reset_max_memory_allocated",
                calling(device_memory.reset_peak),
                "the process's peak resident bytes",
            ),
            Replacement(owner, "mem_get_info", _value(device_memory.mem_get_info), "the machine's memory"),
            *_each(owner, "memory_snapshot", returning([]), "there is no caching allocator"),
            *_each(owner, "empty_cache", returning(), "there is no caching allocator"),
        )
    ),
    Replacement("torch.cuda", "ipc_collect", returning(), "there is no CUDA IPC"),
    # torch.distributed, by both of its names
    *(
        Replacement(owner, name, getattr(collectives, name), why)
        for owner in ("torch.distributed", "torch.distributed.distributed_c10d")
        for name, why in (
            ("init_process_group", "NCCL becomes gloo"),
            ("new_group", "NCCL becomes gloo"),
            ("barrier", "gloo takes no device_ids"),
            ("all_reduce", "gloo has no AVG"),
            ("reduce_scatter_tensor", "gloo has no AVG"),
            ("all_gather", "gloo takes no unequal shapes"),
            ("reduce_scatter", "gloo takes no unequal shapes"),
        )
    ),
    # Megatron
    Replacement(
        "megatron.core.datasets.utils",
        "compile_helpers",
        megatron_parts.compile_without_helpers,
        "a wheel has no Makefile",
    ),
    Replacement(
        "megatron.core.transformer.torch_norm.WrappedTorchNorm",
        "__new__",
        megatron_parts.torch_norm,
        "refuses sequence parallelism",
    ),
    Replacement(
        "megatron.core.transformer.dot_product_attention.DotProductAttention",
        "__init__",
        megatron_parts.attention_init,
        "refuses context parallelism",
    ),
    Replacement(
        "megatron.core.transformer.dot_product_attention.DotProductAttention",
        "forward",
        megatron_parts.attention_forward,
        "has no context parallelism",
    ),
    Replacement(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "sharded_state_dict",
        optimizer_state.sharded_state_dict,
        "reads the state of torch's Adam before a step has made it",
    ),
    Replacement(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "_set_main_param_and_optimizer_states",
        optimizer_state.set_parameter_state,
        "overwrites the loaded step counters of torch's Adam",
    ),
    Replacement(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "load_state_dict",
        optimizer_state.load_state_dict,
        "gives all parameters of torch's Adam one step counter",
    ),
    Replacement(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "get_write_results_queue",
        megatron_parts.forked_results_queue,
        "spawns a process that imports Megatron once more",
    ),
    Replacement(
        "megatron.training.initialize",
        "_warmup_jit_function",
        megatron_parts.without_warm_up,
        "its draws would make initial weights depend on the layout",
    ),
)


ADDITIONS: tuple[Addition, ...] = (
    Addition(
        "megatron.core.datasets.helpers_cpp",
        megatron_parts.lend_dataset_helpers,
        "a checkout has no built dataset helpers: it gets those of an installed wheel",
    ),
    Addition(
        "a filter on the logger megatron.core.tensor_parallel.random",
        megatron_parts.quiet_shared_generator,
        "it warns whenever the CPU generator moves, which here is the CUDA one",
    ),
)


def owner_of(replacement: Replacement) -> Any:
    """The module or class that holds the replaced name."""
    try:
        return importlib.import_module(replacement.owner)
    except ModuleNotFoundError:
        module, _, cls = replacement.owner.rpartition(".")
        return getattr(importlib.import_module(module), cls)


def apply(part: Literal["torch", "megatron"]) -> None:
    """Replace every name of `part`.

    Names that this version of torch hasn't are left out. A name that Megatron hasn't raises AttributeError:
    its version is not supported.
    """
    # Both names of a torch.distributed function hold one original, wrapped once for each.
    made = []
    for replacement in TABLE:
        if replacement.part != part:
            continue
        owner = owner_of(replacement)
        if part == "torch" and not hasattr(owner, replacement.name):
            continue
        made.append((owner, replacement.name, replacement.make(getattr(owner, replacement.name))))
    for owner, name, new in made:
        setattr(owner, name, new)
    if part == "megatron":
        for addition in ADDITIONS:
            addition.add()
