"""Small gradients in Megatron's own optimizers on real ranks, by hand."""

import argparse
from functools import partial
from pathlib import Path

import mesh
import pytest
import torch

from megatron_probes.catalog import Priority
from megatron_probes.config import ProbeConfig
from megatron_probes.cpu.fork import fork_ranks, gloo_process_group
from megatron_probes.ledger import Kind
from megatron_probes.sinks import read_records

pytestmark = [pytest.mark.slow, pytest.mark.megatron]


class Parameters(torch.nn.Module):
    """Parameters under dotted names, each with a `main_grad`, and Megatron's marks on them."""

    def __init__(self, gradients: dict, dtypes: dict | None = None) -> None:
        super().__init__()
        for name, gradient in gradients.items():
            module = self
            *path, last = name.split(".")
            for piece in path:
                if not hasattr(module, piece):
                    module.add_module(piece, torch.nn.Module())
                module = getattr(module, piece)
            dtype = (dtypes or {}).get(name, torch.float32)
            parameter = torch.nn.Parameter(torch.ones(len(gradient), dtype=dtype))
            parameter.main_grad = torch.tensor(gradient, dtype=torch.float32)
            module.register_parameter(last, parameter)


def mark(parameter: torch.nn.Parameter, **marks: object) -> torch.nn.Parameter:
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    if marks.pop("tp_sharded", False):
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


def build_optimizer(module: torch.nn.Module, *, clip: float = 0.0, scale: float | None = None):
    """Megatron's optimizer for fp32 parameters or for those with fp32 masters, as its factory wires it."""
    from megatron.core import parallel_state as mpu
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    low = any(p.dtype != torch.float32 for p in module.parameters()) or scale is not None
    config = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=clip, bf16=low)
    inner = torch.optim.AdamW(module.parameters(), lr=1e-3)
    if low:
        scaler = None if scale is None else ConstantGradScaler(scale)
        optimizer = Float16OptimizerWithFloat16Params(inner, config, scaler, lambda *args: None)
    else:
        optimizer = FP32Optimizer(inner, config, lambda *args: None)
    optimizer.grad_stats_parallel_group = mpu.get_model_parallel_group()
    optimizer.tp_group = mpu.get_tensor_model_parallel_group()
    return optimizer


def start(module, optimizer, folder: Path, vocab_size: int = 1 << 20, **gradient_config):
    """The adapter's road from an optimizer to the gradient probe."""
    from megatron_probes.adapters.megatron_lm.bindings import Binding
    from megatron_probes.adapters.megatron_lm.hooks import watch_gradients
    from megatron_probes.adapters.megatron_lm.layout import build_topology
    from megatron_probes.adapters.megatron_lm.observed import observe_model
    from megatron_probes.probes import GradientProbe

    args = argparse.Namespace(sequence_parallel=False, num_distributed_optimizer_instances=1)
    topology = build_topology([module], args, torch.device("cpu"))
    config = ProbeConfig(strict=True, sample_every=1, gradient=gradient_config)
    bindings = {"gradient": Binding("gradient", "bound"), "experts": Binding("experts", "off")}
    observed = observe_model([module], optimizer, topology, bindings, config.gradient, vocab_size)
    assert bindings["gradient"].status == "bound", bindings["gradient"].reason
    groups = [part.group for part in observed.gradient_slices]
    probe = GradientProbe(config.gradient, observed.layer_parts, groups)
    session = mesh.start_session(topology, [probe], folder, config)
    watch_gradients(session, probe, optimizer, observed.gradient_slices, observed.replication_check)
    return session, observed.replication_check


def step_on_ranks(rank, build, folder, ranks_as):
    """One optimizer step in this rank on what `build(rank)` returns: a module and its options."""
    from megatron.core import parallel_state as mpu

    with gloo_process_group():
        mpu.initialize_model_parallel(**ranks_as)
        module, options = build(rank)
        gradient_config = options.pop("gradient", {})
        optimizer = options.pop("optimizer", None) or build_optimizer(module, **options)
        session, check = start(module, optimizer, folder, **gradient_config)
        with torch.no_grad():
            mesh.run_step(session, 1, optimizer.step)
        if check is not None:
            check.report()
        cells = session.ledger.due(Kind.SUM, Priority.P0).tolist()
        session.close()
        mpu.destroy_model_parallel()
        return cells


def values_of(build, folder, ranks=1, **ranks_as):
    cells = fork_ranks(
        partial(step_on_ranks, build=build, folder=folder, ranks_as=ranks_as),
        ranks,
        timeout_s=120,
        preloaded=True,
        log_dir=folder / "logs",
    )
    assert all(mine == cells[0] for mine in cells), "ranks ended with different sums"
    (record,) = read_records(folder)
    return record.values


def tied_over_stages(rank):
    if rank == 0:
        module = Parameters({"embedding.word_embeddings.weight": [3.0, 4.0]})
        mark(module.embedding.word_embeddings.weight, shared_embedding=True)
        return module, {}
    module = Parameters({"output_layer.weight": [3.0, 4.0], "layer.weight": [12.0]})
    mark(module.output_layer.weight, shared=True, shared_embedding=True)
    return module, {}


def tied_under_two_names(rank):
    module = Parameters({"embedding.word_embeddings.weight": [3.0, 4.0], "layer.weight": [12.0]})
    module.output_layer = torch.nn.Module()
    module.output_layer.weight = module.embedding.word_embeddings.weight
    return module, {}


@pytest.mark.parametrize(
    ("build", "ranks", "ranks_as"),
    [(tied_over_stages, 2, {"pipeline_model_parallel_size": 2}), (tied_under_two_names, 1, {})],
)
def test_a_tied_embedding_counts_once(tmp_path, build, ranks, ranks_as):  # PC24
    assert values_of(build, tmp_path, ranks, **ranks_as)["grad/norm"] == pytest.approx(13.0, rel=1e-9)


def experts_of_two_ranks(rank):
    module = Parameters(
        {"mlp.experts.weight": [[1.0, 2.0, 2.0], [2.0, 3.0, 6.0]][rank], "dense.weight": [4.0]}
    )
    mark(module.mlp.experts.weight, allreduce=False)
    return module, {}


def test_each_rank_s_experts_count_and_the_dense_part_once(tmp_path):  # PC29
    values = values_of(experts_of_two_ranks, tmp_path, 2, expert_model_parallel_size=2)
    assert values["grad/norm"] == pytest.approx(8.6023253, rel=1e-6)
    assert values["grad/expert/norm"] == pytest.approx(58**0.5, rel=1e-6)
    assert values["grad/dense/norm"] == pytest.approx(4.0)


def main_grad_alone(rank):
    return Parameters({"weight": [3.0, 4.0]}), {}


def low_precision_beside_float32(rank):
    return Parameters({"a": [3.0], "b": [4.0]}, {"b": torch.bfloat16}), {}


@pytest.mark.parametrize("build", [main_grad_alone, low_precision_beside_float32])
def test_the_framework_s_gradient_is_read(tmp_path, build):  # PC27 (a), (c)
    assert values_of(build, tmp_path)["grad/norm"] == pytest.approx(5.0, rel=1e-6)


def cleared(rank):
    module = Parameters({"weight": [3.0, 4.0]})
    optimizer = build_optimizer(module)
    prepare = optimizer.prepare_grads

    def prepare_and_clear():
        found_inf = prepare()
        optimizer.optimizer.zero_grad(set_to_none=True)
        return found_inf

    optimizer.prepare_grads = prepare_and_clear
    return module, {"optimizer": optimizer}


def test_a_gradient_that_is_gone_is_absent(tmp_path):  # PC27 (b)
    values = values_of(cleared, tmp_path)
    assert not [tag for tag in values if tag.startswith("grad/")]


def sharded_and_replicated(rank):
    module = Parameters({"sharded": [[3.0], [4.0]][rank], "replicated": [12.0]})
    mark(module.sharded, tp_sharded=True)
    return module, {}


def test_a_replicated_parameter_counts_once(tmp_path):  # PC43 (a)
    values = values_of(sharded_and_replicated, tmp_path, 2, tensor_model_parallel_size=2)
    assert values["grad/norm"] == pytest.approx(13.0, rel=1e-9)


def scaled(rank):
    return Parameters({"weight": [3072.0, 4096.0]}, {"weight": torch.bfloat16}), {"scale": 1024.0}


def scaled_and_infinite(rank):
    return Parameters({"weight": [float("inf"), 4096.0]}, {"weight": torch.bfloat16}), {"scale": 1024.0}


def test_the_loss_scale_is_taken_off(tmp_path):  # PC43 (b)
    assert values_of(scaled, tmp_path)["grad/norm"] == pytest.approx(5.0, rel=1e-6)


def test_an_infinite_gradient_is_infinite(tmp_path):  # PC43 (b)
    values = values_of(scaled_and_infinite, tmp_path)
    assert values["grad/norm"] == float("inf")
    assert values["grad/nonfinite"] == 1
    assert "grad/norm_after_clip" not in values


def clipped(rank):
    return Parameters({"weight": [3.0, 4.0]}), {"clip": 1.0}


def test_before_and_after_clipping_have_their_names(tmp_path):  # PC43 (c)
    values = values_of(clipped, tmp_path)
    assert values["grad/norm"] == pytest.approx(5.0, rel=1e-6)
    assert values["grad/norm_after_clip"] == pytest.approx(0.9999998, rel=1e-6)


def accumulated(rank):
    module = Parameters({"weight": [0.0, 0.0]})
    for _ in range(8):
        module.weight.main_grad += torch.tensor([1.5, 2.0]) / 8
    return module, {}


def test_accumulated_micro_batches_make_one_norm(tmp_path):  # PC43 (d)
    assert values_of(accumulated, tmp_path)["grad/norm"] == pytest.approx(2.5, rel=1e-6)


def averaged_over_data_ranks(rank):
    """Megatron's own data parallelism averages the ranks' [3, 0] and [0, 4]."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    module = Parameters({"weight": [0.0, 0.0]})
    del module.weight.main_grad
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), module)
    model.zero_grad_buffer()
    (module.weight * torch.tensor([[3.0, 0.0], [0.0, 4.0]][rank])).sum().backward()
    model.finish_grad_sync()
    return module, {}


def test_the_norm_is_that_of_the_reduced_gradient(tmp_path):  # PC43 (e)
    assert values_of(averaged_over_data_ranks, tmp_path, 2)["grad/norm"] == pytest.approx(2.5, rel=1e-6)


def unflagged(rank):
    return Parameters({"sink.weight": [[6.0], [8.0]][rank]}), {}


def unflagged_with_override(rank):
    module, options = unflagged(rank)
    return module, options | {"gradient": {"placement": {"sink.*": "tp_sharded"}}}


def test_an_unflagged_split_parameter_is_named(tmp_path):  # PC03
    values_of(unflagged, tmp_path, 2, tensor_model_parallel_size=2)
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert "the gradient of sink.weight differs between tensor-parallel ranks" in logs


def test_an_override_gives_the_whole_norm(tmp_path):  # PC03
    values = values_of(unflagged_with_override, tmp_path, 2, tensor_model_parallel_size=2)
    assert values["grad/norm"] == pytest.approx(10.0, rel=1e-9)
