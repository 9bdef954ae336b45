# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in the trainer: spread over ranks or not, the same run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.moe import mixtures_of
from shardwise.report.html import write_report
from shardwise.train.config import TrainConfig
from tests.one_card import ranks_device
from tests.ranks import run_ranks
from tests.train_runs import events_of, make_trainer, write_text

# In 16 bits, as a GPU orthogonalises, a token may choose another expert in a later step.
NEAR = 2e-4 if ranks_device() == "cpu" else 2e-2
MODEL = GPTConfig(
    dim=16,
    num_layers=3,
    num_heads=2,
    context=16,
    num_experts=4,
    expert_hidden_dim=16,
    shared_hidden_dim=16,
    num_dense_layers=1,
    z_coefficient=0.01,
    bias_rate=0.01,
)


def train(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> list[int]:
    trainer = make_trainer(rank, world_size, folder, model=MODEL, steps=4, **changes)
    trainer.run()
    biases = [router.expert_bias for router in trainer.experts.routers]
    assert len(biases) == 2 and all(bias.abs().max() > 0 for bias in biases)
    experts = trainer.parts.model.blocks[1].feed_forward.experts
    return [experts.num_experts, experts.fc1.weight.to_local().numel()]


def seen(folder: Path) -> list[list[float]]:
    names = ("loss", "grad_norm", "expert_load_max", "expert_idle_share")
    steps = events_of(folder, "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    return [[event[name] for name in names] for event in steps]


def test_spread_experts_train_as_one_rank_does(tmp_path: Path) -> None:
    """Muon under zero3: 1 rank; 2 ranks; experts over 2 of 4, also replicated, and over 2 of 2."""
    data = write_text(tmp_path)
    runs = {"one": (1, 1), "data": (2, 1), "pairs": (4, 2), "hsdp": (4, 2), "all": (2, 2)}
    for name, (ranks, ep) in runs.items():
        changes = {"data": data, "ep": ep, "strategy": "hsdp" if name == "hsdp" else "zero3"}
        found = run_ranks(train, ranks, str(tmp_path / name), changes)
        assert [local for local, _ in found] == [4 // ep] * ranks
        # Every element of the experts is on one rank, or on one of each replica.
        assert sum(held for _, held in found) == 4 * 32 * 16 * (2 if name == "hsdp" else 1)
    expected = torch.tensor(seen(tmp_path / "one"))
    assert expected[:, 2].min() > 1.05  # some expert is busier than the others
    for name in runs:
        torch.testing.assert_close(torch.tensor(seen(tmp_path / name)), expected, rtol=NEAR, atol=0)
        [counts] = [event["counts"] for event in events_of(tmp_path / name, "experts")]
        assert [sum(layer) for layer in counts] == [12 * 16 * 2] * 2

    plans = {name: events_of(tmp_path / name, "plan")[0]["plan"] for name in runs}
    for name, (_, ep) in runs.items():
        assert (f"experts over ep={ep}," in plans[name]["text"]) == (ep > 1)
        (receipt,) = events_of(tmp_path / name, "receipt")
        assert (
            receipt["differences"] == "" and "elements of the matrix optimizer" in receipt["rows"]
        )
    assert len({made["num_parameters"] for made in plans.values()}) == 1, "of all ranks' experts"
    page = write_report(tmp_path / "hsdp").read_text()
    for words in (
        "hsdp over dp_outer=2 x dp=2 (4 ranks), experts over ep=2, muon",
        "all_to_all over ep (2 ranks), if routed evenly",
        " and 1 alike (one of 2 shares)",
    ):
        assert words in page, words


PLAIN = dataclasses.replace(MODEL, dim=32, expert_hidden_dim=32, num_experts=8, num_layers=2)
EVERYTHING = dataclasses.replace(
    PLAIN,
    expert_activation="clamped_quick_geglu",
    expert_biases=True,
    expert_layout="indexed",
    gate_up_block=8,
    delay_expert_gradients=True,
    expert_score="sigmoid",
    expert_groups=4,
    groups_per_token=2,
    expert_scale=1.5,
    sequence_balance_coefficient=0.001,
)


def learn(
    rank: int, world_size: int, folder: str, model: GPTConfig, changes: dict[str, Any]
) -> list[bool]:
    trainer = make_trainer(rank, world_size, folder, model=model, **changes)
    assert sum(p.numel() for p in trainer.parts.model.parameters()) < model.num_parameters
    trainer.run()
    return [layer.experts.delay_weight_gradient for layer in mixtures_of(trainer.parts.model)]


def test_every_option_of_the_experts_together_learns_like_none(tmp_path: Path) -> None:
    """Weight layout, interleaved gate and up, biases, another activation, delayed gradients,
    groups, balance by sequence: one run, experts over two ranks."""
    changes = {"data": write_text(tmp_path), "steps": 16, "ep": 2, "eval_every": 16}
    changes |= {"save_every": 16, "batch": 32}
    found = {}
    for name, model in (("plain", PLAIN), ("everything", EVERYTHING)):
        delayed = run_ranks(learn, 2, str(tmp_path / name), model, changes)
        assert delayed == [[name == "everything"]] * 2
        found[name] = events_of(tmp_path / name, "eval")[-1]["loss"]
    assert found["plain"] < 3.4 and abs(found["everything"] - found["plain"]) < 0.15, found
    whole = GPT(EVERYTHING)
    assert sum(p.numel() for p in whole.parameters()) == EVERYTHING.num_parameters


@pytest.mark.parametrize("changes", [{"ep": 3}, {"ep": 2, "model": GPTConfig()}])
def test_what_cannot_be_spread_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"ep={changes['ep']}"):
        TrainConfig(**({"model": MODEL} | changes))
    with pytest.raises(ValueError, match=r"ep=4 does not divide the 6 ranks"):
        TrainConfig(model=MODEL, ep=4).expert_mesh_shape(6)
    shape = TrainConfig(model=MODEL, ep=2, strategy="hsdp").expert_mesh_shape(8)
    assert shape == {"dp_outer": 2, "dp": 2, "ep": 2}


def one_step(rank: int, world_size: int, folder: str, data: str, coefficient: float) -> None:
    model = dataclasses.replace(MODEL, balance_coefficient=coefficient)
    make_trainer(rank, world_size, folder, model=model, steps=1, data=data).run()


def test_bits_per_byte_are_of_the_text_alone(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    found = []
    for coefficient in (0.0, 50.0):
        folder = tmp_path / str(coefficient)
        run_ranks(one_step, 2, str(folder), data, coefficient)
        found += events_of(folder, "step")
    even, steered = found
    assert steered["auxiliary_loss"] > 1 > even["auxiliary_loss"] > 0  # the z-loss
    for name in ("loss", "bits_per_byte"):
        assert steered[name] == pytest.approx(even[name], rel=1e-6)
