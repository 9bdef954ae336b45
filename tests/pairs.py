# SPDX-License-Identifier: Apache-2.0
"""Features of a training step, and few cases that hold every pair of their values.

A case is one training run on two ranks, or on four where it needs a mesh of two axes. It is right
(the losses are those of one rank that sees the whole batch), or it is refused with an error that
names the reason. docs/support.md shows the pairs; tests/interop/test_support.py runs the cases.
"""

from __future__ import annotations

import itertools
import tempfile
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.moe import mixtures_of
from tests.cases import pairwise

FEATURES: dict[str, tuple[str, ...]] = {
    "strategy": ("zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp"),
    "wrapping": ("fully_shard", "data_parallel"),
    "optimizer": ("AdamW", "Muon", "a function"),
    "weights": ("fp32", "bf16", "mxfp8", "fp8_block"),
    "recompute": ("no recompute", "recompute"),
    "microbatches": ("1 microbatch", "2 microbatches"),
    "tp": ("no tp", "tp 2"),
    "ep": ("no ep", "ep 2"),
    "compile": ("eager", "compile"),
    "resume": ("straight", "resumed"),
}
Case = dict[str, str]
STEPS, SEQUENCES, LENGTH = 3, 8, 8


def refusal(case: Case) -> str | None:
    """A part of the error that this case gets, or None where it is right."""
    if case["wrapping"] == "data_parallel" and case["strategy"] in ("zero3", "hsdp", "hfsdp"):
        return "data_parallel"
    if case["tp"] == "tp 2" and case["ep"] == "ep 2":
        return "experts"
    if case["tp"] == "tp 2" and "fp8" in case["weights"]:
        return "nothing would be stored"
    return None


# The order in which cases are filled: what is dear first, so that few cases hold it.
ORDER = ("compile", "strategy", "optimizer", "wrapping", "microbatches", "tp", "recompute")
ORDER += ("weights", "resume", "ep")


def cut_over(model: GPT, mesh: DeviceMesh) -> None:
    """Cut the products of all blocks, experts too, over an axis."""
    rows = dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel())
    plan: dict[str, Any] = {f"attention.{name}": style for name, style in rows.items()}
    plan |= {"attention.wo": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
    plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
    for block in model.blocks:
        if not mixtures_of(block):
            parallelize_module(block, mesh, plan)
            continue
        fc1 = block.feed_forward.experts.fc1
        fc1.weight = nn.Parameter(distribute_tensor(fc1.weight.detach(), mesh, [Shard(0)]))


def is_dear(case: Case) -> bool:
    """Whether a case traces for a long time, on every rank, a third value that no pair needs:
    tensor parallelism is compiled by itself (and under zero3 in parity/test_tensor_parallel), a
    resumed run, which is traced twice, without experts, recomputation and fp8."""
    if case["compile"] == "eager":
        return False
    resumed, again = case["resume"] == "resumed", case["recompute"] == "recompute"
    if case["tp"] == "tp 2":
        twice = case["microbatches"] == "2 microbatches"
        return case["strategy"] != "zero0" or resumed or again or twice
    return resumed and (again or case["ep"] == "ep 2" or "fp8" in case["weights"])


def world_of(case: Case) -> int:
    """The ranks of a case. Compiled blocks with tensor parallelism or spread experts, which take
    longest to trace, have no second axis: eager ones have it, and parity/test_tensor_parallel
    compiles tensor parallelism under zero3."""
    cut = "tp 2" in case.values() or "ep 2" in case.values()
    return 4 if case["strategy"] in ("hsdp", "hfsdp") or (cut and case["compile"] == "eager") else 2


def pairs() -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Every two values of different features."""
    values = [[(name, value) for value in held] for name, held in FEATURES.items()]
    return [
        pair
        for one, other in itertools.combinations(values, 2)
        for pair in itertools.product(one, other)
    ]


def cases() -> list[Case]:
    """Cases such that every pair that can be right is in one that is, and every pair that cannot in
    one that is refused."""
    every = [plain(dict(pair)) for pair in pairs()]
    refused = [one for one in every if refusal(one) is not None]

    def fits(values: tuple[str, ...]) -> bool:
        case = dict(zip(ORDER, values, strict=True))
        return refusal(case) is None and not is_dear(case)

    right = pairwise(*(FEATURES[name] for name in ORDER), fits=fits)
    return refused + [plain(dict(zip(ORDER, values, strict=True))) for values in right]


def plain(some: Case) -> Case:
    """The case with the simplest value of every feature that it does not name."""
    return {name: some.get(name, values[0]) for name, values in FEATURES.items()}


def pairs_of(case: Case) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


# ------------------------------------------------------------------------------ one case


@sw.matrix_optimizer
def heavy_ball(gradient: Any, state: Any, *, lr: float, beta: float = 0.9) -> Any:
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
    state["momentum"].mul_(beta).add_(gradient)
    return lr * state["momentum"]


def model_of(case: Case) -> GPT:
    """Without norms of heads: under tensor parallelism each rank would see its own heads alone."""
    experts: dict[str, Any] = {}
    width = 128 if case["weights"] == "fp8_block" else 32  # sides of its blocks
    if case["ep"] == "ep 2":
        experts = {"num_experts": 4, "expert_hidden_dim": width, "balance_coefficient": 0.0}
    recompute = "block" if case["recompute"] == "recompute" else "none"
    model = GPT(
        GPTConfig(
            vocab_size=64, dim=width, num_layers=2, num_heads=2, context=LENGTH,
            recompute=recompute, qk_norm=False, **experts,
        )
    )  # fmt: skip
    model.init_weights(0)
    return model


def wrap(model: GPT, case: Case, mesh: DeviceMesh, placements: sw.Placements, **more: Any) -> None:
    uncut = ("head.weight",) if case["tp"] == "tp 2" and "fp8" in case["weights"] else ()
    precision = sw.Precision(weights=case["weights"], reduce="fp32", exclude=uncut)
    if case["compile"] == "compile":
        model.compile(backend="eager")  # traced as ever; kernels would take a CPU minutes to build
    if case["wrapping"] == "data_parallel":
        sw.data_parallel(model, mesh=mesh, placements=placements, precision=precision, **more)
        return
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh, placements=placements, precision=precision)
    sw.fully_shard(model, mesh=mesh, placements=placements, precision=precision)


def optimizer_of(model: nn.Module, case: Case) -> Any:
    matrix = {"AdamW": None, "Muon": sw.muon(lr=0.02), "a function": heavy_ball(lr=0.1)}
    return sw.optimizer(model, matrix=matrix[case["optimizer"]], elementwise=sw.adamw(lr=3e-3))


def train(model: GPT, optimizer: Any, case: Case, mine: slice, steps: range) -> list[float]:
    """The mean loss of this rank's sequences in each step."""
    pieces = 2 if case["microbatches"] == "2 microbatches" else 1
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (SEQUENCES, LENGTH + 1), generator=generator)[mine]
        total = 0.0
        for part in tokens.chunk(pieces):
            loss = model(part[:, :-1], part[:, 1:]) / pieces
            loss.backward()
            total += loss.item()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def sharded(case: Case, rank: int) -> list[float]:
    """The losses of the case, the mean of all ranks."""
    world = world_of(case)
    tp = 2 if case["tp"] == "tp 2" else 1
    outer = 2 if case["strategy"] in ("hsdp", "hfsdp") else 1
    mesh = sw.init_mesh(dp_outer=outer, tp=tp, device_type="cpu")
    name = case["strategy"]
    placements = {"hsdp": sw.hsdp(), "hfsdp": sw.hfsdp()}.get(name) or sw.zero(int(name[-1]))
    share = SEQUENCES // (world // tp)
    mine = slice(rank // tp * share, (rank // tp + 1) * share)

    def built() -> tuple[GPT, Any]:
        if case["compile"] == "compile":
            torch._dynamo.reset()  # graphs of the model before
        model, more = model_of(case), {}
        if tp > 1:
            cut_over(model, mesh["tp"])
        if case["ep"] == "ep 2":
            more = spread(model, case, mesh, placements)
        wrap(model, case, mesh, placements, **more)
        return model, optimizer_of(model, case)

    model, optimizer = built()
    if case["resume"] == "straight":
        losses = train(model, optimizer, case, mine, range(STEPS))
    else:
        losses = train(model, optimizer, case, mine, range(1))
        folder = [tempfile.mkdtemp()] if rank == 0 else [None]
        dist.broadcast_object_list(folder)
        sw.save(f"{folder[0]}/checkpoint", model, optimizer)
        model, optimizer = built()
        sw.load(f"{folder[0]}/checkpoint", model, optimizer)
        losses += train(model, optimizer, case, mine, range(1, STEPS))  # one step with its state
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return (total / world).tolist()


def spread(model: GPT, case: Case, mesh: DeviceMesh, placements: sw.Placements) -> dict[str, Any]:
    """Experts over pairs of ranks; the other axis of each strategy is that of the experts."""
    if mesh.ndim == 1:
        grid = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("dp", "ep"))
        held = grid["dp"]
        tokens = sw.comm.as_axis(mesh.get_group(), "dp")
    else:
        grid = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_outer", "dp", "ep"))
        held = grid["dp_outer", "dp"]
        tokens = sw.comm.as_axis(dist.group.WORLD, "all")
    axis = sw.comm.as_axis(grid.get_group("ep"), "ep")
    precision = sw.Precision(weights=case["weights"], reduce="fp32")
    for layer in mixtures_of(model):
        layer.spread(axis, tokens)
        if case["wrapping"] == "fully_shard":
            sw.fully_shard(layer.experts, mesh=held, placements=placements, precision=precision)
    return {"meshes": {"*.experts": held}} if case["wrapping"] == "data_parallel" else {}


@cache
def mesh_of_one() -> DeviceMesh:
    """An axis of this rank alone; every rank must ask for it."""
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("other", "dp"))["dp"]


def alone(case: Case, mesh: DeviceMesh) -> list[float]:
    """The losses of one rank that sees the whole batch, with the same optimizer and format."""
    return _alone(tuple((name, case[name]) for name in ("optimizer", "weights", "ep")), mesh)


@cache
def _alone(some: tuple[tuple[str, str], ...], mesh: DeviceMesh) -> list[float]:
    """Many cases have the same: nothing else of a case may change a loss."""
    simple = plain(dict(some))
    model = model_of(simple)
    wrap(model, simple, mesh, sw.zero(0))
    return train(model, optimizer_of(model, simple), simple, slice(None), range(STEPS))
