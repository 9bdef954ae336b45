# SPDX-License-Identifier: Apache-2.0
"""Cases of FSDP2's contract: more of what people do to parameters, reading and writing."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.contract.helpers import assert_close, full
from tests.interop.fsdp2_contract import assert_same, both, case, step, words
from tests.interop.fsdp2_habits import habit


def local_of(p: Any) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


READS: dict[str, Callable[[Any], Any]] = {
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

for _habit, _read in READS.items():
    case(f"habit: {_habit}")(lambda shard, read=_read: habit(shard, read))

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
        model.to(torch.bfloat16).float().cpu()
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
