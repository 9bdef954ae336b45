# SPDX-License-Identifier: Apache-2.0
"""Names of expert weights, both ways, with every guard; and loading one layout into another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.moe import keys
from shardwise.moe.activation import swiglu
from shardwise.moe.grouped_mlp import GroupedMLP


def indexed(prefix: str = "", name: str = "weight", experts: int = 3) -> dict[str, Tensor]:
    return {f"{prefix}{name}{index}": torch.full((2, 4), float(index)) for index in range(experts)}


def grouped(prefix: str = "", experts: int = 3) -> dict[str, Tensor]:
    return {f"{prefix}weight": torch.stack(list(indexed(experts=experts).values()))}


def unchanged(state: dict[str, Any], call: Any) -> None:
    before = list(state.items())
    assert not call(state)
    assert [key for key, _ in before] == list(state)
    assert all(value is state[key] for key, value in before)


def test_both_ways() -> None:
    state: dict[str, Any] = {"other": 1, **indexed("a.")}
    assert keys.to_grouped(state, "a.", "weight", 3)
    assert list(state) == ["other", "a.weight"] and state["a.weight"].shape == (3, 2, 4)
    assert keys.to_indexed(state, "a.", "weight", 3)
    assert torch.equal(state["a.weight2"], torch.full((2, 4), 2.0)) and "a.weight" not in state


def test_what_is_there_already_or_incomplete_is_left_alone() -> None:
    def stack(state: Any) -> bool:
        return keys.to_grouped(state, "", "weight", 3)

    def part(state: Any) -> bool:
        return keys.to_indexed(state, "", "weight", 3)

    unchanged({**indexed(), **grouped()}, stack)  # the target is there
    unchanged({**indexed(), **grouped()}, part)
    unchanged({"weight0": torch.ones(1), "weight2": torch.ones(1)}, stack)  # incomplete
    unchanged({**grouped(), "weight1": torch.ones(1)}, part)  # any member is there
    unchanged({}, part)
    unchanged(indexed(experts=4), stack)  # made for more experts


def test_splitting_by_slices_or_chunks() -> None:
    assert [part.shape for part in keys.split(torch.ones(3, 2), 3, "w")] == [(2,)] * 3
    assert [part.shape for part in keys.split(torch.ones(6, 2), 3, "w")] == [(2, 2)] * 3
    with pytest.raises(ValueError, match=r"'w' of shape \[4, 2\]"):
        keys.split(torch.ones(4, 2), 3, "w")
    with pytest.raises(ValueError, match="cannot be split"):
        keys.to_indexed({"weight": torch.ones(4, 2)}, "", "weight", 3)


class Experts(nn.Module):
    def __init__(self, layout: Any) -> None:
        super().__init__()
        self.mlp = GroupedMLP(3, 4, 2, activation=swiglu(), bias=True, weight_layout=layout)
        self.head = nn.Linear(4, 4)


def test_whole_main_weights_may_have_the_other_layout() -> None:
    source, target = Experts("indexed"), Experts("grouped")
    state = source.state_dict()
    before = list(state)
    sw.load_full_state_dict(target, state)
    assert list(state) == before, "the caller's keys stay as they are"
    for name in ("fc1", "fc2"):
        mine, theirs = (getattr(model.mlp, name).experts("weight") for model in (target, source))
        assert torch.equal(mine.value(torch.float32), theirs.value(torch.float32))
    assert torch.equal(target.head.weight, source.head.weight)


@pytest.mark.parametrize("layout", ["grouped", "indexed"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stored_one_by_one_for_any_number_of_ranks(ranks: int, layout: str) -> None:
    """Saved with 6 experts, read by any number of ranks."""
    stored: dict[str, Any] = {"fc.weight": torch.arange(6.0)[:, None]}
    assert keys.to_indexed(stored, "fc.", "weight", 6)
    assert sorted(stored) == [f"fc.weight{index}" for index in range(6)]
    local = 6 // ranks
    for rank in range(ranks):
        state = dict(stored)
        first = rank * local
        assert keys.from_one_by_one(
            state, "fc.", "weight", local, first_expert=first, layout=layout
        )
        values = (
            state["fc.weight"].flatten().tolist()
            if layout == "grouped"
            else [float(state[f"fc.weight{index}"]) for index in range(local)]
        )
        assert values == list(range(first, first + local))
        assert len(state) == (1 if layout == "grouped" else local)
    state = {"fc.weight0": torch.ones(1)}
    assert not keys.from_one_by_one(state, "fc.", "weight", 2, first_expert=0, layout="grouped")


# ------------------------------------------------------------------------------ modules


def make(weight: Any = "grouped", bias: Any = "grouped", block: int = 0) -> GroupedMLP:
    mlp = GroupedMLP(
        3, 8, 12, activation=swiglu(), bias=True, weight_layout=weight, bias_layout=bias,
        gate_up_block=block,
    )  # fmt: skip
    for parameter in mlp.parameters():
        nn.init.normal_(parameter)
    return mlp


def outputs(mlp: GroupedMLP) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 8, generator=generator)
    return mlp(x, torch.tensor([4, 4, 9]).int(), torch.rand(9, generator=generator)).detach()


@pytest.mark.parametrize("source", [("grouped", "indexed", 0), ("indexed", "grouped", 4)], ids=str)
@pytest.mark.parametrize("target", [("grouped", "grouped", 2), ("indexed", "indexed", 0)], ids=str)
def test_any_layout_loads_into_any_other(source: Any, target: Any) -> None:
    first, second = make(*source), make(*target)
    state = first.state_dict()
    copies = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    second.load_state_dict(state)
    torch.testing.assert_close(outputs(second), outputs(first), rtol=1e-5, atol=1e-5)
    fresh = first.state_dict()
    assert all(torch.equal(fresh[key], value) for key, value in copies.items())
    first.load_state_dict(second.state_dict())  # and back
    assert all(torch.equal(value, first.state_dict()[key]) for key, value in copies.items())


def test_the_order_of_gate_and_up_is_recorded_and_never_guessed() -> None:
    first = make(block=4)
    state = first.state_dict()
    assert state["fc1._extra_state"] == {"gate_up_block": 4}
    foreign = {key: value for key, value in state.items() if "extra" not in key}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="does not hold the order of gate and up"):
            make().load_state_dict(dict(foreign), strict=strict)
    keys.declare_gate_up(foreign, "fc1.", 4)
    second = make(block=0)
    second.load_state_dict(foreign)
    torch.testing.assert_close(outputs(second), outputs(first), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="gate_up_block=2"):
        keys.declare_gate_up(state, "fc1.", 2)
    # A checkpoint whose tensors went in unconverted is refused.
    with pytest.raises(ValueError, match="stored in blocks of 4"):
        make(block=0).fc1.set_extra_state({"gate_up_block": 4})  # type: ignore[operator]


def test_a_wrong_number_of_experts_is_named() -> None:
    state = make("indexed").state_dict()
    state["fc1.weight3"] = torch.ones(24, 8)
    with pytest.raises(RuntimeError, match=r"fc1\.weight"):
        make("grouped").load_state_dict(state)
    state = make("grouped").state_dict()
    state["fc2.weight"] = torch.ones(4, 8, 12)
    with pytest.raises(RuntimeError, match=r"'fc2\.weight' has 4 experts, this module has 3"):
        make("indexed").load_state_dict(state)
