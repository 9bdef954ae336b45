# SPDX-License-Identifier: Apache-2.0
"""Random programs drive units through their states: every step stands in the table of ``unit.py``,
units are at rest between the steps of a program, and gradients are those of plain torch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.shard import unit as unit_file
from shardwise.shard.module import unit_of
from shardwise.shard.unit import Phase, Progress, Unit
from tests.contract.helpers import WIDTH, assert_gradients_equal, vectors
from tests.ranks import run_ranks

Step = tuple[str, str, str, str, str]  # event, phase before and after, progress before and after
EVENTS = ("pre_forward", "post_forward", "end_forward", "prefetch", "pre_backward", "arrived")
EVENTS += ("inputs_done", "pass_by", "end_backward", "release_unused", "rest")


# ------------------------------------------------------------------------------ the table


def table() -> list[tuple[str, str, str]]:
    """(event, phase, progress) of each row in the docstring."""
    text = (unit_file.__doc__ or "").split("progress\n", 1)[1]
    rows = []
    for line in text.splitlines():
        if not line.strip():
            return rows
        event, phase, progress = (line[a:b].strip() for a, b in ((4, 20), (20, 44), (44, 68)))
        rows.append((event, phase, progress))
    return rows


def fits(row: tuple[str, str, str], step: Step) -> bool:
    event, phase, progress, *_ = row
    return event == step[0] and _fits(phase, *step[1:3]) and _fits(progress, *step[3:])


def _fits(column: str, before: str, after: str) -> bool:
    if column == "=":
        return before == after
    first, sign, second = column.split()
    if sign == "=":
        return before == after and first in ("any", before)
    return first in ("any", before) and second == after


@contextmanager
def noting(steps: set[Step]) -> Any:
    """Note what each event does to a unit; one that runs inside another of the unit counts for
    itself, and not for the outer one."""
    before = {event: getattr(Unit, event) for event in EVENTS}
    depth: dict[Unit, int] = {}

    def noted(event: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Unit, *args: Any, **kwargs: Any) -> Any:
            was, number = (self.phase.value, self.progress.value), depth.get(self, 0)
            result = method(self, *args, **kwargs)
            if depth.get(self, 0) == number:  # no event of the unit inside this one
                is_ = (self.phase.value, self.progress.value)
                steps.add((event, was[0], is_[0], was[1], is_[1]))
            depth[self] = depth.get(self, 0) + 1
            return result

        return call

    for event, method in before.items():
        setattr(Unit, event, noted(event, method))
    try:
        yield
    finally:
        for event, method in before.items():
            setattr(Unit, event, method)


# ------------------------------------------------------------------------------ programs


class ProgramError(Exception):
    """Raised by a program on purpose."""


class Model(nn.Module):
    """Units of many kinds: a plain one, one that is called twice, one that is recomputed, a frozen
    one, a list of two modules that may run in part."""

    def __init__(self) -> None:
        super().__init__()
        names = ("plain", "twice", "recomputed", "frozen", "first", "second")
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.frozen.requires_grad_(False)
        self.skip: frozenset[str] = frozenset()
        self.fail = ""

    def forward(self, x: Tensor) -> Tensor:
        for name in ("plain", "again", "recomputed", "frozen", "first", "second", "twice"):
            if name in self.skip:
                continue
            part = self.get_submodule({"again": "twice"}.get(name, name))
            if name in ("again", "recomputed") and torch.is_grad_enabled():
                # Of "again" the tanh is recomputed too, so its recomputation runs to its end.
                inner, outer = (part, torch.tanh) if name == "recomputed" else (_tanh(part), _same)
                x = x + outer(checkpoint(inner, x, use_reentrant=False))
            else:
                x = x + torch.tanh(part(x))
            if self.fail == f"forward {name}":
                raise ProgramError
            if self.fail == f"backward {name}" and x.requires_grad:
                x.register_hook(_fail)
        return x


def _tanh(part: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tanh(part(x))


def _same(x: Tensor) -> Tensor:
    return x


def _fail(grad: Tensor) -> None:
    raise ProgramError


def wrapped(strategy: str, unused: str) -> tuple[Any, Model]:
    torch.manual_seed(0)
    net, plain = Model(), Model()
    plain.load_state_dict(net.state_dict())
    options: dict[str, Any] = {
        "mesh": sw.init_mesh(device_type="cpu"),
        "placements": sw.zero(int(strategy[-1])),
        "unused_parameters": unused,
    }
    for name in ("plain", "twice", "recomputed", "frozen"):
        sw.fully_shard(net.get_submodule(name), **options)
    sw.fully_shard([net.first, net.second], **options)
    return sw.fully_shard(net, **options), plain


class Program:
    """Random actions on a sharded model and on plain torch."""

    def __init__(self, seed: int, strategy: str, unused: str) -> None:
        self.random = random.Random(seed)
        self.net, self.plain = wrapped(strategy, unused)
        self.may_skip = unused == "zeros"
        self.units = [unit for part in self.net.modules() if (unit := unit_of(part)) is not None]
        self.graphs: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        self.step_number = 0

    def run(self, length: int) -> None:
        actions = [self.forward, self.forward, self.evaluate, self.part, self.backward]
        actions += [self.backward, self.backward, self.inputs, self.fails, self.step, self.hands]
        for _ in range(length):
            self.random.choice(actions)()
            for unit in self.units:
                assert unit.phase is Phase.RESTING and unit.progress is Progress.UNTOUCHED
                assert not unit.arrivals.missing and not unit.arrivals.delayed
                assert not unit.calls.running and not unit.calls.open
        while self.graphs:
            self.backward()

    def _batch(self) -> Tensor:
        self.step_number += 1
        return vectors(0, self.step_number).requires_grad_()

    def _choose(self) -> None:
        skippable = ("plain", "recomputed", "first", "second") if self.may_skip else ()
        chosen = frozenset(name for name in skippable if self.random.random() < 0.25)
        self.net.skip = self.plain.skip = chosen

    def forward(self) -> None:
        self._choose()
        x = self._batch().requires_grad_(self.step_number % 4 > 0)
        y = x.detach().clone().requires_grad_(x.requires_grad)
        self.graphs.append((self.net(x).square().mean(), self.plain(y).square().mean(), x, y))

    def evaluate(self) -> None:
        with torch.no_grad():
            x = self._batch()
            torch.testing.assert_close(self.net(x), self.plain(x))

    def part(self) -> None:
        """A unit called by itself."""
        name = self.random.choice(("plain", "frozen"))
        x = self._batch().detach()
        with torch.no_grad():
            part = self.net.get_submodule(name)(x)
        torch.testing.assert_close(part, self.plain.get_submodule(name)(x))

    def backward(self) -> None:
        if not self.graphs:
            return
        chosen = self.random.randrange(len(self.graphs))
        keep = self.random.random() < 0.3
        ours, theirs, _, _ = self.graphs[chosen] if keep else self.graphs.pop(chosen)
        ours.backward(retain_graph=keep)
        theirs.backward(retain_graph=keep)
        for mine, plain in zip(self.net.parameters(), self.plain.parameters(), strict=True):
            if self.may_skip and plain.grad is None and mine.grad is not None:
                plain.grad = torch.zeros_like(plain)  # as unused_parameters="zeros" says
        assert_gradients_equal(self.net, self.plain)

    def inputs(self) -> None:
        """The gradient of an input alone."""
        if self.graphs and self.graphs[-1][2].requires_grad:
            ours, theirs, x, y = self.graphs.pop()
            mine, expected = torch.autograd.grad(ours, x)[0], torch.autograd.grad(theirs, y)[0]
            torch.testing.assert_close(mine, expected)

    def fails(self) -> None:
        """An exception in forward or backward; then everything is dropped."""
        where = self.random.choice(("forward", "backward"))
        self.net.skip = self.plain.skip = frozenset()
        self.net.fail = f"{where} {self.random.choice(('plain', 'recomputed', 'first', 'twice'))}"
        with pytest.raises(ProgramError):
            self.net(self._batch()).square().mean().backward()
        self.net.fail = ""
        self.net.reset_iter_state()
        self.graphs = []
        self.plain.zero_grad()

    def step(self) -> None:
        if not self.graphs:
            for optimizer in (self.optimizer, self.plain_optimizer):
                optimizer.step()
                optimizer.zero_grad()

    def hands(self) -> None:
        """Weights gathered and released by hand."""
        part = self.net.get_submodule(self.random.choice(("plain", "frozen", "twice")))
        part.unshard()
        part.reshard()


def run_programs(rank: int, world_size: int, strategy: str, unused: str) -> set[Step]:
    steps: set[Step] = set()
    with noting(steps):
        for seed in range(PROGRAMS):
            Program(seed, strategy, unused).run(length=14)
    return steps


PROGRAMS = 8
CASES = [(s, unused) for s in ("zero1", "zero3") for unused in ("none", "zeros")]


@functools.cache
def seen(strategy: str, unused: str) -> frozenset[Step]:
    return frozenset().union(*run_ranks(run_programs, 2, strategy, unused))


@pytest.mark.parametrize(("strategy", "unused"), CASES)
def test_every_step_stands_in_the_table(strategy: str, unused: str) -> None:
    unknown = [step for step in seen(strategy, unused) if not any(fits(r, step) for r in table())]
    assert not unknown and len(seen(strategy, unused)) > 15


def test_every_row_of_the_table_was_seen_but_those_of_other_tests() -> None:
    steps = frozenset().union(*(seen(*case) for case in CASES))
    rows = table()
    assert len(rows) == 24 and {event for event, *_ in rows} == set(EVENTS)
    unseen = [row for row in rows if not any(fits(row, step) for step in steps)]
    # Of other tests: delayed gradients (test_experts.py), a backward inside a forward
    # (test_in_time.py).
    expected = ["backward = backward", "forward = forward"]
    assert sorted(row[:2] for row in unseen) == [("end_backward", one) for one in expected], unseen


def test_a_row_that_is_missing_is_noticed() -> None:
    """The negative control."""
    steps = seen("zero3", "zeros")
    for taken in ("resting > forward", "forward > resting"):
        rows = [row for row in table() if row[1] != taken]
        assert any(not any(fits(row, step) for row in rows) for step in steps)
