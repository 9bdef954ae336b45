# SPDX-License-Identifier: Apache-2.0
"""The launcher and its ranks: signals, kills, restarts, and what the launcher says of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardwise.checkpoint import verify
from shardwise.train.launch import Guard, explain
from shardwise.train.loop import Trainer
from tests.ranks import run_ranks
from tests.train_runs import (
    events_of,
    finish,
    fork_launcher,
    forked,
    make_trainer,
    ranks_of,
    start,
    steps_done,
    stop_all,
    wait_for_end,
    wait_until,
    write_recipe,
    write_text,
)

# Machines are sometimes busy, and three processes import torch for each run.
CHANGES = {"steps": 100_000, "save_every": 5, "eval_every": 0}
LAST = 20  # of the steps that are compared


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that fails half way leaves a run going, which would slow down all that come after."""
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # the recipe imports the tests
    yield
    stop_all()


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(folder, "step")}


def first_losses(folder: Path) -> dict[int, float]:
    """Losses of the steps that are compared; a run stops one step after it was asked to."""
    found = losses(folder)
    assert sorted(found) == list(range(1, max(found) + 1)) and max(found) >= LAST
    return {step: found[step] for step in range(1, LAST + 1)}


def stop_after(trainer: Trainer, last: int) -> None:
    """Ask a run that would be very long to stop after a step."""
    real = trainer._train_step

    def asked(guard: Guard) -> str | None:
        done = real(guard)
        if trainer.step == last:
            os.kill(os.getpid(), signal.SIGUSR1)
        return done

    trainer._train_step = asked  # type: ignore[method-assign]


def train_in_peace(rank: int, world_size: int, folder: str, data: str) -> None:
    trainer = make_trainer(rank, world_size, folder, data=data, **CHANGES)
    stop_after(trainer, LAST)
    trainer.run()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(train_in_peace, 2, str(folder / "run"), write_text(folder))
    return first_losses(folder / "run")


# ------------------------------------------------------------------------------ the true command


def test_one_rank_is_the_process_itself_and_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    name, run = write_recipe(tmp_path, f"**{CHANGES}"), tmp_path / "run"
    process = fork_launcher("train", name, "--out", "run", "--nproc", "1", cwd=tmp_path)
    wait_until(lambda: steps_done(run) >= 3, process)
    assert (run / ".lock").read_text().startswith(f"pid {process.pid} ")
    os.kill(process.pid, signal.SIGTERM)
    code, out, err = process.finish()
    assert code == 0, err
    assert "starting 1 ranks" in out and "stopped after step" in out
    *_, saved = events_of(run, "save")
    assert saved["step"] == events_of(run, "end")[-1]["step"]
    assert verify(tmp_path / saved["path"]).ok


def test_killed_ranks_are_restarted_as_often_as_told_and_then_the_run_ends(
    undisturbed: dict[int, float], tmp_path: Path
) -> None:
    name, run = write_recipe(tmp_path, f"**{CHANGES}"), tmp_path / "run"
    process = fork_launcher("train", name, "--out", "run", "--max-restarts", "1", cwd=tmp_path)
    wait_until(lambda: steps_done(run) >= 6 and events_of(run, "save"), process)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    wait_until(lambda: events_of(run, "resume") and steps_done(run) >= LAST, process)
    assert events_of(run, "resume")[0]["step"] >= 5
    assert first_losses(run) == undisturbed
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    code, _, err = process.finish()
    assert code == 128 + signal.SIGKILL, err
    assert "rank 1" in err and "SIGKILL" in err and "--resume" in err
    assert "Traceback" not in err
    *_, reported = events_of(run, "save")
    assert verify(tmp_path / reported["path"]).ok, "what was reported saved is there"
    last = reported["step"]
    more = ("--resume", "--steps", str(last + 5))
    done = forked("train", name, "--out", "run", *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert events_of(run, "resume")[-1]["step"] >= last
    assert events_of(run, "end")[-1]["step"] == last + 5


def test_hours_end_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(train_for_a_moment, 2, str(tmp_path / "run"), write_text(tmp_path))
    (saved,) = events_of(tmp_path / "run", "save")
    (end,) = events_of(tmp_path / "run", "end")
    assert end["reason"].startswith(("hours=", "another rank")) and saved["step"] == end["step"]
    assert 0 < end["step"] < 100_000


def train_for_a_moment(rank: int, world_size: int, folder: str, data: str) -> None:
    changes = {**CHANGES, "save_every": 100_000, "hours": 0.3 / 3600}
    make_trainer(rank, world_size, folder, data=data, **changes).run()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_launcher_saves_at_the_next_step_and_leaves_nothing_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    name = write_recipe(tmp_path, "steps=100000, save_every=100000, eval_every=0")
    (tmp_path / "tmp").mkdir()
    places = {"TMPDIR": str(tmp_path / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    # One of them is the true command, in processes that import torch and end as others do.
    began = {signal.SIGHUP: start, signal.SIGKILL: fork_launcher}[number]
    process = began("train", name, "--out", "run", cwd=tmp_path, **places)
    wait_until(lambda: steps_done(tmp_path / "run") >= 3, process)
    before, ranks = steps_done(tmp_path / "run"), ranks_of(process.pid)
    if isinstance(process, Popen):  # the terminal is gone, and with it what could be written to
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
    os.kill(process.pid, number)
    if number == signal.SIGKILL:
        wait_for_end(ranks)
    code, out, err = finish(process) if isinstance(process, Popen) else process.finish()
    assert code == (-number if number == signal.SIGKILL else 0), err
    wait_for_end(ranks)
    (saved,) = events_of(tmp_path / "run", "save")
    assert before <= saved["step"] == steps_done(tmp_path / "run")
    assert verify(tmp_path / saved["path"]).ok
    assert events_of(tmp_path / "run", "end")[-1]["reason"] != "finished"
    assert "Traceback" not in err
    if number == signal.SIGHUP:
        assert list((tmp_path / "tmp").iterdir()) == [], "temporary folders, torch's too"
    if number != signal.SIGHUP:
        assert f"stopped after step {saved['step']}" in out and "--resume" in out


# ------------------------------------------------------------------------------ parts of it


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name
)
def test_every_signal_asks_the_launcher_and_a_rank_to_stop(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "asked").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_STOP", str(tmp_path / "asked"))
        assert Guard().asked is not None
    before = signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore it
    try:
        with Guard(tell=tmp_path / "stop") as guard:
            assert guard.asked is None
            os.kill(os.getpid(), number)
            assert guard.asked == number.name and (tmp_path / "stop").exists()
            if number == signal.SIGINT:
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def test_a_signal_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Guard() as guard:
            os.kill(os.getpid(), signal.SIGHUP)
            assert guard.asked is None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert guard.asked == "SIGUSR1"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_the_launcher_killed_is_not_called_out_of_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failed(rank: int, exitcode: int, timestamp: int) -> ProcessFailure:
        found = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file="")
        found.timestamp = timestamp
        return found

    stuck = {
        0: failed(0, 1, 50),
        1: failed(1, -signal.SIGKILL, 80),
        2: failed(2, -signal.SIGTERM, 50),
    }
    assert explain(stuck) == 1
    assert capsys.readouterr().err == "", "rank 0 has said why"
    assert explain({0: failed(0, 1, 50), 1: failed(1, -9, 50)}) == 137
    assert "rank 1 (pid 101) was killed by SIGKILL (out of memory?)" in capsys.readouterr().err
    assert explain({0: failed(0, -9, 50), 1: failed(1, -15, 50)}) == 137
    assert "rank 0" in capsys.readouterr().err
