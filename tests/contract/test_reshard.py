# SPDX-License-Identifier: Apache-2.0
"""When whole weights are released: after forward, after backward, by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.shard.module import units_of
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    Block,
    Net,
    Trial,
    adamw,
    assert_at_rest,
    assert_close,
    assert_parameters_equal,
    num_groups,
    on,
    options_for,
    pair,
    raised,
    ranks_for,
    sgd,
    transient_bytes,
    trial,
    vector_loss,
    vectors,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

LAYERS = 3


Deep = partial(Net, layers=LAYERS)


def gathers(call: Callable[[], Any]) -> list[tuple[str, int]]:
    """(axis, its size) of every all-gather of one call."""
    with sw.comm.record() as calls:
        call()
    return [(c.axis, c.size) for c in calls if c.operation == "all_gather"]


def choices(rank: int, world_size: int, wanted: bool | int | None, expected: str) -> list[int]:
    """``expected``: who gathers again in backward. Returns the sizes of the groups that did."""
    t = trial(rank, world_size, "zero3", Deep, reshard_after_forward=wanted)
    t.train(make=adamw)
    net, losses = t.net, []
    forward = gathers(lambda: losses.append(word_loss(net, rank)))
    backward = gathers(lambda: losses[0].backward())
    units = {"all": (net, *net.blocks), "all but the root": net.blocks, "nobody": ()}[expected]
    assert len(forward) == num_groups(net, *net.blocks)
    assert len(backward) == (num_groups(*units) if units else 0)
    return sorted({size for _, size in backward})


def test_reshard_after_forward_decides_how_often_weights_are_gathered() -> None:
    run_ranks(choices, 2, True, "all")
    run_ranks(choices, 2, False, "nobody")
    run_ranks(choices, 2, None, "all but the root")


def test_reshard_to_fewer_ranks_gathers_from_those_in_backward() -> None:
    assert run_ranks(choices, 4, 2, "all") == [[2]] * 4
    assert run_ranks(choices, 4, 4, "all") == [[4]] * 4, "as True"
    run_ranks(choices, 2, 1, "nobody")  # as False


@on_ranks(4)
def test_reshard_to_half_the_ranks_keeps_half_the_bytes(rank: int, world_size: int) -> None:
    """Bytes of weights alive between forward and backward, for True, 2 and False."""
    found = []
    for wanted in (True, 2, False):
        net = wrap(Net(layers=LAYERS), world_size, reshard_after_forward=wanted)
        before = transient_bytes()["compute"]
        loss = word_loss(net, rank)
        found.append(transient_bytes()["compute"] - before)
        loss.backward()
        assert transient_bytes()["compute"] == before
        del net, loss
    released, half, kept = found
    assert released == 0 and kept > 0
    assert half == kept // 2


@on("zero3", make=Deep)
def test_setters_of_resharding_hold_from_the_next_call_on(t: Trial) -> None:
    net = t.net

    def count() -> tuple[int, int]:
        losses: list[Any] = []
        forward = gathers(lambda: losses.append(word_loss(net, t.rank)))
        backward = gathers(lambda: losses[0].backward())
        return len(forward), len(backward)

    block, every = num_groups(net.blocks[0]), num_groups(net, *net.blocks)
    blocks = LAYERS * block
    assert count() == (every, blocks)
    net.set_reshard_after_forward(False)
    assert count() == (every, 0)
    net.set_reshard_after_forward(True)
    assert count() == (every, every)
    net.set_reshard_after_forward(False, recurse=False)
    assert count() == (every, blocks)
    net.blocks[0].set_reshard_after_forward(False)
    assert count() == (every, blocks - block)
    # Kept after backward too: the next forward needs no gather, until the weights change.
    net.set_reshard_after_backward(False)
    count()
    assert count() == (0, blocks - block)
    net.set_reshard_after_forward(False)
    count()
    assert count() == (0, 0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)
    assert count() == (every, 0), "another version of the weights is gathered anew"
    before = transient_bytes()["compute"]
    net.set_reshard_after_backward(True)
    count()
    assert transient_bytes()["compute"] < before


@on_ranks(2)
def test_unshard_in_backward_can_be_spared_for_an_embedding(rank: int, world_size: int) -> None:
    """``set_unshard_in_backward(False)`` where backward does not read the weights."""
    found = []
    for needed in (True, False):
        net, plain = pair(Net)
        sw.fully_shard(net.embedding, mesh=sw.init_mesh(dp=world_size))
        net.embedding.set_unshard_in_backward(needed)
        t = Trial(wrap(net, world_size), plain, rank, world_size, transient_bytes())
        found.append(len(gathers(t.backward)))
    assert found[1] == found[0] - 1
    # A norm saves its weight itself, and not a view of the memory that is released.
    block: Any = nn.Sequential(nn.LayerNorm(vectors(rank).shape[-1]))
    sw.fully_shard(block, **options_for("zero3", world_size))
    block.set_unshard_in_backward(False)
    net = wrap(nn.Sequential(block), world_size)
    raised(lambda: net(vectors(rank).requires_grad_()).sum().backward(), RuntimeError)


@on("zero0", "zero1", "zero3")
def test_state_dicts_of_an_unsharded_unit_are_the_sharded_ones(t: Trial) -> None:
    t.net.blocks[0].unshard()
    assert not isinstance(t.net.blocks[0].up.weight, DTensor)
    state = t.net.state_dict()
    assert len(state) > 10 and all(isinstance(value, DTensor) for value in state.values())
    t.net.blocks[0].unshard()
    with torch.no_grad():
        for parameter in t.plain.parameters():
            parameter.add_(1.0)
    t.net.load_state_dict(t.plain.state_dict())
    assert_parameters_equal(t.net, t.plain, 0.0)
    t.backward()


@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
@on(*MAIN_STRATEGIES)
def test_unshard_and_reshard_by_hand(t: Trial, later: bool) -> None:
    first, plain = t.net.blocks[0], t.plain.blocks[0]
    for _ in range(2):
        handle = first.unshard(async_op=later)
        assert (handle is not None) == later
        for _ in range(2 * later):
            handle.wait()  # a second wait is harmless
        for name, whole in first.named_parameters():
            assert isinstance(whole, nn.Parameter) and not isinstance(whole, DTensor), name
            assert_close(whole.detach(), plain.get_parameter(name).detach(), name, 0.0)
        assert isinstance(t.net.blocks[1].up.weight, DTensor), "not recursive"
        first.reshard()
        assert_at_rest(t.net, t.before)
    first.unshard(async_op=later)  # then used: gathered once
    t.backward()


@on(*MAIN_STRATEGIES, make=Deep, reshard_after_forward=False)
def test_whole_weights_kept_over_an_optimizer_step_are_refreshed(t: Trial) -> None:
    """Weights kept whole over an optimizer step are those of after the step when next used."""
    t.net.set_reshard_after_backward(False)
    at_rest = [p for unit in units_of(t.net) for group in unit.groups for p in group.sharded]
    optimizers = torch.optim.SGD(at_rest, lr=0.1), sgd(t.plain)
    for step in range(3):
        t.add(word_loss, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # The same when the weights are whole in the modules' hands while the main ones change.
    t.net.blocks[1].unshard()
    with torch.no_grad():
        for parameter in (*at_rest, *t.plain.parameters()):
            parameter.add_(0.25)
        ours, theirs = (model.blocks[1](vectors(t.rank)) for model in t.both)
        assert_close(ours, theirs, "output", 1e-5)
        assert_close(t.net(words(t.rank)), t.plain(words(t.rank)), "output", 1e-3)


@on("zero3", reshard_after_forward=False)
def test_modules_hold_whole_parameters_as_long_as_these_are_kept(t: Trial) -> None:
    """As FSDP2: weights that a forward kept, until reshard(), backward or a state dict; but not
    after an evaluation, when people write to parameters and build optimizers."""
    net, rank = t.net, t.rank

    def sharded() -> list[bool]:
        return [isinstance(value, DTensor) for value in net.parameters()]

    word_loss(net, rank).backward()  # gradients that zero_grad finds though others are shown
    loss = word_loss(net, rank)
    assert not any(sharded())
    assert_parameters_equal(net, t.plain, tolerance=0.0)
    net.zero_grad()
    loss.backward()
    assert all(sharded())
    with torch.no_grad():
        net(words(rank))
    assert all(sharded())
    net(words(rank))
    assert not any(sharded())
    raised(sgd(net).step, RuntimeError)
    net.reshard()
    assert any(sharded()) and not all(sharded())
    assert all(isinstance(value, DTensor) for value in net.state_dict().values())
    assert all(sharded())


class Watched(nn.Module):
    """A block that notes how much is gathered while it computes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(sw.ledger.current["compute"])
        x = self.inner(x)
        if x.requires_grad:
            x.register_hook(self.note)
        return x * 1  # the unit's own hook is on this one, so that ours runs after it

    def note(self, grad: Tensor) -> None:
        self.seen.append(sw.ledger.current["compute"])


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Watched() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def watch(net: Any, rank: int) -> tuple[list[int], list[int]]:
    """Units whole while each block computes: forward, then backward (both in order of blocks)."""
    base = transient_bytes()["compute"]
    for block in net.blocks:
        block.seen.clear()
    vector_loss(net, rank).backward()
    seen = [[nbytes - base for nbytes in block.seen] for block in net.blocks]
    assert all(len(entry) == 2 for entry in seen)
    unit = min(entry[0] for entry in seen)
    assert unit > 0
    forward = [round(entry[0] / unit) for entry in seen]
    return forward, [round(entry[1] / unit) for entry in seen]


@on("zero3", make=Chain)
def test_the_next_unit_is_gathered_ahead_both_ways(t: Trial) -> None:
    for _ in range(3):
        forward, backward = watch(t.net, t.rank)
        assert forward == [2, 2, 2, 2, 1], "itself and the next one, none behind the last"
        assert max(backward) <= 2 and backward[-1] == 2, "itself and the one before it"
        assert_at_rest(t.net, t.before)
    with torch.no_grad():
        t.net(vectors(t.rank))
    seen = [block.seen[-1] - t.before["compute"] for block in t.net.blocks]
    assert max(seen) <= 2 * min(seen), "two units, also without gradients"
    assert_at_rest(t.net, t.before)


@on("zero3", make=Chain)
def test_lists_decide_what_is_gathered_ahead(t: Trial) -> None:
    blocks = list(t.net.blocks)
    watch(t.net, t.rank)
    for position, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 3])
        block.set_modules_to_backward_prefetch(blocks[max(position - 2, 0) : position][::-1])
    for _ in range(2):
        assert watch(t.net, t.rank) == ([3, 3, 3, 2, 1], [1, 2, 3, 3, 3]), "and two ahead"
        assert_at_rest(t.net, t.before)
    for block in blocks:
        block.set_modules_to_forward_prefetch([])
        block.set_modules_to_backward_prefetch([])
    assert watch(t.net, t.rank) == ([1] * 5, [1] * 5), "an empty list: nothing ahead"


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_offloading_on_a_cpu_trains_right(
    rank: int, world_size: int, strategy: str, pin: bool, mixed: bool
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if mixed else {}
    options["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)
    t = trial(rank, world_size, strategy, **options)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in t.both]
    for step in range(3):
        for microbatch in range(2):
            t.net.set_is_last_backward(microbatch == 1)
            t.add(word_loss, 2 * step + microbatch)
        t.equal(0.05 if mixed else 1e-5)
        for parameter in t.net.parameters():
            assert parameter.device.type == "cpu" and parameter.grad.device.type == "cpu"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters_equal(t.net, t.plain, 5e-3 if mixed else 1e-5)
