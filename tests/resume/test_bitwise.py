# SPDX-License-Identifier: Apache-2.0
"""A run that stopped and went on is the run that never stopped, to the last bit.

uninterrupted   step 0 1 2 | 3 4 5          compared: losses 3-5, parameters, optimizer states,
resumed         step 0 1 2 | save           the data position, the learning rate, and what each
                elsewhere, load | 3 4 5     generator draws next
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import Store
from tests.ranks import run_ranks
from tests.resume.helpers import Net, assert_equal, everything, make, train_step

# The first test of a session starts ranks for four world sizes, which takes its time.

BEFORE, AFTER = 3, 3


class Run:
    """Model, optimizer, scheduler and the position in the data: all that a trainer has."""

    def __init__(self, strategy: str, optimizer: str, world_size: int, seed: int) -> None:
        self.net, self.optimizer = make(strategy, optimizer, world_size, seed)
        # Milestones are a Counter with integer keys, which plain JSON would turn into strings.
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.3)
        self.position = 0

    def steps(self, count: int, rank: int, world_size: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(train_step(self.net, self.optimizer, self.position, rank, world_size))
            self.scheduler.step()
            self.position += 1
        return losses

    def extra(self) -> dict[str, Any]:
        return {"position": self.position, "scheduler": self.scheduler.state_dict()}

    def take(self, extra: dict[str, Any]) -> None:
        self.position = extra["position"]
        self.scheduler.load_state_dict(extra["scheduler"])


def draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def seed_each_rank(rank: int) -> None:
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    numpy.random.seed(300 + rank)


def final(run: Run, losses: list[float]) -> dict[str, Any]:
    return {
        "losses": losses,
        "values": everything(run.net, run.optimizer),
        "position": run.position,
        "lr": [group["lr"] for group in run.optimizer.param_groups],
        "draws": draws(),
    }


def resumed(
    rank: int, world_size: int, strategy: str, optimizer: str, root: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    run = Run(strategy, optimizer, world_size, seed=1)
    seed_each_rank(rank)
    run.steps(BEFORE, rank, world_size)
    draws()
    with Store(root) as store:
        # In the background: the next step changes every tensor while they are being written.
        store.save(run.position, run.net, run.optimizer, run.extra())
        uninterrupted = final(run, run.steps(AFTER, rank, world_size))
    again = Run(strategy, optimizer, world_size, seed=7)
    again.steps(1, rank, world_size)
    path = store.wait()
    assert path is not None and path.name == f"step-{BEFORE:06d}"
    again.take(sw.load(path, again.net, again.optimizer))
    return uninterrupted, final(again, again.steps(AFTER, rank, world_size))


# The trainer's own runs (test_train.py) resume under every strategy, with Muon and AdamW.
@pytest.mark.parametrize(
    ("strategy", "optimizer"), [("zero1", "adamw"), ("zero3", "muon"), ("hfsdp", "adamw")]
)
def test_a_resumed_run_is_the_uninterrupted_one(
    strategy: str, optimizer: str, tmp_path: Path
) -> None:
    world_size = 4 if strategy.startswith("h") else 2
    results = run_ranks(resumed, world_size, strategy, optimizer, str(tmp_path))
    first = results[0][0]["draws"]
    for rank, (uninterrupted, again) in enumerate(results):
        assert_equal(again.pop("values"), uninterrupted.pop("values"))
        assert again == uninterrupted
        assert len(again["losses"]) == AFTER and again["position"] == BEFORE + AFTER
        assert again["lr"][0] < 0.02, "the scheduler has stepped"
        assert rank == 0 or uninterrupted["draws"] != first, "every rank has its own generators"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_plain_run_without_a_process_group_too(optimizer: str, tmp_path: Path) -> None:
    uninterrupted, again = resumed(0, 1, "plain", optimizer, str(tmp_path))
    assert_equal(again.pop("values"), uninterrupted.pop("values"))
    assert again == uninterrupted


# ------------------------------------------------------------------------------ random states


def save_draws(rank: int, world_size: int, path: str) -> tuple[float, float, float]:
    layer = torch.nn.Linear(2, 2)
    seed_each_rank(rank)
    with torch.device("meta"):
        sw.save(path, layer, extra={"of": rank})
    return draws()


def load_draws(rank: int, world_size: int, path: str) -> tuple[dict[str, Any], Any]:
    layer = torch.nn.Linear(2, 2)
    extra = sw.load(path, layer)
    first = draws()
    seed_each_rank(7)
    with torch.device("meta"):  # the user's default device is for the user's tensors
        sw.load(path, layer)
    assert draws() == first, "the same whenever it is loaded"
    seed_each_rank(rank)
    kept = draws()
    seed_each_rank(rank)
    sw.load(path, layer, strict=False)
    assert draws() == kept, "and left alone where weights alone are loaded"
    return extra, first


def test_generators_and_extra_of_every_rank_come_back(tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    saved = run_ranks(save_draws, 3, path)
    assert len(set(saved)) == 3
    loaded = run_ranks(load_draws, 3, path)
    assert [extra for extra, _ in loaded] == [{"of": 0}, {"of": 1}, {"of": 2}]
    assert [first for _, first in loaded] == saved


def test_another_world_size_seeds_every_rank_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    saved = run_ranks(save_draws, 3, path)
    loaded = run_ranks(load_draws, 2, path)
    assert [extra for extra, _ in loaded] == [{"of": 0}] * 2, "rank 0's"
    found = [first for _, first in loaded]
    assert len({*found, *saved}) == 5, "no stream is drawn from twice"
    assert [first for _, first in run_ranks(load_draws, 2, path)] == found


# ------------------------------------------------------------------------------ new states


NUMBERED = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
}


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("kind", NUMBERED)
def test_a_new_optimizer_takes_the_states_that_were_saved(
    kind: str, before: int, tmp_path: Path
) -> None:
    """Also those of an optimizer that has made no step, and so has none."""

    def made() -> tuple[Net, Any]:
        net = Net()
        return net, NUMBERED[kind]([p for p in net.parameters() if p.requires_grad])

    torch.manual_seed(1)
    plain, one = made()
    for step in range(before):
        train_step(plain, one, step, 0, 1)
    sw.save(tmp_path / "first", plain, one)
    assert len(one.state) == 13 * before or kind == "adagrad"  # has states from the beginning
    saved, other = made()
    sw.load(tmp_path / "first", saved, other)
    for net, optimizer in ((plain, one), (saved, other)):
        torch.manual_seed(2)
        for step in range(before, 3):
            train_step(net, optimizer, step, 0, 1)
    assert_equal(everything(saved, other), everything(plain, one))
