"""Which gradient elements a rank counts, on optimizer-held tensors and real tensor-parallel ranks."""

import logging

import pytest
import torch
import torch.distributed as dist

from megatron_probes.adapters.megatron_lm.gradients import ReplicationCheck, counted_slices
from megatron_probes.adapters.megatron_lm.ownership import HeldTensor, counts_here
from megatron_probes.cpu.fork import fork_ranks, gloo_process_group
from megatron_probes.topology import Topology
from tests.meshes import ranks_of


def held(
    name: str, gradient: list[float] | None, *, attribute: str = "grad", shape: tuple[int, ...] | None = None
) -> HeldTensor:
    size = len(gradient) if gradient is not None else 1
    parameter = torch.nn.Parameter(torch.zeros(shape or (size,)))
    tensor = torch.nn.Parameter(torch.zeros(size))
    if gradient is not None:
        setattr(tensor, attribute, torch.tensor(gradient))
    return HeldTensor(name, parameter, tensor, 0, False, attribute)


def test_a_missing_gradient_is_no_zero():  # PC27
    empty = torch.empty(0)
    (part,) = counted_slices([held("layer_000.w", None)], Topology.single(), {}, vocab_size=8)
    assert part.read(empty) is empty
    (part,) = counted_slices([held("layer_000.w", [3.0, 4.0])], Topology.single(), {}, vocab_size=8)
    assert part.read(empty).tolist() == [3.0, 4.0]


def test_the_gradient_is_read_where_the_optimizer_keeps_it():  # PC27
    tensor = held("layer_000.w", [3.0, 4.0], attribute="decoupled_grad")
    assert tensor.tensor.grad is None
    assert tensor.gradient.tolist() == [3.0, 4.0]


def test_a_tied_copy_is_never_counted():  # PC24
    tensor = held("embedding.word_embeddings.weight", [3.0, 4.0])
    assert counts_here(tensor, Topology.single(), {})
    tensor.parameter.shared = True
    assert not counts_here(tensor, Topology.single(), {})


def test_copies_are_counted_on_one_rank_and_shards_on_all():
    ranks = ranks_of(dp=2, tp=2)
    replicated = held("layer_000.input_layernorm.weight", [1.0])
    sharded = held("layer_000.mlp.linear_fc1.weight", [1.0])
    sharded.parameter.tensor_model_parallel = True
    assert [counts_here(replicated, rank, {}) for rank in ranks] == [True, False, False, False]
    assert [counts_here(sharded, rank, {}) for rank in ranks] == [True, True, False, False]
    overrides = {"*.input_layernorm.*": "tp_sharded"}
    assert [counts_here(replicated, rank, overrides) for rank in ranks] == [True, True, False, False]


def test_rows_that_pad_the_vocabulary_stand_apart():
    tensor = held("output_layer.weight", [float(i) for i in range(8)], shape=(4, 2))
    tensor.parameter.tensor_model_parallel = True
    first, last = ranks_of(tp=2)
    empty = torch.empty(0)
    (whole,) = counted_slices([tensor], first, {}, vocab_size=7)
    assert not whole.group.padding
    real, padding = counted_slices([tensor], last, {}, vocab_size=7)
    assert real.read(empty).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert (padding.group.padding, padding.read(empty).tolist()) == (True, [6.0, 7.0])


def unflagged_on_rank(rank: int) -> list[str]:
    """PC03: an attention parameter split over two tensor-parallel ranks without a flag."""
    with gloo_process_group():
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("megatron_probes").addHandler(handler)
        tensors = [
            held("layer_000.self_attention.sinks", [6.0 + 2.0 * rank]),
            held("layer_000.input_layernorm.weight", [1.0, 2.0]),
        ]
        check = ReplicationCheck(tensors, {}, dist.group.WORLD, torch.device("cpu"))
        for _ in range(3):
            check.compare()
            check.report()
        overridden = {"*.sinks": "tp_sharded"}
        quiet = ReplicationCheck(tensors, overridden, dist.group.WORLD, torch.device("cpu"))
        quiet.compare()
        quiet.report()
        return messages


@pytest.mark.slow
def test_a_split_parameter_without_a_flag_is_named():  # PC03
    for messages in fork_ranks(unflagged_on_rank, 2, timeout_s=120):
        assert len(messages) == 1
        assert "layer_000.self_attention.sinks" in messages[0]
        assert "gradient.placement" in messages[0]


def test_an_override_gives_the_full_norm():  # PC03
    squares = 0.0
    for topology, gradient in zip(ranks_of(tp=2), (6.0, 8.0), strict=True):
        tensor = held("layer_000.self_attention.sinks", [gradient])
        if counts_here(tensor, topology, {"*.sinks": "tp_sharded"}):
            squares += float(tensor.gradient.square().sum())
    assert squares**0.5 == 10.0
