# SPDX-License-Identifier: Apache-2.0
"""A truncated, flipped, missing or foreign file is named by every reader, and never loaded."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import shardwise as sw
from shardwise.checkpoint import (
    CheckpointError,
    DamagedError,
    MismatchError,
    Store,
    export,
    valid_checkpoints,
    verify,
)
from tests.models import fill, filled, mesh_of
from tests.ranks import run_ranks

FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "index.json", "state.json", "rank-00001.json")


def save_two(rank: int, world_size: int, root: str) -> None:
    model = sw.fully_shard(filled(0.0), mesh=mesh_of(world_size))
    with Store(root, keep=3) as store:
        for step in (1, 2):
            fill(model, step)
            store.save(step, model, extra={"step": step})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "store"
    run_ranks(save_two, 2, str(folder))
    return folder


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "store"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path, position: int | None = None, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1 << bit
    path.write_bytes(data)


def replace_by_link(path: Path) -> None:
    hidden = path.with_name("hidden")
    path.rename(hidden)
    path.symlink_to(hidden)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "flipped": flip,
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "link": replace_by_link,
}


def load_damaged(rank: int, world_size: int, path: str) -> str:
    model = sw.fully_shard(filled(-1.0), mesh=mesh_of(world_size))
    try:
        sw.load(path, model)
    except CheckpointError as error:
        for parameter in model.parameters():
            assert (parameter.full_tensor() == -1.0).all(), "nothing was loaded"
        return str(error)
    raise AssertionError("damage was loaded")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_not_loaded(damage: str, name: str, root: Path) -> None:
    path = root / "step-000002"
    assert verify(path).ok
    DAMAGES[damage](path / name)
    report = verify(path)
    assert not report.ok and name in str(report)
    model = filled(-1.0)
    with pytest.raises(CheckpointError, match=name):
        sw.load(path, model)
    assert all((parameter == -1.0).all() for parameter in model.parameters())
    with pytest.raises(CheckpointError, match=name):
        export(path, root.parent / "out")
    assert not (root.parent / "out").exists()
    # What costs no reading is seen at once; what does, by the load, which takes the one before.
    cheap = damage != "flipped"
    newest = valid_checkpoints(root)[-1][0].name
    assert newest == ("step-000001" if cheap else "step-000002")
    store = Store(root)
    found = store.resume(model)
    assert found is not None and found[0] == root / "step-000001" and found[1] == {"step": 1}
    assert all((parameter == 1.0).all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["__1_0.distcp", "rank-00001.json"])
def test_every_rank_raises_where_one_has_found_the_damage(name: str, root: Path) -> None:
    """Each file is hashed by one rank; all must hear of it."""
    flip(root / "step-000002" / name)
    messages = run_ranks(load_damaged, 2, str(root / "step-000002"))
    assert messages[0] == messages[1]
    assert name in messages[0] and "sha256" in messages[0]


def test_no_flipped_bit_anywhere_passes(root: Path) -> None:
    path, rng = root / "step-000002", random.Random(3)
    names = sorted(entry.name for entry in path.iterdir())
    assert len(names) == 8  # two ranks: two of tensors, two of values; two indices, state, manifest
    for name in names:
        whole = (path / name).read_bytes()
        for _ in range(40):
            flip(path / name, rng.randrange(len(whole)), rng.randrange(8))
            with pytest.raises(CheckpointError):
                sw.load(path, filled(0.5))
            assert not verify(path).ok
            (path / name).write_bytes(whole)
    assert verify(path).ok


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "shardwise checkpoint 2"}', '{"format": "shardwise checkpoint 1"}'],
)
def test_without_a_valid_manifest_there_is_no_checkpoint(
    text: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "step-000002" / "manifest.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert Store(root).checkpoints()[-1] == root / "step-000001"
    assert "step-000002 is no valid checkpoint" in caplog.text
    assert not verify(root / "step-000002").ok
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        sw.load(root / "step-000002", filled(0.5))
    (root / "step-000002" / "manifest.json").unlink()
    assert Store(root).checkpoints()[-1] == root / "step-000001"
    with pytest.raises(CheckpointError, match="never finished"):
        sw.load(root / "step-000002", filled(0.5))


def test_a_manifest_that_was_edited_is_refused(root: Path) -> None:
    path = root / "step-000002" / "manifest.json"
    content = json.loads(path.read_text())
    content["body"]["step"] = 7
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedError, match="sha256"):
        sw.load(root / "step-000002", filled(0.5))


def test_a_damaged_checkpoint_does_not_block_its_step(root: Path) -> None:
    """The run that went back to step 1 comes to step 2 again."""
    flip(root / "step-000002" / "__0_0.distcp")
    with Store(root, keep=2) as store:
        found = store.resume(filled(0.5))
        assert found is not None and found[0].name == "step-000001"
        store.save(2, filled(2.5), extra={"step": 2})
    assert store.checkpoints()[-1] == root / "step-000002-r2"
    model = filled(0.5)
    assert sw.load(root / "step-000002-r2", model) == {"step": 2}
    assert all((parameter == 2.5).all() for parameter in model.parameters())


def test_nothing_sound_is_an_error_and_nothing_at_all_is_none(root: Path, tmp_path: Path) -> None:
    assert Store(tmp_path / "empty").resume(filled(0.5)) is None
    assert Store(tmp_path / "empty").checkpoints() == []
    for step in (1, 2):
        flip(root / f"step-00000{step}" / "__0_0.distcp")
    with pytest.raises(DamagedError, match=r"no checkpoint in .* is sound"):
        Store(root).resume(filled(0.5))


def test_resume_does_not_pass_over_a_checkpoint_of_another_model(root: Path) -> None:
    with pytest.raises(MismatchError, match="missing from it"):
        Store(root).resume(nn.Linear(3, 3))


def test_a_folder_and_a_missing_path_are_told_apart(root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pass one of them, .*step-000002"):
        sw.load(root, filled(0.5))
    with pytest.raises(CheckpointError, match="no such directory"):
        sw.load(root / "step-000009", filled(0.5))


@pytest.mark.parametrize("given", ["model.safetensors", "pytorch_model.bin", "."])
def test_weights_that_no_save_of_ours_wrote_are_no_damage(given: str, tmp_path: Path) -> None:
    """A file of weights, or a folder of the hub: nothing is wrong with it, and what reads it is
    named."""
    (tmp_path / ("model.safetensors" if given == "." else given)).write_bytes(bytes(64))
    with pytest.raises(CheckpointError, match=r"sw\.load_full_state_dict\(model, ") as caught:
        sw.load(tmp_path / given, filled(0.5))
    assert not isinstance(caught.value, DamagedError)
    assert "never finished" not in str(caught.value) and str(tmp_path) in str(caught.value)


def go_on_from_the_older(rank: int, world_size: int, root: str) -> list[list[str]]:
    model = sw.fully_shard(filled(0.0), mesh=mesh_of(world_size))
    seen = []
    with Store(root, keep=2) as store:
        resumed = store.resume(model)
        assert resumed is not None and resumed[1] == {"step": 1}
        for step in (3, 4):
            store.save(step, model, extra={"step": step})
            store.wait()
            seen.append([path.name for path in store.checkpoints()])
    return seen


def test_a_damaged_checkpoint_is_not_counted_among_those_that_are_kept(root: Path) -> None:
    [first, second] = [path.name for path in Store(root).checkpoints()]
    flip(root / second / "__0_0.distcp")
    # Rank 0 removes what is old.
    after_three, after_four = run_ranks(go_on_from_the_older, 2, str(root))[0]
    assert after_three[:2] == [first, second] and len(after_three) == 3
    assert len(after_four) == 2 and after_four[0] == after_three[2], "two sound ones are there now"
