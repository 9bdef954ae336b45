# SPDX-License-Identifier: Apache-2.0
"""What happens to a run when ranks are killed, stopped or slowed, and when numbers break."""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardwise.checkpoint import SaveError, valid_checkpoints, verify
from shardwise.checkpoint.attempt import Attempt
from shardwise.train.guard import BrokenGradientError, Guard
from shardwise.train.launch import asking_to_stop, explain
from tests.ranks import run_ranks
from tests.train_runs import (
    TINY,
    events_of,
    finish,
    make_trainer,
    ranks_of,
    shardwise,
    start,
    steps_done,
    stop_all,
    values_of,
    wait_for_end,
    wait_until,
    write_text,
)

# Machines are sometimes busy, and three processes import torch for each run.
pytestmark = pytest.mark.timeout(400)

RECIPE = """
import dataclasses
from tests.train_runs import TINY

def tiny():
    return dataclasses.replace(TINY, data={data!r}, {changes})
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def] # noqa: ANN201
    """Writes a recipe with the given changes; returns what to type for it."""
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def write(changes: str = "") -> str:
        file = tmp_path / "recipe.py"
        file.write_text(RECIPE.format(data=write_text(tmp_path), changes=changes))
        return f"{file}:tiny"

    return write


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """A test that fails half way leaves a run going, which would slow down all that come after."""
    yield
    stop_all()


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(folder, "step")}


# ------------------------------------------------------------------------------ ranks that go

CHANGES = {"steps": 60, "save_every": 5, "eval_every": 0}


def train_in_peace(rank: int, world_size: int, folder: str, data: str) -> None:
    make_trainer(rank, world_size, folder, data=data, **CHANGES).run()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(train_in_peace, 2, str(folder / "run"), write_text(folder))
    return losses(folder / "run")


def test_a_killed_rank_ends_the_run_and_the_next_goes_on(recipe, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    name = recipe("steps=100000, save_every=3, eval_every=0")
    process = start("train", name, "--out", "run", cwd=tmp_path)
    wait_until(
        lambda: (
            len(events_of(tmp_path / "run", "save")) >= 1
            if (tmp_path / "run" / "events.jsonl").exists()
            else False
        ),
        process,
    )
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGKILL, err
    assert "rank 1" in err and "SIGKILL" in err and "--resume" in err
    assert "Traceback" not in err
    reported = events_of(tmp_path / "run", "save")
    assert all(verify(tmp_path / event["path"]).ok for event in reported[-1:]), (
        "what was reported saved is there"
    )
    last = reported[-1]["step"]
    done = shardwise(
        "train", name, "--out", "run", "--resume", "--steps", str(last + 60), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert events_of(tmp_path / "run", "resume")[0]["step"] >= last
    assert events_of(tmp_path / "run", "end")[-1]["step"] == last + 60


def test_restarted_ranks_go_on_by_themselves_as_if_nothing_had_happened(  # type: ignore[no-untyped-def]
    recipe, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    name = recipe(f"**{CHANGES}")
    process = start("train", name, "--out", "run", "--max-restarts", "2", cwd=tmp_path)
    wait_until(lambda: steps_done(tmp_path / "run") >= 12, process)
    os.kill(ranks_of(process)[0], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    went_on = events_of(tmp_path / "run", "resume")
    assert went_on and went_on[0]["step"] >= 5
    assert losses(tmp_path / "run") == undisturbed
    assert sorted(losses(tmp_path / "run")) == list(range(1, 61))


@pytest.mark.parametrize(
    ("to", "number"),
    [
        ("launcher", signal.SIGTERM),
        ("one rank", signal.SIGTERM),
        ("launcher", signal.SIGHUP),
        ("launcher", signal.SIGUSR1),
        ("launcher", signal.SIGKILL),
    ],
)
def test_a_signal_saves_at_the_next_step_and_leaves_nothing_behind(  # type: ignore[no-untyped-def]
    recipe, to: str, number: signal.Signals, tmp_path: Path
) -> None:
    name = recipe("steps=100000, save_every=100000, eval_every=0")
    (tmp_path / "tmp").mkdir()
    places = {"TMPDIR": str(tmp_path / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    process = start("train", name, "--out", "run", cwd=tmp_path, **places)
    wait_until(lambda: steps_done(tmp_path / "run") >= 3, process)
    before, ranks = steps_done(tmp_path / "run"), ranks_of(process)
    if number == signal.SIGHUP:  # the terminal is gone, and with it what could be written to
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
    os.kill(process.pid if to == "launcher" else ranks[1], number)
    code, out, err = finish(process)
    assert code == (-number if number == signal.SIGKILL else 0), err
    wait_for_end(ranks)
    (saved,) = events_of(tmp_path / "run", "save")
    assert before <= saved["step"] == steps_done(tmp_path / "run")
    assert verify(tmp_path / saved["path"]).ok
    assert events_of(tmp_path / "run", "end")[-1]["reason"] != "finished"
    assert "Traceback" not in err
    assert list((tmp_path / "tmp").iterdir()) == [], "temporary folders, torch's too"
    if number != signal.SIGHUP:
        assert f"stopped after step {saved['step']}" in out and "--resume" in out


def test_a_run_is_alone_in_its_folder_and_begins_anew_if_it_never_saved(  # type: ignore[no-untyped-def]
    recipe, tmp_path: Path
) -> None:
    name = recipe("save_every=100000, eval_every=0, steps=100000")
    run = tmp_path / "run"
    process = start("train", name, "--out", "run", cwd=tmp_path)
    wait_until(lambda: steps_done(run) >= 3, process)
    ranks = ranks_of(process)
    for words in (("--resume",), ()):
        done = shardwise("train", name, "--out", "run", *words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("error:") == 1 and f"pid {ranks[0]} on host" in done.stderr
    assert process.poll() is None, "and goes on"
    for pid in [*ranks, process.pid]:
        os.kill(pid, signal.SIGKILL)
    finish(process)
    wait_for_end(ranks)
    assert not (run / "checkpoints").exists()
    done = shardwise("train", "--out", "run", "--resume", "--steps", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ended before its first checkpoint" in done.stdout
    *_, (_, manifest) = valid_checkpoints(run / "checkpoints")
    assert manifest.step == 3 and manifest.config is not None
    assert manifest.config["model"]["dim"] == TINY.model.dim, "of the run, no recipe was named"
    assert [event["step"] for event in events_of(run, "resume")] == [0]


def test_a_signal_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with asking_to_stop(tmp_path / "stop"), Guard() as guard:
            os.kill(os.getpid(), signal.SIGHUP)
            assert guard.asked is None and not (tmp_path / "stop").exists()
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
    assert explain(stuck, signalled={101, 102}) == 1
    said = capsys.readouterr().err
    assert "out of memory" not in said and said.count("error:") == 1
    assert "rank 1 (pid 101) did not end" in said and "the launcher killed it" in said
    assert explain({0: failed(0, 1, 50), 1: failed(1, -9, 50)}, signalled=set()) == 137
    assert "rank 1 (pid 101) was killed by SIGKILL (out of memory?)" in capsys.readouterr().err
    assert explain({0: failed(0, -9, 50), 1: failed(1, -15, 50)}, signalled={101}) == 137
    assert "rank 0" in capsys.readouterr().err


def test_a_stopped_rank_is_named_by_collective_and_step(recipe, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    name = recipe("steps=100000, save_every=100000, eval_every=0, timeout=4.0")
    process = start("train", name, "--out", "run", cwd=tmp_path)
    wait_until(lambda: steps_done(tmp_path / "run") >= 3, process)
    stopped = ranks_of(process)[1]
    os.kill(stopped, signal.SIGSTOP)
    wait_until((tmp_path / "run" / "error-rank0.txt").exists, process)
    os.kill(stopped, signal.SIGKILL)  # torch's agent would do so too, 30 s later
    code, _, err = finish(process)
    assert code != 0
    (line,) = [line for line in err.splitlines() if line.startswith("error: rank 0")]
    assert f"step {steps_done(tmp_path / 'run') + 1}:" in line, line
    assert any(
        name in line for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    ), line
    assert "another rank" in line, line
    assert (tmp_path / "run" / "error-rank0.txt").exists()


def test_a_slow_rank_changes_nothing(  # type: ignore[no-untyped-def]
    recipe, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    name = recipe(f"**{CHANGES}")
    process = start("train", name, "--out", "run", cwd=tmp_path)
    for target in (3, 6, 9):
        wait_until(lambda target=target: steps_done(tmp_path / "run") >= target, process)
        slow = ranks_of(process)[target % 2]
        os.kill(slow, signal.SIGSTOP)
        since = time.monotonic()  # longer than many steps: the others must wait for it
        wait_until(lambda since=since: time.monotonic() - since > 0.5, process)
        os.kill(slow, signal.SIGCONT)
    code, _, err = finish(process)
    assert code == 0, err
    assert losses(tmp_path / "run") == undisturbed != {}


# ------------------------------------------------------------------------------ numbers that break


def broken_gradient(
    rank: int, world_size: int, folder: str, data: str, steps: list[int], limit: int
) -> tuple[list[int], bool, str]:
    """NaN enters on the last rank alone, in the given steps."""
    trainer = make_trainer(rank, world_size, folder, data=data, steps=6, max_skipped=limit)
    forward = trainer.parts.model.forward

    def poisoned(*args: object) -> torch.Tensor:
        loss = forward(*args)
        broken = (
            trainer.step + 1 in steps and rank == world_size - 1 and trainer.parts.model.training
        )
        return loss * float("nan") if broken else loss

    trainer.parts.model.forward = poisoned
    before: dict[int, dict[str, torch.Tensor]] = {}
    real = trainer._train_step

    def watched(guard: object) -> str | None:
        before[trainer.step] = values_of(trainer)
        return real(guard)  # type: ignore[arg-type]

    trainer._train_step = watched  # type: ignore[method-assign, assignment]
    try:
        trainer.run()
    except BrokenGradientError as error:
        return sorted(before), False, str(error)
    kept = all(
        torch.equal(value, before[step][name])
        for step in steps
        for name, value in before[step - 1].items()
    )
    return sorted(before), kept, f"{trainer.skips.total} dropped"


@pytest.mark.parametrize("strategy", ["zero3"])
def test_a_nan_on_one_rank_drops_the_step_on_all(strategy: str, tmp_path: Path) -> None:
    data = write_text(tmp_path)
    results = run_ranks(broken_gradient, 2, str(tmp_path / "run"), data, [2, 4, 5], 2)
    assert all(result == ([0, 1, 2, 3, 4, 5], True, "3 dropped") for result in results), results
    skipped = events_of(tmp_path / "run", "skip")
    assert [event["step"] for event in skipped] == [2, 4, 5]
    assert "NaN" in skipped[0]["where"][0] and "weight" in skipped[0]["where"][0]
    final = events_of(tmp_path / "run", "step")[-1]
    assert final["loss"] == final["loss"], "the run is sound again"


def test_too_many_in_a_row_end_the_run_on_every_rank(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    results = run_ranks(broken_gradient, 2, str(tmp_path / "run"), data, [3, 4, 5], 1)
    for steps, _, text in results:
        assert steps == [0, 1, 2, 3]
        assert "step 4" in text and "2 steps in a row" in text and "max_skipped" in text


# ------------------------------------------------------------------------------ saves that fail


def failing_saves(rank: int, world_size: int, folder: str, data: str, fail: list[int]) -> str:
    trainer = make_trainer(rank, world_size, folder, data=data, save_every=2)
    real, error = trainer.store._write, OSError(28, "No space left on device")

    def write(attempt, snapshot, step):  # type: ignore[no-untyped-def] # noqa: ANN202
        if step in fail:
            attempt.fail(error)
            raise error
        return real(attempt, snapshot, step)

    trainer.store._write = write  # type: ignore[method-assign]
    try:
        trainer.run()
    except SaveError as failed:
        return str(failed)
    return "saved"


def test_a_full_disk_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    assert run_ranks(failing_saves, 2, str(tmp_path / "run"), data, [4]) == ["saved"] * 2
    assert [event["step"] for event in events_of(tmp_path / "run", "save")] == [2, 6, 8]
    (warning,) = events_of(tmp_path / "run", "warning")
    assert "No space left" in warning["text"]


def on_a_small_disk(
    rank: int, world_size: int, folder: str, data: str, room: int
) -> tuple[str, int, list[str]]:
    """Train where no file can grow beyond ``room`` bytes."""
    said: list[str] = []

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, hear = logging.getLogger("shardwise.train"), Hear(logging.WARNING)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    logger.addHandler(hear)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        trainer = make_trainer(rank, world_size, folder, data=data)
        trainer.run()
    except SaveError as failed:
        return str(failed), trainer.step, said
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logger.removeHandler(hear)
    return "saved", trainer.step, said


def test_a_disk_too_small_for_one_checkpoint_is_named_once_and_alike(tmp_path: Path) -> None:
    run, data = tmp_path / "run", write_text(tmp_path)
    found = run_ranks(on_a_small_disk, 2, str(run), data, 4000)
    texts = {text for text, _, _ in found}
    (text,) = texts
    assert f"step {TINY.steps} was not saved" in text and "[Errno 27] File too large" in text
    assert "rank 0: OSError" in text and "__0_0.distcp" in text
    assert [step for _, step, _ in found] == [TINY.steps] * 2, "training went on to its end"
    (warning,) = found[0][2]
    assert "events.jsonl cannot be written" in warning and "rank 0" in warning
    assert found[1][2] == []
    assert list((run / "checkpoints").iterdir()) == [], "no temporary folder stays"


def no_room_for_a_marker(rank: int, world_size: int, folder: str, data: str) -> tuple[str, int]:
    """The last rank cannot make the file by which it would tell the others."""
    trainer = make_trainer(rank, world_size, folder, data=data, save_every=TINY.steps)
    real = Attempt._marker

    def marker(self: Attempt, word: str) -> Path:
        return Path("/proc/nowhere") if rank == world_size - 1 else real(self, word)

    Attempt._marker = marker  # type: ignore[method-assign]
    try:
        trainer.run()
    except SaveError as failed:
        return str(failed), trainer.step
    finally:
        Attempt._marker = real  # type: ignore[method-assign]
    return "saved", trainer.step


def test_a_rank_that_cannot_even_leave_a_word_keeps_nobody_waiting(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (text,) = {
        text for text, _ in run_ranks(no_room_for_a_marker, 2, str(run), write_text(tmp_path))
    }
    assert "rank 1: FileNotFoundError" in text, "the reason, not what another rank saw of it"
    assert list((run / "checkpoints").iterdir()) == []


def test_a_last_save_that_fails_is_an_error(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    said = run_ranks(failing_saves, 2, str(tmp_path / "run"), data, [TINY.steps])
    assert all("No space left" in text for text in said), said
