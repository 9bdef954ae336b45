# SPDX-License-Identifier: Apache-2.0
"""When whole weights are released: after forward, after backward, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    Block,
    Net,
    assert_at_rest,
    assert_close,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    num_groups,
    options_for,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    vector_loss,
    vectors,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

LAYERS = 3


def train(net: Any, plain: Any, rank: int, world_size: int, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(steps):
        check_backward(net, plain, word_loss, rank, world_size, step)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain)


def gathers(call: Callable[[], Any]) -> list[tuple[str, int]]:
    """(axis, its size) of every all-gather of one call."""
    with sw.comm.record() as calls:
        call()
    return [(c.axis, c.size) for c in calls if c.operation == "all_gather"]


def choices(rank: int, world_size: int, wanted: bool | int | None, expected: str) -> list[int]:
    """``expected``: who gathers again in backward. Returns the sizes of the groups that did."""
    net, plain = pair(lambda: Net(layers=LAYERS))
    wrap(net, world_size, "zero3", reshard_after_forward=wanted)
    before = transient_bytes()
    train(net, plain, rank, world_size)
    assert_at_rest(net, before)
    losses = []
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


@on_ranks(4)
def test_a_number_that_does_not_divide_the_ranks_is_refused(rank: int, world_size: int) -> None:
    indivisible, zero, replicated = [
        raised(lambda: wrap(Net(), world_size, reshard_after_forward=3), ValueError),
        raised(lambda: wrap(Net(), world_size, reshard_after_forward=0), ValueError),
        raised(lambda: wrap(Net(), world_size, "zero1", reshard_after_forward=2), ValueError),
    ]
    assert "3" in indivisible and "divide" in indivisible
    assert "0" in zero
    assert "replicated" in replicated


@on_ranks(2)
def test_setters_of_resharding_hold_from_the_next_call_on(rank: int, world_size: int) -> None:
    net, plain = pair(lambda: Net(layers=LAYERS))
    wrap(net, world_size)

    def count() -> tuple[int, int]:
        losses: list[Any] = []
        forward = gathers(lambda: losses.append(word_loss(net, rank)))
        backward = gathers(lambda: losses[0].backward())
        average_gradients(plain, word_loss, world_size)
        assert_gradients_equal(net, plain)
        net.zero_grad()
        plain.zero_grad()
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
    assert "bool" in raised(lambda: net.set_reshard_after_forward(2), ValueError)
    # Kept after backward too: the next forward needs no gather, until the weights change.
    net.set_reshard_after_backward(False)
    count()
    assert count() == (0, blocks - block)
    net.set_reshard_after_forward(False)
    count()
    assert count() == (0, 0)
    with torch.no_grad():
        for model in (net, plain):
            for parameter in model.parameters():
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
        options = {"mesh": sw.init_mesh(dp=world_size)}
        sw.fully_shard(net.embedding, **options)
        net.embedding.set_unshard_in_backward(needed)
        wrap(net, world_size)
        losses: list[Any] = []
        losses.append(word_loss(net, rank))
        found.append(len(gathers(lambda losses=losses: losses[0].backward())))
        average_gradients(plain, word_loss, world_size)
        assert_gradients_equal(net, plain)
    with_gather, without = found[0], found[1]
    assert without == with_gather - 1


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3"])
@on_ranks(2)
def test_state_dicts_of_an_unsharded_unit_are_the_sharded_ones(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    net.blocks[0].unshard()
    assert not isinstance(net.blocks[0].up.weight, DTensor)
    state = net.state_dict()
    assert len(state) > 10 and all(isinstance(value, DTensor) for value in state.values())
    net.blocks[0].unshard()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1.0)
    net.load_state_dict(plain.state_dict())
    assert_parameters_equal(net, plain, 0.0)
    with torch.no_grad():
        assert_close(net(words(rank)), plain(words(rank)), "output", 1e-5)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "async"])
@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_unshard_and_reshard_by_hand(
    rank: int, world_size: int, strategy: str, asynchronous: bool
) -> None:
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for _ in range(2):
        handle = net.blocks[0].unshard(async_op=asynchronous)
        assert (handle is not None) == asynchronous
        if handle is not None:
            handle.wait()
            handle.wait()  # a second wait is harmless
        for name, whole in net.blocks[0].named_parameters():
            assert not isinstance(whole, DTensor), f"{name} is whole"
            assert isinstance(whole, nn.Parameter)
            assert_close(whole.detach(), plain.blocks[0].get_parameter(name).detach(), name, 0.0)
        assert isinstance(net.blocks[1].up.weight, DTensor), "not recursive"
        assert isinstance(net.head.weight, DTensor)
        net.blocks[0].reshard()
        assert_at_rest(net, before)
    # Unsharded by hand, then used: gathered once.
    net.blocks[0].unshard(async_op=asynchronous)
    check_backward(net, plain, word_loss, rank, world_size)
    assert_at_rest(net, before)


def torch_groups(net: Any) -> list[list[torch.Tensor]]:
    """The parameters at rest, even of a unit that is unsharded now: what an optimizer holds."""
    from shardwise.shard.module import units_of

    return [group.sharded for unit in units_of(net) for group in unit.groups]


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_whole_weights_kept_over_an_optimizer_step_are_refreshed(
    rank: int, world_size: int, strategy: str
) -> None:
    """Weights kept whole over an optimizer step are those of after the step when next used."""
    net, plain = pair(lambda: Net(layers=LAYERS))
    wrap(net, world_size, strategy, reshard_after_forward=False)
    net.set_reshard_after_backward(False)
    train(net, plain, rank, world_size)
    with torch.no_grad():
        assert_close(net(words(rank)), plain(words(rank)), "output", 1e-5)
    # The same when the weights are whole in the modules' hands while the main ones change.
    net.blocks[1].unshard()
    sharded = [p for group in torch_groups(net) for p in group]
    with torch.no_grad():
        for parameter in sharded:
            parameter.add_(0.25)
        for parameter in plain.parameters():
            parameter.add_(0.25)
        assert_close(net.blocks[1](vectors(rank)), plain.blocks[1](vectors(rank)), "output", 1e-5)
        assert_close(net(words(rank)), plain(words(rank)), "output", 1e-3)  # of some hundreds


@on_ranks(2)
def test_modules_hold_whole_parameters_as_long_as_these_are_kept(
    rank: int, world_size: int
) -> None:
    """As FSDP2: weights that a forward kept, until reshard(), backward or a state dict; but not
    after an evaluation, when people write to parameters and build optimizers."""
    net, plain = pair(Net)
    wrap(net, world_size, reshard_after_forward=False)

    def sharded() -> list[bool]:
        return [isinstance(value, DTensor) for value in net.parameters()]

    word_loss(net, rank).backward()  # gradients that zero_grad finds though others are shown
    loss = word_loss(net, rank)
    assert not any(sharded())
    assert_parameters_equal(net, plain, tolerance=0.0)
    net.zero_grad()
    loss.backward()
    assert all(sharded())
    average_gradients(plain, word_loss, world_size)
    assert_gradients_equal(net, plain)
    with torch.no_grad():
        net(words(rank))
    assert all(sharded())
    net(words(rank))
    assert not any(sharded())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert "reshard()" in raised(optimizer.step, RuntimeError)
    net.reshard()
    assert any(sharded()) and not all(sharded())
    assert all(isinstance(value, DTensor) for value in net.state_dict().values())
    assert all(sharded())


@on_ranks(2)
def test_a_backward_that_reads_weights_it_was_told_not_to_gather_raises(
    rank: int, world_size: int
) -> None:
    """A norm saves its weight itself, and not a view of the memory that is released."""
    block = nn.Sequential(nn.LayerNorm(vectors(rank).shape[-1]))
    sw.fully_shard(block, **options_for("zero3", world_size))
    block.set_unshard_in_backward(False)
    net = wrap(nn.Sequential(block), world_size, "zero3")
    x = vectors(rank).requires_grad_()
    assert "not allocated" in raised(lambda: net(x).sum().backward(), RuntimeError)


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


@on_ranks(2)
def test_the_next_unit_is_gathered_ahead_both_ways(rank: int, world_size: int) -> None:
    net, plain = pair(Chain)
    wrap(net, world_size)
    before = transient_bytes()
    for _ in range(3):
        forward, backward = watch(net, rank)
        assert forward == [2, 2, 2, 2, 1], "itself and the next one, none behind the last"
        assert max(backward) <= 2, backward
        assert backward[-1] == 2, "itself and the one before it"
        average_gradients(plain, vector_loss, world_size)
        assert_gradients_equal(net, plain)
        assert_at_rest(net, before)


@on_ranks(2)
def test_lists_decide_what_is_gathered_ahead(rank: int, world_size: int) -> None:
    net, plain = pair(Chain)
    wrap(net, world_size)
    before = transient_bytes()
    blocks = list(net.blocks)
    watch(net, rank)
    net.zero_grad()
    for position, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 3])
        block.set_modules_to_backward_prefetch(blocks[max(position - 2, 0) : position][::-1])
    for _ in range(2):
        forward, backward = watch(net, rank)
        assert forward == [3, 3, 3, 2, 1], "itself and two ahead"
        assert backward == [1, 2, 3, 3, 3]
        average_gradients(plain, vector_loss, world_size)
        assert_gradients_equal(net, plain)
        assert_at_rest(net, before)
    for block in blocks:
        block.set_modules_to_forward_prefetch([])
        block.set_modules_to_backward_prefetch([])
    forward, backward = watch(net, rank)
    assert forward == [1] * 5 and backward == [1] * 5, "an empty list: nothing ahead"


@on_ranks(2)
def test_a_pass_without_gradients_holds_two_units_and_leaves_none(
    rank: int, world_size: int
) -> None:
    net = wrap(Chain(), world_size)
    base = transient_bytes()["compute"]
    with torch.no_grad():
        net(vectors(rank))
    seen = [block.seen[-1] - base for block in net.blocks]
    assert max(seen) <= 2 * min(seen), seen
    assert transient_bytes()["compute"] == base


def offloaded(rank: int, world_size: int, strategy: str, pin: bool, mixed: bool) -> None:
    net, plain = pair(Net)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if mixed else {}
    wrap(net, world_size, strategy, offload_policy=CPUOffloadPolicy(pin_memory=pin), **options)
    before = transient_bytes()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    tolerance = 0.05 if mixed else 1e-5
    for step in range(3):
        for microbatch in range(2):
            net.set_is_last_backward(microbatch == 1)
            seed = 2 * step + microbatch
            word_loss(net, rank, seed).backward()
            average_gradients(plain, lambda m, r, seed=seed: word_loss(m, r, seed), world_size)
        assert_gradients_equal(net, plain, tolerance)
        assert_at_rest(net, before)
        for parameter in net.parameters():
            assert parameter.device.type == "cpu" and parameter.grad.device.type == "cpu"
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain, 5e-3 if mixed else 1e-5)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hfsdp"])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
def test_offloading_on_a_cpu_trains_right(strategy: str, mixed: bool) -> None:
    run_ranks(offloaded, ranks_for(strategy), strategy, True, mixed)


def test_offloading_without_pinned_memory() -> None:
    run_ranks(offloaded, 2, "zero3", False, False)


@on_ranks(2)
def test_an_unknown_offload_policy_is_refused(rank: int, world_size: int) -> None:
    assert wrap(Net(), world_size, offload_policy=OffloadPolicy()) is not None
    message = raised(lambda: wrap(Net(), world_size, offload_policy="cpu"), ValueError)
    assert "offload_policy" in message and "cpu" in message
