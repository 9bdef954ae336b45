# SPDX-License-Identifier: Apache-2.0
"""A resumed run: changes that are taken or refused, and the checkpoint from which it goes on."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import CheckpointError, Manifest, save
from shardwise.moe import mixtures_of
from shardwise.shard.module import units_of
from shardwise.train.config import FIXED, TrainConfig
from shardwise.train.run import Request, newest_checkpoint, resolve
from tests.one_card import ranks_device
from tests.ranks import run_ranks
from tests.resume.test_train import refuse, straight
from tests.train_runs import TINY, events_of, make_trainer, values_of, write_text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a run of eight steps on it; nobody writes to it."""
    folder = tmp_path_factory.mktemp("finished")
    run_ranks(straight, 2, str(folder / "run"), {"data": write_text(folder)})
    return folder


def test_a_checkpoint_of_another_model_or_other_data_is_refused_on_every_rank(
    finished: Path, tmp_path: Path
) -> None:
    data, path = finished / "text.txt", str(finished / "run" / "checkpoints" / "step-000004")
    wider = dataclasses.replace(TINY.model, dim=32)
    said = run_ranks(refuse, 2, str(tmp_path / "b"), path, {"data": str(data), "model": wider})
    assert said[0] == said[1] and "wq.weight" in said[0] and "[16, 16]" in said[0]
    other = tmp_path / "other.txt"
    other.write_text("something else entirely. " * 400)
    said = run_ranks(refuse, 2, str(tmp_path / "c"), path, {"data": str(other)})
    assert "other data" in said[0]
    said = run_ranks(refuse, 2, str(other / "below"), None, {"data": str(data)})
    assert said[0] == said[1] and "Not a directory" in said[0], "not rank 0 alone"


# ------------------------------------------------------------------------------ other flags

# What a resumed run is asked to change, field by field: the new value, and which of the figures of
# ``seen`` must then differ. A new field of TrainConfig fails until it stands here or in FIXED.
EFFECTS: dict[str, tuple[Any, str]] = {
    "documents": ("joined", "documents"),
    "steps": (10, "steps"),
    "batch": (24, "tokens"),
    "microbatches": (2, "microbatches"),
    "recompute": ("block", "recomputed"),
    "hours": (1e-9, "steps"),
    "strategy": ("hsdp", "placements"),
    "replicas": (1, "mesh"),
    "ep": (2, "experts"),
    "matrix_lr": (0.04, "lr"),
    "lr": (6e-3, "lr"),
    "weight_decay": (0.5, "values"),
    "warmup": (7, "lr"),
    "schedule": ("cosine", "lr"),
    "decay": (0.0, "lr"),
    "final": (0.9, "lr"),
    "clip": (1e-3, "values"),
    "precision": ("bf16" if ranks_device() == "cpu" else "fp32", "values"),
    "compile": ("on", "compiled"),
    "eval_every": (1, "evaluated"),
    "eval_windows": (3, "held_out"),
    "save_every": (1, "saved"),
    "keep": (1, "kept"),
    "keep_every": (1, "linked"),
    "eval_data": ("other text", "held_out"),
    "max_skipped": (3, "max_skipped"),
    "timeout": (50.0, "timeout"),
    "sample": (4, "sampled"),
    "profile_step": (1, "profiled"),
    "deterministic": (True, "deterministic"),
}
GROUPS = [
    ("strategy", "replicas", "recompute", "weight_decay", "schedule", "final", "keep_every"),
    ("documents", "ep", "eval_data", "precision"),
    ("clip", "eval_windows"),
    ("hours",),
]
TOGETHER = tuple(name for name in EFFECTS if not any(name in group for group in GROUPS))
ROUTED = dataclasses.replace(TINY.model, num_experts=4, experts_per_token=2)
REFUSED = {
    "model": (dataclasses.replace(TINY.model, dim=32), r"attention\.wq\.weight"),
    "data": ("other text", "other data"),
    **{
        name: (value, f"{name}=")
        for name, value in {
            "seed": 1,
            "tokenizer": "bpe:300",
            "optimizer": "adamw",
            "init_from": "elsewhere",
            "module": "elsewhere.py:build",
        }.items()
    },
}


def test_every_field_is_classified() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert EFFECTS.keys() | REFUSED.keys() == fields
    assert not EFFECTS.keys() & REFUSED.keys()
    assert FIXED.keys() <= REFUSED.keys()


def seen(
    rank: int, world_size: int, folder: str, path: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """The behaviour of a resumed run that can be seen from outside of its configuration."""
    before = torch.are_deterministic_algorithms_enabled()
    calls: list[int] = []
    try:
        trainer = make_trainer(rank, world_size, folder, path, **changes)
        trainer.parts.model.register_forward_pre_hook(
            lambda model, args: calls.append(len(args[0])) if model.training else None
        )
        with torch.compiler.set_stance("force_eager"):  # compilers are slow on a CPU
            trainer.run()
        unit = next(iter(units_of(trainer.parts.model)))
        steps = events_of(folder, "step") if rank == 0 else []
        return {
            "steps": trainer.step,
            "tokens": [event["tokens"] for event in steps],
            "microbatches": len(calls) / (trainer.step - 4),
            "placements": str(unit.groups[0].placements),
            "mesh": [axis.size for axis in unit.groups[0].ranks.axes],
            "compiled": trainer.parts.model.softmax is not None,
            "experts": [layer.experts.num_experts for layer in mixtures_of(trainer.parts.model)],
            "lr": [event["lr"] for event in steps],
            "groups": [group["lr"] for group in trainer.parts.optimizer.param_groups],
            "values": {name: value.tolist() for name, value in values_of(trainer).items()},
            "evaluated": [event["step"] for event in events_of(folder, "eval")],
            "held_out": [event["loss"] for event in events_of(folder, "eval")],
            "saved": [event["step"] for event in events_of(folder, "save")],
            "kept": len(trainer.store.checkpoints()),
            "linked": len([*Path(folder).glob("kept/*")]),
            "recomputed": len(trainer.parts.model.recomputed),
            "max_skipped": trainer.config.max_skipped,
            "timeout": trainer.store.timeout,
            "sampled": len(events_of(folder, "sample")),
            "profiled": [event["step"] for event in events_of(folder, "profile")],
            "documents": trainer.parts.model.document_end,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Resumes a run after step 4 with some changes; gives what is seen, and remembers it."""
    root = tmp_path_factory.mktemp("begun")
    data = write_text(root)
    known: dict[str, dict[str, Any]] = {}

    def go_on(**changes: Any) -> dict[str, Any]:
        if (key := repr(sorted(changes.items()))) in known:
            return known[key]
        first = {"model": ROUTED, "data": data}
        if "eval_data" in changes:
            changes["eval_data"] = str(root / "other.txt")
            Path(changes["eval_data"]).write_text("something else entirely. " * 400)
        source = root / "source" / "checkpoints" / "step-000004"
        if not source.exists():
            run_ranks(straight, 2, str(root / "source"), {**first, "steps": 8})
        folder = root / f"resumed-{len(known)}"
        shutil.copytree(source, folder / "checkpoints" / "step-000004")
        path = str(folder / "checkpoints" / "step-000004")
        known[key] = run_ranks(seen, 2, str(folder), path, {**first, **changes})[0]
        (*_, newest) = sorted((folder / "checkpoints").iterdir())
        written = Manifest.read(newest).config
        assert written is not None
        assert all(written[name] == value for name, value in changes.items()), "for a resume"
        return known[key]

    return go_on


@pytest.mark.parametrize("names", [*GROUPS, TOGETHER], ids="-".join)
def test_what_is_given_on_resume_takes_effect(names: tuple[str, ...], begun: Any) -> None:
    found, without = begun(**{name: EFFECTS[name][0] for name in names}), begun()
    for figure in {EFFECTS[name][1] for name in names}:
        assert found[figure] != without[figure], figure


def test_the_learning_rates_of_a_resumed_run_are_those_asked_for(begun: Any) -> None:
    changes = {name: EFFECTS[name][0] for name in TOGETHER}
    asked = dataclasses.replace(TINY, **changes)
    expected = [rate * asked.factor(10) for rate in (asked.matrix_lr, asked.lr)]
    assert begun(**changes)["groups"] == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_change_on_resume_is_refused_by_name(
    name: str, finished: Path, tmp_path: Path
) -> None:
    data, run = str(finished / "text.txt"), finished / "run"
    config = dataclasses.replace(TINY, data=data)
    value, said = REFUSED[name]
    if name in FIXED:
        for given, refused in ((value, True), (getattr(config, name), False)):
            configure = lambda saved, given=given: dataclasses.replace(saved, **{name: given})  # noqa: E731
            request = Request(out=str(run), resume="latest", configure=configure)
            if not refused:
                assert resolve(request).config.data == data, "the same value again is no change"
                continue
            with pytest.raises(ValueError, match=said):
                resolve(request)
        return
    if name == "data":
        value = str(tmp_path / "other.txt")
        Path(value).write_text("something else entirely. " * 400)
    path = str(run / "checkpoints" / "step-000004")
    for text in run_ranks(refuse, 2, str(tmp_path / "b"), path, {"data": data, name: value}):
        assert re.search(said, text), text


def test_fewer_steps_than_were_done_are_refused(finished: Path, tmp_path: Path) -> None:
    path = str(finished / "run" / "checkpoints" / "step-000004")
    changes = {"data": str(finished / "text.txt"), "steps": 2}
    for text in run_ranks(refuse, 2, str(tmp_path / "b"), path, changes):
        assert "steps=2, and " in text and "step-000004 was saved after step 4" in text


def older_one(rank: int, world_size: int, folder: str, path: str, data: str, older: bool) -> Any:
    try:
        trainer = make_trainer(rank, world_size, folder, path, or_older=older, data=data)
    except ValueError as error:
        return str(error)
    return trainer.step


@pytest.mark.parametrize("damage", ["a bit", "a pipe"])
def test_a_damaged_newest_checkpoint_gives_way_to_an_older_one_if_any_will_do(
    damage: str, finished: Path, tmp_path: Path
) -> None:
    """Whatever each of the ranks has seen of it."""
    data, run = str(finished / "text.txt"), tmp_path / "run"
    shutil.copytree(finished / "run", run)
    newest = run / "checkpoints" / "step-000008"
    shard = newest / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    if damage == "a pipe":
        shard.unlink()
        os.mkfifo(shard)
    assert run_ranks(older_one, 2, str(run), str(newest), data, True) == [4, 4]
    said = run_ranks(older_one, 2, str(run), str(newest), data, False)
    assert all("rank-00001.safetensors" in text for text in said), "asked for by name"
    if damage == "a pipe":  # seen without a look at the bytes, by an export too
        assert newest_checkpoint(run).name == "step-000004"


def foreign(rank: int, world_size: int, folder: str, data: str) -> str:
    """A sound checkpoint of the same model that no trainer has written."""
    here = Path(folder)
    trainer = make_trainer(rank, world_size, str(here / "one"), data=data)
    save(here / "saved", trainer.parts.model, trainer.parts.optimizer, extra={"epoch": 1})
    try:
        make_trainer(rank, world_size, str(here / "two"), str(here / "saved"), data=data)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_program_is_named(tmp_path: Path) -> None:
    for message in run_ranks(foreign, 2, str(tmp_path), write_text(tmp_path)):
        assert "saved" in message and "'step'" in message and "sw.load" in message
