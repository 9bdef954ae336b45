# SPDX-License-Identifier: Apache-2.0
"""Grouped experts on an accelerator: ``python -m tests.device_moe`` on a machine with a Hopper GPU.

CI has none, so pytest does not collect this. bf16 against float64, with the one rounding that the
contract fixes (z); every shipped kernel configuration; outputs that start as NaN; the host never
waits. Experts that are spread over ranks, two processes on one card, inside compiled graphs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.kernels.grouped import FC1_TILE
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.moe.activation import (
    Activation,
    clamped_quick_geglu,
    clamped_swiglu,
    split_gate_up,
    squared_relu,
    swiglu,
)
from shardwise.moe.grouped_mlp import GroupedMLP
from shardwise.moe.layer import MixtureOfExperts, mixtures_of
from shardwise.moe.products import GROUPED, LOOP, FusedProducts
from shardwise.moe.router import Routing, logits_of
from tests.ranks import run_ranks

log = logging.getLogger(__name__)
HIDDEN, WIDTH = 256, 384
COUNTS = {
    "uneven": [130, 0, 377, 221, 1, 0],
    "one expert": [0, 0, 0, 700, 0, 0],
    "no tokens": [0] * 6,
}
TOLERANCE = 6e-3
CASES: list[tuple[Activation, int, bool, str]] = [
    (swiglu(), 0, False, "grouped"),
    (swiglu(), 32, True, "indexed"),
    (swiglu(), 8, False, "grouped"),
    (swiglu(), 6, False, "grouped"),  # no tile for it: the products and the pass apart
    (clamped_quick_geglu(alpha=1.702, limit=1.0, offset=1.0), 16, True, "grouped"),
    (clamped_swiglu(limit=1.0), 0, True, "indexed"),
    (squared_relu(), 0, True, "grouped"),
]


class Rounded(torch.autograd.Function):
    """z as bf16 holds it, in float64; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.bfloat16().double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def reference(
    x: Tensor, p: Tensor, weights: dict[str, Tensor], counts: list[int], act: Activation, block: int
) -> Tensor:
    out = []
    for expert, (rows, chance) in enumerate(zip(x.split(counts), p.split(counts), strict=True)):
        z = Rounded.apply(rows @ weights["fc1.weight"][expert].T)
        if "fc1.bias" in weights:
            z = Rounded.apply(z + weights["fc1.bias"][expert])
        if act.gated:
            gate, up = split_gate_up(z, block)
            if act.limit is not None:
                gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            h = gate * torch.sigmoid(act.alpha * gate) * (up + act.offset)
        else:
            h = z.clamp(min=0).square()
        y = (h * chance[:, None]) @ weights["fc2.weight"][expert].T
        if "fc2.bias" in weights:
            y = y + chance[:, None] * weights["fc2.bias"][expert]
        out.append(y)
    return torch.cat(out)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote is NaN."""
    empty, like = torch.empty, torch.empty_like

    def fill(made: Tensor) -> Tensor:
        return made.fill_(float("nan")) if made.is_floating_point() else made

    torch.empty = lambda *a, **k: fill(empty(*a, **k))
    torch.empty_like = lambda *a, **k: fill(like(*a, **k))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, like


def relative(value: Tensor, expected: Tensor) -> float:
    if expected.numel() == 0 or not expected.any():
        return float(value.double().abs().sum())
    return float((value.double() - expected).norm() / expected.norm())


def together(mlp: GroupedMLP, name: str, attribute: str) -> Tensor:
    linear, kind = name.split(".")
    experts = getattr(mlp, linear).experts(kind)
    parts = [getattr(parameter, attribute) for parameter in experts.parameters]
    return parts[0] if experts.grouped else torch.stack(parts)


def check(case: tuple[Activation, int, bool, str], spread: str, fuse: bool, grads: str) -> None:
    act, block, bias, layout = case
    counts = COUNTS[spread]
    torch.manual_seed(0)
    mlp = GroupedMLP(
        len(counts), HIDDEN, WIDTH, activation=act, gate_up_block=block, bias=bias,
        weight_layout=layout, device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=1.0 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5)
        if grads == "main":
            parameter.main_grad = torch.ones(parameter.shape, device="cuda")
    mlp.products = FusedProducts(FC1_TILE if fuse else None)
    rows = sum(counts)
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16().requires_grad_()
    p = torch.rand(rows, device="cuda").requires_grad_()
    dy = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with poisoned():
            y = mlp(x, ends, p)
            y.backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [f"{linear}.{kind}" for linear in ("fc1", "fc2")
             for kind in (("weight", "bias") if bias else ("weight",))]  # fmt: skip
    exact = {name: together(mlp, name, "data").double().requires_grad_() for name in names}
    x64, p64 = x.detach().double().requires_grad_(), p.detach().double().requires_grad_()
    want = reference(x64, p64, exact, counts, act, block)
    want.backward(dy.double())
    errors = {"y": relative(y, want), "dx": relative(x.grad, x64.grad),
              "dp": relative(p.grad, p64.grad)}  # fmt: skip
    for name in names:
        got = together(mlp, name, "main_grad") - 1 if grads == "main" else together(
            mlp, name, "grad")  # fmt: skip
        errors[name] = relative(got, exact[name].grad)
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not wrong, f"{act} block {block} bias {bias} {layout} {spread} {fuse} {grads}: {wrong}"


def check_same_on_every_path() -> None:
    """The fused path and the loop differ by the order of sums alone."""
    torch.manual_seed(1)
    loop = GroupedMLP(6, HIDDEN, WIDTH, activation=swiglu(), device="cuda",
                      dtype=torch.bfloat16)  # fmt: skip
    loop.products = LOOP
    fused = GroupedMLP(6, HIDDEN, WIDTH, activation=swiglu(), device="cuda",
                       dtype=torch.bfloat16, weight_layout="indexed", gate_up_block=32)  # fmt: skip
    fused.load_state_dict(loop.state_dict())
    x = torch.randn(729, HIDDEN, device="cuda").bfloat16()
    ends = torch.tensor(COUNTS["uneven"], device="cuda").cumsum(0).int()
    p = torch.rand(729, device="cuda")
    a, b = loop(x, ends, p), fused(x, ends, p)
    assert (a != b).float().mean() < 0.02 and relative(a, b.double()) < 1e-3


def check_logits() -> None:
    """Products of bf16 factors: logits as exact as fp32, gradients to their own rounding."""
    torch.manual_seed(3)
    x = torch.randn(4096, 1024, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(64, 1024, device="cuda") / 32).bfloat16().requires_grad_()
    logits, slope = logits_of(x, weight), torch.randn(4096, 64, device="cuda")
    logits.backward(slope)
    exact = x.detach().double() @ weight.detach().double().T
    assert logits.dtype == torch.float32 and relative(logits, exact) < 1e-6
    assert x.grad is not None and weight.grad is not None
    for found, wide in (
        (x.grad, slope.double() @ weight.detach().double()),
        (weight.grad, slope.double().T @ x.detach().double()),
    ):
        # As near as the bf16 number next to the exact one, but for a tie now and then.
        assert (found != wide.bfloat16()).float().mean() < 0.01


def check_layer_never_waits() -> None:
    """Router, dispatch and experts, forward and backward: the host asks the device for nothing."""
    torch.manual_seed(2)
    routing = Routing(num_experts=8, experts_per_token=2, balance_loss=0.1, z_loss=0.1,
                      bias_rate=0.01)  # fmt: skip
    shared = nn.Linear(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
    layer = MixtureOfExperts(routing, HIDDEN, WIDTH, activation=swiglu(), shared=shared,
                             device="cuda", dtype=torch.bfloat16)  # fmt: skip
    x = torch.randn(4, 96, HIDDEN, device="cuda").bfloat16().requires_grad_()
    for mode in ("default", "error"):  # kernels are built in the first
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out, routes = layer(x)
            (out.float().square().mean() + routes.loss).backward()
            layer.router.update_bias()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad is not None for parameter in layer.parameters())


def check_model(weights: str) -> None:
    """A GPT with experts under fully_shard on one rank: fused experts against torch's products."""
    config = GPTConfig(dim=256, num_layers=3, num_heads=4, context=128, num_experts=8,
                       expert_hidden_dim=384, shared_hidden_dim=128, num_dense_layers=1,
                       z_coefficient=0.01, bias_rate=0.01, recompute="block")  # fmt: skip
    words = torch.randint(0, 257, (4, 129), generator=torch.Generator().manual_seed(0)).cuda()
    losses = []
    for products in (None, GROUPED):
        with torch.device("meta"):
            model = GPT(config)
        for module in model.modules():
            if isinstance(module, GroupedMLP):
                module.products = products
        mesh = sw.init_mesh(device_type="cuda")
        precision = sw.Precision(weights=weights, reduce="fp32")  # type: ignore[arg-type]
        for unit in [*model.blocks, model]:
            sw.fully_shard(unit, mesh=mesh, placements=sw.zero(3), precision=precision)
        model.to_empty(device="cuda")
        model.init_weights(0)
        optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=1e-3))
        found = []
        for _ in range(20):
            loss = model(words[:, :-1], words[:, 1:])
            loss.backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            for module in model.modules():
                if isinstance(module, MixtureOfExperts):
                    module.router.update_bias()
            found.append(float(loss))
        losses.append(found)
    fused, products = losses
    assert abs(fused[0] - products[0]) < 2e-3 * products[0], (fused[0], products[0])
    assert fused[-1] < 0.8 * fused[0] and abs(fused[-1] - products[-1]) < 0.05 * products[0], losses


def _on_two(changes: dict[str, Any], weights: str) -> None:
    run_ranks(check_spread, 2, changes, weights, backend="cpu:gloo,cuda:gloo", timeout=150)


SPREAD: dict[str, dict[str, Any]] = {
    "exact sizes": {},
    "exact sizes, recomputed, delayed": {"recompute": "block", "delay_expert_gradients": True},
}


def check_spread(rank: int, world_size: int, changes: dict[str, Any], weights: str) -> None:
    """Spread experts in a graph against the same layers without one: bit for bit where the graph
    runs torch's own kernels, to rounding where Inductor writes them."""
    config = GPTConfig(dim=256, num_layers=3, num_heads=4, context=128, num_experts=8,
                       expert_hidden_dim=384, shared_hidden_dim=128, num_dense_layers=1,
                       balance_coefficient=0.01, bias_rate=0.01, **changes)  # fmt: skip
    mesh = sw.init_mesh(device_type="cuda")
    grid = init_device_mesh("cuda", (1, world_size), mesh_dim_names=("dp", "ep"))
    axis = sw.comm.as_axis(grid.get_group("ep"), "ep")
    runs = []
    for backend in (None, "aot_eager", "inductor"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = GPT(config).cuda()
        model.init_weights(0)
        for layer in mixtures_of(model):
            layer.spread(axis, sw.comm.as_axis(mesh.get_group(), "dp"))
            layer.experts.delay_weight_gradient = config.delay_expert_gradients
        for block in model.blocks if backend is not None else ():
            block.compile_forward(backend=backend, dynamic=False)  # type: ignore[operator]
        precision = sw.Precision(weights=weights, reduce="fp32")  # type: ignore[arg-type]
        for block in model.blocks:
            inside = {"*.experts": grid["dp"]} if mixtures_of(block) else None
            sw.fully_shard(block, mesh=mesh, meshes=inside, precision=precision)
        sw.fully_shard(model, mesh=mesh, precision=precision)
        optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=1e-3))
        found = []
        for step in range(6):
            made = torch.Generator().manual_seed(10 * step + rank)
            words = torch.randint(0, 257, (4, 129), generator=made).cuda()
            loss = model(words[:, :-1], words[:, 1:])
            loss.backward()
            found += [loss.detach().clone(), optimizer.clip_grad_norm(1.0).clone()]
            optimizer.step()
            optimizer.zero_grad()
            for layer in mixtures_of(model):
                layer.router.update_bias()
        runs.append(found + [one.to_local().clone() for one in model.parameters()])  # type: ignore[attr-defined]
    eager, graphs, inductor = runs
    assert all(map(torch.equal, eager, graphs)), list(map(relative, graphs[:12], eager[:12]))
    apart = list(map(relative, inductor[:12], eager[:12]))
    assert max(apart) < 2e-2, apart


def main() -> int:
    failures = 0
    number = 0
    for case in CASES:
        for spread in COUNTS:
            for fuse, grads in ((True, "autograd"), (False, "main")):
                number += 1
                try:
                    check(case, spread, fuse, grads)
                except Exception as error:
                    failures += 1
                    log.error("FAILED %s: %s", type(error).__name__, str(error)[:400])
    for name, call in (
        ("paths", check_same_on_every_path),
        ("logits", check_logits),
        ("no waiting", check_layer_never_waits),
        ("model in bf16", lambda: check_model("bf16")),
        ("model in mxfp8", lambda: check_model("mxfp8")),
        *(
            (f"spread, {kind}", partial(_on_two, changes, "bf16"))
            for kind, changes in SPREAD.items()
        ),
        ("spread, in fp8", partial(_on_two, {}, "fp8_block")),
    ):
        number += 1
        try:
            call()
        except Exception as error:
            failures += 1
            log.error("FAILED %s: %s", name, str(error)[:400], exc_info=True)
    log.info("%d checks, %d failed", number, failures)
    return int(failures > 0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main())
