# SPDX-License-Identifier: Apache-2.0
"""Saves in the background: one at a time, joined, cleaned up, and their failures never lost."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import SaveError, Store, files, meeting, saving, verify
from shardwise.checkpoint.manifest import Manifest
from tests.models import filled, mesh_of
from tests.ranks import run_ranks

REPOSITORY = Path(__file__).parents[2]


def net(value: float = 0.0) -> nn.Module:
    return filled(value, width=900)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@contextlib.contextmanager
def full_disk(after: int) -> Iterator[None]:
    """New files of checkpoints take ``after`` bytes together."""
    room, original = [after], files.HashedFile.write

    def limited(self: Any, data: Any) -> None:
        room[0] -= memoryview(data).nbytes
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, data)

    with mock.patch.object(files.HashedFile, "write", limited):
        yield


@contextlib.contextmanager
def writing(before: Callable[[], object]) -> Iterator[None]:
    """Each save calls ``before`` in the background, before it writes."""
    original = saving.Save.write

    def write(*arguments: Any) -> Path:
        assert threading.current_thread() is not threading.main_thread()
        before()
        return original(*arguments)

    with mock.patch.object(saving.Save, "write", write):
        yield


# ------------------------------------------------------------------------------ asynchronous


def test_a_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    """Training goes on while the writer waits; what is written is what was."""
    release, settings = threading.Event(), {"lr": {"at": 1}}
    model = net(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    store = Store(tmp_path, config=settings)
    with writing(lambda: release.wait(30)):
        store.save(1, model, optimizer, {"note": [1]})
        assert store.checkpoints() == [], "not there before it is whole"
        assert not store.idle
        settings["lr"]["at"] = 2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
            for state in optimizer.state.values():
                state["exp_avg"].fill_(9.0)
        release.set()
        assert store.wait() == tmp_path / "step-000001" == store.checkpoints()[-1]
    assert store.idle
    sw.load(tmp_path / "step-000001", model, optimizer)
    assert all((parameter == 1.0).all() for parameter in model.parameters())
    assert all((state["exp_avg"] == 0).all() for state in optimizer.state.values())
    assert Manifest.read(tmp_path / "step-000001").config == {"lr": {"at": 1}}


def test_resume_waits_for_the_save_under_way(tmp_path: Path) -> None:
    """A rollback right after a save loaded the checkpoint before that one, or found none."""
    store, model = Store(tmp_path), net(0.0)
    with writing(lambda: time.sleep(0.5)):
        store.save(1, net(1.0), extra={"step": 1})
        assert store.resume(model) == (tmp_path / "step-000001", {"step": 1})
        assert all((parameter == 1.0).all() for parameter in model.parameters())
        with full_disk(after=100):
            store.save(2, net(2.0))
            found = store.resume(model)
    assert found is not None and found[0] == tmp_path / "step-000001", "the older one, if it fails"
    with pytest.raises(SaveError):
        store.wait()


def test_one_save_at_a_time(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with writing(lambda: seen.append(names(tmp_path))), Store(tmp_path, keep=None) as store:
        for step in range(6):
            store.save(step, net(step))
    expected = [f"step-{step:06d}" for step in range(6)]
    assert [one[:-1] for one in seen] == [expected[:step] for step in range(6)]
    assert names(tmp_path) == expected and all(verify(path).ok for path in tmp_path.iterdir())


def test_a_process_that_ends_waits_for_its_last_save(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.faults.test_store_background import net, Store\n"
        f"Store({str(tmp_path)!r}).save(3, net(3.0))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=REPOSITORY)
    assert names(tmp_path) == ["step-000003"] and verify(tmp_path / "step-000003").ok


# ------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("part", [0.0, 0.5, 0.9, 0.999])
def test_a_full_disk_is_reported_and_survived(
    part: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, keep=1)
    store.save(1, net(1.0))
    store.wait()
    # In the tensors, the values of the rank, the table, the manifest.
    after = int(part * sum(file.stat().st_size for file in (tmp_path / "step-000001").iterdir()))
    with full_disk(after):
        store.save(2, net(2.0))
        with pytest.raises(SaveError, match="No space left on device"):
            store.save(3, net(3.0))
    assert "the checkpoint of step 2 has failed" in caplog.text
    assert store.checkpoints()[-1] == tmp_path / "step-000001", "the one before is untouched"
    store.wait()  # said once
    store.save(5, net(5.0))  # and there is room again
    assert store.wait() == tmp_path / "step-000005"
    assert names(tmp_path) == ["step-000005"], "the old one and what the failure left are gone"


def fail_on_one_rank(rank: int, world_size: int, root: str, broken: int) -> list[str]:
    model = sw.fully_shard(net(1.0), mesh=mesh_of(world_size))
    store = Store(root, timeout=200)
    with full_disk(2000) if rank == broken else contextlib.nullcontext():
        store.save(1, model)
        try:
            store.wait()
        except SaveError as error:
            message = str(error)
        else:
            raise AssertionError("nobody said anything")
    assert store.checkpoints() == []
    store.save(2, model)
    path = store.wait()
    assert path is not None and verify(path).ok
    return [message, path.name]


@pytest.mark.parametrize("broken", [0, 1])
def test_the_failure_of_one_rank_is_everybodys(broken: int, tmp_path: Path) -> None:
    for message, saved in run_ranks(fail_on_one_rank, 2, str(tmp_path), broken):
        assert "No space left on device" in message
        assert saved == "step-000002"
    assert names(tmp_path) == ["step-000002"]


def refuse_the_new_name(rank: int, world_size: int, root: str, call: str) -> str:
    """The disk of rank 0 fails after the rename: nobody may count on the checkpoint."""
    model = sw.fully_shard(net(1.0), mesh=mesh_of(world_size))
    original = getattr(meeting, call) if call == "sync_directory" else Path.touch

    def failing(path: Path, *args: Any) -> None:
        if path in (Path(root), Path(root) / "step-000001" / meeting.END):
            raise OSError(errno.EIO, "Input/output error")
        original(path, *args)

    owner = meeting if call == "sync_directory" else Path
    with mock.patch.object(owner, call, failing) if rank == 0 else contextlib.nullcontext():
        store = Store(root, timeout=60)
        store.save(1, model)
        with pytest.raises(SaveError) as caught:
            store.wait()
    assert store.checkpoints() == []
    store.save(1, model)
    assert store.wait() == Path(root) / "step-000001"
    return str(caught.value)


@pytest.mark.parametrize("call", ["sync_directory", "touch"])
def test_a_failure_after_the_rename_is_everybodys(call: str, tmp_path: Path) -> None:
    """Rank 0 raised, and the others had seen the new name."""
    messages = run_ranks(refuse_the_new_name, 2, str(tmp_path / "store"), call)
    assert "Input/output error" in messages[0]
    assert "Input/output error" in messages[1] or meeting.GIVEN_UP in messages[1]


def rank_0_lists(rank: int, world_size: int, root: str) -> bool:
    store, model = Store(root), sw.fully_shard(net(1.0), mesh=mesh_of(world_size))
    with mock.patch.object(os, "listdir", side_effect=os.listdir) as listing:
        store.save(1, model)
        assert store.wait() == Path(root) / "step-000001"
    return listing.called


def test_rank_0_alone_lists_the_shared_folder(tmp_path: Path) -> None:
    assert run_ranks(rank_0_lists, 3, str(tmp_path)) == [True, False, False]


def no_memory(rank: int, world_size: int, root: str) -> str:
    model = sw.fully_shard(net(1.0), mesh=mesh_of(world_size))
    store = Store(root, timeout=60)
    failing = mock.patch.object(store._staging, "copy", side_effect=MemoryError("no more"))
    try:
        with failing if rank == 1 else contextlib.nullcontext():
            store.save(1, model)
        store.wait()
    except (SaveError, MemoryError) as error:
        return str(error)
    return "saved"


def test_a_rank_without_memory_for_the_copy_is_named(tmp_path: Path) -> None:
    """The folder went, and the innocent ranks blamed themselves."""
    innocent, guilty = run_ranks(no_memory, 2, str(tmp_path))
    assert guilty == "no more" and "rank 1: MemoryError: no more" in innocent


def one_rank_stops(rank: int, world_size: int, root: str, which: int) -> str:
    model = sw.fully_shard(net(1.0), mesh=mesh_of(world_size))
    store = Store(root, timeout=0.5)
    if rank == which == 1:  # it took part in the agreement, and then its disk hung
        store._write = lambda save, result: result.set_result(Path())  # type: ignore[method-assign]
    # Rank 0 dies after the rename, before it says that this was the end.
    dead = mock.patch.object(Path, "touch") if rank == which == 0 else contextlib.nullcontext()
    with dead:
        store.save(1, model)
        try:
            store.wait()
        except SaveError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_never_comes_is_waited_for_and_named(which: int, tmp_path: Path) -> None:
    message = run_ranks(one_rank_stops, 2, str(tmp_path), which)[1 - which]
    assert ("rank 0 to finish" if which == 0 else "ranks [1] to write their part") in message
    if which == 0:  # the checkpoint is there, and whole
        assert verify(Store(tmp_path).checkpoints()[-1]).ok


# ------------------------------------------------------------------------------ keep


def test_the_last_is_the_last_saved_not_the_highest_step(tmp_path: Path) -> None:
    """Somebody went back to step 10: what is saved then is newer than step 30."""
    with Store(tmp_path, keep=2) as store:
        for step in (20, 30):
            store.save(step, net(step))
    with Store(tmp_path, keep=2) as store:
        store.save(11, net(11))
        store.wait()
        assert store.checkpoints()[-1] == tmp_path / "step-000011"
    assert names(tmp_path) == ["step-000011", "step-000030"]


def test_what_is_not_valid_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    store.save(1, net(1.0))
    store.wait()
    (tmp_path / "step-000009").mkdir()
    (tmp_path / "step-000009" / "notes.txt").write_text("somebody's")
    (tmp_path / "step-000001" / "manifest.json").write_text("{")
    store.save(2, net(2.0))
    store.save(3, net(3.0))
    store.wait()
    assert names(tmp_path) == ["step-000001", "step-000003", "step-000009"]


def test_a_removal_that_fails_is_survived_and_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, keep=1)
    store.save(1, net(1.0))
    store.wait()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "rmtree", mock.Mock(side_effect=PermissionError("no")))
        store.save(2, net(2.0))
        assert store.wait() == tmp_path / "step-000002", "the save is fine"
    assert "stays for now" in caplog.text
    assert store.checkpoints()[-1] == tmp_path / "step-000002"
    left = [name for name in names(tmp_path) if ".tmp-" in name]
    assert len(left) == 1, "out of sight, not half a checkpoint"
    store.save(3, net(3.0))
    store.wait()
    assert names(tmp_path) == ["step-000003"]


# ------------------------------------------------------------------------------ leftovers


def test_what_a_dead_run_left_goes_when_the_next_one_saves(tmp_path: Path) -> None:
    left = meeting.temporary(tmp_path / "step-000001")
    left.mkdir()
    (left / "x").touch()
    (tmp_path / "notes.tmp").mkdir()  # somebody's
    assert Store(tmp_path).resume(net()) is None
    assert left.exists(), "who reads removes nothing"
    with Store(tmp_path) as store:
        store.save(2, net())
    assert names(tmp_path) == ["notes.tmp", "step-000002"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"keep": 0}, "keep at least 1"),
        ({"keep": True}, "keep at least 1"),
        ({"timeout": 0}, "a number of seconds"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        Store(tmp_path, **arguments)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        Store(tmp_path / "file")
    for step in (-1, 1.0, True):
        with pytest.raises(ValueError, match="a step is an integer"):
            Store(tmp_path).save(step, net())  # type: ignore[arg-type]
