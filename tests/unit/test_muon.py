# SPDX-License-Identifier: Apache-2.0
"""Muon in one process: against a textbook in float64, against torch's, and its rules."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.kernels.polynomials import DEFAULT, PRESETS
from shardwise.optim.muon import SCALES
from tests.models import Weights as Parameters
from tests.reference.muon import SlowMuon

STEPS = 6
Weights = partial(Parameters, scale=0.1)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


def set_gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    grads = gradients(model, step)
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name].clone()
    return grads


def whole(rows: int, cols: int) -> list[tuple[list[int], list[int]]]:
    return [(list(range(rows)), list(range(cols)))]


SHAPES = {"wide": (8, 24), "tall": (30, 12), "square": (16, 16)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"nesterov": False, "momentum": 0.9},
        {"weight_decay": 0.3},
        {"weight_decay": 0.3, "decay": "cautious"},
        {"scale": "match_rms_adamw"},
        {"scale": "unit_rms_norm"},
        {"scale": "max_side"},
        {"scale": "none", "preset": "keller"},
        {"preset": "polar_express"},
    ],
    ids=str,
)
def test_it_follows_the_textbook(options: dict[str, Any]) -> None:
    model = Weights(SHAPES)
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.1, **options), elementwise=None)
    slow = SlowMuon(
        {name: p.detach() for name, p in model.named_parameters()},
        {name: whole(*shape) for name, shape in SHAPES.items()},
        PRESETS[options.get("preset", DEFAULT)],
        lr=0.1,
        momentum=options.get("momentum", 0.95),
        weight_decay=options.get("weight_decay", 0.0),
        nesterov=options.get("nesterov", True),
        cautious=options.get("decay") == "cautious",
        scale=options.get("scale", "original"),
    )
    for step in range(STEPS):
        slow.step(set_gradients(model, step))
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.detach().double(), slow.weights[name], rtol=0, atol=2e-4, msg=name
        )
        found = optimizer.state[parameter]["momentum_buffer"].double()
        torch.testing.assert_close(found, slow.buffers[name], rtol=0, atol=1e-5, msg=name)


def test_adamw_is_torchs_bit_for_bit() -> None:
    shapes = SHAPES | {"vector": (17,), "cube": (2, 3, 4)}
    ours, theirs = Weights(shapes), Weights(shapes)
    settings = sw.adamw(lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    optimizer = sw.optimizer(ours, matrix=None, elementwise=settings)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(STEPS):
        for model in (ours, theirs):
            set_gradients(model, step)
        optimizer.step()
        reference.step()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, its)
        for key, value in reference.state[its].items():
            assert torch.equal(optimizer.state[mine][key], value), key


def test_scales_by_name() -> None:
    assert SCALES["original"](8, 2) == 2.0 and SCALES["original"](2, 8) == 1.0
    assert SCALES["match_rms_adamw"](100, 25) == pytest.approx(2.0)
    assert SCALES["unit_rms_norm"](2, 8) == 0.5
    assert SCALES["max_side"](2, 9) == SCALES["max_side"](9, 2) == 3.0
    assert SCALES["none"](2, 8) == 1.0


@pytest.mark.parametrize("name", ["spectral", "spectral_norm"])
def test_a_scale_that_libraries_disagree_about_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="scale=") as caught:
        sw.muon(scale=name)
    for part in ("sqrt(max(1, out/in))", "'original'", "sqrt(max(out, in))", "'max_side'"):
        assert part in str(caught.value)


def test_settings_that_cannot_work_are_refused_together() -> None:
    with pytest.raises(ValueError, match="cannot work") as caught:
        sw.muon(lr=-1, momentum=1.0, preset="kelly", scale="rms", decay="l2")
    message = str(caught.value)
    for part in ("lr=-1", "momentum=1.0", "'kelly' is unknown", "'rms'", "'l2'"):
        assert part in message, message
    with pytest.raises(ValueError, match=r"lr=-1 .*; betas=\(0.9, 1.0\)"):
        sw.adamw(lr=-1, betas=(0.9, 1.0))


def test_an_optimizer_that_cannot_work_is_refused() -> None:
    vectors = Weights({"a": (5,), "b": (6,)})
    with pytest.raises(ValueError, match="no matrices to orthogonalise"):
        sw.optimizer(vectors, matrix=sw.muon(), elementwise=sw.adamw())
    both = Weights({"a": (5,), "m": (4, 4)})
    with pytest.raises(ValueError, match="'a' belong to no optimizer"):
        sw.optimizer(both, matrix=sw.muon(), elementwise=None)
    with pytest.raises(ValueError, match="cannot work") as caught:
        sw.optimizer(nn.Identity(), matrix="muon", elementwise=torch.optim.AdamW)
    for part in ("matrix='muon'", "use sw.adamw", "no trainable parameters"):
        assert part in str(caught.value)
    turned = nn.Linear(4, 4)
    turned.weight = nn.Parameter(torch.zeros(4, 3).t())
    with pytest.raises(ValueError, match="'weight' is not contiguous"):
        sw.optimizer(turned, matrix=sw.muon(), elementwise=sw.adamw())
    with torch.device("meta"):
        late = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="'weight' has no values yet"):
        sw.optimizer(late, matrix=sw.muon(), elementwise=sw.adamw())
    with pytest.raises(TypeError, match=r"takes the model, not a.*sw\.Muon takes parameters"):
        sw.optimizer(nn.Linear(3, 3).parameters(), matrix=None, elementwise=sw.adamw())


def test_schedulers_closures_hooks_and_groups() -> None:
    model = Weights(SHAPES | {"vector": (6,)})
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.2), elementwise=sw.adamw(lr=0.01))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in model.parameters())
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[2] < losses[1] < losses[0] and seen == ["before", "after"] * 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.2 / 8, 0.01 / 8]
    assert [group["kind"] for group in optimizer.param_groups] == ["matrix", "elementwise"]


def test_settings_that_are_changed_later_or_loaded_take_effect() -> None:
    settings = {"scale": "match_rms_adamw", "preset": "keller", "momentum": 0.5}
    models = [Weights(SHAPES) for _ in range(3)]
    built, edited, loaded = (
        sw.optimizer(model, matrix=sw.muon(**own), elementwise=None)
        for model, own in zip(models, (settings, {}, {}), strict=True)
    )
    edited.param_groups[0].update(settings)
    loaded.load_state_dict(copy.deepcopy(built.state_dict()))
    for step in range(2):
        for model, optimizer in zip(models, (built, edited, loaded), strict=True):
            set_gradients(model, step)
            optimizer.step()
    for model in models[1:]:
        assert all(map(torch.equal, model.parameters(), models[0].parameters()))


@pytest.mark.parametrize("in_step", [False, True])
def test_a_clip_reaches_the_momentum_and_not_the_orthogonal_update(in_step: bool) -> None:
    models = [Weights(SHAPES) for _ in range(2)]
    optimizers = [sw.optimizer(m, matrix=sw.muon(lr=0.1), elementwise=None) for m in models]
    for model in models:
        set_gradients(model, 0)
    norm = optimizers[0].clip_grad_norm(0.01, in_step=in_step)
    for optimizer in optimizers:
        optimizer.step()
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        clipped, whole = (
            o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (mine, its), strict=True)
        )
        torch.testing.assert_close(clipped, whole * (0.01 / norm))
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-5)


def test_dropped_states_begin_anew() -> None:
    model = Weights(SHAPES | {"vector": (6,)})
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    for drop in (optimizer.state.clear, lambda: optimizer.state[model.vector].clear()):
        set_gradients(model, 0)
        optimizer.step()
        assert optimizer.state[model.vector]["exp_avg"].any()
        drop()
        optimizer.step()
        assert optimizer.state[model.vector]["step"] == 1
        assert optimizer.state[model.wide]["momentum_buffer"].any()


def test_states_are_loaded_by_name() -> None:
    model = Weights(SHAPES)
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=None)
    set_gradients(model, 0)
    optimizer.step()
    turned = Weights(dict(reversed(SHAPES.items())))
    other = sw.optimizer(turned, matrix=sw.muon(), elementwise=None)
    other.load_state_dict(optimizer.state_dict())
    for name, parameter in model.named_parameters():
        expected = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(other.state[turned.get_parameter(name)]["momentum_buffer"], expected)
    names = dict(zip("abc", reversed(SHAPES.values()), strict=True))
    renamed = sw.optimizer(Weights(names), matrix=sw.muon(), elementwise=None)
    with pytest.raises(ValueError, match=r"'a' of shape .* would get momentum_buffer of"):
        renamed.load_state_dict(optimizer.state_dict())


def test_another_kind_of_state_dict_is_refused() -> None:
    model = Weights(SHAPES | {"vector": (6,)})
    one = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    other = sw.optimizer(model, matrix=None, elementwise=sw.adamw())
    with pytest.raises(ValueError, match=r"groups of kinds \['elementwise'\]"):
        one.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="kind=None"):
        one.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    late = {"params": [nn.Parameter(torch.zeros(2))], "kind": "elementwise", "name": "late"}
    with pytest.raises(ValueError, match="does not know maximize, learning_rate"):
        one.add_param_group(late | {"maximize": True, "learning_rate": 1.0})
    one.add_param_group(late | {"lr": 1.0})


def test_a_group_can_be_added() -> None:
    model, more = Weights(SHAPES), Weights({"extra": (6, 9)})
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.1), elementwise=None)
    optimizer.add_param_group({"params": list(more.parameters()), "kind": "matrix", "lr": 0.0})
    before = more.extra.detach().clone()
    for lr, moves in ((0.0, False), (0.1, True)):
        optimizer.param_groups[1]["lr"] = lr
        set_gradients(model, 0)
        set_gradients(more, 0)
        optimizer.step()
        assert torch.equal(more.extra, before) is not moves
    optimizer.load_state_dict(optimizer.state_dict())
    set_gradients(model, 0)
    optimizer.step()
    kept, extra = optimizer.param_groups
    optimizer.param_groups = [extra, kept]
    optimizer.step()
