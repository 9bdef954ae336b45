# SPDX-License-Identifier: Apache-2.0
"""Tensors that the library hands out, kept and read later: the values that they had, today's values
where they are views of what lives on, or NaN; never memory that was given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import holders, memory
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.shard.module import unit_of
from tests.contract.helpers import (
    STRATEGIES,
    WIDTH,
    Net,
    options_for,
    ranks_for,
    vectors,
    word_loss,
)
from tests.contract.helpers import wrap as wrap_net
from tests.ranks import on_ranks, run_ranks

Keep = Callable[[Tensor], object]


class Keeping(nn.Linear):
    """Gives its weight to somebody who may keep it, or a view of it."""

    def __init__(self, keep: Keep = id) -> None:
        super().__init__(WIDTH, WIDTH)
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self.weight)
        return super().forward(x)


class Turning(Keeping):
    """Gives the very view that autograd saves."""

    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.t()
        self.keep(turned)
        return x @ turned + self.bias


def wrap(net: nn.Sequential, strategy: str, world_size: int, **options: Any) -> list[Any]:
    """The blocks of the whole weights of each layer."""
    options = options_for(strategy, world_size) | options
    wrapped = [sw.fully_shard(one, **options) for one in (*net, net)]
    return [unit_of(one).groups[0].whole.block for one in wrapped[:-1]]  # type: ignore[union-attr]


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The findings of every search through the objects of Python, from now on."""
    found: list[bool] = []

    def look(*args: Any) -> bool:
        found.append(holders.is_kept(*args))
        return found[-1]

    monkeypatch.setattr(memory, "is_kept", look)
    return found


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda weight: weight[:2],
    "detached": lambda weight: weight.detach(),
    "turned": lambda weight: weight.t(),
    "data": lambda weight: weight.data,
    "unbound": lambda weight: weight.unbind()[3],
    "numpy": lambda weight: weight.detach().numpy(),
    "alias": lambda weight: weight.view_as(weight),
}


def values(kept: Any) -> Tensor:
    return torch.as_tensor(kept).detach().clone()


def check_views(rank: int, world_size: int, view: str, strategy: str) -> None:
    kept: list[Any] = []
    net = nn.Sequential(Keeping(lambda weight: kept.append(VIEWS[view](weight))), Keeping())
    truth = values(VIEWS[view](net[0].weight))
    blocks = wrap(net, strategy, world_size)
    for step in range(3):
        gc.collect(step)  # young or old, they are found
        loss = net(vectors(rank)).square().sum()
        assert torch.equal(values(kept[-1]), truth), f"step {step}, after forward"
        loss.backward()
        assert torch.equal(values(kept[-1]), truth), f"step {step}, after backward"
        with torch.no_grad():
            net(vectors(rank))
        assert all(torch.equal(values(one), truth) for one in kept), f"step {step}, evaluation"
    if strategy == "zero3":
        assert not any(block.live for block in blocks)


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_weights(view: str) -> None:
    """Kept by forward, in a list: read after it, after its backward and after an evaluation."""
    run_ranks(check_views, 2, view, "zero3")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_views_of_weights_in_all_strategies(strategy: str) -> None:
    run_ranks(check_views, ranks_for(strategy), "slice", strategy)


class Slots:
    __slots__ = ("view",)


def keep_in_closure(kept: list[Any], view: Tensor) -> None:
    kept.append(lambda: view)


def keep_in_slots(kept: list[Any], view: Tensor) -> None:
    one = Slots()
    one.view = view
    kept.append(lambda: one.view)


def keep_deep(kept: list[Any], view: Tensor) -> None:
    one = ({"layers": [(view,)]},)
    kept.append(lambda: one[0]["layers"][0][0])


@pytest.mark.parametrize("keep", [keep_in_closure, keep_in_slots, keep_deep])
@pytest.mark.parametrize("retain", [False, True])
@on_ranks(2)
def test_views_that_autograd_saves_too(
    rank: int, world_size: int, retain: bool, keep: Callable[[list[Any], Tensor], None]
) -> None:
    """Wherever they are kept; what autograd keeps alone is given back as ever, in place."""
    kept: list[Any] = []
    net = nn.Sequential(Turning(partial(keep, kept)), Turning(), Turning())
    truth = net[0].weight.detach().t().clone()
    blocks = wrap(net, "zero3", world_size)
    for _ in range(3):
        before = [block.storage for block in blocks]
        loss = net(vectors(rank)).square().sum()
        assert torch.equal(kept[-1](), truth) and not any(block.live for block in blocks)
        assert [block.storage is old for block, old in zip(blocks, before, strict=True)] == [
            False,
            True,
            True,
        ]
        loss.backward(retain_graph=retain)
        assert all(torch.equal(one(), truth) for one in kept)
        assert not any(block.live for block in blocks)


class Product(torch.autograd.Function):
    """A kernel that keeps what it needs as attributes, past save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.turned, ctx.more = weight.detach().t(), {"rows": [weight.detach()[:3], (weight[1:],)]}
        ctx.save_for_backward(x)
        return x @ weight.detach().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        rows = ctx.more["rows"]
        assert torch.equal(ctx.turned.t()[:3], rows[0]) and torch.equal(
            ctx.turned.t()[1:], rows[1][0]
        )
        return grad @ ctx.turned.t(), grad.t() @ x


class ByKernel(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias  # type: ignore[no-any-return,no-untyped-call]


class Recomputed(Turning):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", [Keeping, Turning, ByKernel, Recomputed])
@on_ranks(2)
def test_what_autograd_keeps_alone_is_given_back(
    rank: int, world_size: int, kind: type[Keeping], hooked: bool
) -> None:
    """Such a weight stays in place, and holders are looked for once, not in every step. ``hooked``:
    hooks for saved tensors that keep these as they are, as some that offload activations do."""
    net = nn.Sequential(kind(), kind(), kind())
    blocks = wrap(net, "zero3", world_size)
    with pytest.MonkeyPatch.context() as patch:
        looks = count_looks(patch)
        for step in range(4):
            before = [block.storage for block in blocks]
            with keeping_hooks(hooked):
                loss = net(vectors(rank)).square().sum()
            assert all(block.storage is old for block, old in zip(blocks, before, strict=True))
            assert not any(block.live or block.storage.nbytes() for block in blocks)
            loss.backward()
            assert not any(block.live or block.storage.nbytes() for block in blocks)
            # What a kernel's node has kept beyond backward is left to it, and looked for again.
            assert len(looks) <= (3 if kind is not ByKernel else 3 * step + 3)
    assert not any(looks)


def keeping_hooks(on: bool) -> Any:
    keep = lambda saved: (saved,)  # noqa: E731
    return graph.saved_tensors_hooks(keep, lambda packed: packed[0]) if on else nullcontext()


@pytest.mark.parametrize("generation", [None, 0, 1, 2])
def test_objects_that_have_become_old_are_found_too(generation: int | None) -> None:
    whole, since = torch.zeros(8), holders.time_now()
    storage, ours = whole.untyped_storage(), {id(whole)}
    kept = [whole[2:]]
    if generation is not None:
        gc.collect(generation)
    assert holders.is_kept(storage, ours, since)
    kept.clear()
    assert not holders.is_kept(storage, ours, since)


@on_ranks(2)
def test_weights_after_their_release(rank: int, world_size: int) -> None:
    """The weight itself is NaN for whoever holds it then, and no write to it is lost silently."""
    kept: list[Any] = []
    net = nn.Sequential(Keeping(kept.append), Keeping())
    truth = net[0].weight.detach().clone()
    wrap(net, "zero3", world_size)
    loss = net(vectors(rank)).square().sum()
    assert kept[0].isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        kept[0].add_(1)
    loss.backward()
    net[0].unshard()
    assert torch.equal(kept[0], truth) and kept[0] is net[0].weight
    view = net[0].weight[1:]
    net[0].reshard()
    assert torch.equal(view, truth[1:]) and kept[0].isnan().all()


# ------------------------------------------------------------------------------ gradients


class Adding(torch.autograd.Function):
    """A kernel that adds its weight's gradient to ``main_grad``, and shows that to somebody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, keep: Keep) -> Tensor:
        ctx.weight, ctx.keep = weight, keep
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.t() @ x)
        ctx.keep(ctx.weight.main_grad)
        ctx.weight.grad_added_to_main_grad = True
        return None, None, None


class AddingLinear(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        return Adding.apply(x, self.weight, self.keep)  # type: ignore[no-any-return,no-untyped-call]


GRADIENT_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda grad: grad,
    "slice": lambda grad: grad[2:],
    "detached": lambda grad: grad.detach(),
    "numpy": lambda grad: grad.numpy(),
}


def check_main_grad(
    rank: int, world_size: int, view: str, strategy: str, pool: str, accumulate: bool
) -> None:
    kept: list[Any] = []
    net = nn.Sequential(AddingLinear(lambda grad: kept.append(GRADIENT_VIEWS[view](grad))))
    net[0].bias = None
    weight = net[0].weight.detach().clone()
    model = sw.fully_shard(net, **options_for(strategy, world_size), memory=pool)
    seen: list[tuple[Any, Tensor]] = []
    for step in range(3):
        local = torch.zeros_like(weight)
        for last in (False, True) if accumulate else (True,):
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            x = vectors(rank, 2 * step + last)
            local += (2 * x @ weight.t()).t() @ x
            model(x).square().sum().backward()
        grad: Any = net[0].weight.grad
        truth = local.clone()
        torch.distributed.all_reduce(truth)
        torch.testing.assert_close(grad.full_tensor(), truth / world_size)
        shown = values(kept[-1])
        if strategy == "zero0" and not accumulate:  # summed in .grad itself
            local = grad.full_tensor()
        torch.testing.assert_close(shown, values(GRADIENT_VIEWS[view](local)))
        seen.append((kept[-1], shown))
        model.zero_grad()
        assert all(torch.equal(values(one), was) for one, was in seen), f"step {step}"
    # In the middle of an accumulation
    model.set_requires_gradient_sync(False)
    model(vectors(rank)).square().sum().backward()
    shown = values(kept[-1])
    model.zero_grad() if accumulate else model.reset_iter_state()
    model(vectors(rank, 1)).square().sum().backward()
    assert torch.equal(values(kept[-2]), shown) and not torch.equal(values(kept[-1]), shown)
    assert all(torch.equal(values(one), was) for one, was in seen)


@pytest.mark.parametrize("view", GRADIENT_VIEWS)
def test_main_grad(view: str) -> None:
    """A kernel's author keeps it: it stays what it was when it was summed."""
    run_ranks(check_main_grad, 2, view, "zero3", "caching", False)


# Packed gradients come from the pool where none wait; caching and no accumulation are above.
@pytest.mark.parametrize(
    ("strategy", "pool", "accumulate"),
    [(strategy, "trace", False) for strategy in STRATEGIES]
    + [(strategy, "caching", True) for strategy in STRATEGIES]
    + [("zero3", "trace", True)],
)
def test_main_grad_in_all_strategies(strategy: str, pool: str, accumulate: bool) -> None:
    run_ranks(check_main_grad, ranks_for(strategy), "itself", strategy, pool, accumulate)


# ------------------------------------------------------------------------------ codes in fp8


class Coded(nn.Linear):
    """Keeps the codes and scales of its weight, as they were given, and what they were then."""

    def __init__(self, kept: list[Any], keeps: bool) -> None:
        super().__init__(128, 128, bias=False)
        self.kept, self.keeps = kept, keeps

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        planes = [*weight.quantised.planes.values(), weight.quantised.plane("forward")]
        found = [one for plane in planes for one in (plane.codes, plane.scales, plane.codes[:2])]
        found += planes[-1].right  # as products on a GPU ask for it
        self.kept += [(one, one.clone()) for one in [*found, weight.detach(), weight[:3]]]
        if not self.keeps:
            self.kept.clear()
        return super().forward(x)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("pool", ["caching", "trace"])
@pytest.mark.parametrize("format", ["mxfp8_rowcol", "mxfp8_2d", "fp8_block"])
@on_ranks(2)
def test_codes(rank: int, world_size: int, format: Any, pool: str, keeps: bool) -> None:
    """Kept codes do not change; codes that nobody keeps are given back in place."""
    kept: list[Any] = []
    net = nn.Sequential(*(Coded(kept, keeps) for _ in range(3)))
    precision = sw.Precision(weights=format)
    for one in (*net, net):
        sw.fully_shard(one, **options_for("zero3", world_size), precision=precision, memory=pool)
    left: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        was = memory.Block.leave
        patch.setattr(memory.Block, "leave", lambda block: left.append(was(block)))
        for step in range(3):
            net(vectors(rank, step, 128)).square().sum().backward()
            with torch.no_grad():
                net(vectors(rank, step, 128))
            assert all(torch.equal(one, then) for one, then in kept), f"step {step}"
            with torch.no_grad():
                for weight in net.parameters():
                    weight.mul_(0.5)
    assert keeps == bool(left)


@on_ranks(2)
def test_inputs_written_between_forwards_are_read_anew(rank: int, world_size: int) -> None:
    """Also by ways that no version tells of: no codes of an activation outlive a forward."""
    net = nn.Linear(128, 128, bias=False)
    precision = sw.Precision(weights="fp8_block")
    sw.fully_shard(net, **options_for("zero3", world_size), precision=precision)
    x = vectors(rank, 0, 128).bfloat16()
    with torch.no_grad():
        for _ in range(2):
            net(x)
            x.data.copy_(vectors(rank, 1, 128))
            assert torch.equal(net(x), net(x.clone()))


# ------------------------------------------------------------------------------ at rest

AT_REST: dict[str, Callable[[Any, Any], list[Any]]] = {
    "gradients": lambda net, opt: [p.grad for p in net.parameters()],
    "pieces of gradients": lambda net, opt: [p.grad.to_local() for p in net.parameters()],
    "rows of gradients": lambda net, opt: [p.grad.to_local()[:1] for p in net.parameters()],
    "whole gradients": lambda net, opt: [p.grad.full_tensor() for p in net.parameters()],
}
ALIVE: dict[str, Callable[[Any, Any], list[Any]]] = {
    "pieces of weights": lambda net, opt: [p.to_local() for p in net.parameters()],
    "a state dict": lambda net, opt: list(net.state_dict().values()),
    "states": lambda net, opt: [
        one for state in opt.state.values() for one in state.values() if isinstance(one, Tensor)
    ],
}


@pytest.mark.parametrize("matrix", [None, sw.muon(lr=0.02)], ids=["adamw", "muon"])
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "data_parallel"])
@on_ranks(2)
def test_what_is_at_rest(rank: int, world_size: int, strategy: str, matrix: Any) -> None:
    """Gradients stay what they were when they were dropped; weights and states are today's, and
    what ``.to()`` has left behind stays too."""
    net = wrap_net(Net(), world_size, strategy)
    opt = sw.optimizer(net, matrix=matrix, elementwise=sw.adamw(lr=1e-3))
    dropped: list[tuple[Any, Tensor]] = []
    alive: list[tuple[str, list[Any]]] = []
    for step in range(3):
        word_loss(net, rank, step).backward()
        for find in AT_REST.values():
            dropped += [(one, local(one).clone()) for one in find(net, opt)]
        opt.step()
        opt.zero_grad()
        alive += [(name, find(net, opt)) for name, find in ALIVE.items()]
        assert all(torch.equal(local(one), then) for one, then in dropped), f"step {step}"
        for name, kept in alive:
            pairs = zip(kept, ALIVE[name](net, opt), strict=True)
            assert all(torch.equal(local(one), local(now)) for one, now in pairs), f"{name}, {step}"
    pieces = alive[0][1]
    then = [one.clone() for one in pieces]
    net.to(torch.float64)
    word_loss(net, rank)
    assert all(map(torch.equal, pieces, then))
    assert all(torch.equal(local(one), then) for one, then in dropped)


def local(one: Any) -> Tensor:
    return one.to_local() if hasattr(one, "to_local") else one  # type: ignore[no-any-return]


def test_a_plan_looks_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory to keep, and looking through all objects takes time."""
    looks = count_looks(monkeypatch)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, dim=32, num_layers=2, num_heads=2, context=8))
    sw.plan(model, {"dp": 4}, sw.zero(3), batch=(1, 8))
    assert not looks


@pytest.mark.parametrize("collected", [0, 1])
@pytest.mark.parametrize("held", [True, False])
def test_a_collection_during_a_look_hides_nothing_and_counts_nothing_twice(
    held: bool, collected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of objects is an object too: to make it may collect, and put objects that were listed,
    or are to be listed, into the next age."""
    listed = gc.get_objects

    def list_objects(generation: int) -> list[Any]:
        if generation == 1:
            gc.collect(collected)
        return listed(generation)

    gc.collect()
    weight = torch.zeros(4, 4)
    views = [weight.t()]
    loss = (torch.ones(4, requires_grad=True) @ views[0]).sum()
    since = holders.time_now()
    if collected:
        gc.collect(0)
    if not held:
        views.clear()  # autograd has it alone
    monkeypatch.setattr(gc, "get_objects", list_objects)
    assert holders.is_kept(weight.untyped_storage(), {id(weight)}, since) == held
    assert loss.requires_grad
