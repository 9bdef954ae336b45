# SPDX-License-Identifier: Apache-2.0
"""No lane reads or writes memory that another lane may still be using, whatever starts the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

import shardwise as sw
from shardwise.checkpoint.saving import Snapshot, Staging
from shardwise.core.agreement import all_ranks
from shardwise.shard.gradient import Gradients
from shardwise.shard.group import Group
from tests.models import STRATEGIES, Model, loss_of, make_model, tokens
from tests.races.checker import Checker, without
from tests.races.helpers import (
    NUM_RANKS,
    PRECISIONS,
    backward,
    evaluate,
    make,
    name_memory,
    posing,
)

pytestmark = pytest.mark.cpu_only("follows the lanes of one pretended process")

Meshes = dict[int, DeviceMesh]


@pytest.fixture(scope="module")
def meshes() -> Iterator[Meshes]:
    with posing() as found:
        yield found


def sgd(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def ours(model: Model) -> torch.optim.Optimizer:
    return sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())


# -------------------------------------------------------------------------------------- what runs


def train(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        backward(model)
        step(optimizer)


def accumulate(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        for microbatch in range(3):
            model.set_is_last_backward(microbatch == 2)
            backward(model, microbatch)
        step(optimizer)


def penalise(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Autograd adds to gradients of parameters at rest while others are being reduced."""
    for _ in range(2):
        for microbatch in range(2):
            penalty = sum(parameter.square().sum() for parameter in model.parameters())
            (loss_of(model, tokens(0, microbatch, 0, NUM_RANKS)) + penalty).backward()
        step(optimizer)


def evaluate_between(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        backward(model)
        evaluate(model)
        step(optimizer)
        evaluate(model)
        evaluate(model)


def load(model: Model, optimizer: torch.optim.Optimizer) -> None:
    state = make_model(width=32, depth=3, seed=5).state_dict()
    backward(model)
    model.load_state_dict(state)
    evaluate(model)
    sw.load_full_state_dict(model, state)
    backward(model)
    step(optimizer)


def save_between(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """The copy to the host reads weights and states right after a step, and before the next."""
    for _ in range(2):
        backward(model)
        step(optimizer)
        Staging().copy(Snapshot(all_ranks(), model, optimizer, None, None).tensors)


def unshard(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """By hand, right after a write."""
    for _ in range(2):
        backward(model)
        step(optimizer)
        for module in (model, *model.layers):
            module.unshard()
            assert module.state_dict() is not None  # it shows the weights at rest again
        read_weights(model)
        for module in (model, *model.layers):
            module.reshard()


def unshard_ahead(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """By hand and asynchronously, right after a write; and a write before anybody waits."""
    for _ in range(2):
        backward(model)
        step(optimizer)
        handles = [module.unshard(async_op=True) for module in (model, *model.layers)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        for handle in handles:
            handle.wait()
        read_weights(model)
        handles = [module.unshard(async_op=True) for module in model.layers]
        backward(model)
        step(optimizer)


def read_weights(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if not isinstance(parameter, sw.ShardedTensor):
                parameter.sum()


def call_submodule(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """A layer alone, after a step and after a load."""
    hidden = torch.randn(2, 32)
    for _ in range(2):
        backward(model)
        step(optimizer)
        model.layers[1](hidden).sum().backward()
        step(optimizer)
        with torch.no_grad():
            model.layers[2](hidden)
        model.load_state_dict(make_model(width=32, depth=3, seed=5).state_dict())
        with torch.no_grad():
            model.layers[0](hidden)


def keep_graphs(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Two backwards of one graph. (A step between them is refused.)"""
    for _ in range(2):
        loss = backward(model, keep=True)
        loss.backward()
        step(optimizer)


def step_in_hooks(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Each parameter is stepped as its gradient comes; one layer is called twice."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(update) for p in optimizers]
    layers = list(model.layers)
    model.layers[2].set_modules_to_backward_prefetch([layers[1], layers[0]])
    for _ in range(2):
        hidden = model.layers[1](torch.randn(2, 32, requires_grad=True))
        model.layers[1](hidden * 2).sum().backward()
        backward(model)
    for hook in hooks:
        hook.remove()


def write_every_way(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """A gather that nobody waited for reads what is written next."""
    writes: list[Callable[[torch.Tensor], Any]] = [
        lambda p: p.add_(1),
        lambda p: p.to_local().add_(1),
        lambda p: p.data.add_(1),
        lambda p: torch._foreach_add_([p], 1),
        lambda p: torch.add(p, 1, out=p),
        lambda p: torch.nn.init.uniform_(p),
        lambda p: p.copy_(torch.ones(p.shape)),
        lambda p: [p.__get_tensor_shard__(i).zero_() for i in indices(p)],
    ]
    evaluate(model)
    with torch.no_grad():
        for write in writes:
            for layer in model.layers:
                for parameter in layer.parameters():
                    parameter.mul_(1.0)
                layer.unshard(async_op=True)
                layer._shardwise_unit.hide()
                for parameter in layer.parameters():
                    write(parameter)
    evaluate(model)


def indices(parameter: sw.ShardedTensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return [MetadataIndex("", offsets) for offsets, _ in parameter.cut.boxes]


RUNS = (
    train,
    accumulate,
    penalise,
    evaluate_between,
    load,
    save_between,
    unshard,
    unshard_ahead,
    call_submodule,
    keep_graphs,
    step_in_hooks,
    write_every_way,
)


def races(
    meshes: Meshes,
    run: Callable[[Model, torch.optim.Optimizer], None],
    strategy: str,
    precision: str = "bf16",
    optimizer: Callable[[Model], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> list[str]:
    torch.manual_seed(0)
    with Checker() as checker:
        model = make(meshes, strategy, precision, **options)
        name_memory(checker, model)
        run(model, optimizer(model))
    lanes = checker.num_operations
    assert lanes["compute"] > 100, "nothing ran"
    if strategy != "zero0" or precision != "fp32":
        assert any(lane.startswith("gather") for lane in lanes), f"no gather in {lanes}"
    return checker.races


def all_races(
    meshes: Meshes, runs: Sequence[Any], strategy: str, *args: Any, **options: Any
) -> dict[str, list[str]]:
    found = {run.__name__: races(meshes, run, strategy, *args, **options) for run in runs}
    return {name: each for name, each in found.items() if each}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_lane_uses_what_another_may_be_using(meshes: Meshes, strategy: str) -> None:
    """zero2 and hsdp differ from zero1 and zero3 in what is reduced, and when."""
    reduce_otherwise = strategy in ("zero2", "hsdp")
    runs = (accumulate, penalise, keep_graphs, step_in_hooks) if reduce_otherwise else RUNS
    assert all_races(meshes, runs, strategy) == {}


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [(s, name) for s in ("zero1", "zero3") for name in ("fp32", "mxfp8", "fp8_block")],
)
def test_no_format_changes_that(meshes: Meshes, strategy: str, precision: str) -> None:
    runs = [accumulate, unshard_ahead, keep_graphs]
    if precision != "fp8_block":  # whose model is wider
        runs.append(call_submodule)
    assert all_races(meshes, runs, strategy, precision) == {}


@pytest.mark.parametrize(
    ("strategy", "precision", "options"),
    [
        ("zero3", "bf16", {"memory": "trace"}),
        ("hfsdp", "mxfp8", {"memory": "trace"}),
        ("zero3", "bf16", {"reshard_after_forward": False}),
        ("zero3", "bf16", {"reshard_after_forward": 2}),
        ("zero3", "mxfp8", {"reshard_after_forward": 2}),
        ("zero3", "mxfp8", {"grain": sw.ELEMENT}),  # bf16 is gathered, and encoded everywhere
        ("hfsdp", "mxfp8", {"grain": sw.ELEMENT}),
        ("zero3", "bf16", {"unused_parameters": "zeros"}),
    ],
    ids=str,
)
def test_options_keep_the_order_of_lanes(
    meshes: Meshes, strategy: str, precision: str, options: dict[str, Any]
) -> None:
    runs = [accumulate, evaluate_between, unshard_ahead]
    assert all_races(meshes, runs, strategy, precision, **options) == {}


# ------------------------------------------------------------------------------ buckets


def step_and_write(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Writes right after a step: an average of weights, a load."""
    for _ in range(2):
        backward(model)
        step(optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.lerp_(torch.zeros(()), 0.1)
    backward(model)
    step(optimizer)
    model.load_state_dict(make_model(width=32, depth=3, seed=5).state_dict())
    optimizer.step()
    evaluate(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_buckets_are_ordered(meshes: Meshes, overlap: bool) -> None:
    for run in (train, step_and_write, save_between, keep_graphs):
        torch.manual_seed(0)
        with Checker() as checker:
            model = make_model(width=32, depth=3)
            sw.data_parallel(
                model,
                mesh=meshes[1],
                precision=PRECISIONS["bf16"],
                bucket_mb=0.02,
                overlap_gather=overlap,
            )
            name_memory(checker, model)
            run(model, ours(model))
        lanes = checker.num_operations
        assert sum(lanes[name] for name in lanes if name.startswith("gather")) > 10, lanes
        assert checker.races == [], run.__name__


def mark_the_end_of_steps(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """``set_post_optim_event``: gathers wait for the step, and for what is written after it."""
    backward(model)
    lanes = model._shardwise_unit.runtime.lanes
    for written_late in (False, True):
        backward(model)
        step(optimizer)
        model.set_post_optim_event(lanes.mark("compute"))
        if written_late:
            with torch.no_grad():
                for parameter in model.layers[1].parameters():
                    parameter.mul_(0.5)
        evaluate(model)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_event_after_the_step_is_enough(meshes: Meshes, strategy: str) -> None:
    assert races(meshes, mark_the_end_of_steps, strategy) == []


# -------------------------------------------------------------------------------------- offloading


def write_after_forward(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """No backward waits for the copies to the device."""
    backward(model)
    optimizer.step()
    for _ in range(2):
        evaluate(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        model.layers[0].unshard()
        model.layers[0].reshard()
        optimizer.step()


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_the_host_writes_offloaded_weights_when_they_have_been_copied(
    meshes: Meshes, strategy: str
) -> None:
    owner, method = Gradients, "_room_for_result"
    make_main = getattr(owner, method)
    for run in (train, accumulate, save_between, write_after_forward, step_in_hooks):
        torch.manual_seed(0)
        with Checker() as checker:
            model = make(meshes, strategy, offload_policy=CPUOffloadPolicy())
            name_memory(checker, model)

            def on_host(gradients: Any, checker: Checker = checker) -> Any:
                main = make_main(gradients)
                checker.name(main, "main gradient", on_host=True)
                return main

            with patch.object(owner, method, on_host):
                run(model, sgd(model))
        assert checker.num_operations["host"] > 10, "the host wrote nothing"
        assert checker.races == [], run.__name__


# ------------------------------------------------------------------------------- negative controls


@pytest.mark.parametrize(
    ("run", "strategy", "method", "lanes"),
    [
        (train, "zero3", "join", ("gather", "compute")),
        (unshard, "zero1", "join", ("gather", "compute")),
        (train, "zero3", "wait", ("compute",)),
        (train, "zero3", "join", ("reduce", "compute")),
        (train, "hsdp", "join", ("outer", "reduce")),
        (accumulate, "hfsdp", "wait", ("reduce",)),
    ],
)
def test_a_promise_that_is_left_out_is_found(
    meshes: Meshes, run: Any, strategy: str, method: str, lanes: tuple[str, ...]
) -> None:
    with without(method, *lanes):
        assert races(meshes, run, strategy) != []


@pytest.mark.parametrize("name", ["_prepare", "_issued"])
def test_groups_keep_the_promises(meshes: Meshes, name: str) -> None:
    """Without what ``Group`` does before and after a gather."""

    def as_before(group: Group, runtime: Any, *blocks: Any) -> None:
        if name == "_issued":
            group._ready = runtime.lanes.mark("gather")

    with patch.object(Group, name, as_before):
        assert races(meshes, unshard_ahead, "zero1") != []
        assert races(meshes, unshard_ahead, "zero3") != []
