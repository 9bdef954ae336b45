# SPDX-License-Identifier: Apache-2.0
"""The main weight is the only truth: whoever wrote it, the next forward computes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core import comm
from tests.models import (
    PRECISIONS,
    STRATEGIES,
    Model,
    loss_of,
    make_model,
    mesh_for,
    ranks_for,
    shard_model,
    tokens,
)
from tests.parity.helpers import make_sharded
from tests.ranks import on_ranks, run_ranks
from tests.whole import whole_parameters

OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
}


def full(model: nn.Module) -> dict[str, Tensor]:
    return whole_parameters(model)


def step_with_adamw(model: Model) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer.step()
    optimizer.zero_grad()


def step_with_foreach_sgd(model: Model) -> None:
    torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=True).step()


def step_with_single_tensor_adam(model: Model) -> None:
    torch.optim.Adam(model.parameters(), lr=0.05, foreach=False).step()


def write_to_local(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(1.5)
    sw.mark_written(model)


def write_to_data(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5).add_(0.01)


def write_to_parameter(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02)


def initialise(model: Model) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.05)


def load_a_full_state_dict(model: Model) -> None:
    model.load_state_dict(make_model(depth=2, seed=7).state_dict())


def load_its_own_kind(model: Model) -> None:
    state = {name: value.detach().clone().add_(0.1) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def copy_full_tensors(model: Model) -> None:
    other = make_model(depth=2, seed=8)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(value)


WRITERS: tuple[Callable[[Model], None], ...] = (
    step_with_adamw,
    step_with_foreach_sgd,
    step_with_single_tensor_adam,
    write_to_local,
    write_to_data,
    write_to_parameter,
    initialise,
    load_a_full_state_dict,
    load_its_own_kind,
    copy_full_tensors,
)


def expected_output(weights: dict[str, Tensor], batch: Tensor, precision: str) -> Tensor:
    model = make_model(depth=2)
    model.load_state_dict(weights)
    if precision == "bf16":
        model.to(torch.bfloat16)
    with torch.no_grad():
        return model(batch)


def check_writers(rank: int, world_size: int, strategy: str, precision: str, options: str) -> int:
    model = make_sharded(
        STRATEGIES[strategy], world_size, precision=PRECISIONS[precision], **OPTIONS[options]
    )
    batch = tokens(0, 0, rank, world_size)
    before = full(model)
    for writer in WRITERS:
        if "step" in writer.__name__:
            loss_of(model, batch).backward()
        else:
            with torch.no_grad():
                model(batch)  # what stays gathered after this is stale after the write
        writer(model)
        after = full(model)
        assert len(after) == 15
        for name, value in after.items():
            assert not torch.equal(value, before[name]), f"{writer.__name__} left {name} alone"
        with torch.no_grad():
            found = model(batch)
        tolerance = 1e-5 if precision == "fp32" else 2e-2
        torch.testing.assert_close(
            found,
            expected_output(after, batch, precision),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, w=writer: f"{w.__name__}: {m}",
        )
        model.zero_grad()
        before = after
    return len(WRITERS)


@pytest.mark.parametrize(
    ("strategy", "precision", "options"),
    [(strategy, "bf16", "default") for strategy in STRATEGIES]
    + [(strategy, "fp32", "default") for strategy in ("zero0", "zero1", "zero3")]
    # Where weights are whole between uses there is nothing to keep.
    + [(strategy, "bf16", "kept") for strategy in ("zero3", "hfsdp")],
)
def test_the_next_forward_sees_what_was_written(
    strategy: str, precision: str, options: str
) -> None:
    world_size = ranks_for(strategy)
    seen = run_ranks(check_writers, world_size, strategy, precision, options)
    assert seen == [len(WRITERS)] * world_size


@on_ranks(2)
def test_stale_weights_would_be_noticed(rank: int, world_size: int) -> None:
    """Negative control: with the count of writes taken out, the same comparison fails."""
    model = make_sharded(sw.zero(1), world_size)
    batch = tokens(0, 0, rank, world_size)
    with torch.no_grad():
        model(batch)
    write_to_local(model)
    for unit in (model, *model.layers):
        for group in unit._shardwise_unit.groups:
            group.whole.made_from = group.writes  # as if nothing had been written
    with torch.no_grad():
        found = model(batch)
    assert (found - expected_output(full(model), batch, "fp32")).abs().max() > 1e-3


# ------------------------------------------------------------------- writes that no counter sees


def write_unseen(parameter: sw.ShardedTensor) -> None:
    """As numpy, DLPack or a foreign kernel does: by address."""
    torch.from_dlpack(parameter.to_local().detach()).mul_(1.5)


class Foreign(torch.optim.Optimizer):
    """An optimizer whose kernel writes by address (apex, bitsandbytes, CPUAdam)."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                write_unseen(parameter)


def mark(model: Model) -> None:
    for parameter in model.parameters():
        write_unseen(parameter)
    sw.mark_written(model)


UNSEEN: dict[str, tuple[sw.Placements, dict[str, Any]]] = {
    **{f"zero{stage}": (sw.zero(stage), {"precision": PRECISIONS["bf16"]}) for stage in range(4)},
    "kept": (sw.zero(3), {"precision": PRECISIONS["bf16"], "reshard_after_forward": False}),
    "mxfp8": (sw.zero(1), {"precision": sw.Precision(weights="mxfp8")}),
}


@pytest.mark.parametrize("case", UNSEEN)
@on_ranks(2)
def test_steps_and_marks_count_as_writes(rank: int, world_size: int, case: str) -> None:
    placements, options = UNSEEN[case]
    model = make_model(width=32, depth=2)
    shard_model(model, placements, mesh_for(placements, world_size), **options)
    batch = tokens(0, 0, rank, world_size)
    for write in (mark, lambda model: Foreign(model.parameters()).step()):
        with torch.no_grad():
            before = model(batch)
        write(model)
        # A second model, which has never seen other weights.
        fresh = make_model(width=32, depth=2)
        fresh.load_state_dict(full(model))
        shard_model(fresh, placements, mesh_for(placements, world_size), **options)
        with torch.no_grad():
            found = model(batch)
            assert torch.equal(found, fresh(batch)) and not torch.equal(found, before)
    for parameter in model.parameters():  # negative control: this is what cannot be seen
        write_unseen(parameter)
    with torch.no_grad():
        stale = torch.equal(model(batch), found)
    assert stale == (case not in ("zero3",)), "whether the control sees the fault"


@pytest.mark.parametrize("name", ["ours", "adamw", "foreign"])
@on_ranks(2)
def test_counting_steps_gathers_nothing_twice(rank: int, world_size: int, name: str) -> None:
    """Gathers of each step under zero(1): one per unit, whoever steps."""
    gathers = []
    model = make_sharded(sw.zero(1), world_size, precision=PRECISIONS["bf16"])
    model.layers[1].requires_grad_(False)
    optimizer: torch.optim.Optimizer = {
        "ours": lambda: sw.optimizer(model, matrix=None, elementwise=sw.adamw()),
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
        "foreign": lambda: Foreign(model.parameters()),
    }[name]()
    loss_of(model, tokens(0, 0, rank, world_size)).backward()
    for _ in range(3):
        with comm.record() as calls:
            optimizer.step()
            optimizer.zero_grad()
            loss_of(model, tokens(0, 0, rank, world_size)).backward()
        gathers.append(sum(call.operation == "all_gather" for call in calls))
    assert gathers == [2, 2, 2], "the root and one layer; the other is frozen"


def test_a_model_without_units_cannot_be_marked() -> None:
    with pytest.raises(ValueError, match="mark_written: nothing of this Linear"):
        sw.mark_written(nn.Linear(2, 2))
