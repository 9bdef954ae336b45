# SPDX-License-Identifier: Apache-2.0
"""A run that stopped and went on is the run that never stopped, bit for bit."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from shardwise.report.html import write_report
from shardwise.train import loop
from shardwise.train.loop import Trainer
from tests.one_card import ranks_device
from tests.ranks import run_ranks
from tests.train_runs import TINY, events_of, inside, make_trainer, values_of, write_text

NEAR = 1e-4 if ranks_device() == "cpu" else 2e-2  # a GPU orthogonalises in 16 bits
Seen = tuple[dict[str, torch.Tensor], torch.Tensor]


def finish(trainer: Trainer) -> Seen:
    trainer.run()
    return values_of(trainer), torch.get_rng_state()


def straight(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> Seen:
    return finish(make_trainer(rank, world_size, folder, **changes))


def resumed(rank: int, world_size: int, folder: str, path: str, changes: dict[str, Any]) -> Seen:
    torch.manual_seed(99)  # whatever the process did before
    return finish(make_trainer(rank, world_size, folder, path, **changes))


def refuse(
    rank: int, world_size: int, folder: str, path: str | None, changes: dict[str, Any]
) -> str:
    try:
        make_trainer(rank, world_size, folder, path, **changes)
    except ValueError as error:
        return str(error)
    return "nothing was wrong"


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    return {e["step"]: (e["loss"], e["grad_norm"]) for e in events_of(folder, "step")}


def compare(
    strategy: str, optimizer: str, world_size: int, tmp_path: Path, half: int = 2, **changes: Any
) -> None:
    """A run of twice ``half`` steps, and one that goes on after half of them."""
    usual = {"strategy": strategy, "optimizer": optimizer, "data": write_text(tmp_path)}
    changes = usual | {"steps": 2 * half, "save_every": half, "eval_every": half} | changes
    first, second = tmp_path / "first", tmp_path / "second"
    expected = run_ranks(straight, world_size, str(first), changes)
    assert sorted(losses(first)) == list(range(1, 2 * half + 1))
    point = second / "checkpoints" / f"step-{half:06}"
    point.parent.mkdir(parents=True)
    shutil.copytree(first / "checkpoints" / point.name, point)
    found = run_ranks(resumed, world_size, str(second), str(point), changes)
    assert losses(second) == {step: v for step, v in losses(first).items() if step > half}
    for receipt in events_of(first, "receipt") + events_of(second, "receipt"):
        assert receipt["differences"] == "" and len(receipt["rows"]) >= 3, receipt
    held_out = [[(e["step"], e["loss"]) for e in events_of(f, "eval")] for f in (first, second)]
    assert held_out[0][1:] == held_out[1] != []
    for (values, rng), (again, rng_again) in zip(expected, found, strict=True):
        assert values.keys() == again.keys()
        for name in values:
            assert torch.equal(values[name], again[name]), name
        assert torch.equal(rng, rng_again)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "ranks"),
    [("zero0", "muon", 2), ("zero1", "adamw", 3), ("zero3", "muon", 2), ("hfsdp", "muon", 4)],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    strategy: str, optimizer: str, ranks: int, tmp_path: Path
) -> None:
    """zero2 and hsdp are resumed in interop/test_support, and by ``sw.load`` in test_anything."""
    compare(strategy, optimizer, ranks, tmp_path)
    (resume,) = events_of(tmp_path / "second", "resume")
    assert resume["text"].endswith("continues bit for bit"), resume["text"]


def test_reading_a_profile_is_no_time_of_the_step_after_it(tmp_path: Path) -> None:
    changes = {"data": write_text(tmp_path), "steps": 2, "profile_step": 1, "eval_every": 0}
    run_ranks(straight, 1, str(tmp_path / "run"), changes)
    (profile,), steps = (events_of(tmp_path / "run", kind) for kind in ("profile", "step"))
    # Times in events are rounded to a millisecond.
    assert steps[1]["seconds"] <= steps[1]["time"] - profile["time"] + 1e-3


def test_with_weights_in_mxfp8(tmp_path: Path) -> None:
    wide = dataclasses.replace(TINY.model, dim=32)
    compare("zero3", "muon", 2, tmp_path, half=2, model=wide, precision="mxfp8")
    (run,) = events_of(tmp_path / "first", "run")
    weights = run["weights"]
    assert weights["format"] == "mxfp8" and weights["stored"] >= 7 * wide.num_layers
    kept = {name: why for why, names in weights["kept"].items() for name in names}
    assert kept["embedding.weight"] == "read by Embedding, not only by linears"
    assert kept["blocks.*.attention_norm.weight"] == "read by RMSNorm, not only by linears"
    page = write_report(tmp_path / "first").read_text()
    assert "Weights in mxfp8" in page and "read by Embedding" in page
    narrow = {"precision": "mxfp8", "data": write_text(tmp_path)}
    for said in run_ranks(refuse, 2, str(tmp_path / "narrow"), None, narrow):
        assert "mxfp8" in said and "multiples of 32" in said


def test_with_a_mixture_of_many_short_documents_and_a_cosine(tmp_path: Path) -> None:
    """Documents are apart in every window, and each source is in the middle of an epoch."""
    (tmp_path / "short").mkdir()
    for number in range(60):
        (tmp_path / "short" / f"{number}.txt").write_text(
            f"{number} ends soon; " * (1 + number % 3)
        )
    data = f"{tmp_path / 'short'}:0.7,{write_text(tmp_path)}:0.3"
    compare("zero3", "muon", 2, tmp_path, half=4, data=data, schedule="cosine", final=0.0)


OWN = """
import torch
from torch import nn

class Cell(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mix, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, x):
        before = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        return x + torch.tanh(self.mix(self.norm(before)))

class Tiny(nn.Module):
    def __init__(self, words, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(words, dim)
        self.cells = nn.ModuleList(Cell(dim) for _ in range(2))
        self.head = nn.Linear(dim, words)

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens)
        for cell in self.cells:
            x = cell(x)
        logits = self.head(x)
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

class Mute(Tiny):
    def forward(self, tokens, targets):
        return super().forward(tokens, targets)

def build(config):
    return Tiny(config.model.vocab_size).eval()

def mute(config):
    return Mute(config.model.vocab_size)

def wrong(config):
    return 3
"""


def test_with_a_module_of_ones_own(tmp_path: Path) -> None:
    """The same loop, resume, evaluation and sample."""
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path / 'own.py'}:build"
    compare("zero3", "muon", 2, tmp_path, module=name, sample=3)
    run = events_of(tmp_path / "first", "run")[0]
    assert run["model"]["text"].startswith(name) and run["model"]["parameters"] > 8000
    assert events_of(tmp_path / "first", "sample")[0]["text"].startswith(loop.PROMPT)
    done = inside("export", "first", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {"embedding.weight", "cells.1.mix.weight", "head.bias"} <= found.keys(), "its own names"
    data = str(tmp_path / "text.txt")
    mute = {"module": name.replace("build", "mute"), "data": data, "steps": 1, "sample": 3}
    run_ranks(straight, 2, str(tmp_path / "mute"), mute)
    assert not events_of(tmp_path / "mute", "sample"), "it gives no logits"
    wrong = {"module": name.replace("build", "wrong"), "data": data}
    said = run_ranks(refuse, 2, str(tmp_path / "b"), None, wrong)
    assert all("returned a int, and must return a torch.nn.Module" in text for text in said)


def sampled(rank: int, world_size: int, folder: str, data: str) -> None:
    trainer = make_trainer(rank, world_size, folder, data=data, sample=4)

    def draw(model: Any, drawn: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
        return torch.cat([drawn, torch.tensor([[0x62, 0xC3, 256, 0x63][:count]])], dim=1)

    with mock.patch.object(loop, "generate", draw):
        trainer.sample()
    trainer.events.close()


def test_the_end_of_a_document_ends_a_text(tmp_path: Path) -> None:
    run_ranks(sampled, 1, str(tmp_path), write_text(tmp_path))
    (event,) = events_of(tmp_path, "sample")
    assert event["text"] == f"{loop.PROMPT}b\ufffd"


# ------------------------------------------------------------------------------ another world size


def positions(
    rank: int, world_size: int, folder: str, path: str | None, changes: dict[str, Any]
) -> tuple[list[int], float]:
    """The windows that this rank trained on, and the held-out loss at the start."""
    noted_at: dict[int, Any] = {}  # a GPU's batches are made a step ahead
    trainer = make_trainer(rank, world_size, folder, path, **changes)
    bits = trainer.evaluate()
    real = trainer.parts.sampler.windows

    def noted(position: int) -> Any:
        noted_at[position] = windows = real(position)
        return windows

    trainer.parts.sampler.windows = noted  # type: ignore[method-assign]
    trainer.run()
    end = trainer.parts.sampler.position
    return [w for at in sorted(noted_at) if at < end for _, w in noted_at[at]], bits


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
        assert all(near[step][0] == pytest.approx(far[step][0], abs=NEAR) for step in near)
        assert sorted(near) == [5, 6, 7, 8]
