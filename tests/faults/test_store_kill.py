# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at any moment of a save: what was reported saved is there, whole, and loads.

A server process, itself a fork of one that has imported torch, forks: a rank costs milliseconds.
Random moments are a short soak (tests/soak.py); here each call to the file system is met once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import Manifest, Store, files, valid_checkpoints, verify
from tests.ranks import rank_context

RANDOM_KILLS = 18


def model_at(step: int) -> nn.Module:
    """Weights that say which step they are of."""
    model = nn.Sequential(nn.Linear(33, 65), nn.Linear(65, 33))
    set_step(model, step)
    return model


def set_step(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(1000.0 * index + step)


def assert_holds(path: Path) -> int:
    """A checkpoint is whole and holds the values of its own step, not a mixture."""
    report = verify(path)
    assert report.ok, str(report)
    step = Manifest.read(path).step
    assert step is not None
    found, expected = model_at(-1), model_at(step)
    assert sw.load(path, found) == {"step": step}
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), f"{path} holds other values than those of step {step}"
    return step


# ------------------------------------------------------------------------------ random moments


def fork(work: Callable[[], Any]) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        # Die with the server, however it ends (PR_SET_PDEATHSIG).
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


# ------------------------------------------------------------------------------ every moment


@contextlib.contextmanager
def dying_at(call: int) -> Iterator[list[str]]:
    """Kill this process just before its ``call``-th touch of the file system."""
    made: list[str] = []
    before: list[tuple[Any, str, Any]] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        before.append((owner, name, original))

        def watched(*args: Any, **kwargs: Any) -> Any:
            # Of the many small writes around a tensor's bytes, a kill before one is like another.
            if name != "write" or memoryview(args[1]).nbytes > 1000:
                made.append(name)
            if len(made) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open"):
        watch(os, name)
    watch(files.HashedFile, "write")
    try:
        yield made
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def kill_at_every_call(root: Path) -> int:
    """One save after another, killed one call later each time. Returns the number of calls."""
    with Store(root / "first", keep=1) as store:
        store.save(1, model_at(1), extra={"step": 1})
    for call in range(1, 10_000):
        folder = shutil.copytree(root / "first", root / f"call-{call}")

        def work(folder: Path = folder, call: int = call) -> None:
            store = Store(folder, keep=1)
            with dying_at(call):
                store.save(2, model_at(2), extra={"step": 2})
                store.wait()
                (folder.parent / f"reported-{call}").touch()

        _, status = os.waitpid(fork(work), 0)
        finished = os.WIFEXITED(status)
        assert finished or os.WTERMSIG(status) == signal.SIGKILL
        assert not finished or os.WEXITSTATUS(status) == 0
        [*_, (path, _)] = valid_checkpoints(folder)
        newest = assert_holds(path)
        reported = (root / f"reported-{call}").exists()
        assert newest == 2 if reported else newest in (1, 2)
        with Store(folder, keep=1) as store:  # the next run
            store.save(3, model_at(3), extra={"step": 3})
        assert [entry.name for entry in folder.iterdir()] == ["step-000003"]
        if finished:
            return call - 1
    raise AssertionError("a save that never ends")


# ------------------------------------------------------------------------------ from pytest


def serve(what: str, root: str) -> None:
    torch.set_num_threads(1)
    folder = Path(root)
    # What is imported on first use is imported here, once, and not by every child.
    model = model_at(0)
    sw.save(folder / "warm", model, torch.optim.AdamW(model.parameters()))
    from tests.soak import kill_saves  # which imports this file

    result: Any
    if what == "random":
        result = kill_saves(folder / "kills", RANDOM_KILLS, 5)["kills"]
    else:
        result = kill_at_every_call(folder)
    (folder / "result.json").write_text(json.dumps(result))


def run_server(what: str, root: Path) -> Any:
    process = rank_context().Process(target=serve, args=(what, str(root)))
    process.start()
    process.join(800)
    assert process.exitcode == 0, "its error stands above"
    return json.loads((root / "result.json").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and its children die with it")
def test_a_rank_killed_at_random_moments_of_a_save_loses_nothing(tmp_path: Path) -> None:
    """A short soak: every strategy, one rank or all of them killed."""
    assert run_server("random", tmp_path) == RANDOM_KILLS


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and its children die with it")
def test_a_kill_before_any_call_to_the_file_system_loses_nothing(tmp_path: Path) -> None:
    calls = run_server("every", tmp_path)
    # 2 fsyncs of files, 3 of directories, 2 renames, writes, removals: that the net was cast.
    assert calls > 15, calls


# ------------------------------------------------------------------------------ power failures


def test_everything_is_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill loses no page of memory, a power failure does: the order of fsyncs is the defence."""
    happened: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        happened.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def watched_rename(source: Any, target: Any) -> None:
        happened.append(("rename", os.path.basename(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    sw.save(tmp_path / "one", model_at(1))
    published = happened.index(("rename", "one"))
    manifest = happened.index(("fsync", "manifest.json"))
    synced = {name for what, name in happened[:manifest] if what == "fsync"}
    assert "rank-00000.safetensors" in synced
    folder = next(iter(name for name in synced if ".tmp-" in name))
    assert ("fsync", folder) in happened[manifest:published], "the manifest's name"
    assert happened[published + 1] == ("fsync", tmp_path.name), "the new name"
