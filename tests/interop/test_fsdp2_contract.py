# SPDX-License-Identifier: Apache-2.0
"""The contract of FSDP2 (issue 16), case by case, on torch's ``fully_shard`` and on this one.

A case is a function of the library under test that raises where a script would be let down. All
cases hold here; ``TORCH_FAILS`` names those that do not on torch, so the table is never a claim.
The suite runs the cases with this library. The command runs them with torch's too, adds those that
the suite leaves out, and writes docs/fsdp2_contract.md:

    python -m tests.interop.test_fsdp2_contract
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise as sw
from tests.contract.helpers import assert_close, full
from tests.interop import (
    fsdp2_habits,  # noqa: F401  (its cases)
    fsdp2_page,
)
from tests.interop.fsdp2_contract import (
    CASES,
    CPU_ONLY,
    LIBRARIES,
    RANKS,
    TORCH_FAILS,
    Net,
    Tail,
    assert_same,
    both,
    case,
    shard_net,
    step,
    trains,
    words,
)
from tests.one_card import device_type
from tests.ranks import run_ranks

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
    net.to_empty(device=device_type())
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


@case("5 meta: to_empty and reset_parameters")
def meta_reset(shard: Any) -> None:
    net = meta_net(shard)
    net.to_empty(device=device_type())
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    found = {name: full(p.detach()).std().item() for name, p in net.named_parameters()}
    assert 0.5 < found["embed.weight"] < 1.5 and 0.05 < found["output.weight"] < 0.5
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))


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
    net.to_empty(device=device_type())
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
    net.to_empty(device=device_type())
    set_model_state_dict(net, values, options=StateDictOptions(full_state_dict=True))
    trains(net, plain)


@case("5 get_model_state_dict(full, cpu_offload) is rank 0's")
def get_full(shard: Any) -> None:
    net, plain = both(shard)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(net, options=options)
    assert set(found) == (set(plain.state_dict()) if dist.get_rank() == 0 else set())
    for name, value in found.items():
        assert torch.equal(value, plain.state_dict()[name].cpu())


# ------------------------------------------------------------------------------ 6: optimizer state


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW for-loop": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}
# Torch's Adafactor cannot step on DTensors.
FAILS = {"Adafactor": "in-place operations"}


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
    case(f"6 {_name}: sharded state", torch_fails=FAILS.get(_name))(
        lambda shard, make=_make: reload(shard, make, StateDictOptions())
    )
    case(f"6 {_name}: full state", torch_fails=FAILS.get(_name))(
        lambda shard, make=_make: reload(shard, make, StateDictOptions(full_state_dict=True))
    )
    case(f"6 {_name}: full, cpu_offload, broadcast_from_rank0", torch_fails=FAILS.get(_name))(
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


# ------------------------------------------------------------------------------ both libraries


def run_case(rank: int, world_size: int, name: str, library: str) -> str:
    """The error of a case that should fail with torch, on this rank. (An exception that leaves the
    function would cost the test new ranks.)"""
    torch.manual_seed(0)
    try:
        CASES[name](LIBRARIES[library])
    except BaseException:  # pytest's own too
        if library == "shardwise" or name not in TORCH_FAILS:
            raise
        return traceback.format_exc()
    return ""


def marked(name: str) -> Any:
    reason = CPU_ONLY.get(name)
    return name if reason is None else pytest.param(name, marks=pytest.mark.cpu_only(reason))


@pytest.mark.parametrize("name", [marked(name) for name in sorted(CASES)])
def test_contract(name: str) -> None:
    run_ranks(run_case, RANKS[name], name, "shardwise")


# ------------------------------------------------------------------------------ the table


def frameworks() -> dict[str, Callable[[Path], None]]:
    """Tests of their own files, which train with torch's ``fully_shard`` and with this one and
    compare the losses; those in brackets are of this one alone."""
    from tests.interop import (
        test_accelerate,
        test_lightning,
        test_lora,
        test_torchtitan,
        test_transformers,
    )

    rows: dict[str, Any] = {
        f"accelerate, {name}": lambda _, name=name: test_accelerate.test_losses_are_those_of_fsdp2(
            name=name
        )
        for name in test_accelerate.CASES
    }
    return rows | {
        "[accelerate, save_state and load_state]": lambda folder: (
            test_accelerate.test_states_are_saved_and_loaded("FULL_STATE_DICT", folder)
        ),
        "[save_pretrained of a wrapped model]": (
            test_transformers.test_save_pretrained_writes_whole_weights
        ),
        "transformers.Trainer": test_transformers.test_trainer,
        "Lightning Fabric": test_lightning.test_fabric,
        "Lightning Trainer": test_lightning.test_trainer,
        "torchtitan's way of building a run": lambda folder: (
            test_torchtitan.test_losses_are_those_of_fsdp2(True, folder)
        ),
        "[LoRA, as torchtune begins]": lambda _: (
            test_lora.test_torchtune_begins_on_the_meta_device()
        ),
        "[LoRA of peft]": test_lora.test_peft,
    }


def outcome(run: Callable[[], Any], fails: str | None = None) -> str:
    try:
        said = "".join(run() or [])
    except Exception as error:
        said = str(error)
        assert fails is None
    else:
        assert re.search(fails or "", said), said
        if not said:
            return "works"
    last = [line for line in said.splitlines() if "Error" in line]
    return f"fails: {(last or [said])[-1].strip()[:90]}"


def add_cases() -> None:
    """Add the cases of the table that the suite does not run."""
    from tests.interop import fsdp2_parallel  # noqa: F401


def run_row(rank: int, world_size: int, name: str, library: str) -> str:
    add_cases()
    return run_case(rank, world_size, name, library)


def run_table() -> None:
    """Write every row: ``{row: [torch's outcome, ours]}``, and the page that shows them."""
    add_cases()
    rows = {}
    for name in CASES:
        theirs, ours = (
            outcome(
                partial(run_ranks, run_row, RANKS[name], name, library),
                TORCH_FAILS.get(name) if library == "torch" else None,
            )
            for library in LIBRARIES
        )
        rows[name] = [theirs, ours]
    for name, run in frameworks().items():
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(partial(run, Path(folder)))
        alone = name.startswith("[")
        theirs = "not run" if alone else "the same losses" if found == "works" else "?"
        rows[f"11 {name.strip('[]')}"] = [theirs, found]
    fsdp2_page.CONTRACT.write_text(json.dumps(rows, indent=0, sort_keys=True) + "\n")
    fsdp2_page.write()


def test_the_page_has_every_row() -> None:
    """Its outcomes are those of the last whole run; rows that fail on torch are known here."""
    add_cases()
    rows = json.loads(fsdp2_page.CONTRACT.read_text())
    assert rows.keys() == {*CASES, *(f"11 {name.strip('[]')}" for name in frameworks())}
    assert {ours for _, ours in rows.values()} == {"works"}
    assert {name for name, (theirs, _) in rows.items() if "fails" in theirs} == {*TORCH_FAILS}
    assert not fsdp2_page.unexplained(), "tests of torch's suite that fail here without a reason"
    assert fsdp2_page.PAGE.read_text() == fsdp2_page.drawn(), "python -m tests.interop.fsdp2_page"


if __name__ == "__main__":
    from tests.interop import test_fsdp2_contract as _this

    _this.run_table()
