# SPDX-License-Identifier: Apache-2.0
"""Run folders: which one is meant, what may be begun or resumed there, and by whom."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardwise as sw
from shardwise.train import run as module
from shardwise.train.recipes import load_recipe
from shardwise.train.run import (
    Request,
    all_checkpoints,
    claim,
    find_resume,
    free_names,
    lock,
    newest_folder,
    resolve,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_in(path: Path, *steps: int) -> Path:
    """A run that has ended, with checkpoints of these steps."""
    path.mkdir(parents=True)
    (path / "events.jsonl").write_text('{"kind": "run", "restarts": 0}\n')
    for step in steps:
        save(path, step)
    return path


def save(path: Path, step: int) -> Path:
    place = path / "checkpoints" / f"step-{step:06d}"
    config = load_recipe("smoke").to_json() | {"fitted": None}
    sw.save(place, nn.Linear(1, 1), config=config)
    return place


def killed_in(path: Path) -> Path:
    """A run that was killed in its first save."""
    (path / "checkpoints" / "step-000001.tmp-1a2b3c4d-4711-8812736-9f8e7d6c").mkdir(parents=True)
    (path / "events.jsonl").write_text('{"kind": "run"}\n{"kind": "step", "step": 1}\n{"kind"')
    return path


# ------------------------------------------------------------------------------ which is meant


def test_a_run_never_lands_in_another() -> None:
    assert resolve(Request()).folder == Path("runs/default")
    run_in(Path("runs/default"))
    assert resolve(Request()).folder == Path("runs/default-2")
    killed_in(Path("runs/default-2"))
    assert next(free_names("a/b.py:default")) == Path("runs/default-3")
    Path("runs/default-3").mkdir()
    Path("runs/default-3/.lock").touch()  # a start that failed left nothing else
    assert resolve(Request()).folder == Path("runs/default-3")
    save(Path("runs/default"), 1)
    with pytest.raises(ValueError, match="holds a run already"):
        resolve(Request(out="runs/default"))
    assert resolve(Request(out="runs/default-2")).checkpoint is None, "it was never saved"
    Path("file").touch()
    with pytest.raises(ValueError, match="--out file cannot be written to"):
        claim(Request(out="file"))


def test_the_newest_run_is_the_one_that_wrote_last() -> None:
    assert newest_folder("default") is None and newest_folder() is None
    for name, time in (("default-2", 1), ("default", 2), ("default_other", 3)):
        os.utime(run_in(Path("runs", name)) / "events.jsonl", (time, time))
    assert newest_folder("default") == Path("runs/default")
    assert newest_folder() == Path("runs/default_other")


def test_what_cannot_be_resumed_says_why(here: Path) -> None:
    with pytest.raises(ValueError, match="no such checkpoint or run"):
        find_resume("default", None, "latest")
    with pytest.raises(ValueError, match="no such checkpoint"):
        find_resume("default", None, "elsewhere")
    Path("empty").mkdir()
    with pytest.raises(ValueError, match="not inside the folder of a run"):
        find_resume("default", None, "empty")
    with pytest.raises(ValueError, match="manifest"):
        resolve(Request(out="out", resume="empty"))
    damaged = killed_in(Path("runs/default"))
    (damaged / "checkpoints" / "step-000001").mkdir()
    for resume, said in ((None, "holds a run already"), ("latest", "no valid checkpoint")):
        with pytest.raises(ValueError, match=said):
            resolve(Request(out="runs/default", resume=resume))
    with pytest.raises(ValueError, match="no checkpoint"):
        all_checkpoints(run_in(Path("unsaved")))


def test_a_resumed_run_lands_where_it_was_told() -> None:
    run, out = run_in(Path("run"), 1), Path("out")
    checkpoint = run / "checkpoints" / "step-000001"
    for named, older in ((str(run), True), (str(checkpoint), False)):
        assert find_resume("default", None, named) == (run, checkpoint, older)
        assert find_resume("default", "run", named) == (run, checkpoint, older)
        assert find_resume("default", "out", named) == (out, checkpoint, older)
    run_in(out, 3)
    with pytest.raises(ValueError, match="holds another run"):
        find_resume("default", "out", "run")
    later = save(run, 9)
    assert find_resume("default", "run", "latest") == (run, later, True)
    found = resolve(Request(out="run", resume=str(checkpoint)))
    assert found.checkpoint == checkpoint and not found.or_older
    assert found.config == load_recipe("smoke"), "the saved one"


def test_flags_change_a_resumed_run_unless_they_cannot() -> None:
    run_in(Path("run"), 15)

    def resumed(**changes: Any) -> Any:
        configure = lambda config: dataclasses.replace(config, **changes)  # noqa: E731
        return resolve(Request(out="run", resume="latest", configure=configure)).config

    assert resumed(lr=0.5).lr == 0.5
    saved = resumed()
    dataclasses.replace(saved, warmup=9).check_resume(saved)
    for change in ({"seed": 3}, {"optimizer": "adamw"}):
        with pytest.raises(ValueError, match=rf"cannot change to {next(iter(change))}="):
            resumed(**change)


def test_a_run_that_never_saved_begins_anew_and_restarted_ranks_resume_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = killed_in(Path("runs/default"))
    for resume in ("latest", "runs/default"):
        found = resolve(Request(resume=resume))
        assert (found.folder, found.checkpoint) == (mine, None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found = resolve(Request())
    assert (found.folder, found.checkpoint) == (mine, None), "killed before its first checkpoint"
    # Somebody went back to step 1 of another run; what these ranks have saved is gone on from.
    first = save(run_in(Path("first")), 1)
    request = Request(out=str(mine), resume=str(first))
    assert resolve(request).checkpoint == first
    saved = save(mine, 4)
    assert resolve(request).checkpoint == saved == resolve(Request()).checkpoint


# ------------------------------------------------------------------------------ one writer


def in_another_process(work: Any) -> tuple[int, int]:
    """Run ``work`` in a child that then lives on until its pipe is closed: (pid, pipe)."""
    reading, writing = os.pipe()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        keep = work()
        os.write(tell, b"." if keep else b"?")
        os.read(reading, 1)
        os._exit(0)
    os.close(tell)
    os.close(reading)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    return child, writing


@pytest.fixture
def held(here: Path) -> Any:
    """A run folder that another process holds; gives its pid."""
    killed_in(here / "run")
    child, pipe = in_another_process(lambda: lock(here / "run"))
    yield child
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, 9)
        os.waitpid(child, 0)
    os.close(pipe)


@pytest.mark.parametrize("resume", [None, "latest", "run"])
def test_a_folder_whose_owner_lives_is_refused_by_name(held: int, resume: str | None) -> None:
    request = Request(out="run", resume=resume)
    before = sorted(path.name for path in Path("run").iterdir())
    said = f"pid {held} on host {socket.gethostname()}"
    with pytest.raises(ValueError, match=said):
        claim(request)
    assert sorted(path.name for path in Path("run").iterdir()) == before
    os.kill(held, 9)  # whatever happens to the owner, the kernel gives the lock back
    os.waitpid(held, 0)
    resolved, mine = claim(request)
    assert resolved.folder == Path("run")
    os.close(mine)


def test_two_runs_begun_at_once_get_two_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    first, held = claim(Request(recipe="smoke"))
    second, other = claim(Request(recipe="smoke"))
    assert (first.folder, second.folder) == (Path("runs/smoke"), Path("runs/smoke-2"))
    assert json.loads((first.folder / "config.json").read_text())["steps"] == 20
    os.close(held)
    # A run begins and ends there between the choice of the name and the lock.
    real, begun = module.lock, []

    def late(folder: Path) -> int:
        if not begun:
            begun.append(folder)
            (folder / "events.jsonl").touch()
        return real(folder)

    monkeypatch.setattr(module, "lock", late)
    third, held = claim(Request(recipe="smoke"))
    assert begun == [Path("runs/smoke")] and third.folder == Path("runs/smoke-3")
    os.close(held)
    os.close(other)


def test_a_file_system_without_locks_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        resolved, held = claim(Request(recipe="smoke", out="run"))
    assert resolved.folder.is_dir() and len(caplog.records) == 1
    os.close(held)
