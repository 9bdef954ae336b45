# SPDX-License-Identifier: Apache-2.0
"""What users do between the lines: each as in plain torch, or refused by name."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.core import comm
from shardwise.core.layout import Layout
from shardwise.shard.codec import Cast
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    WIDTH,
    Block,
    Net,
    Trial,
    adamw,
    assert_at_rest,
    assert_close,
    assert_gradients_equal,
    assert_parameters_equal,
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
    wrap,
)
from tests.ranks import on_ranks, run_ranks

WAYS = ("zero0", "zero1", "zero3", "data_parallel")

# ------------------------------------------------------------------------------ gradients


@on(*WAYS)
def test_gradients_that_users_exchange_or_make(t: Trial) -> None:
    """Gradients that the user exchanged or made, and a backward that adds to them."""
    t.backward()
    for model in t.both:
        first, second = model.blocks[0], model.blocks[1]
        for one, other in (
            (first.up.weight, second.up.weight),  # of two units
            (first.up.bias, second.up.bias),
        ):
            one.grad, other.grad = other.grad, one.grad
    t.backward(word_loss, 1)
    for model in t.both:
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 0.5)  # whole, and the same on all ranks
    t.backward(word_loss, 2)
    for model in t.both:
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 2
        model.head.weight.grad = None
    t.backward(word_loss, 3)
    for model in t.both:
        sgd(model).step()
        norm, down = model.blocks[0].norm, model.blocks[0].down
        norm.weight.grad, down.bias.grad = down.bias.grad, norm.weight.grad  # of one buffer
        sw.optimizer(model, matrix=None, elementwise=sw.adamw(lr=0.1)).step()
    assert_parameters_equal(t.net, t.plain)


@on("zero3")
def test_gradients_of_inputs_reduce_nothing(t: Trial) -> None:
    t.net.set_requires_gradient_sync(False)
    t.add()
    t.net.set_requires_gradient_sync(True)
    with comm.record() as calls:
        x = vectors(t.rank).requires_grad_()
        torch.autograd.grad(t.net.blocks[0](x).sum(), x)
    assert {call.operation for call in calls} == {"all_gather"}
    assert all(parameter.grad is None for parameter in t.net.parameters())
    t.backward(word_loss, 1)  # with what has waited


def penalty_of(model: Any) -> Tensor:
    return sum((0.1 * one.square().sum() for one in model.parameters()), torch.zeros(()))


def distance_of(model: Any) -> Tensor:
    """From values that weights had: elastic weight consolidation."""
    pairs = zip(model.parameters(), model.earlier, strict=True)
    return sum((0.1 * ((one - was) * was).sum() for one, was in pairs), torch.zeros(()))


def penalised(
    model: Any, rank: int, step: int, first: bool, of: Callable[[Any], Tensor] = penalty_of
) -> Tensor:
    """A loss with a penalty on weights that lie outside of any forward. Backward comes to what was
    computed ``first`` last: while other gradients of these weights are being reduced."""
    penalty = of(model) if first else torch.zeros(())
    loss = word_loss(model, rank, step) + penalty
    return loss if first else loss + of(model)


@pytest.mark.parametrize("strategy", WAYS)
@on_ranks(2)
def test_a_penalty_on_weights_at_rest(rank: int, world_size: int, strategy: str) -> None:
    t = trial(rank, world_size, strategy)
    for step, (first, sync) in enumerate([(True, True), (False, True), (True, False)]):
        t.net.set_requires_gradient_sync(sync)
        t.add(penalised, step, first)
    t.net.set_requires_gradient_sync(True)
    t.backward(penalised, 9, True)
    for model in t.both:
        penalty_of(model).backward()
    assert_gradients_equal(t.net, t.plain)
    t.zero_grad()
    for model in t.both:
        model.earlier = [one.detach().clone() for one in model.parameters()]
    if strategy == "zero3":  # the root's weights are not at rest then
        late = partial(penalised, step=10, first=False, of=distance_of)
        raised(lambda: late(t.net, rank).backward(), NotImplementedError)
        t.net.reset_iter_state()
    else:
        t.backward(penalised, 10, False, distance_of)
    t.backward(penalised, 11, True, distance_of)


def through_full_tensors(model: Any, rank: int, step: int) -> Tensor:
    """Products of a rank's own values with weights outside of any forward."""
    head, inner = model.head.weight, model.blocks[0].up.weight * 2
    if isinstance(head, DTensor):
        head, inner = head.full_tensor(), inner.full_tensor()
    seen = vectors(rank, step)
    loss = word_loss(model, rank, step) + (seen @ head.t()).square().mean()
    return loss + (seen @ inner.t()).std()


@on(*WAYS)
def test_gradients_flow_through_full_tensors(t: Trial) -> None:
    """Reduced over ranks like any other: what a rank computes with them is its own."""
    for step in range(2):
        t.backward(through_full_tensors, step)


@on("zero0")
def test_gradients_that_replicas_divide_take_what_is_added_to_them(t: Trial) -> None:
    """A penalty, and weight decay by hand."""
    optimizers = [
        sw.optimizer(one, matrix=sw.muon(), elementwise=sw.adamw()) for one in (t.net, t.plain)
    ]
    for step in range(2):
        t.backward(penalised, step, True)
        for model, optimizer in zip(t.both, optimizers, strict=True):
            for parameter in model.parameters():
                parameter.grad.add_(parameter.detach(), alpha=0.1)
            torch._foreach_add_([p.grad for p in model.parameters()], list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters_equal(t.net, t.plain, tolerance=1e-4)


# ------------------------------------------------------------------------------ objects


@on(*WAYS)
def test_a_backward_whose_model_was_deleted_is_refused(t: Trial) -> None:
    loss = word_loss(t.net, t.rank)
    t.net = None
    gc.collect()
    raised(loss.backward, RuntimeError)


class Configured(Net):
    """Cannot be built without arguments."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=layers)


@on("zero3", make=partial(Configured, 2))
def test_copies_of_wrapped_modules(t: Trial) -> None:
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        raised(partial(save, t.net), NotImplementedError)
    raised(partial(copy.deepcopy, t.net), AssertionError)
    shallow = copy.copy(t.net)
    assert type(shallow) is type(t.net)
    word_loss(shallow, t.rank).backward()
    average_gradients(t.plain, word_loss, t.world_size)
    assert_gradients_equal(t.net, t.plain)


@on(*WAYS)
def test_a_model_may_run_in_inference_mode_first(t: Trial) -> None:
    with torch.inference_mode():  # before the first training step
        t.net(words(t.rank))
        whole = sw.full_state_dict(t.net)
    assert torch.equal(whole["head.weight"], t.plain.head.weight)
    t.backward()


@on(*WAYS)
def test_a_state_dict_inside_forward(t: Trial) -> None:
    """``state_dict()`` inside forward, as loggers and averages do."""
    seen: list[int] = []

    def look(*_: Any) -> None:
        state = t.net.state_dict()
        assert all(isinstance(value, sw.ShardedTensor) for value in state.values())
        seen.append(len(state))

    t.net.blocks[0].register_forward_hook(look)
    t.net.blocks[1].up.register_forward_pre_hook(look)
    t.backward()
    assert len(seen) >= 2


@on("zero0", "zero3")
def test_a_forward_past_the_hooks_is_refused(t: Trial) -> None:
    """``module.forward(x)`` is called past the hooks that gather."""
    raised(lambda: t.net.blocks[0].forward(vectors(t.rank)), NotImplementedError)
    weight = t.net.head.weight
    raised(lambda: nn.functional.embedding(torch.arange(3), weight), NotImplementedError)
    # The first step of a product, a transposed copy, works: torch refuses the second.
    raised(lambda: nn.functional.linear(vectors(t.rank), weight), RuntimeError)


class Grown(Net):
    def forward(self, words: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(words))
        if hasattr(self, "adapter"):
            x = x + self.adapter(x)
        return self.head(self.blocks[1](x))


@on("zero3", make=Grown)
def test_a_module_with_a_unit_of_its_own_may_be_added(t: Trial) -> None:
    for step in range(3):
        t.zero_grad()
        if step == 1:
            for model in t.both:
                torch.manual_seed(3)
                model.adapter = nn.Linear(WIDTH, WIDTH)
            sw.fully_shard(t.net.adapter, **options_for("zero3", t.world_size))
        t.backward(word_loss, step)


@pytest.mark.parametrize("some", [False, True])
@on_ranks(2)
def test_an_optimizer_built_before_wrapping_is_refused(
    rank: int, world_size: int, some: bool
) -> None:
    """Catching the error and going on does not make the optimizer right."""
    net = Net()
    optimizer = adamw(net.blocks[1] if some else net)
    wrap(net, world_size)
    for _ in range(2):
        word_loss(net, rank).backward()
        assert ".weight'" in raised(optimizer.step, RuntimeError)


@on("zero3")
def test_an_optimizer_over_gathered_weights_is_refused(t: Trial) -> None:
    t.net.blocks[0].unshard()
    optimizer = adamw(t.net)
    word_loss(t.net, t.rank).backward()
    assert ".weight'" in raised(optimizer.step, RuntimeError)


# ------------------------------------------------------------------------------ writes


def loaded(model: Any, parameters: list[Any]) -> None:
    model.load_state_dict(Net().state_dict())


def stepped(model: Any, parameters: list[Any]) -> None:
    torch.optim.SGD(parameters, lr=0.1).step()


@pytest.mark.parametrize("write", [stepped, loaded])
@on("zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "data_parallel")
def test_weights_written_between_forward_and_backward_are_named(t: Trial, write: Any) -> None:
    for model in t.both:
        word_loss(model, t.rank).backward()
        parameters = list(model.parameters())  # at rest; the root's are whole after its forward
        loss = word_loss(model, t.rank)
        if model is t.net:
            loss.backward(retain_graph=True)  # nothing was written yet
        with torch.no_grad():
            write(model, parameters)
        model.zero_grad()
        raised(loss.backward, RuntimeError)  # torch says so too
    t.net.reset_iter_state()
    del loss
    t.plain.load_state_dict(sw.full_state_dict(t.net))
    t.plain.zero_grad()
    t.backward(word_loss, 1)


@on("zero1", "zero3")
def test_parameters_read_after_a_step_are_those_of_the_step(t: Trial) -> None:
    """A forward without a backward leaves gathered weights in the modules; after the step an
    average of the weights must not read these."""
    optimizers = [sgd(model) for model in t.both]
    t.backward()
    t.net(words(t.rank, 1))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_parameters_equal(t.net, t.plain)
    t.backward()


def saved_in_between(rank: int, world_size: int, folder: str) -> None:
    """Reading is not writing."""
    t = trial(rank, world_size, "zero3")
    loss = word_loss(t.net, rank)
    sw.full_state_dict(t.net)
    dcp.save(t.net.state_dict(), checkpoint_id=f"{folder}/dcp")
    sw.save(f"{folder}/own", t.net)
    with torch.no_grad():
        t.net(words(rank, 1))
    loss.backward()
    average_gradients(t.plain, word_loss, world_size)
    assert_gradients_equal(t.net, t.plain)


def test_a_save_between_forward_and_backward_is_no_write(tmp_path: Any) -> None:
    run_ranks(saved_in_between, 2, str(tmp_path))


class Passing(torch.optim.Optimizer):
    """An optimizer of one's own, which passes empty pieces by."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                if not isinstance(one, sw.ShardedTensor) or one.to_local().numel():
                    one.add_(one.grad, alpha=-0.1)


@on("zero0", "zero3")
def test_writes_that_ranks_share_are_right(t: Trial) -> None:
    for step in range(3):
        t.add(word_loss, step)
        for model in t.both:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            Passing(model.parameters(), {}).step()
            with torch.no_grad():
                for one in model.parameters():
                    one.sub_(0.1 * one.grad)
                    one.grad = (one.grad * 1.5).clone() / 1.5
                    one.grad.mul_(torch.full(one.shape, 0.5))
                    one.add_(one.grad)
                    one.clamp_(min=torch.linspace(-1, 0, one.numel()).view(one.shape))
                    torch.add(one, torch.linspace(0, 1, one.numel()).view(one.shape), out=one.grad)
            model.zero_grad()
    assert_parameters_equal(t.net, t.plain)


@on("zero1")
def test_one_rank_may_use_its_pieces(t: Trial) -> None:
    """``to_local()`` is no write, nor what is done to it: counted on one rank, a write would gather
    there alone."""
    t.backward()
    if t.rank == 0:
        assert all(p.to_local().detach().mul_(1.0).norm() >= 0 for p in t.net.parameters())
    found = []
    for _ in range(2):
        with comm.record() as calls:
            t.net(words(t.rank))
        found.append([call.operation for call in calls])
        with torch.no_grad():
            t.net.head.weight.mul_(2)
    assert found == [[], ["all_gather"]]


# ------------------------------------------------------------------------------ exceptions


class BoomError(Exception):
    """Only our own mine raises it."""


class Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise BoomError("backward")


class MinedBlock(Block):
    armed: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if self.armed == "forward":
            raise BoomError("forward")
        if self.armed == "backward":
            hidden = Mine.apply(hidden)
        return x + self.down(hidden.tanh())


class Mined(nn.Module):
    """Blocks, and a mine inside one of them. ``careful``: it catches what its block raises."""

    careful = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MinedBlock() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except BoomError:
                if not self.careful:
                    raise
                x = x + 1
        return self.last(x)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
@on("zero0", "zero1", "zero3", "hsdp", "hfsdp", make=Mined)
def test_after_an_exception_and_a_reset_training_is_right(
    t: Trial, where: str, waits: bool
) -> None:
    optimizers = [adamw(model) for model in t.both]
    for number in range(3):
        if waits:  # gradients of an earlier microbatch, still unreduced, are dropped too
            t.net.set_requires_gradient_sync(False)
            vector_loss(t.net, t.rank, 50).backward()
            t.net.set_requires_gradient_sync(True)
        t.net.blocks[number].armed = where
        raised(lambda: vector_loss(t.net, t.rank, 60).backward(), BoomError)
        t.net.blocks[number].armed = None
        if where == "backward":  # gradients that it left are not mixed with those of the next
            raised(lambda: vector_loss(t.net, t.rank), RuntimeError)
        raised(lambda: t.net.blocks[0].reset_iter_state(), RuntimeError)  # it is for the root
        t.net.reset_iter_state()
        assert_at_rest(t.net, t.before)
        assert all(parameter.grad is None for parameter in t.net.parameters())
        t.backward(vector_loss, number)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_parameters_equal(t.net, t.plain)


@on(*MAIN_STRATEGIES, make=Mined)
def test_an_exception_that_the_model_catches_itself(t: Trial) -> None:
    t.net.set_reduce_scatter_unused_params(True)
    for armed in ("forward", None, "forward"):
        for model in t.both:
            model.careful, model.blocks[1].armed = True, armed
        t.add(vector_loss)
        for name, parameter in t.plain.named_parameters():
            if parameter.grad is not None:
                assert_close(full(t.net.get_parameter(name).grad), parameter.grad, name)
        assert_at_rest(t.net, t.before)
        t.zero_grad()


@on(*WAYS)
def test_training_goes_on_after_a_hook_raised(t: Trial) -> None:
    """A forward that ends in a hook's exception, on every rank; then training goes on."""

    def fail(*_: Any) -> None:
        raise KeyError("the user's own")

    for module in (t.net.blocks[0], t.net.blocks[1].up, t.net.head, t.net):
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            handle = register(fail)
            raised(lambda: word_loss(t.net, t.rank), KeyError)
            handle.remove()
            t.zero_grad()
            t.backward()


# ------------------------------------------------------------------------------ moves, meta


def reset_parameters(model: nn.Module, seed: int = 3) -> None:
    """As frameworks do it: every module that knows how, in order."""
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def meta_net(world_size: int, strategy: str) -> Any:
    with torch.device("meta"):  # wrapped inside of it, as torch's own tests do
        net = wrap(Net(), world_size, strategy)
    assert all(parameter.is_meta for parameter in net.parameters())
    return net


@pytest.mark.parametrize("how", ["reset", "one by one", "loaded"])
@pytest.mark.parametrize("strategy", [*MAIN_STRATEGIES, "data_parallel"])
@on_ranks(ranks_for)
def test_values_made_after_wrapping_are_those_of_an_eager_model(
    rank: int, world_size: int, strategy: str, how: str
) -> None:
    plain = Net()
    reset_parameters(plain)
    t = trial(rank, world_size, strategy)
    t.net, t.plain = meta_net(world_size, strategy), plain
    assert "embedding.weight" in raised(lambda: t.net(words(rank)), RuntimeError)
    if how == "one by one":
        torch.manual_seed(3)
        for module in t.net.modules():
            module.to_empty(device="cpu", recurse=False)
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    else:
        t.net.to_empty(device="cpu")
        t.net.load_state_dict(plain.state_dict()) if how == "loaded" else reset_parameters(t.net)
    assert_parameters_equal(t.net, plain, tolerance=0.0)
    t.before = {}
    t.add()
    assert_gradients_equal(t.net, plain)


def other_seeds(rank: int, world_size: int, strategy: str) -> list[Tensor]:
    net = meta_net(world_size, strategy)
    net.to_empty(device="cpu")
    reset_parameters(net, 100 + rank)
    with torch.no_grad():
        output = net(words(0))
    return [output, *(full(parameter).clone() for parameter in net.parameters())]


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
def test_seeds_that_differ_between_ranks_give_one_model_all_the_same(strategy: str) -> None:
    first, *others = run_ranks(other_seeds, ranks_for(strategy), strategy)
    assert first[1].unique().numel() > 100, "the embedding was initialised"
    for other in others:
        assert all(map(torch.equal, first, other))


@on(*MAIN_STRATEGIES)
def test_a_wrapped_model_can_change_its_dtype(t: Trial) -> None:
    for model in t.both:
        model.double()
    assert {parameter.dtype for parameter in t.net.parameters()} == {torch.float64}
    optimizers = [sgd(model) for model in t.both]
    for step in range(2):
        t.add(word_loss, step)
        assert_gradients_equal(t.net, t.plain, 1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def moved(rank: int, world_size: int, stage: int) -> Tensor:
    """One row, so that a rank has no elements; then every tensor is made anew."""
    net = nn.Linear(4, 1, bias=False)
    nn.init.ones_(net.weight)
    options = options_for(f"zero{stage}", world_size)
    sw.fully_shard(net, **options, precision=sw.Precision(weights="bf16"))
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        net._apply(lambda tensor: 2 * tensor)
    return net(torch.ones(1, 4)).detach().float()


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_without_elements_take_over_new_tensors_too(stage: int) -> None:
    assert [float(each) for each in run_ranks(moved, 2, stage)] == [16.0, 16.0]


@on(*MAIN_STRATEGIES)
def test_a_module_inside_a_unit_moves_alone(t: Trial) -> None:
    """Its parameters leave the flat buffer, which forward gathers: the next one takes them over."""
    optimizers = [sgd(model) for model in t.both]
    for step in range(3):
        t.backward(word_loss, step)
        for model, optimizer in zip(t.both, optimizers, strict=True):
            inner = model.blocks[0].up
            inner.double()
            inner._apply(lambda tensor: 2 * tensor)
            inner.float()  # with the gradients that the optimizer reads next
            optimizer.step()
            optimizer.zero_grad()
            model.head._apply(lambda tensor: 2 * tensor)
        assert_parameters_equal(t.net, t.plain)
    t.net.head.double()
    assert "'head.weight'" in raised(lambda: t.net(words(t.rank)), ValueError)


# ------------------------------------------------------------------------------ buckets, codecs


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(2)
def test_buckets_train_as_plain_torch_does(rank: int, world_size: int, overlap: bool) -> None:
    t = trial(rank, world_size, "data_parallel", overlap_gather=overlap)
    assert len(t.net._shardwise_unit.groups) > 2
    t.train()


class Scaled(Cast):
    """Numbers, and beside them the largest of each shard: two buffers, as codes and scales are."""

    def room(self, layout: Layout) -> Sequence[tuple[torch.dtype, int]]:
        return [(self.dtype, layout.shard_size), (torch.float32, 4)]

    def encode(self, main: Tensor, outs: Sequence[Tensor], layout: Layout, first: int) -> None:
        largest = main.view(outs[1].numel() // 4, -1).abs().amax(1, keepdim=True)
        outs[1].view(-1, 4).copy_(largest.expand(-1, 4))
        outs[0].copy_((main.view(len(largest), -1) / largest).view(-1))

    def is_plain(self, dtype: torch.dtype) -> bool:
        return False


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_the_buffers_of_a_codec_are_one_collective(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(lambda: nn.Linear(8, 16))
    with patch("shardwise.shard.group.Cast", Scaled):
        sw.fully_shard(net, **options_for(strategy, world_size))
    (group,) = net._shardwise_unit.groups
    shards, numel = group.layout.num_shards, group.layout.numel
    with comm.record() as calls:
        net.unshard()
    last = calls[-1]
    assert last.operation == "all_gather" and last.nbytes == 4 * (numel + 4 * shards)
    assert len(calls) == (2 if strategy == "hfsdp" else 1)
    codes, scales = group.whole.tensors
    decoded = (codes.view(shards, -1) * scales.view(shards, 4)[:, :1]).view(-1)
    for index, parameter in enumerate(plain.parameters()):
        start = group.layout.starts[index]
        found = decoded[start : start + parameter.numel()].view(parameter.shape)
        torch.testing.assert_close(found, parameter.detach())
