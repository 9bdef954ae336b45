# SPDX-License-Identifier: Apache-2.0
"""Cases of FSDP2's contract: optimizers, knobs, and what people do to parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor, Shard

from tests.contract.helpers import assert_close, full, raised
from tests.interop.fsdp2_contract import Tail, assert_same, both, case, step, trains, words
from tests.one_card import UNTRACED, device_type

# ------------------------------------------------------------------------------ 7: torch.optim


def trains_with(shard: Any, make: Any, tolerance: float = 1e-4) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        optimizer = make(model)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(words()).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    assert_same(net, plain, tolerance)


@case("7 torch.optim.Muon", torch_fails="differs by")
def torch_muon(shard: Any) -> None:
    trains_with(shard, lambda m: torch.optim.Muon(matrices(m)))


def matrices(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def optimizer_case(name: str, make: Any, torch_fails: str | None = None) -> None:
    case(f"7 torch.optim.{name}", torch_fails=torch_fails)(lambda shard: trains_with(shard, make))


_optim = torch.optim
optimizer_case("Adafactor", lambda m: _optim.Adafactor(m.parameters()), "in-place operations")
optimizer_case("LBFGS", lambda m: _optim.LBFGS(m.parameters(), max_iter=4))
for _form in ("foreach", "fused"):
    optimizer_case(
        f"Adam({_form}=True)", lambda m, f=_form: _optim.Adam(m.parameters(), **{f: True})
    )


@case("7 autograd.grad of inputs leaves parameters alone")
def gradients_of_inputs(shard: Any) -> None:
    net = Tail()
    plain = copy.deepcopy(net)
    shard(net)
    found = []
    for model in (net, plain):
        x = torch.ones(2, 8, requires_grad=True)
        found.append(torch.autograd.grad(model(x).square().sum(), x)[0])
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_close(found[0], found[1], "input")
    net(torch.ones(2, 8)).sum().backward()
    assert net.body.weight.grad is not None


# ------------------------------------------------------------------------------ 8: knobs


@case("8 shard_placement_fn with another dimension")
def placement(shard: Any) -> None:
    net, plain = both(shard, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    trains(net, plain)


@case("8 shard_placement_fn where nothing divides evenly", torch_fails="uneven sharding")
def placement_uneven(shard: Any) -> None:
    net = nn.Linear(7, 5)
    shard(net, shard_placement_fn=lambda p: Shard(p.ndim - 1))


@case("8 clip_grad_norm_ returns what has full_tensor()")
def clip(shard: Any) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        model(words()).square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (net, plain)]
    assert_close(norms[0].full_tensor(), norms[1], "norm")
    assert_close(full(net.embed.weight.grad), plain.embed.weight.grad, "clipped")


@case("8 fully_shard.state(module)")
def state_of(shard: Any) -> None:
    net, _ = both(shard)
    assert shard.state(net) is not None and shard.state(net.blocks[0]) is not None
    assert shard.state(net.blocks[0][0]) is None


class Eight(Tensor):
    """A parameter that asks to be gathered in its own way, as torchao's float8 does."""

    @staticmethod
    def fsdp_pre_all_gather(mesh: Any) -> Any:
        raise RuntimeError("called")


@case("8 fsdp_pre_all_gather is called or refused", torch_fails="nothing was raised")
def extension(shard: Any) -> None:
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Eight))
    text = raised(lambda: shard(net)(torch.ones(1, 4)), Exception)
    assert "called" in text or "fsdp_pre_all_gather" in text


# ------------------------------------------------------------------------------ habits

HABITS: dict[str, Callable[[Any], Any]] = {
    "norm by row": lambda p: p.norm(dim=1),
    "norm of .data": lambda p: p.data.norm(),
    "mean, std, var": lambda p: torch.stack([full(p.mean()), full(p.std()), full(p.var())]),
    "a row": lambda p: p[3],
    "rows": lambda p: p[2:5],
    "columns": lambda p: p[:, 1:3],
    "chunk": lambda p: p.chunk(2)[1],
    "split by column": lambda p: p.split([3, 5], dim=1)[1],
    "t()": lambda p: p.t(),
    "mT @": lambda p: p.mT @ p,
    "permute": lambda p: p.permute(1, 0),
    "view(-1)": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(4, -1),
    "unsqueeze": lambda p: p.unsqueeze(0),
    "sort": lambda p: p.flatten().sort().values,
    "svd": lambda p: torch.linalg.svdvals(p),
    "cat": lambda p: torch.cat([p, p]),
    "redistribute": lambda p: (
        p.redistribute(placements=[Shard(1)]) if isinstance(p, DTensor) else p
    ),
    "new_zeros": lambda p: p.new_zeros(3),
    "divided by row norms": lambda p: p / (p.norm(dim=1, keepdim=True) + 1),
    "isnan().any()": lambda p: p.isnan().any(),
    "cpu().clone()": lambda p: p.cpu().clone(),
    "bfloat16()": lambda p: p.bfloat16(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "repr": lambda p: (repr(p), p)[1],
    "norm by column": lambda p: p.norm(dim=0),
    "abs().max()": lambda p: p.abs().max(),
    "an element": lambda p: p[3, 2],
    "chunk by column": lambda p: p.chunk(2, dim=1)[1],
    "sum by row": lambda p: p.sum(dim=1),
    "topk": lambda p: p.flatten().topk(3).values,
    "quantile": lambda p: p.detach().quantile(0.3),
    "stack": lambda p: torch.stack([p, p]),
    "zeros_like": lambda p: torch.zeros_like(p),
    "isfinite().all()": lambda p: torch.isfinite(p).all(),
    "== and .all()": lambda p: (p == p).all(),
    "numpy() of to_local()": lambda p: (local_of(p).detach().numpy(), p)[1],
    "half() and back": lambda p: p.half().float().bfloat16(),
    "full_tensor().cpu().numpy()": lambda p: torch.from_numpy(full(p).detach().cpu().numpy()),
    "numel, element_size, dtype": lambda p: torch.tensor([p.numel(), p.element_size(), p.dim()]),
}


def local_of(p: Any) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def habit(shard: Any, read: Callable[[Any], Any]) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        model(words()).square().mean().backward()
    for name in ("embed.weight", "blocks.1.0.weight"):
        ours, theirs = net.get_parameter(name), plain.get_parameter(name)
        for one, other in (
            (ours, theirs),
            (ours.detach(), theirs.detach()),
            (ours.grad, theirs.grad),
        ):
            assert_close(full(read(one)).detach(), read(other).detach(), name, 1e-4)


for _habit, _read in HABITS.items():
    _cpu_only = "numpy reads memory of the host" if _habit.startswith("numpy()") else None
    case(f"habit: {_habit}", cpu_only=_cpu_only)(lambda shard, read=_read: habit(shard, read))


@case("habit: nn.init", torch_fails="embed.weight")
def inits(shard: Any) -> None:
    """Torch's DTensor draws other numbers than one process."""
    net, plain = both(shard)
    for fill in (
        lambda p: nn.init.normal_(p, std=0.02),
        lambda p: nn.init.trunc_normal_(p, std=0.02),
        nn.init.xavier_uniform_,
        nn.init.orthogonal_,
        nn.init.eye_,
    ):
        for model in (net, plain):
            torch.manual_seed(5)
            fill(model.embed.weight)
        assert_close(full(net.embed.weight.detach()), plain.embed.weight.detach(), "embed.weight")


@case("habit: state dict surgery")
def surgery(shard: Any) -> None:
    net, plain = both(shard)
    values = {f"module.{name}": value.clone() for name, value in net.state_dict().items()}
    values = {name.removeprefix("module."): value * 2 for name, value in values.items()}
    del values["output.weight"]
    assert net.load_state_dict(values, strict=False).missing_keys == ["output.weight"]
    assert_close(full(net.norm.weight.detach()), plain.norm.weight.detach() * 2, "norm")
    assert_close(full(net.output.weight.detach()), plain.output.weight.detach(), "output")


@case("habit: an average of weights, loaded back")
def average(shard: Any) -> None:
    net, plain = both(shard)
    kept = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    for name, parameter in net.named_parameters():
        kept[name].lerp_(parameter.detach(), 0.0)
    net.load_state_dict(kept)
    assert_same(net, plain)


WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda p: p.copy_(p.detach() * 2),
    "data.mul_": lambda p: p.data.mul_(0.5),
    "data.copy_": lambda p: p.data.copy_(p.data + 1),
    "add_ of the gradient": lambda p: p.add_(p.grad, alpha=-0.1),
    "grad.mul_": lambda p: (p.grad.mul_(0.5), p.sub_(p.grad)),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "foreach": lambda p: torch._foreach_mul_([p], 0.9),
    "lerp_": lambda p: p.lerp_(torch.ones_like(p), 0.25),
    "addcdiv_": lambda p: p.addcdiv_(p.grad, p.grad.abs() + 1, value=-0.1),
    "clip_grad_value_": lambda p: (nn.utils.clip_grad_value_([p], 1e-3), p.sub_(p.grad)),
    "requires_grad_ and back": lambda p: p.requires_grad_(False).requires_grad_(True).mul_(2),
}


def writes(shard: Any, write: Callable[[Any], Any]) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        model(words()).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)
    assert_same(net, plain)
    with torch.no_grad():  # what forward sees
        assert_close(net(words()), plain(words()), "output", 1e-4)


for _habit, _write in WRITES.items():
    case(f"habit: {_habit}")(lambda shard, write=_write: writes(shard, write))


@case("habit: a plain full tensor written to a parameter", torch_fails="got mixed")
def write_plain(shard: Any) -> None:
    writes(shard, lambda p: p.copy_(torch.full(p.shape, 0.25)))


@case("habit: p.data = values", torch_fails="embed.weight: differs by")
def write_data(shard: Any) -> None:
    """Torch's writes are lost: forward gathers another tensor."""
    writes(shard, lambda p: setattr(p, "data", p.data * 2))
    net, plain = both(shard)
    for model in (net, plain):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device_type())  # itself
        values = nn.utils.parameters_to_vector(plain.parameters()).detach() * 3
        nn.utils.vector_to_parameters(values, model.parameters())
    assert_same(net, plain)


@case("habit: torch.compile of an optimizer's step", cpu_only=UNTRACED)
def compiled_step(shard: Any) -> None:
    torch._dynamo.reset()
    net, plain = both(shard)
    for model in (net, plain):
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        for _ in range(2):
            step(model, optimizer)
    assert_same(net, plain)


@case("habit: attributes of parameters", torch_fails="decays")
def attributes(shard: Any) -> None:
    """Attributes that were set before wrapping are gone with torch's."""
    plain, made = Tail(), Tail()
    for parameter in made.parameters():
        parameter.decays = parameter.ndim > 1  # type: ignore[attr-defined]
    net = shard(made)
    identities = [id(parameter) for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.seen = True
    net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})
    net(torch.ones(2, 8)).sum().backward()
    assert identities == [id(parameter) for parameter in net.parameters()]
    assert all(parameter.seen for parameter in net.parameters())
    assert [p.decays for p in net.parameters()] == [p.ndim > 1 for p in plain.parameters()]


@case("habit: optimizers inside backward")
def steps_inside(shard: Any) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        each = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

        def apply(p: Any, each: Any = each) -> None:
            each[p].step()
            each[p].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(apply)
        for _ in range(2):
            model(words()).square().mean().backward()
    assert_same(net, plain)


@case("habit: groups by dimensions, a scheduler, accumulation, a scaler, a clip")
def whole_loop(shard: Any) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        sizes = [[p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False)]
        groups = [{"params": sizes[0], "weight_decay": 0.1}, {"params": sizes[1]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (count + 1))
        scaler = torch.amp.GradScaler(device_type(), init_scale=8.0)
        for _ in range(2):
            for microbatch in range(2):
                if model is net:
                    net.set_is_last_backward(microbatch == 1)
                    net.set_requires_gradient_sync(microbatch == 1)
                scaler.scale(model(words()).square().mean() / 2).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, full(norm))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad(set_to_none=False)
    assert_same(net, plain)


@case("habit: an evaluation, then training", torch_fails="differs by")
def evaluated(shard: Any) -> None:
    """After torch's evaluation the optimizer that is made next holds other parameters."""
    net, plain = both(shard)
    with torch.no_grad():
        assert_close(net.eval()(words()), plain(words()), "evaluation")
    with torch.inference_mode():
        assert_close(net(words()).clone(), plain(words()), "inference")
    trains(net.train(), plain)


@case("10 replicate (DDP in place) around wrapped modules")
def replicated_around(shard: Any) -> None:
    _, plain = both(lambda module: module)
    net = copy.deepcopy(plain)
    shard(net.blocks[0])
    replicate(net)
    for model in (net, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(2):
            step(model, optimizer)
    assert_same(net, plain)


def hooked(model: Any) -> list[str]:
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: seen.append(n))
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    return seen


@case("habit: hooks of parameters and modules")
def hooks(shard: Any) -> None:
    found = []
    for model in both(shard):
        found.append(hooked(model))
        model(words()).square().mean().backward()
    assert sorted(found[0]) == sorted(found[1]) and len(found[0]) == len(set(found[0])) == 10


@case("habit: dtype moves of a model")
def moves(shard: Any) -> None:
    net, plain = both(shard)
    for model in (net, plain):
        model.to(torch.bfloat16).float().to(device_type())
        model.half().to(torch.float32)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_same(net, plain, 1e-4)


@case("habit: torch.save of whole state dicts, loaded into a plain model")
def saved_whole(shard: Any) -> None:
    net, plain = both(shard)
    file = io.BytesIO()
    torch.save({name: full(value) for name, value in net.state_dict().items()}, file)
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    assert_same(net, plain, 0.0)
