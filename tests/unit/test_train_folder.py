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
from shardwise.train import session
from shardwise.train.config import TrainConfig
from shardwise.train.folder import Claim, RunLock, find_resume, new_folder, newest_folder
from shardwise.train.recipes import load_recipe
from shardwise.train.session import Request, claim, resolve


def run_in(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "events.jsonl").write_text('{"kind": "end"}\n')
    return path


def killed_in(path: Path, config: TrainConfig | None = None) -> Path:
    """A run that was killed in its first save."""
    (path / "checkpoints" / "step-000001.tmp-1a2b3c4d-4711-8812736-9f8e7d6c").mkdir(parents=True)
    (path / "events.jsonl").write_text('{"kind": "run"}\n{"kind": "step", "step": 1}\n{"kind"')
    if config is not None:
        (path / "config.json").write_text(json.dumps(config.to_json()))
    return path


def test_a_run_never_lands_in_another(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert new_folder("default", None, root) == tmp_path / "default"
    run_in(tmp_path / "default")
    assert new_folder("default", None, root) == tmp_path / "default-2"
    run_in(tmp_path / "default-2")
    assert new_folder("a/b.py:default", None, root) == tmp_path / "default-3"
    with pytest.raises(ValueError, match="holds a run already"):
        new_folder("default", str(tmp_path / "default"), root)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="is a file"):
        new_folder("default", str(file), root)


def test_the_newest_run_of_a_recipe_is_the_one_that_wrote_last(tmp_path: Path) -> None:
    assert newest_folder("default", None, str(tmp_path)) is None
    older, newer = run_in(tmp_path / "default-2"), run_in(tmp_path / "default")
    run_in(tmp_path / "default_other")
    os.utime(older / "events.jsonl", (1, 1))
    os.utime(newer / "events.jsonl", (2, 2))
    assert newest_folder("default", None, str(tmp_path)) == newer


def test_what_cannot_be_resumed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no run of recipe 'default'"):
        find_resume("default", None, "latest")
    run_in(tmp_path / "runs" / "default")  # its checkpoints were removed since
    with pytest.raises(ValueError, match="holds no valid checkpoint"):
        find_resume("default", None, "latest")
    with pytest.raises(ValueError, match="no such checkpoint"):
        find_resume("default", None, "elsewhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="manifest"):
        find_resume("default", None, "empty")


def test_a_resumed_run_lands_where_it_was_told_with_the_model_that_was_named(
    tmp_path: Path,
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    checkpoint = run / "checkpoints" / "step-000001"
    sw.save(checkpoint, nn.Linear(1, 1), config=load_recipe("smoke").to_json())
    (run / "events.jsonl").write_text("{}\n")
    for named in (str(run), str(checkpoint)):
        assert find_resume("default", None, named) == (run, checkpoint)
        assert find_resume("default", str(run), named) == (run, checkpoint)
        assert find_resume("default", str(out), named) == (out, checkpoint)
    run_in(out)
    for named in (str(run), str(checkpoint)):
        with pytest.raises(ValueError, match="holds another run"):
            find_resume("default", str(out), named)
        assert find_resume("default", str(out), named, again=True) == (out, checkpoint)
    # Somebody goes back to step 1; what was saved since then, and not before, is gone on from.
    later = run / "checkpoints" / "step-000009"
    sw.save(later, nn.Linear(1, 1), config=load_recipe("smoke").to_json())
    went_back = [{"kind": "run", "restarts": 0}, {"kind": "save"}, {"kind": "run", "restarts": 0}]
    for since, expected in (([], checkpoint), ([{"kind": "save"}], later)):
        lines = [*went_back, {"kind": "run", "restarts": 1}, *since]
        (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert find_resume("default", None, str(checkpoint)) == (run, checkpoint)
        assert find_resume("default", None, str(checkpoint), again=True) == (run, expected)
    request = Request(recipe="smoke", resume=str(checkpoint))
    assert resolve(request).checkpoint == checkpoint
    # One that is named itself is the one that is meant; where a run is, a damaged one gives way.
    assert not resolve(request).or_older
    of_run = resolve(dataclasses.replace(request, resume=str(run)))
    assert of_run.checkpoint == later and of_run.or_older
    assert resolve(Request(resume="latest", out=str(run))).or_older
    with pytest.raises(ValueError, match=r"another model.*num_experts 0 there, 8 here"):
        resolve(dataclasses.replace(request, recipe="moe_tiny"))


# ------------------------------------------------------------------------------ never saved


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("resume", [None, "latest", "runs/default"])
@pytest.mark.parametrize("out", [None, "runs/default"])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(
    here: Path, resume: str | None, out: str | None
) -> None:
    run = killed_in(here / "runs" / "default", load_recipe("smoke"))
    resolved = resolve(Request(resume=resume, out=out, changes={"seed": 7}))
    assert resolved.checkpoint is None and resolved.config.seed == 7
    if resume is None and out is None:
        assert resolved.folder == Path("runs/default-2"), "the next free name, as ever"
    else:
        assert resolved.folder.resolve() == run
    expected = load_recipe("default" if resume is None else "smoke")
    assert resolved.config == dataclasses.replace(expected, seed=7), "of the run that was meant"
    if resume is not None:
        with pytest.raises(ValueError, match=r"another model.*num_experts"):
            resolve(Request(recipe="moe_tiny", resume=resume, out="runs/default"))


def test_a_start_that_left_only_its_lock_begins_anew(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / ".lock").touch()
    for resume in (None, "latest"):
        resolved = resolve(Request(recipe="smoke", out="run", resume=resume))
        assert (resolved.folder, resolved.checkpoint) == (Path("run"), None)
        assert resolved.config == load_recipe("smoke")
    (here / "run" / "config.json").write_text('{"warp": 9}')
    with pytest.raises(ValueError, match=r"config\.json cannot be read .*'warp'.*without --resume"):
        resolve(Request(out="run", resume="latest"))


def test_checkpoints_that_are_all_damaged_are_not_passed_over_for_a_new_run(here: Path) -> None:
    run = killed_in(here / "run")
    (run / "checkpoints" / "step-000001").mkdir()
    for resume, said in ((None, "holds a run already"), ("latest", "no valid checkpoint")):
        with pytest.raises(ValueError, match=said):
            resolve(Request(out="run", resume=resume))


def test_restarted_ranks_find_the_run_of_their_own_launch(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = here / "runs" / "default", here / "runs" / "default-2"
    for folder, launch in ((mine, "this"), (other, "that")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
        resolved, claimed = claim(Request())
        assert resolved.folder.resolve() == folder
        sw.save(
            folder / "checkpoints" / "step-000001",
            nn.Linear(1, 1),
            config=load_recipe("smoke").to_json(),
        )
        claimed.release()
    os.utime(other / ".lock", (1e10, 1e10))  # the newest, but another's
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resolve(Request()).checkpoint == Path("runs/default/checkpoints/step-000001")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a third")
    assert resolve(Request()).folder == Path("runs/default-3")


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
    killed_in(here / "run", load_recipe("smoke"))
    child, pipe = in_another_process(lambda: RunLock(here / "run"))
    yield child
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, 9)
        os.waitpid(child, 0)
    os.close(pipe)


@pytest.mark.parametrize("resume", [None, "latest", "run"])
def test_a_folder_whose_owner_lives_is_refused_by_name(
    here: Path, held: int, resume: str | None
) -> None:
    request = Request(out="run", resume=resume)
    before = sorted(path.name for path in (here / "run").iterdir())
    said = f"still going on .pid {held} on host {socket.gethostname()}.*--out"
    with pytest.raises(ValueError, match=said):
        claim(request)
    assert sorted(path.name for path in (here / "run").iterdir()) == before
    os.kill(held, 9)  # whatever happens to the owner, the kernel gives the lock back
    os.waitpid(held, 0)
    resolved, claimed = claim(request)
    assert resolved.folder == Path("run")
    claimed.release()


def test_two_runs_begun_at_once_get_two_folders(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = session.new_folder, []

    def late(recipe: str, out: str | None) -> Path:
        found = real(recipe, out)
        if not taken:  # the other run comes between the choice of a name and the folder
            taken.append(found)
            found.mkdir(parents=True)
        return found

    monkeypatch.setattr(session, "new_folder", late)
    resolved, claimed = claim(Request(recipe="smoke"))
    assert taken == [Path("runs/smoke")] and resolved.folder == Path("runs/smoke-2")
    assert list(taken[0].iterdir()) == []
    claimed.release()


def test_nothing_stays_of_a_run_that_did_not_begin(here: Path) -> None:
    resolved, claimed = claim(Request(recipe="smoke", out="deep/er/run"))
    assert json.loads((resolved.folder / "config.json").read_text())["steps"] == 20
    claimed.undo()
    assert list(here.iterdir()) == []
    run = killed_in(here / "run")
    Claim(run, new=False).undo()
    assert (run / "events.jsonl").exists(), "what another run has left is not ours to remove"


def test_a_lock_file_that_was_removed_in_between_locks_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "run").mkdir()
    real, removed = fcntl.flock, []

    def flock(file: int, how: int) -> None:
        if not removed:
            removed.append(file)
            os.unlink(here / "run" / ".lock")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RunLock(here / "run")
    with pytest.raises(ValueError, match="still going on"):
        RunLock(here / "run")
    lock.release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_says_so_once(
    here: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        resolved, claimed = claim(Request(recipe="smoke", out="run"))
    assert resolved.folder.is_dir()
    (record,) = caplog.records
    assert "cannot lock" in record.message and "start only one" in record.message
    claimed.release()


def test_a_folder_that_cannot_be_written_to_is_named(here: Path) -> None:
    (here / "file").touch()
    with pytest.raises(ValueError, match=r"--out file/run cannot be written to \(File exists"):
        claim(Request(recipe="smoke", out="file/run"))
    (here / "runs").touch()
    with pytest.raises(ValueError, match=r"--out runs/smoke cannot be written to \(File exists"):
        claim(Request(recipe="smoke"))
