# SPDX-License-Identifier: Apache-2.0
"""MXFP8 weights as a program meets them: read late, written, printed, copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.contract.helpers import options_for, raised
from tests.models import mesh_for
from tests.ranks import on_ranks, run_ranks

WIDTH = 128


def shard(model: nn.Module, world_size: int, format: str = "mxfp8") -> nn.Module:
    placements = sw.zero(3)
    return sw.fully_shard(
        model,
        placements=placements,
        mesh=mesh_for(placements, world_size),
        precision=sw.Precision(weights=format, reduce="fp32"),
    )


# ------------------------------------------------------------------------------- versions


class Recomputed(nn.Module):
    """Notes what each pass computes with; the second one is inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: Tensor) -> Tensor:
        self.seen.append(self.linear.weight.detach().float())
        return self.linear(x).tanh()


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "fp8_block"])
@on_ranks(2)
def test_a_recomputation_never_mixes_two_versions(rank: int, world_size: int, format: str) -> None:
    """A recomputation would mix two versions of a weight: refused before it begins."""
    model = shard(Recomputed(), world_size, format)
    larger = {name: 4 * value for name, value in sw.full_state_dict(model).items()}
    loss = model(torch.ones(2, WIDTH)).float().sum()
    sw.load_full_state_dict(model, larger)
    message = raised(loss.backward, RuntimeError)
    model.reset_iter_state()
    assert len(model.seen) == 1
    model(torch.ones(2, WIDTH)).float().sum().backward()
    forward, again = model.seen[1:]
    assert torch.equal(forward, again) and forward.norm() > 3 * model.seen[0].norm()
    assert "'Recomputed'" in message and "written" in message


# ------------------------------------------------------------------------------- writes


class Written(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(2.0)
        return super().forward(input)


@on_ranks(2)
def test_writes_that_would_be_lost_are_refused(rank: int, world_size: int) -> None:
    model = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), world_size)
    model.unshard()
    weight, one = model[0].weight, torch.ones(WIDTH, WIDTH)

    def augmented() -> None:
        nonlocal weight
        weight += 1

    calls: dict[str, Callable[[], Any]] = {
        "zero_": lambda: weight.zero_(),
        "fill_": lambda: nn.init.ones_(weight),
        "uniform_": lambda: nn.init.kaiming_uniform_(weight),
        "__setitem__": lambda: weight.__setitem__(0, 1.0),
        "add_": augmented,
        "__set__": lambda: setattr(weight, "data", one),
        "mul": lambda: torch.mul(one, 2, out=weight),
        "_foreach_mul_": lambda: torch._foreach_mul_([weight], 2.0),
    }
    before = weight.detach().clone()
    with torch.no_grad():
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=rf"^{name} writes to '0.weight'.*reshard\(\)"):
                call()
        # Reading a weight to write something else is as good as ever.
        assert torch.equal(one.bfloat16().mul_(weight), before)
        assert torch.equal(torch.mul(weight, 2, out=one.bfloat16()), 2 * before)
        weight.requires_grad_(True)
        model.reshard()
        model[0].weight.mul_(2.0)  # as the message says
        model.unshard()
        assert torch.equal(model[0].weight, 2 * before)
    inside = shard(nn.Sequential(Written(WIDTH, WIDTH)), world_size)
    with pytest.raises(RuntimeError, match=r"mul_ writes to '0\.weight'"):
        inside(torch.ones(2, WIDTH))


# ------------------------------------------------------------------------------- copies, text


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@on_ranks(2)
def test_a_weight_is_copied_as_a_plain_one_and_always_prints(rank: int, world_size: int) -> None:
    model = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), world_size)
    model.unshard()
    weight = model[0].weight
    values = weight.detach().clone()
    copied, loaded = copy.deepcopy(weight), saved(weight)
    model.reshard()
    assert type(copied) is nn.Parameter and copied.requires_grad
    assert type(values) is type(loaded) is Tensor
    assert torch.equal(copied.detach(), values) and torch.equal(loaded, values)
    assert f"{WIDTH}x{WIDTH}" in repr(weight)
    for read in (copy.deepcopy, pickle.dumps, torch.clone, lambda weight: weight.float()):
        with pytest.raises(RuntimeError, match=r"are not gathered.*unshard\(\)"):
            read(weight)


# ------------------------------------------------------------------------------- patterns


def mistyped(rank: int, world_size: int) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    options = options_for("zero3", world_size)
    precision = sw.Precision(weights="mxfp8", include=("net.0.weight",))
    for layer in net:
        sw.fully_shard(layer, **options, precision=precision)
    sw.fully_shard(net, **options, precision=precision)
    with pytest.raises(ValueError, match=r"nothing would be stored.*'net\.0\.weight'"):
        net(torch.ones(2, WIDTH))
    half = sw.fully_shard(
        nn.Linear(WIDTH, WIDTH), **options,
        precision=sw.Precision(weights="mxfp8", exclude=("head.*",)),
    )  # fmt: skip
    half(torch.ones(2, WIDTH))  # a part of a model, run alone: it is in MXFP8
    assert sw.precision_report(half).stored == ("weight",)


def test_a_pattern_that_matches_nothing_is_refused_before_anything_runs() -> None:
    run_ranks(mistyped, 2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    precision = sw.Precision(weights="mxfp8", exclude=("up.*",))
    with pytest.raises(ValueError, match=r"plan: .*'up\.\*' matches none of the 4 parameters"):
        sw.plan(model, {"dp": 2}, precision=precision)
