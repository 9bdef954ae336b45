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
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardwise as sw
from shardwise.checkpoint import Store
from shardwise.report.html import write_report
from shardwise.train import session
from shardwise.train.config import TrainConfig
from shardwise.train.events import EventFile, Events
from shardwise.train.folder import (
    Claim,
    RunLock,
    ended_unsaved,
    find_resume,
    last_holder,
    new_folder,
    newest_folder,
)
from shardwise.train.recipes import load_recipe
from shardwise.train.session import Request, Resolved, claim, resolve


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


def is_run_of(resolved: Resolved, config: TrainConfig) -> bool:
    return config.to_json().items() <= resolved.config.to_json().items()


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
    assert is_run_of(resolved, dataclasses.replace(expected, seed=7)), "of the run that was meant"
    if resume is not None:
        with pytest.raises(ValueError, match=r"another model.*num_experts"):
            resolve(Request(recipe="moe_tiny", resume=resume, out="runs/default"))


def test_a_start_that_left_only_its_lock_begins_anew(here: Path) -> None:
    (here / "run").mkdir()
    for resume in (None, "latest", "locked", None, "latest"):
        if resume == "locked":  # until then the run was killed before it could
            (here / "run" / ".lock").touch()
            continue
        resolved = resolve(Request(recipe="smoke", out="run", resume=resume))
        assert (resolved.folder, resolved.checkpoint) == (Path("run"), None)
        assert is_run_of(resolved, load_recipe("smoke"))
    (here / "run" / "config.json").write_text('{"warp": 9}')
    with pytest.raises(ValueError, match=r"config\.json cannot be read .*'warp'.*without --resume"):
        resolve(Request(out="run", resume="latest"))
    values = {"deterministic": "no", "microbatches": "8", "data": None, "lr": True, "model": 3}
    (here / "run" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="cannot be read") as caught:
        resolve(Request(out="run", resume="latest"))
    for text in (
        "deterministic='no' is a str: give true or false",
        "microbatches='8' is a str: give a whole number or auto",
        "data=None is a NoneType: give a text",
        "lr=True is a bool: give a number",
        "model=3 is a int: give GPTConfig",
    ):
        assert text in str(caught.value)


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
            config=json.loads((folder / "config.json").read_text()),
        )
        claimed.release()
    os.utime(other / ".lock", (1e10, 1e10))  # the newest, but another's
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resolve(Request()).checkpoint == Path("runs/default/checkpoints/step-000001")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a third")
    assert resolve(Request()).folder == Path("runs/default-3")


# ------------------------------------------------------------------------------ whose checkpoint


def begin(out: str, *, step: int | None = 1, **request: Any) -> Path:
    """A run that was begun in a folder and killed after its save of ``step``; the checkpoint."""
    resolved, claimed = claim(Request(out=out, **request))
    (resolved.folder / "events.jsonl").write_text('{"kind": "run"}\n')
    path = resolved.folder / "checkpoints" / f"step-{step or 0:06d}"
    if step is not None:
        described = json.loads((resolved.folder / "config.json").read_text())
        sw.save(path, nn.Linear(1, 1), config=described)
    claimed.release()
    return path


def edit(folder: str, **changes: Any) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_was_changed_in_config_json_takes_effect_and_is_named(here: Path) -> None:
    saved = begin("run", recipe="smoke")
    again = Request(out="run", resume="latest")
    assert resolve(again).note == "" and is_run_of(resolve(again), load_recipe("smoke"))
    edit("run", lr=0.5, clip=7.0)
    for resume in ("latest", "run", str(saved)):
        found = resolve(Request(out="run", resume=resume, changes={"clip": 3.0}))
        assert (found.config.lr, found.config.clip) == (0.5, 3.0)
        assert "run/config.json" in found.note and "step-000001" in found.note
        assert "lr=0.5 (was 0.003)" in found.note and "clip" not in found.note, "a flag was given"
    other = resolve(Request(out="other", resume=str(saved)))
    assert is_run_of(other, load_recipe("smoke")) and not other.note, "it is a run of its own"
    edit("run", seed=4)
    with pytest.raises(ValueError, match=r"seed=4 \(saved: 0;.*run/config\.json differs"):
        resolve(again)
    assert resolve(dataclasses.replace(again, changes={"seed": 0})).config.seed == 0
    stretched = {**load_recipe("smoke").to_json()["model"], "rope_scaling": {"factor": 2.0}}
    edit("run", seed=0, model=stretched)
    assert "model.rope_scaling.factor=2.0 (was None)" in resolve(again).note
    edit("run", seed=0, model={**load_recipe("smoke").to_json()["model"], "dim": 4})
    with pytest.raises(ValueError, match=r"another model than run/config\.json \(dim .* 4 here"):
        resolve(again)


def test_a_warmup_that_is_over_is_not_changed_without_a_word(here: Path) -> None:
    begin("run", recipe="smoke", step=None)  # warmup=2
    described = json.loads(Path("run/config.json").read_text())
    store = Store(Path("run/checkpoints"), config=described)
    store.save(step=6, model=nn.Linear(1, 1))
    store.wait()
    works: list[dict[str, Any]] = [
        {"warmup": 2},
        {"warmup": 9},
        {"warmup": 5, "schedule": "cosine"},
    ]
    for changes in works:
        resolve(Request(out="run", resume="latest", changes=changes))
    said = r"cannot change to warmup=5 \(saved: 2; the warmup ended before step 6\): keep"
    with pytest.raises(ValueError, match=said):
        resolve(Request(out="run", resume="latest", changes={"warmup": 5}))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"lr": ', '{"warp": 9}', '{"lr": "fast"}', "[" * 99999]
)
def test_a_config_json_that_no_run_can_have_is_refused(here: Path, content: str) -> None:
    begin("run", recipe="smoke")
    Path("run/config.json").write_text(content)
    with pytest.raises(ValueError, match=r"run/config\.json cannot be read .*or remove it"):
        resolve(Request(out="run", resume="latest"))
    Path("run/config.json").unlink()
    assert is_run_of(resolve(Request(out="run", resume="latest")), load_recipe("smoke"))
    os.mkfifo("run/config.json")
    with pytest.raises(ValueError, match="no regular file"):
        resolve(Request(out="run", resume="latest"))


@pytest.mark.parametrize("device", [False, True])
def test_only_regular_files_are_read_and_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, device: bool
) -> None:
    """A pipe would be waited for, a device read for ever."""

    def put(path: Path) -> Path:
        path.symlink_to("/dev/zero") if device else os.mkfifo(path)
        return path

    log = put(tmp_path / "events.jsonl")
    events = Events([EventFile(log)])
    events("step", step=1)
    assert f"{log} is no regular file" in caplog.text
    for read in (lambda: write_report(tmp_path), lambda: ended_unsaved(tmp_path)):
        with pytest.raises(ValueError, match=r"no regular file|holds no events\.jsonl"):
            read()
    lock = put(tmp_path / ".lock")
    assert last_holder(tmp_path) == {}
    with pytest.raises(ValueError, match=rf"{lock} is no regular file"):
        RunLock(tmp_path)


@pytest.mark.parametrize("newer", [True, False])
def test_a_checkpoint_of_another_run_is_refused_by_name(here: Path, newer: bool) -> None:
    """Equal configurations or not; also one that would be loaded only if the newest is damaged."""
    mine = begin("mine", recipe="smoke", step=2)
    shutil.copytree(mine, "copy")
    theirs = begin("theirs", recipe="smoke", step=3 if newer else 1)
    theirs.rename(mine.parent / theirs.name)
    for resume in ("latest", "mine", f"mine/checkpoints/{theirs.name}"):
        with pytest.raises(ValueError, match=rf"{theirs.name} was saved by another run"):
            claim(Request(out="mine", resume=resume))
    assert resolve(Request(resume=str(mine))).checkpoint == mine, "named itself, it is this run's"
    found = resolve(Request(out="new", resume=f"mine/checkpoints/{theirs.name}"))
    assert found.folder == Path("new"), "as its own run it may go on"


def test_a_run_begun_from_a_checkpoint_and_killed_unsaved_begins_from_it_again(here: Path) -> None:
    saved = begin("first", recipe="smoke", step=5)
    begin("second", step=None, resume=str(saved), changes={"lr": 0.5})
    found = resolve(Request(out="second", resume="latest"))
    assert found.checkpoint is not None and found.checkpoint.resolve() == saved.resolve()
    assert found.config.lr == 0.5 and "lr=0.5" in found.note
    own = begin("second", step=7, resume="latest")
    assert resolve(Request(out="second", resume="latest")).checkpoint == own
    names = [json.loads(Path(out, "config.json").read_text())["run"] for out in ("first", "second")]
    assert len(set(names)) == 2


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
    said = f"has not ended .pid {held} on host {socket.gethostname()}.*--out"
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
    with pytest.raises(ValueError, match="has not ended"):
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


def test_a_file_of_tokens_needs_no_tokenizer(tmp_path: Path) -> None:
    """README's ``train gpt_124m --data tokens.bin``: the recipe's tokenizer is that of its text."""
    data, out = str(tmp_path / "tokens.bin"), str(tmp_path / "run")
    request = Request(recipe="gpt_124m", out=out, changes={"data": data})
    assert resolve(request).config.tokenizer == "bytes"
    text = Request(recipe="gpt_124m", out=out, changes={"data": str(tmp_path / "text.txt")})
    assert resolve(text).config.tokenizer == "bpe:8192"
    # One that is given is kept, and refused when the data is read.
    given = Request(recipe="gpt_124m", out=out, changes={"data": data, "tokenizer": "bpe:300"})
    assert resolve(given).config.tokenizer == "bpe:300"
