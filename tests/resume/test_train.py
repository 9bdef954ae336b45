# SPDX-License-Identifier: Apache-2.0
"""A run that stopped and went on is the run that never stopped, bit for bit."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.report.html import write_report
from shardwise.train.loop import Trainer
from tests.ranks import run_ranks
from tests.train_runs import TINY, events_of, make_trainer, values_of, write_text

Seen = tuple[dict[str, torch.Tensor], torch.Tensor]


def finish(trainer: Trainer) -> Seen:
    trainer.run()
    return values_of(trainer), torch.get_rng_state()


def straight(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> Seen:
    return finish(make_trainer(rank, world_size, folder, **changes))


def resumed(rank: int, world_size: int, folder: str, path: str, changes: dict[str, Any]) -> Seen:
    torch.manual_seed(99)  # whatever the process did before
    return finish(make_trainer(rank, world_size, folder, path, **changes))


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    return {e["step"]: (e["loss"], e["grad_norm"]) for e in events_of(folder, "step")}


def compare(strategy: str, optimizer: str, world_size: int, tmp_path: Path, **changes: Any) -> None:
    changes |= {"strategy": strategy, "optimizer": optimizer, "data": write_text(tmp_path)}
    first, second = tmp_path / "first", tmp_path / "second"
    expected = run_ranks(straight, world_size, str(first), changes)
    assert sorted(losses(first)) == list(range(1, 9))
    point = second / "checkpoints" / "step-000004"
    point.parent.mkdir(parents=True)
    shutil.copytree(first / "checkpoints" / "step-000004", point)
    found = run_ranks(resumed, world_size, str(second), str(point), changes)
    assert losses(second) == {step: v for step, v in losses(first).items() if step > 4}
    held_out = [[(e["step"], e["loss"]) for e in events_of(f, "eval")] for f in (first, second)]
    assert held_out[0][1:] == held_out[1] != []
    for (values, rng), (again, rng_again) in zip(expected, found, strict=True):
        assert values.keys() == again.keys()
        for name in values:
            assert torch.equal(values[name], again[name]), name
        assert torch.equal(rng, rng_again)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
def test_a_resumed_run_is_the_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    compare(strategy, "muon", 2, tmp_path)


@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_on_two_axes(strategy: str, tmp_path: Path) -> None:
    compare(strategy, "muon", 4, tmp_path)


def test_with_weights_in_mxfp8(tmp_path: Path) -> None:
    wide = dataclasses.replace(TINY.model, dim=32)
    compare("zero3", "muon", 2, tmp_path, precision="mxfp8", model=wide)
    (run,) = events_of(tmp_path / "first", "run")
    weights, (planned,) = run["weights"], events_of(tmp_path / "first", "plan")
    assert weights["format"] == "mxfp8" and weights["stored"] >= 7 * wide.num_layers
    kept = {name: why for why, names in weights["kept"].items() for name in names}
    named = "read by an embedding; include=('*', 'embedding.weight') stores it too"
    assert kept["embedding.weight"] == named
    assert kept["blocks.*.attention_norm.weight"] == "read by RMSNorm, not by linears alone"
    assert planned["plan"]["weights"]["mxfp8"]["parameters"] == weights["stored"]
    page = write_report(tmp_path / "first").read_text()
    assert "Weights in MXFP8" in page and "read by an embedding" in page
    assert "gathered in backward" in page
    narrow = {"precision": "mxfp8_2d", "data": write_text(tmp_path)}
    for said in run_ranks(refuse, 2, str(tmp_path / "narrow"), None, narrow):
        assert "none of the" in said and "can be stored so" in said and "multiples of 32" in said


def test_with_adamw_on_three_ranks(tmp_path: Path) -> None:
    compare("zero3", "adamw", 3, tmp_path)


# ------------------------------------------------------------------------------ another world size


def positions(
    rank: int, world_size: int, folder: str, path: str | None, changes: dict[str, Any]
) -> tuple[list[int], float]:
    """The windows that this rank trained on, and the held-out loss at the start."""
    seen: list[int] = []
    trainer = make_trainer(rank, world_size, folder, path, **changes)
    bits = trainer.evaluate()
    real = trainer.parts.sampler.windows

    def noted(position: int) -> Any:
        windows = real(position)
        seen.extend(int(window) for window in windows)
        return windows

    trainer.parts.sampler.windows = noted  # type: ignore[method-assign]
    trainer.run()
    return seen, bits


def test_another_number_of_ranks_neither_repeats_nor_skips(tmp_path: Path) -> None:
    # No decay: learning rates that fall towards the last step would depend on which it is.
    changes = {"data": write_text(tmp_path), "steps": 4, "decay": 0.0}
    whole = tmp_path / "whole"
    run_ranks(positions, 2, str(whole), None, {**changes, "steps": 8})
    two = run_ranks(positions, 2, str(tmp_path / "a"), None, changes)
    path = tmp_path / "a" / "checkpoints" / "step-000004"
    for world_size, strategy in ((1, "zero0"), (3, "zero3"), (4, "hfsdp")):
        more = {**changes, "steps": 8, "strategy": strategy}
        out = tmp_path / f"b{world_size}"
        rest = run_ranks(positions, world_size, str(out), str(path), more)
        trained = [w for seen, _ in two for w in seen] + [w for seen, _ in rest for w in seen]
        assert len(trained) == 8 * 12 and len(set(trained)) == len(trained)
        # The same steps, summed by other ranks in another order: near, not equal.
        far, near = losses(whole), losses(out)
        assert all(near[step][0] == pytest.approx(far[step][0], abs=1e-4) for step in near)
        assert sorted(near) == [5, 6, 7, 8]


def refuse(
    rank: int, world_size: int, folder: str, path: str | None, changes: dict[str, Any]
) -> str:
    try:
        make_trainer(rank, world_size, folder, path, **changes)
    except ValueError as error:
        return str(error)
    return "nothing was wrong"


def test_a_checkpoint_of_another_model_or_other_data_is_refused_on_every_rank(
    tmp_path: Path,
) -> None:
    data = write_text(tmp_path)
    run_ranks(straight, 2, str(tmp_path / "a"), {"data": data, "steps": 4})
    path = str(tmp_path / "a" / "checkpoints" / "step-000004")
    wider = dataclasses.replace(TINY.model, dim=32)
    said = run_ranks(refuse, 2, str(tmp_path / "b"), path, {"data": data, "model": wider})
    assert said[0] == said[1] and "wq.weight" in said[0] and "[16, 16]" in said[0]
    other = tmp_path / "other.txt"
    other.write_text("something else entirely. " * 400)
    said = run_ranks(refuse, 2, str(tmp_path / "c"), path, {"data": str(other)})
    assert "other data" in said[0]
    said = run_ranks(refuse, 2, str(other / "below"), None, {"data": data})
    assert said[0] == said[1] and "below cannot be written to" in said[0], "not rank 0 alone"


def older_one(rank: int, world_size: int, folder: str, path: str, data: str, older: bool) -> Any:
    try:
        trainer = make_trainer(rank, world_size, folder, path, or_older=older, data=data)
    except ValueError as error:
        return str(error)
    return trainer.step


@pytest.mark.parametrize("damage", ["a bit", "zeros", "a pipe"])
def test_a_damaged_newest_checkpoint_gives_way_to_an_older_one_if_any_will_do(
    damage: str, tmp_path: Path
) -> None:
    """Whatever each of the ranks has seen of it."""
    data = write_text(tmp_path)
    run = tmp_path / "run"
    run_ranks(straight, 2, str(run), {"data": data})
    newest = run / "checkpoints" / "step-000008"
    shard = newest / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(len(content)) if damage == "zeros" else content)
    if damage == "a pipe":
        shard.unlink()
        os.mkfifo(shard)
    assert run_ranks(older_one, 2, str(run), str(newest), data, True) == [4, 4]
    said = run_ranks(older_one, 2, str(run), str(newest), data, False)
    assert all("__1_0.distcp" in text for text in said), "asked for by name, it is refused by name"
