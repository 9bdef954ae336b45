# SPDX-License-Identifier: Apache-2.0
"""Experts as users treat modules: copied, assigned to, cast, frozen in part, spread twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.moe import (
    GroupedLinear,
    GroupedMLP,
    MixtureOfExperts,
    Routing,
    declare_gate_up,
    swiglu,
)
from tests.ranks import on_ranks

ENDS = torch.tensor([5, 10, 15, 20], dtype=torch.int32)


def experts(**options: Any) -> GroupedMLP:
    torch.manual_seed(0)
    mlp = GroupedMLP(4, 8, 8, activation=swiglu(), bias=True, **options)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    return mlp


def mixture(**routing: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    plan = Routing(num_experts=4, experts_per_token=2, **routing)
    return MixtureOfExperts(plan, 8, 8, activation=swiglu(), weight_layout="indexed")


def after_a_step(mlp: GroupedMLP) -> dict[str, torch.Tensor]:
    optimizer = sw.optimizer(mlp, matrix=sw.muon(lr=0.1), elementwise=sw.adamw(lr=0.1))
    generator = torch.Generator().manual_seed(1)
    x, p = torch.randn(20, 8, generator=generator), torch.rand(20, generator=generator)
    mlp(x, ENDS, p).square().sum().backward()
    optimizer.step()
    return {name: value.detach() for name, value in mlp.named_parameters()}


def test_copies_and_assigned_weights_are_the_same_matrices() -> None:
    """Grouped biases are no matrices, gate and up are two, also of parameters made anew."""
    expected = after_a_step(experts())
    with torch.device("meta"):
        assigned = GroupedMLP(4, 8, 8, activation=swiglu(), bias=True)
    assigned.load_state_dict(experts().state_dict(), assign=True)
    for mlp in (copy.deepcopy(experts()), assigned):
        for name, value in after_a_step(mlp).items():
            torch.testing.assert_close(value, expected[name])


def test_a_share_keeps_what_is_frozen_and_is_no_share_of_a_share() -> None:
    layer = mixture()
    for index in (0, 3):
        layer.experts.fc1.get_parameter(f"weight{index}").requires_grad_(False)
    layer.keep_share(2, 1)  # experts 2 and 3
    linear = layer.experts.fc1
    assert [linear.get_parameter(f"weight{i}").requires_grad for i in (0, 1)] == [True, False]
    with pytest.raises(ValueError, match="has 2 of 4 experts, from number 2 on: they are spr"):
        layer.keep_share(2, 1)


def test_counts_and_biases_stay_exact_in_a_bf16_model() -> None:
    router = mixture(bias_rate=0.001).router
    router.expert_bias += 0.3
    router.load += 501.0
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert router.load.tolist() == [501.0] * 4 and router.expert_bias.dtype == torch.float32
    torch.testing.assert_close(router.expert_bias, torch.full((4,), 0.3))


def test_counts_start_anew_where_a_model_without_values_gets_them() -> None:
    """Counts are no part of a state dict, so loading one does not bring them."""
    with torch.device("meta"):
        made = mixture(bias_rate=0.001)
    torch.use_deterministic_algorithms(True)  # what to_empty leaves is nan then, not luck
    try:
        made.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    made.load_state_dict(mixture(bias_rate=0.001).state_dict())
    assert made.router.tally().tolist() == [0.0] * 4


def test_tiny_scores_are_normalised_too() -> None:
    router = mixture(score="sigmoid", normalise=True, scale=2.0).router
    with torch.no_grad():
        router.weight.copy_(torch.tensor([-60.0, -60.5, -61.0, -62.0])[:, None].expand(4, 8) / 8)
        weights = router(torch.ones(3, 8)).weights
    torch.testing.assert_close(weights.sum(-1), torch.full((3,), 2.0))


def test_delayed_gradients_after_a_first_evaluation() -> None:
    mlp = experts(delay_weight_gradient=True)
    x, p = torch.randn(20, 8), torch.rand(20)
    with torch.inference_mode():
        mlp(x.clone(), ENDS.clone(), p.clone())
    mlp(x, ENDS, p).sum().backward()
    mlp.backward_dw()
    assert all(parameter.grad is not None for parameter in mlp.parameters())


# ------------------------------------------------------------------------------ dtypes


def _reference(mlp: GroupedMLP, x: Tensor, p: Tensor) -> Tensor:
    """Expert by expert in the dtype of the rows, by autograd."""
    parts = []
    for number, (rows, weights) in enumerate(zip(x.split(5), p.split(5), strict=True)):
        z = rows @ mlp.fc1.weight[number].T + mlp.fc1.bias[number]
        gate, up = z.chunk(2, -1)
        h = gate * torch.sigmoid(gate) * up * weights[:, None]
        parts.append(h @ mlp.fc2.weight[number].T + weights[:, None] * mlp.fc2.bias[number])
    return torch.cat(parts)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float64_is_computed_in_float64(dtype: torch.dtype, autocast: bool) -> None:
    """Torch's own autocast leaves float64 alone."""
    mlp = experts().double()
    x = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    p = torch.rand(20).to(dtype).requires_grad_()
    found, expected = [], []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for compute, into in ((lambda: mlp(x, ENDS, p), found), (None, expected)):
            y = compute() if compute else _reference(mlp, x, p.double())
            inputs = [x, p, *mlp.parameters()]
            into += [y, *torch.autograd.grad(y.square().sum(), inputs)]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        limit = 1e-6 if other.dtype == torch.float32 else 1e-13
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def test_a_router_computes_float64_in_float64() -> None:
    x = torch.randn(20, 8, dtype=torch.float64)
    layer = mixture(balance_loss=0.1, z_loss=0.1).double()
    weight = layer.router.weight.detach()
    y, routes = layer(x)
    scores = (x @ weight.T).softmax(-1)
    best = scores.gather(-1, routes.experts)
    assert y.dtype == routes.weights.dtype == routes.loss.dtype == torch.float64
    torch.testing.assert_close(
        routes.weights, best / best.sum(-1, keepdim=True), rtol=1e-13, atol=0
    )
    (y.sum() + routes.loss).backward()


# ------------------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize("module", ["mlp", "layer", "delayed"])
def test_experts_compile_on_the_cpu_in_fp32(module: str) -> None:
    """The last between graphs."""
    torch._dynamo.reset()
    layer = mixture()
    layer.experts.delay_weight_gradient = module == "delayed"
    mlp, weight = layer.experts, layer.experts.fc1.weight0
    x, p = torch.randn(20, 8, requires_grad=True), torch.rand(20)
    calls: dict[str, Any] = {
        "mlp": lambda: mlp(x, ENDS, p),
        "layer": lambda: layer(x)[0],
        "delayed": lambda: layer(x)[0],
    }
    whole = module != "delayed"
    results = []
    for call in (calls[module], torch.compile(calls[module], backend="aot_eager", fullgraph=whole)):
        x.grad = weight.grad = None
        out = call()
        out.sum().backward()
        layer.backward_dw()
        results.append([out, x.grad, weight.grad])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------ refused by name


def mlp_of(count: Any = 4, hidden: Any = 8, layout: Any = "grouped", **options: Any) -> GroupedMLP:
    return GroupedMLP(count, hidden, 8, activation=swiglu(), weight_layout=layout, **options)


LAYER = {"num_experts": 4, "experts_per_token": 2}
WHOLE = (2.5, True, 0, "4")  # no whole numbers of 1 or more
# (what is refused, the parameters that the error names)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: experts()(torch.randn(20, 8), ENDS, None), "p=None"),  # type: ignore[arg-type]
    (lambda: experts(gate_up_block=2.0), "gate_up_block=2.0"),
    (lambda: Routing(num_experts=6.0, experts_per_token=2), "num_experts=6.0"),  # type: ignore[arg-type]
    (lambda: Routing(num_experts=6, experts_per_token=True), "experts_per_token=True"),
    (lambda: Routing(**LAYER, normalise="no"), "normalise='no'"),  # type: ignore[arg-type]
    (lambda: Routing(**LAYER, bias_rate=True), "bias_rate=True"),
    (lambda: Routing(**LAYER, z_loss="0.1"), "z_loss='0.1'"),  # type: ignore[arg-type]
    (lambda: mixture()(torch.randn(8)), "hidden states"),
    (lambda: mixture()(torch.randn(3, 9)), "hidden states"),
    *((lambda wrong=wrong: mlp_of(wrong), "num_experts=") for wrong in WHOLE),
    *((lambda wrong=wrong: mlp_of(4, wrong), "hidden=") for wrong in WHOLE),
    *((lambda wrong=wrong: GroupedLinear(4, wrong, 8), "in_features=") for wrong in WHOLE),
    *(
        (lambda size=size, rank=rank: mixture().keep_share(size, rank), "keep_share|spread")
        for size, rank in ((2.5, 0), (0, 0), (2, 5), (2, -1))
    ),
    *(
        (lambda block=block: declare_gate_up({}, "fc1.", block), "gate_up_block=")
        for block in (-1, 2.5, True, "x")
    ),
]


@pytest.mark.parametrize(("call", "named"), REFUSED)
def test_what_cannot_work_is_refused_by_name(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


@on_ranks(1)
def test_what_is_no_axis_is_refused_by_name(rank: int, world_size: int) -> None:
    mesh = sw.init_mesh(dp=1)
    for wrong in (mesh, mesh.get_group(), 3):
        for given in ({"axis": wrong}, {"axis": None, "tokens": wrong}):
            with pytest.raises(ValueError, match=f"spread.{[*given][-1]}="):
                mixture().spread(**given)
        with pytest.raises(ValueError, match="axis="):
            MixtureOfExperts(mixture().router.routing, 8, 8, activation=swiglu(), axis=wrong)


@pytest.mark.parametrize("layout", ["grouped", "indexed"])
@pytest.mark.parametrize("stored", ["grouped", "indexed"])
def test_other_numbers_of_experts_are_named_once(stored: Any, layout: Any) -> None:
    for here, there in ((8, 16), (16, 8), (8, 9)):
        state = mlp_of(there, layout=stored, bias=True).state_dict()
        with pytest.raises(RuntimeError) as caught:
            mlp_of(here, layout=layout, bias=True).load_state_dict(state)
        for name in ("fc1", "fc2"):
            assert str(caught.value).count(f"'{name}.weight' has {there} experts") == 1
    share = mlp_of(layout=layout)
    share.spread(2, 2)
    with pytest.raises(RuntimeError, match="has 8 experts"):
        share.load_state_dict(mlp_of(8, layout=stored).state_dict())
    state = mlp_of(layout="indexed").state_dict()
    state["fc2.weight2"] = torch.zeros(8, 5)
    with pytest.raises(ValueError, match=r"'fc2.weight2'"):
        mlp_of().load_state_dict(state)
