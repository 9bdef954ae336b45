# SPDX-License-Identifier: Apache-2.0
"""The contract of FSDP2 (issue 16), case by case, on torch's ``fully_shard`` and on this one.

A case is a function of the library under test that raises where a script would be let down. All
cases hold here; ``TORCH_FAILS`` names those that do not on torch, so the table is never a claim:

    python -m tests.interop.test_fsdp2_contract
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise as sw
from tests.contract.helpers import assert_close, full, raised
from tests.ranks import run_ranks

LIBRARIES = {"torch": torch_fsdp.fully_shard, "shardwise": sw.fully_shard}
Case = Callable[[Any], None]
CASES: dict[str, Case] = {}
TORCH_FAILS: dict[str, str] = {}  # a part of the error that torch raises


def case(name: str, *, torch_fails: str | None = None) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        assert name not in CASES
        CASES[name] = function
        if torch_fails is not None:
            TORCH_FAILS[name] = torch_fails
        return function

    return add


def run_case(rank: int, world_size: int, name: str, library: str) -> None:
    torch.manual_seed(0)
    CASES[name](LIBRARIES[library])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", CASES)
def test_contract(name: str, library: str) -> None:
    if library == "torch" and name in TORCH_FAILS:
        with pytest.raises(Exception, match=TORCH_FAILS[name]):
            run_ranks(run_case, 2, name, library, timeout=60)
    else:
        run_ranks(run_case, 2, name, library, timeout=60)


# ------------------------------------------------------------------------------ a model


class Net(nn.Module):
    """An embedding, two blocks, and a tail that is wrapped as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 12, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def shard_net(shard: Any, net: Any, **more: Any) -> Any:
    """As torchtitan and accelerate wrap: blocks, the tail as a list, the model."""
    for block in net.blocks:
        shard(block, **more)
    shard([net.norm, net.output], **more)
    shard(net, **more)
    return net


def both(shard: Any, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    plain = Net()
    return shard_net(shard, copy.deepcopy(plain), **more), plain


def words() -> Tensor:
    return torch.arange(24).view(3, 8) * 5 % 12  # the same on every rank


def step(model: Any, optimizer: Any) -> None:
    loss = model(words()).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(net: Any, plain: Any, tolerance: float = 1e-5) -> None:
    theirs = dict(plain.named_parameters())
    assert [name for name, _ in net.named_parameters()] == list(theirs)
    for name, parameter in net.named_parameters():
        assert_close(
            full(parameter.detach()).float(), theirs[name].detach().float(), name, tolerance
        )


# ------------------------------------------------------------------------------ 3: unused


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


@case("3 unused: of a unit that ran")
def unused_in_unit(shard: Any) -> None:
    net = shard(Branches())
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.randn(2, 8)).sum().backward()
        assert net.unused.weight.grad is None and net.used.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))  # type: ignore[no-any-return]


@case("3 unused: a list of which some ran, chunk by chunk")
def chunked(shard: Any) -> None:
    net = Tail()
    plain = copy.deepcopy(net)
    shard([net.norm, net.head])
    shard(net)
    for model in (net, plain):
        hidden = model(torch.ones(4, 8))
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(2)]
        for chunk in chunks:
            model.head(chunk).square().sum().backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))  # type: ignore[misc]
    for name, parameter in plain.named_parameters():
        assert_close(full(net.get_parameter(name).grad), parameter.grad, name)


# ------------------------------------------------------------------------------ 4, 4b: registered


@case("4 kept after forward: whole parameters until reshard()")
def kept(shard: Any) -> None:
    net = Tail()
    shard(net, reshard_after_forward=False)
    assert isinstance(net.head.weight, DTensor)
    with torch.no_grad():
        net(torch.ones(2, 8))
    assert type(net.head.weight) is not DTensor and not isinstance(net.head.weight, DTensor)
    assert net.head.weight.shape == (12, 8) and net.head.weight.sum().item() != 0
    net.reshard()
    assert isinstance(net.head.weight, DTensor)
    net.unshard()
    assert not isinstance(net.head.weight, DTensor)
    net.reshard()
    assert isinstance(net.head.weight, DTensor)


@case("4 kept after forward: sharded again after backward")
def kept_backward(shard: Any) -> None:
    net, plain = both(shard, reshard_after_forward=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        loss = net(words()).square().mean()
        assert not isinstance(net.blocks[0][0].weight, DTensor)
        loss.backward()
        assert all(isinstance(p, DTensor) for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        step(plain, other)
    assert_same(net, plain)


@case("4b a list survives to_empty, .to(dtype), .half()", torch_fails="single root module")
def lists_move(shard: Any) -> None:
    with torch.device("meta"):
        net = Net()
    for block in net.blocks:
        shard(block)
    shard([net.norm, net.output])  # and nothing around it
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    net.to(torch.bfloat16)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    net.half()
    net.float()
    assert torch.equal(full(net.output.weight.detach()), torch.full((12, 8), 0.5))
    with torch.no_grad():
        assert net.output(net.norm(torch.ones(2, 8))).shape == (2, 12)


# ------------------------------------------------------------------------------ 5: meta device


def meta_net(shard: Any) -> Any:
    with torch.device("meta"):
        net = Net()
    return shard_net(shard, net)


def trains(net: Any, plain: Any) -> None:
    for model in (net, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            step(model, optimizer)
    assert_same(net, plain)


@case("5 meta: to_empty and reset_parameters")
def meta_reset(shard: Any) -> None:
    net = meta_net(shard)
    net.to_empty(device="cpu")
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    found = {name: full(p.detach()).std().item() for name, p in net.named_parameters()}
    assert 0.5 < found["embed.weight"] < 1.5 and 0.05 < found["output.weight"] < 0.5
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))


@case("5 meta: reset_parameters zeroes the padding row", torch_fails="padding row is not zero")
def meta_padding(shard: Any) -> None:
    net = meta_net(shard)
    net.to_empty(device="cpu")
    net.embed.reset_parameters()
    assert not full(net.embed.weight.detach())[0].any(), "the padding row is not zero"
    assert full(net.embed.weight.detach())[1:].all()


def full_values() -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(7)
    plain = Net()
    return plain, {name: value.clone() for name, value in plain.state_dict().items()}


@case("5 meta: load_state_dict(assign=True) of distributed tensors")
def meta_assign(shard: Any) -> None:
    """torchtune's and accelerate's way: distribute_tensor over each parameter's own placements."""
    net, (plain, values) = meta_net(shard), full_values()
    sharded = {
        name: nn.Parameter(distribute_tensor(values[name], p.device_mesh, p.placements))
        for name, p in net.state_dict().items()
    }
    net.load_state_dict(sharded, strict=True, assign=True)
    assert not any(p.is_meta for p in net.parameters())
    trains(net, plain)


@case("5 meta: the same, values on rank 0 alone")
def meta_assign_from_first(shard: Any) -> None:
    net, (plain, values) = meta_net(shard), full_values()
    sharded = {}
    for name, parameter in net.state_dict().items():
        value = values[name] if dist.get_rank() == 0 else torch.empty_like(values[name])
        dist.broadcast(value, src=0)
        sharded[name] = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    net.load_state_dict(sharded, assign=True)
    trains(net, plain)


@case("5 load_state_dict(assign=True) of a model's own state dict")
def assign_own(shard: Any) -> None:
    net, plain = both(shard)
    saved = {name: value.detach().clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    net.load_state_dict(saved, assign=True)
    trains(net, plain)


@case("5 meta: set_model_state_dict(full, broadcast_from_rank0)")
def meta_broadcast(shard: Any) -> None:
    net, (plain, values) = meta_net(shard), full_values()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    net.to_empty(device="cpu")
    set_model_state_dict(net, values if dist.get_rank() == 0 else {}, options=options)
    trains(net, plain)


@case("5 meta: the same without to_empty")
def meta_broadcast_direct(shard: Any) -> None:
    net, (plain, values) = meta_net(shard), full_values()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, values if dist.get_rank() == 0 else {}, options=options)
    trains(net, plain)


@case("5 meta: set_model_state_dict(full) on every rank")
def meta_full(shard: Any) -> None:
    net, (plain, values) = meta_net(shard), full_values()
    net.to_empty(device="cpu")
    set_model_state_dict(net, values, options=StateDictOptions(full_state_dict=True))
    trains(net, plain)


@case("5 get_model_state_dict(full, cpu_offload) is rank 0's")
def get_full(shard: Any) -> None:
    net, plain = both(shard)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(net, options=options)
    assert set(found) == (set(plain.state_dict()) if dist.get_rank() == 0 else set())
    for name, value in found.items():
        assert torch.equal(value, plain.state_dict()[name])


# ------------------------------------------------------------------------------ 6: optimizer state


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW for-loop": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
}


def reload(shard: Any, make: Any, options: StateDictOptions, *, from_first: bool = False) -> None:
    """Two steps, the state through a state dict into another model, two more steps; against four
    steps of a plain one."""
    net, plain = both(shard)
    optimizer, other = make(net.parameters()), make(plain.parameters())
    for _ in range(2):
        step(net, optimizer)
        step(plain, other)
    weights = get_model_state_dict(net, options=options)
    states = get_optimizer_state_dict(net, optimizer, options=options)
    second, _ = both(shard)
    again = make(second.parameters())
    if from_first:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        if dist.get_rank():
            weights, states = {}, {}
    set_model_state_dict(second, weights, options=options)
    set_optimizer_state_dict(second, again, states, options=options)
    for _ in range(2):
        step(second, again)
        step(plain, other)
    assert_same(second, plain)
    get_optimizer_state_dict(second, again, options=options)


for _name, _make in OPTIMIZERS.items():
    case(f"6 {_name}: sharded state")(
        lambda shard, make=_make: reload(shard, make, StateDictOptions())
    )
    case(f"6 {_name}: full state")(
        lambda shard, make=_make: reload(shard, make, StateDictOptions(full_state_dict=True))
    )
    case(f"6 {_name}: full, cpu_offload, broadcast_from_rank0")(
        lambda shard, make=_make: reload(
            shard, make, StateDictOptions(full_state_dict=True, cpu_offload=True), from_first=True
        )
    )


class Matrices(nn.Module):
    """A model of matrices only: all of it belongs to Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@case("6 sw.Muon: sharded, full and broadcast state")
def muon_state(shard: Any) -> None:
    ways = [(StateDictOptions(), False), (StateDictOptions(full_state_dict=True), False)]
    ways.append((StateDictOptions(full_state_dict=True, cpu_offload=True), True))
    for options, from_first in ways:
        torch.manual_seed(3)
        plain = Matrices()
        first, second = (shard(copy.deepcopy(plain)) for _ in range(2))
        made = [sw.Muon(model.parameters(), lr=0.1) for model in (first, second)]
        x = torch.randn(4, 8)

        def steps(model: Any, optimizer: Any, x: Tensor = x) -> None:
            for _ in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        steps(first, made[0])
        weights = get_model_state_dict(first, options=options)
        # A copy: loading shares the memory of tensors that need no conversion.
        states = copy.deepcopy(get_optimizer_state_dict(first, made[0], options=options))
        if from_first:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            weights, states = ({}, {}) if dist.get_rank() else (weights, states)
        set_model_state_dict(second, weights, options=options)
        set_optimizer_state_dict(second, made[1], states, options=options)
        for model, optimizer in zip((first, second), made, strict=True):
            steps(model, optimizer)
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert_close(full(one.detach()), full(other.detach()), "matrix", 1e-6)


# ------------------------------------------------------------------------------ 7: torch.optim


def trains_with(shard: Any, make: Any, tolerance: float = 1e-4) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        optimizer = make(model)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(words()).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    assert_same(net, plain, tolerance)


@case("7 torch.optim.Muon: right, or refused with sw.Muon", torch_fails="differs by")
def torch_muon(shard: Any) -> None:
    if shard is sw.fully_shard:
        run = partial(trains_with, shard, lambda m: torch.optim.Muon(matrices(m)))
        assert "sw.Muon" in raised(run, RuntimeError)
    else:
        trains_with(shard, lambda m: torch.optim.Muon(matrices(m)))


def matrices(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def optimizer_case(name: str, make: Any, torch_fails: str | None = None) -> None:
    case(f"7 torch.optim.{name}", torch_fails=torch_fails)(lambda shard: trains_with(shard, make))


_optim = torch.optim
optimizer_case("Adafactor", lambda m: _optim.Adafactor(m.parameters()), "in-place operations")
optimizer_case("LBFGS", lambda m: _optim.LBFGS(m.parameters(), max_iter=4))
for _form in ("foreach", "fused"):
    optimizer_case(
        f"Adam({_form}=True)", lambda m, f=_form: _optim.Adam(m.parameters(), **{f: True})
    )


@case("7 autograd.grad of inputs leaves parameters alone")
def gradients_of_inputs(shard: Any) -> None:
    net = Tail()
    plain = copy.deepcopy(net)
    shard(net)
    found = []
    for model in (net, plain):
        x = torch.ones(2, 8, requires_grad=True)
        found.append(torch.autograd.grad(model(x).square().sum(), x)[0])
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_close(found[0], found[1], "input")
    net(torch.ones(2, 8)).sum().backward()
    assert net.body.weight.grad is not None


# ------------------------------------------------------------------------------ 8: knobs


@case("8 shard_placement_fn with another dimension")
def placement(shard: Any) -> None:
    net, plain = both(shard, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    trains(net, plain)


@case("8 shard_placement_fn where nothing divides evenly", torch_fails="uneven sharding")
def placement_uneven(shard: Any) -> None:
    net = nn.Linear(7, 5)
    shard(net, shard_placement_fn=lambda p: Shard(p.ndim - 1))


@case("8 a 2-D mesh without names", torch_fails="mesh_dim_names")
def unnamed_mesh(shard: Any) -> None:
    net, plain = both(shard, mesh=init_device_mesh("cpu", (1, 2)))
    trains(net, plain)


@case("8 clip_grad_norm_ returns what has full_tensor()")
def clip(shard: Any) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        model(words()).square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (net, plain)]
    assert_close(norms[0].full_tensor(), norms[1], "norm")
    assert_close(full(net.embed.weight.grad), plain.embed.weight.grad, "clipped")


@case("8 fully_shard.state(module)")
def state_of(shard: Any) -> None:
    net, _ = both(shard)
    assert shard.state(net) is not None and shard.state(net.blocks[0]) is not None
    assert shard.state(net.blocks[0][0]) is None


class Eight(Tensor):
    """A parameter that asks to be gathered in its own way, as torchao's float8 does."""

    @staticmethod
    def fsdp_pre_all_gather(mesh: Any) -> Any:
        raise RuntimeError("called")


@case("8 fsdp_pre_all_gather is called or refused", torch_fails="nothing was raised")
def extension(shard: Any) -> None:
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Eight))
    text = raised(lambda: shard(net)(torch.ones(1, 4)), Exception)
    assert "called" in text or "fsdp_pre_all_gather" in text


# ------------------------------------------------------------------------------ habits

HABITS: dict[str, Callable[[Any], Any]] = {
    "norm by row": lambda p: p.norm(dim=1),
    "norm of .data": lambda p: p.data.norm(),
    "mean, std, var": lambda p: torch.stack([full(p.mean()), full(p.std()), full(p.var())]),
    "a row": lambda p: p[3],
    "rows": lambda p: p[2:5],
    "columns": lambda p: p[:, 1:3],
    "chunk": lambda p: p.chunk(2)[1],
    "split by column": lambda p: p.split([3, 5], dim=1)[1],
    "t()": lambda p: p.t(),
    "mT @": lambda p: p.mT @ p,
    "permute": lambda p: p.permute(1, 0),
    "view(-1)": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(4, -1),
    "unsqueeze": lambda p: p.unsqueeze(0),
    "sort": lambda p: p.flatten().sort().values,
    "svd": lambda p: torch.linalg.svdvals(p),
    "cat": lambda p: torch.cat([p, p]),
    "redistribute": lambda p: (
        p.redistribute(placements=[Shard(1)]) if isinstance(p, DTensor) else p
    ),
    "from_local": lambda p: (
        DTensor.from_local(p.to_local() * 2, p.device_mesh, p.placements)
        if isinstance(p, DTensor)
        else p * 2
    ),
    "new_zeros": lambda p: p.new_zeros(3),
    "divided by row norms": lambda p: p / (p.norm(dim=1, keepdim=True) + 1),
    "isnan().any()": lambda p: p.isnan().any(),
    "cpu().clone()": lambda p: p.cpu().clone(),
    "bfloat16()": lambda p: p.bfloat16(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "repr": lambda p: (repr(p), p)[1],
}


def habit(shard: Any, read: Callable[[Any], Any]) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        model(words()).square().mean().backward()
    for name in ("embed.weight", "blocks.1.0.weight"):
        ours, theirs = net.get_parameter(name), plain.get_parameter(name)
        for one, other in (
            (ours, theirs),
            (ours.detach(), theirs.detach()),
            (ours.grad, theirs.grad),
        ):
            assert_close(full(read(one)).detach(), read(other).detach(), name, 1e-4)


for _habit, _read in HABITS.items():
    case(f"habit: {_habit}")(lambda shard, read=_read: habit(shard, read))


@case("habit: nn.init", torch_fails="embed.weight")
def inits(shard: Any) -> None:
    """Torch's DTensor draws other numbers than one process."""
    net, plain = both(shard)
    for fill in (
        lambda p: nn.init.normal_(p, std=0.02),
        lambda p: nn.init.trunc_normal_(p, std=0.02),
        nn.init.xavier_uniform_,
        nn.init.orthogonal_,
        nn.init.eye_,
    ):
        for model in (net, plain):
            torch.manual_seed(5)
            fill(model.embed.weight)
        assert_close(full(net.embed.weight.detach()), plain.embed.weight.detach(), "embed.weight")


@case("habit: writing to a row", torch_fails="sharding strategy|got mixed")
def write_rows(shard: Any) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        with torch.no_grad():
            model.embed.weight[3] = 7.0
            model.embed.weight[5:7] = torch.ones(2, 8)
    assert_same(net, plain)


@case("habit: state dict surgery")
def surgery(shard: Any) -> None:
    net, plain = both(shard)
    values = {f"module.{name}": value.clone() for name, value in net.state_dict().items()}
    values = {name.removeprefix("module."): value * 2 for name, value in values.items()}
    del values["output.weight"]
    assert net.load_state_dict(values, strict=False).missing_keys == ["output.weight"]
    assert_close(full(net.norm.weight.detach()), plain.norm.weight.detach() * 2, "norm")
    assert_close(full(net.output.weight.detach()), plain.output.weight.detach(), "output")


@case("habit: an average of weights, loaded back")
def average(shard: Any) -> None:
    net, plain = both(shard)
    kept = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    for name, parameter in net.named_parameters():
        kept[name].lerp_(parameter.detach(), 0.0)
    net.load_state_dict(kept)
    assert_same(net, plain)


# ------------------------------------------------------------------------------ the table


def table() -> str:
    lines = ["| case | torch FSDP2 | shardwise |", "|---|---|---|"]
    for name in CASES:
        found = []
        for library in LIBRARIES:
            try:
                run_ranks(run_case, 2, name, library, timeout=60)
                found.append("works")
            except Exception as error:
                last = [line for line in str(error).splitlines() if "Error" in line]
                found.append(f"fails: {(last or [str(error)])[-1].strip()[:90]}")
        lines.append(f"| {name} | {' | '.join(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    from tests.interop import test_fsdp2_contract as _this

    sys.stdout.write(_this.table() + "\n")
