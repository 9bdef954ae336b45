# SPDX-License-Identifier: Apache-2.0
"""torch.compile of blocks, before and after wrapping, in every spelling that scripts use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.moe import GroupedMLP, mixtures_of, swiglu
from tests.cases import pairwise
from tests.models import PRECISIONS, ZERO, Model, loss_of, make_model, mesh_of, tokens
from tests.parity import mxfp8_helpers as fp8
from tests.ranks import on_ranks, run_ranks
from tests.train_runs import make_trainer

Block = Callable[[nn.Module], nn.Module]


def build(way: str, wrap: Block, compiled: Block) -> Model:
    """A model with wrapped and compiled blocks. torchtitan compiles in place; others replace a
    block by what ``torch.compile`` returns."""

    def in_place(block: nn.Module) -> nn.Module:
        block._compiled_call_impl = compiled(block._call_impl)  # as nn.Module.compile does
        return block

    model = make_model()
    steps = {
        "returned, then wrapped": (compiled, wrap),
        "wrapped, then returned": (wrap, compiled),
        "in place, then wrapped": (in_place, wrap),
        "wrapped, then in place": (wrap, in_place),
    }[way]
    for step in steps:
        for index, block in enumerate(model.layers):
            model.layers[index] = step(block)
    return wrap(model)


WAYS = ("returned, then wrapped", "wrapped, then returned")
WAYS += ("in place, then wrapped", "wrapped, then in place")


def trained(model: nn.Module, rank: int, world_size: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of three steps, with an evaluation in between, and the weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        for microbatch in range(2):
            losses.append(loss_of(model, tokens(step, microbatch, rank, world_size)))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(model, tokens(9, 0, rank, world_size)))
    weights = sw.full_state_dict(model)
    sw.load_full_state_dict(model, {name: value + 1 for name, value in weights.items()})
    again = sw.full_state_dict(model)
    assert all(torch.equal(again[name], value + 1) for name, value in weights.items())
    return [loss.detach() for loss in losses], weights


@pytest.mark.parametrize(
    ("way", "precision", "strategy"), pairwise([*WAYS], [*PRECISIONS], ["zero1", "zero3"])
)
@on_ranks(2)
def test_compiled_blocks_are_one_graph_and_compute_the_same_bits(
    rank: int, world_size: int, way: str, precision: str, strategy: str
) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def wrap(module: nn.Module) -> nn.Module:
        return sw.fully_shard(
            module,
            mesh=mesh_of(world_size),
            placements=ZERO[strategy],
            precision=PRECISIONS[precision],
        )

    def compiled(block: Any) -> Any:
        return torch.compile(block, backend=count, fullgraph=True)

    runs = [
        trained(build(way, wrap, step), rank, world_size)
        for step in (compiled, lambda block: block)
    ]
    (losses, weights), (eager_losses, eager_weights) = runs
    assert all(map(torch.equal, losses, eager_losses))
    assert list(weights) == list(eager_weights), "no name of the compiler's"
    assert all(map(torch.equal, weights.values(), eager_weights.values()))
    assert len(graphs) == 2, "one for training and one for evaluation, for all blocks"


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_a_compiled_function_may_call_backward_and_step(
    rank: int, world_size: int, strategy: str
) -> None:
    torch._dynamo.reset()
    runs = []
    for compiled in (True, False):
        model = build(
            "returned, then wrapped",
            lambda m: sw.fully_shard(m, mesh=mesh_of(world_size), placements=ZERO[strategy]),
            lambda block: block,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(batch: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = torch.compile(train, backend="eager") if compiled else train
        losses = [step(tokens(number, 0, rank, world_size)) for number in range(2)]
        runs.append([*losses, *sw.full_state_dict(model).values()])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("format", ["mxfp8", "fp8_block"])
@on_ranks(2)
def test_blocks_in_fp8_are_one_graph_and_compute_the_same_bits(
    rank: int, world_size: int, format: Any
) -> None:
    """Planes come and go between the phases, and one graph serves all layers."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    runs = []
    for compiled in (False, True):
        model = fp8.wrap(fp8.make(True, format), "zero3", world_size,
                         precision=fp8.precision_of(True, format))  # fmt: skip
        for index, layer in enumerate(model.layers if compiled else ()):
            model.layers[index] = torch.compile(layer, backend=count, fullgraph=True)
        often: dict[str, Any] = {"steps": range(2), "evaluate": True}
        seen = fp8.train(model, rank, optimizer=fp8.optimizer_of(model, "adamw"), **often)
        runs.append({name.replace("._orig_mod", ""): value for name, value in seen.items()})
    fp8.assert_same_bits(*runs, format)
    assert len(graphs) == 2, "one for training and one for evaluation, for all layers"
    nodes = [str(node.target) for node in graphs[0].graph.nodes]
    assert not any("fp8_decode" in name for name in nodes)


EXPERTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "every option": (
        sw.Precision(weights="bf16", reduce="fp32"),
        {
            "expert_layout": "indexed",
            "gate_up_block": 8,
            "expert_biases": True,
            "expert_activation": "clamped_quick_geglu",
            "recompute": "block",
        },
    ),
    "fp8": (sw.Precision(weights="fp8_block", reduce="fp32"), {"recompute": "block"}),
    "spread, fp8": (sw.Precision(weights="fp8_block", reduce="fp32"), {"recompute": "block"}),
    "spread, delayed": (sw.Precision(weights="bf16"), {}),
}

EVALUATED = ("every option",)


@pytest.mark.parametrize("kind", EXPERTS)
@on_ranks(lambda kind: 2 if "spread" in kind else 1, of="kind")  # every rank traces for 5 s
def test_blocks_with_experts_are_one_graph_and_compute_the_same_bits(
    rank: int, world_size: int, kind: str
) -> None:
    """Router, rows to experts, grouped products and rows back; weight gradients in ``main_grad``,
    choices counted once where blocks are computed again. Evaluation is traced with every option.
    Experts in fp8 and spread experts run between graphs."""
    torch._dynamo.reset()
    precision, changes = EXPERTS[kind]
    whole = "fp8" not in kind and "spread" not in kind
    width = 128 if "fp8" in kind else 32
    config = GPTConfig(
        dim=width, num_layers=2, num_heads=2, context=16, vocab_size=64, num_experts=4,
        experts_per_token=2, expert_hidden_dim=width, shared_hidden_dim=16, hidden_dim=64,
        balance_coefficient=0.01, z_coefficient=0.001, bias_rate=0.001, **changes,
    )  # fmt: skip
    mesh, runs, count = mesh_of(world_size), [], CompileCounterWithBackend("aot_eager")
    grid = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "ep"))
    for compiled in (False, True):
        torch.manual_seed(0)
        model = GPT(config)
        axis = sw.comm.as_axis(mesh.get_group(), "ep")
        spread = axis if "spread" in kind else None
        for block in model.blocks:
            block.feed_forward.spread(spread, axis)  # type: ignore[operator, union-attr]
            block.feed_forward.experts.delay_weight_gradient = "delayed" in kind  # type: ignore[union-attr]
            if compiled:
                block.compile_forward(backend=count, fullgraph=whole, dynamic=False)  # type: ignore[operator]
        meshes = {"*.experts": grid["dp"]} if spread else None
        for unit in model.blocks:
            sw.fully_shard(unit, mesh=mesh, meshes=meshes, precision=precision)
        sw.fully_shard(model, mesh=mesh, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(4):
            words = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
            loss = model(words.roll(rank), words)
            loss.backward()
            found.append(loss.detach())
            if step % 2:
                found += [parameter.grad.to_local().clone() for parameter in model.parameters()]  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
        if kind in EVALUATED:
            model.eval()
            with torch.no_grad():
                found.append(model(words.roll(rank), words))
        found += [mixture.router.load.clone() for mixture in mixtures_of(model)]
        runs.append(found)
    if whole:
        graphs = 1 + (kind in EVALUATED)
        assert count.frame_count == graphs, "one for training, one for evaluation, for all blocks"
    nodes = [str(node.target) for graph in count.graphs for node in graph.graph.nodes]
    assert not any("index_copy" in name for name in nodes), "Inductor reads before it writes"
    assert all(map(torch.equal, *runs))
    assert runs[0][-1].sum() == 4 * 2 * 16 * 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedMLP(4, 8, 8, activation=swiglu())

    def forward(self, x: Tensor, ends: Tensor, p: Tensor) -> Tensor:
        return self.experts(x, ends, p) + self.experts(x, ends, p)  # type: ignore[no-any-return]


@on_ranks(1)
def test_experts_called_twice_with_one_x_bring_two_gradients(rank: int, world_size: int) -> None:
    """Though a graph computes equal things once, and ``main_grad`` is none of its results."""
    torch._dynamo.reset()
    found = []
    for backend in (None, "aot_eager_decomp_partition"):
        torch.manual_seed(0)
        net = Twice()
        if backend is not None:
            net.forward = torch.compile(net.forward, backend=backend, fullgraph=True)  # type: ignore[method-assign]
        sw.fully_shard(net, mesh=mesh_of(world_size), placements=sw.zero(3))
        x, ends = torch.ones(8, 8, requires_grad=True), torch.tensor([2, 4, 6, 8]).int()
        net(x, ends, torch.ones(8)).sum().backward()
        found.append([parameter.grad.to_local() for parameter in net.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *found))


def graphs_of_a_run(rank: int, world_size: int, folder: str, data: str) -> list[int]:
    """The graphs that were compiled by the end of each step and after the last evaluation."""
    count, real, found = CompileCounterWithBackend("eager"), GPT.compile, []
    with mock.patch.object(GPT, "compile", lambda model: real(model, backend=count)):
        changes: dict[str, Any] = {"data": data, "compile": "on", "steps": 4, "microbatches": 2}
        trainer = make_trainer(rank, world_size, folder, **changes)
        trainer.events = mock.Mock(side_effect=lambda *_, **__: found.append(count.frame_count))
        trainer.run()
    return found


def test_the_first_step_of_a_run_compiles_all_graphs(tmp_path: Path) -> None:
    """Evaluations and microbatches find theirs, also where no document ends in a window."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):  # some microbatches of 6 x 16 tokens hold the end of one
        (text / f"{number}.txt").write_text("so and on, " * 18)
    (found,) = run_ranks(graphs_of_a_run, 1, str(tmp_path / "run"), str(text))
    graphs = {4}  # a block and the loss, each with and without gradients
    assert len(found) > 6 and set(found) == graphs
