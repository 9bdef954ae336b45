# SPDX-License-Identifier: Apache-2.0
"""Which gradients there are: microbatches, frozen and unused parameters, kernels that write."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.core.comm import Call
from shardwise.moe import GroupedMLP, swiglu
from tests.cases import pairwise
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    Trial,
    adamw,
    assert_at_rest,
    assert_close,
    assert_gradients_equal,
    average_gradients,
    full,
    on,
    options_for,
    pair,
    raised,
    ranks_for,
    sgd,
    trial,
    vector_loss,
    vectors,
    word_loss,
    words,
)
from tests.ranks import on_ranks, run_ranks

REDUCTIONS = ("reduce_scatter", "all_reduce")
BUCKETS_TOO = (*STRATEGIES, "data_parallel")
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# ------------------------------------------------------------------------------ microbatches

# The ways to say that more microbatches come.
ANNOUNCED: dict[str, tuple[str, ...]] = {
    "no sync": ("set_requires_gradient_sync",),
    "last backward": ("set_is_last_backward",),
    "both": ("set_requires_gradient_sync", "set_is_last_backward"),
    "all reduce": ("set_requires_all_reduce",),
    "nothing": (),
}


def announce(net: Any, how: str, last: bool) -> None:
    for method in ANNOUNCED[how]:
        getattr(net, method)(last)


# Every way under zero3, those that mean something else on two axes under hfsdp, and each strategy
# twice.
@pytest.mark.parametrize(
    ("strategy", "how", "to_none"),
    [("zero3", how, how in ("no sync", "all reduce")) for how in ANNOUNCED]
    + [("hfsdp", how, True) for how in ("no sync", "all reduce", "nothing")]
    + [(s, how, True) for s in ("zero0", "zero1", "zero2", "hsdp") for how in ("no sync", "both")]
    + [("data_parallel", "no sync", True), ("data_parallel", "last backward", False)],
)
@on_ranks(ranks_for)
def test_microbatches_add_up_however_they_are_announced(
    rank: int, world_size: int, strategy: str, how: str, to_none: bool
) -> None:
    t = trial(rank, world_size, strategy)
    optimizers = [sgd(model) for model in t.both]
    for step in range(2):
        for microbatch in range(3):
            last = microbatch == 2
            announce(t.net, how, last)
            with sw.comm.record() as calls:
                t.add(word_loss, 10 * step + microbatch)
            reduced = [call for call in calls if call.operation in REDUCTIONS]
            assert reduced or not last
            if "set_requires_gradient_sync" in ANNOUNCED[how] and not last:
                assert not reduced
                assert not to_none or all(p.grad is None for p in t.net.parameters())
        t.equal()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    t.train(steps=1)


class Choosing(nn.Module):
    """Blocks, of which each microbatch runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.chosen: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for number in self.chosen:
            x = self.blocks[number](x)
        return self.last(x)


@pytest.mark.parametrize("zeros", [False, True])
@on(*BUCKETS_TOO, make=Choosing)
def test_units_that_only_some_microbatches_use(t: Trial, zeros: bool) -> None:
    """The last microbatch reduces what waits in units that its backward does not come to."""
    if zeros:
        t.net.set_reduce_scatter_unused_params(True)
    for step in range(2):
        for number, chosen in enumerate([(0, 1), (2,), (1,)]):
            t.net.set_requires_gradient_sync(number == 2)
            t.net.chosen = t.plain.chosen = chosen
            t.add(vector_loss, 10 * step + number)
        t.equal()
        t.zero_grad()


def optimizer_of(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    return sw.optimizer(net, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=0.01))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "muon"])
@on("zero1", "zero3")
def test_stepping_while_gradients_wait_unreduced_is_refused(
    t: Trial, kind: str, first: bool
) -> None:
    net, optimizer = t.net, optimizer_of(t.net, kind)
    if not first:  # with grads of before: those of the last microbatch are still unreduced
        word_loss(net, t.rank).backward()
        optimizer.step()
    net.set_requires_gradient_sync(False)
    word_loss(net, t.rank).backward()
    clip = getattr(optimizer, "clip_grad_norm", partial(clip_grad_norm_, list(net.parameters())))
    checked = [partial(clip, 1.0)] if hasattr(optimizer, "clip_grad_norm") else []
    for call in (optimizer.step, *checked):  # torch's own clipping looks for nothing
        assert "'embedding.weight'" in raised(call, RuntimeError)
    net.set_requires_gradient_sync(True)
    word_loss(net, t.rank).backward()  # the last one after all
    clip(1.0)
    optimizer.step()


@pytest.mark.parametrize("how", ["no sync", "last backward", "all reduce"])
@on("zero0", "zero1", "zero3", "hfsdp")
def test_zero_grad_of_a_model_drops_microbatches_that_wait(t: Trial, how: str) -> None:
    """A batch is given up between its microbatches: nothing of it comes back."""
    for step in range(3):
        if step == 2:  # on top of gradients that are there
            word_loss(t.net, t.rank).backward()
        for microbatch in range(2):
            announce(t.net, how, False)
            word_loss(t.net, t.rank, 10 * step + microbatch).backward()
        t.net.zero_grad(set_to_none=step == 0)
        announce(t.net, how, True)
        t.backward(word_loss, 100 + step)
        t.zero_grad()


@on("zero1", "zero3", "hsdp")
def test_the_dtype_may_change_between_microbatches(t: Trial) -> None:
    for step in range(3):
        t.net.set_is_last_backward(step == 2)
        t.add(word_loss, step)
        for model in t.both:
            model.double() if step % 2 == 0 else model.float()
    assert assert_gradients_equal(t.net, t.plain) > 10


# ------------------------------------------------------------------------------ frozen

FROZEN = {
    "first unit": ("blocks.0",),
    "last unit": ("blocks.2",),
    "all but the middle unit": ("embedding", "blocks.0", "blocks.2", "head"),
    "some of every unit": ("up", "embedding"),
    "the root's own": ("embedding", "head"),
}


def freeze(model: nn.Module, *parts: str, trains: bool = False) -> Any:
    touched = [p for name, p in model.named_parameters() if any(part in name for part in parts)]
    assert touched, parts
    for parameter in touched:
        parameter.requires_grad_(trains)
    return model


# Each part where weights are gathered again for backward, and one more time where they stay.
@pytest.mark.parametrize(
    ("strategy", "frozen"),
    [("zero3", frozen) for frozen in FROZEN]
    + [("zero0", "some of every unit"), ("zero1", "the root's own"), ("zero1", "last unit")]
    + [("hfsdp", "all but the middle unit"), ("hfsdp", "some of every unit")],
)
@on_ranks(ranks_for)
def test_frozen_parameters_stay_and_the_others_train(
    rank: int, world_size: int, strategy: str, frozen: str
) -> None:
    t = trial(rank, world_size, strategy, lambda: freeze(Net(layers=3), *FROZEN[frozen]))
    kept = {n: full(p).clone() for n, p in t.net.named_parameters() if not p.requires_grad}
    t.train(make=adamw)
    for name, value in kept.items():
        assert t.net.get_parameter(name).grad is None
        assert torch.equal(full(t.net.get_parameter(name)), value), name


class Adapted(nn.Module):
    """Low-rank adaptation. The frozen weight comes first in forward, so backward reads it last:
    after both adapters have their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.up(self.down(y))


class AdaptedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.inner(x)


@on("zero0", "zero1", "zero3", "hsdp", "hfsdp", make=AdaptedNet)
def test_a_frozen_model_passes_gradients_through_and_reduces_nothing(t: Trial) -> None:
    for step in range(2):
        ours, theirs = (vectors(t.rank, step).requires_grad_() for _ in range(2))
        with sw.comm.record() as calls:
            t.net(ours).square().mean().backward()
        t.plain(theirs).square().mean().backward()
        assert theirs.grad is not None and theirs.grad.abs().sum() > 0
        assert_close(ours.grad, theirs.grad, "gradient of the input", 1e-6)  # type: ignore[arg-type]
        assert all(p.grad is None for p in t.net.parameters())
        assert_at_rest(t.net, t.before)
        assert not [call for call in calls if call.operation in REDUCTIONS]


class AdaptedInside(nn.Module):
    """A frozen body with trained adapters in reentrant checkpoints, as transformers train LoRA: the
    graph of the outer backward has no parameter that is trained, and no gate of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)  # type: ignore[no-any-return]


@on("zero1", "zero3", make=AdaptedInside)
def test_adapters_inside_reentrant_checkpoints_of_a_frozen_model(t: Trial) -> None:
    for step in range(2):
        assert t.backward(vector_loss, step) == 4


CASES = [("zero3", False), ("zero1", True), ("zero3", True), ("hfsdp", True)]


@pytest.mark.parametrize(
    ("case", "first", "part"), pairwise(CASES, [False, True], ["blocks.0", "up", "embedding"])
)
@on_ranks(lambda case: ranks_for(case[0]), of="case")
def test_frozen_and_trained_in_turn(
    rank: int, world_size: int, case: tuple[str, bool], first: bool, part: str
) -> None:
    """``part`` starts trainable or not (``first``), then changes to the other."""
    strategy, mixed = case
    make = partial(freeze, trains=first)
    t = trial(
        rank,
        world_size,
        strategy,
        lambda: make(Net(), part),
        **({"mp_policy": MIXED} if mixed else {}),
    )
    for step, trainable in enumerate((first, first, not first, not first, first)):
        for model in t.both:
            freeze(model, part, trains=trainable)
        t.backward(word_loss, step, tolerance=0.03 if mixed else 1e-5)
        for parameter in t.net.parameters():
            assert parameter.grad is None or parameter.grad.dtype == torch.float32
        t.zero_grad()


@on(*MAIN_STRATEGIES)
def test_a_parameter_that_only_some_ranks_train_is_loudly_nan(t: Trial) -> None:
    t.net.blocks[1].up.weight.requires_grad_(t.rank == 0)
    word_loss(t.net, t.rank).backward()
    grad = t.net.blocks[1].up.weight.grad
    assert (grad is None) == (t.rank != 0) and (t.rank or grad.to_local().isnan().all())


@on("zero3")
def test_freezing_gathered_weights_outlives_them(t: Trial) -> None:
    """``requires_grad_`` of weights that unshard() shows, or that stayed after a forward."""
    t.net.blocks[0].unshard()
    t.net.blocks[0].requires_grad_(False)
    t.net.blocks[0].reshard()
    t.plain.blocks[0].requires_grad_(False)
    t.backward()
    t.net(words(t.rank))
    for model in t.both:
        model.embedding.requires_grad_(False)
    t.backward()
    assert not t.net.embedding.weight.requires_grad


@pytest.mark.parametrize("part", ["blocks.1.up", "blocks.0"])
@on("zero0", "zero3", "data_parallel")
def test_microbatches_before_a_freeze_count(t: Trial, part: str) -> None:
    """As in plain torch, where gradients of earlier microbatches stay; not lost without a word."""
    optimizer = sgd(t.net)
    t.net.set_requires_gradient_sync(False)
    t.add(word_loss, 0)
    for model in t.both:
        freeze(model, part)
    raised(optimizer.step, RuntimeError)
    t.net.set_requires_gradient_sync(True)
    t.backward(word_loss, 1)
    assert t.net.blocks[1 if "up" in part else 0].up.bias.grad is not None
    optimizer.step()


def both_losses(t: Trial, model: Any, step: int) -> Tensor:
    ranks = [t.rank] if model is t.net else range(t.world_size)
    return sum(word_loss(model, one, step) for one in ranks) / len(ranks)  # type: ignore[return-value]


@on("zero0", "zero1", "zero2", "zero3", "data_parallel")
def test_a_change_of_mind_between_forward_and_backward_lasts(t: Trial) -> None:
    parts = ("head", "blocks.0", "blocks.1.up")
    for model in t.both:
        freeze(model, *parts)
    for step, wanted in enumerate([True, True, False, False]):
        for model in t.both:
            loss = both_losses(t, model, step)
            freeze(model, *parts, trains=wanted)
            loss.backward()
        t.equal()
        now = [[p.requires_grad for p in model.parameters()] for model in t.both]
        assert now[0] == now[1]
        t.zero_grad()


@pytest.mark.parametrize("frozen", ["blocks.1.up", "blocks"])
@on("zero0", "zero3", "data_parallel")
def test_what_is_frozen_for_an_evaluation_alone_gets_its_gradient(t: Trial, frozen: str) -> None:
    """Frozen after its forward, for one more, and trained again before backward."""
    for model in t.both:
        loss = both_losses(t, model, 0)
        model.get_submodule(frozen).requires_grad_(False)
        word_loss(model, t.rank, 1)
        model.get_submodule(frozen).requires_grad_(True)
        loss.backward()
    assert_gradients_equal(t.net, t.plain)
    assert t.net.blocks[1].up.weight.grad is not None


# ------------------------------------------------------------------------------ unused


class Choice(nn.Module):
    """Experts inside a unit: a call uses those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.chosen: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.chosen:
            x = x + self.experts[number](x)
        return x


class ChoiceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Choice(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


def chosen_loss(model: Any, rank: int, *chosen: tuple[int, ...]) -> Tensor:
    """``chosen``: for each rank, the experts that it uses."""
    model.blocks[1].chosen = chosen[rank]
    return vector_loss(model, rank)


USED = {
    "alike": ((0, 2),) * 4,
    "some": ((0, 1), (1,), (2,), (0, 1, 2)),
    "one": ((0, 1, 2), (), (), ()),
}


@pytest.mark.parametrize("by_method", [False, True])
@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_unused_parameters_count_as_zeros_where_told(
    rank: int, world_size: int, strategy: str, used: str, by_method: bool
) -> None:
    told = {} if by_method else {"unused_parameters": "zeros"}
    t = trial(rank, world_size, strategy, ChoiceNet, **told)
    if by_method:
        t.net.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        t.add(chosen_loss, *USED[used])
        for parameter in t.plain.parameters():
            if parameter.grad is None:  # zeros are a gradient: optimizers see the same everywhere
                parameter.grad = torch.zeros_like(parameter)
        assert t.equal() == 20
        t.zero_grad()


def _hear(heard: list[str], name: str, parameter: Tensor) -> None:
    heard.append(name)


@on(*STRATEGIES, make=ChoiceNet)
def test_a_parameter_that_no_rank_used_has_no_gradient(t: Trial) -> None:
    """By default, as in plain torch; also where some of its step's microbatches used it."""
    for microbatches in ([(0, 2)], [(0, 1), (2, 0)], [(2,), (0, 1), (0,)], [()]):
        heard: list[str] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_hear, heard, name))
            for name, parameter in t.net.named_parameters()
        ]
        for number, chosen in enumerate(microbatches):
            t.net.set_is_last_backward(number == len(microbatches) - 1)
            t.add(chosen_loss, *[chosen] * 4)
        t.equal()
        with_gradient = {name for name, one in t.plain.named_parameters() if one.grad is not None}
        assert len(with_gradient) == 14 + 2 * len({one for some in microbatches for one in some})
        assert set(heard) == with_gradient, "hooks of parameters without a gradient stay silent"
        for handle in handles:
            handle.remove()
        t.zero_grad()


@pytest.mark.parametrize("accumulate", [False, True])
@on(*BUCKETS_TOO, make=ChoiceNet)
def test_a_gradient_that_only_some_ranks_have_is_loudly_nan(t: Trial, accumulate: bool) -> None:
    """On the ranks that have it. The others are right, and what no rank has stays None."""
    for last in (False, True) if accumulate else (True,):
        t.net.set_is_last_backward(last)
        t.net.set_requires_gradient_sync(last)
        t.add(chosen_loss, (0, 1) if last else (0,), *[(0,)] * 3)
    for name, parameter in t.net.named_parameters():
        wanted = t.plain.get_parameter(name).grad
        if "experts.1" not in name:
            assert (parameter.grad is None) == (wanted is None), name
            assert wanted is None or torch.allclose(full(parameter.grad), wanted, atol=1e-6), name
            continue
        assert (parameter.grad is None) == (t.rank != 0), name
        assert t.rank != 0 or parameter.grad.to_local().isnan().all(), name


class Tail(nn.Module):
    """A head that is called by itself, chunk by chunk, after the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.entry(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "resharded"])
@on_ranks(2)
def test_a_list_of_modules_of_which_some_run_chunk_by_chunk(
    rank: int, world_size: int, kept: bool
) -> None:
    net, plain = pair(Tail)
    sw.fully_shard(net.entry)
    sw.fully_shard([net.norm, net.head], reshard_after_forward=not kept)
    sw.fully_shard(net)

    def backward(model: Any, which: int, share: int) -> None:
        hidden = model(vectors(which))
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(2)]
        for chunk in chunks:
            (model.head(chunk).square().sum() / share).backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))  # type: ignore[misc]

    for _ in range(3):
        backward(net, rank, 1)
        for which in range(world_size):
            backward(plain, which, world_size)
        assert_gradients_equal(net, plain)
        net.zero_grad()
        plain.zero_grad()


WIDE = 32  # whole blocks


class Delayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedMLP(2, WIDE, WIDE, activation=swiglu(), delay_weight_gradient=True)
        self.exit = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, len(x)], dtype=torch.int32)
        return self.exit(self.experts(x.requires_grad_(), ends, torch.ones(len(x))))


@on_ranks(2)
def test_buckets_wait_for_gradients_that_no_graph_knows_of(rank: int, world_size: int) -> None:
    net, plain = pair(Delayed)
    options = options_for("zero1", world_size) | {"unused_parameters": "zeros"}
    sw.data_parallel(net, **options, bucket_mb=0.005)
    plain.experts.delay_weight_gradient = False

    def loss(model: Any, each: int) -> Tensor:
        return model(vectors(each, width=WIDE)).square().mean()

    loss(net, rank).backward()
    average_gradients(plain, loss, world_size)
    net.experts.backward_dw()
    assert_gradients_equal(net, plain)


class Pair(nn.ModuleList):
    def forward(self, x: Tensor, partly: bool) -> Tensor:
        return self[0](x) if partly else self[0](x) + self[1](x)


class Entries(nn.Module):
    """Units whose inputs need no gradient, of which one rank uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Pair([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(4)
        )
        self.exit = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, partly: bool) -> Tensor:
        parts = [block(x, partly and at == 2) for at, block in enumerate(self.blocks)]
        return self.exit(sum(parts))


def entered(rank: int, world_size: int) -> list[Call]:
    t = trial(rank, world_size, "zero3", Entries, unused_parameters="zeros")
    with sw.comm.record() as calls:
        t.backward(lambda model, each: model(vectors(each), each == 1).square().mean())
    return calls


def test_units_that_are_used_in_part_reduce_when_others_do() -> None:
    first, second = run_ranks(entered, 2)
    assert len(first) > 12 and first == second


# ------------------------------------------------------------------------------ written by kernels


class FusedLinear(torch.autograd.Function):
    """x @ W.T, whose backward leaves W's gradient in ``W.main_grad`` and returns none."""

    late = False  # whether the weight is read after its gradient was announced

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool, overwrite: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.fused, ctx.overwrite = weight, fused, overwrite
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        into = grad.flatten(0, -2).T @ x.flatten(0, -2)
        of_input = None if FusedLinear.late else grad @ weight
        if not ctx.fused:
            return grad @ weight, into, None, None
        parameter = ctx.parameter
        if ctx.overwrite:
            target, fresh = parameter.fresh_main_grad()
            if fresh:
                target.copy_(into)  # whatever was there is not a gradient
            else:
                target.add_(into)
        else:
            parameter.main_grad.add_(into)
        parameter.grad_added_to_main_grad = True
        return grad @ weight if of_input is None else of_input, None, None, None


class Fused(nn.Module):
    """A fused weight between ordinary ones, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(7, WIDTH) / 3)
        self.after = nn.Linear(7, WIDTH)
        self.fused = self.overwrite = self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).to(self.weight.dtype)
        y = FusedLinear.apply(x, self.weight, self.fused, self.overwrite)
        if self.twice:
            y = y + FusedLinear.apply(x * 2, self.weight, self.fused, self.overwrite)
        return self.after(y)


class FusedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fused() for _ in range(2))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)  # the root's, fused too
        self.fused = self.overwrite = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return FusedLinear.apply(x.to(self.weight.dtype), self.weight, self.fused, self.overwrite)


def tell(net: Any, **flags: bool) -> None:
    for module in (net, *net.blocks):
        for name, value in flags.items():
            setattr(module, name, value)


@pytest.mark.parametrize(
    ("strategy", "microbatches", "overwrite", "to_none", "each"),
    [(*case, True, False) for case in pairwise([*STRATEGIES], [1, 3], [False, True])]
    + [(strategy, 3, True, False, each) for strategy in MAIN_STRATEGIES for each in (False, True)],
)
@on_ranks(ranks_for)
def test_gradients_written_by_a_kernel_train_like_autograds(
    rank: int,
    world_size: int,
    strategy: str,
    microbatches: int,
    overwrite: bool,
    to_none: bool,
    each: bool,
) -> None:
    t = trial(rank, world_size, strategy, FusedNet)
    tell(t.net, fused=True, overwrite=overwrite)
    optimizers = [sgd(model) for model in t.both]
    for step in range(2):
        for microbatch in range(microbatches):
            t.net.set_is_last_backward(each or microbatch == microbatches - 1)
            t.add(vector_loss, 10 * step + microbatch)
        assert t.equal() == 11
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)


@pytest.mark.parametrize("way", ["adds", "overwrites", "late"])
@on("zero0", "zero3", "hfsdp", make=FusedNet)
def test_a_weight_written_twice_in_one_backward_or_read_after_it(t: Trial, way: str) -> None:
    tell(t.net, fused=True, overwrite=way == "overwrites")
    for model in t.both:
        tell(model, twice=way != "late")
    FusedLinear.late = way == "late"
    try:
        for _ in range(2):
            t.backward(vector_loss)
            t.zero_grad()
    finally:
        FusedLinear.late = False


@on(*MAIN_STRATEGIES, make=FusedNet)
def test_fresh_memory_is_overwritten_not_added_to(t: Trial) -> None:
    """Memory that was never written must not leak into a gradient: it is poisoned here."""
    tell(t.net, fused=True, overwrite=True)
    original = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        made = original(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() and made.numel() else made

    torch.empty = poisoned
    try:
        for microbatch in range(3):
            t.net.set_is_last_backward(microbatch == 2)
            vector_loss(t.net, t.rank, microbatch).backward()
    finally:
        torch.empty = original
    for microbatch in range(3):
        average_gradients(t.plain, partial(vector_loss, step=microbatch), t.world_size)
    t.equal()


@pytest.mark.parametrize("overwrite", [False, True])
@on(*MAIN_STRATEGIES, "data_parallel", make=FusedNet)
def test_a_backward_for_inputs_writes_no_gradient(t: Trial, overwrite: bool) -> None:
    """``torch.autograd.grad`` of inputs: what a kernel writes meanwhile, for it does not know
    better, reaches neither microbatches that wait nor gradients that are there."""
    tell(t.net, fused=True, overwrite=overwrite)

    def slope() -> None:
        inputs = [vectors(t.rank, 9).requires_grad_() for _ in range(2)]
        found = [
            torch.autograd.grad(model(x).square().sum(), x)[0]
            for model, x in zip(t.both, inputs, strict=True)
        ]
        torch.testing.assert_close(*found)

    for step in range(2):
        slope()
        assert all(one.grad is None for one in t.net.parameters())
        for last in (False, True):
            t.net.set_is_last_backward(last)
            t.net.set_requires_gradient_sync(last)
            vector_loss(t.net, t.rank, 2 * step + last).backward()
            slope()
            average_gradients(t.plain, partial(vector_loss, step=2 * step + last), t.world_size)
        t.equal()
        t.zero_grad()
