# SPDX-License-Identifier: Apache-2.0
"""Runs whose ranks are stopped or asked to end, whose numbers break and whose saves fail.

The ranks are forked, without a launcher; ``test_launch`` has the runs that need one.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import SaveError, valid_checkpoints, verify
from shardwise.train.data import load_corpus
from shardwise.train.loop import BrokenGradientError
from tests.ranks import run_ranks
from tests.train_runs import (
    TINY,
    events_of,
    fork_ranks,
    forked,
    make_trainer,
    steps_done,
    stop_all,
    values_of,
    wait_for_end,
    wait_until,
    write_recipe,
    write_text,
)

ENDLESS = "steps=100000, save_every=100000, eval_every=0"


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """A test that fails half way leaves a run going, which would slow down all that come after."""
    yield
    stop_all()


# ------------------------------------------------------------------------------ ranks


def test_a_signal_to_one_rank_saves_on_all_at_the_next_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = fork_ranks("train", write_recipe(tmp_path, ENDLESS), "--out", "run", cwd=tmp_path)
    wait_until(lambda: steps_done(run) >= 3, ranks)
    before = steps_done(run)
    os.kill(ranks.pids[1], signal.SIGTERM)
    code, out, err = ranks.finish()
    assert code == 0 and "Traceback" not in err, err
    (saved,) = events_of(run, "save")
    assert before <= saved["step"] == steps_done(run)
    assert verify(tmp_path / saved["path"]).ok
    assert events_of(run, "end")[-1]["reason"] != "finished"
    assert f"stopped after step {saved['step']}" in out and "--resume" in out


def test_a_run_is_alone_in_its_folder_and_begins_anew_if_it_never_saved(tmp_path: Path) -> None:
    name, run = write_recipe(tmp_path, ENDLESS), tmp_path / "run"
    ranks = fork_ranks("train", name, "--out", "run", cwd=tmp_path)
    wait_until(lambda: steps_done(run) >= 3, ranks)
    for words in (("--resume",), ()):
        done = forked("train", name, "--out", "run", *words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("error:") == 1 and f"pid {ranks.pids[0]} on host" in done.stderr
    assert ranks.poll() is None, "and goes on"
    for pid in ranks.pids:
        os.kill(pid, signal.SIGKILL)
    wait_for_end(ranks.pids)
    assert not (run / "checkpoints").exists()
    done = forked("train", name, "--out", "run", "--resume", "--steps", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ended before its first checkpoint" in done.stdout
    *_, (_, manifest) = valid_checkpoints(run / "checkpoints")
    assert manifest.step == 3 and manifest.config is not None
    assert manifest.config["model"]["dim"] == TINY.model.dim
    assert [event["step"] for event in events_of(run, "resume")] == [0]


STOPPING = """
import os, signal
from datetime import timedelta
import torch
from torch.distributed import distributed_c10d
from shardwise.train.loop import Trainer

train_step, wait = Trainer._train_step, distributed_c10d.Work.wait

def stopping(trainer, guard):
    if trainer.step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    if trainer.step == 3:  # a wait ends after the run's timeout; no test waits so long
        for group in distributed_c10d._world.pg_map:
            given = group._get_backend(torch.device("cpu")).options._timeout
            assert given == timedelta(seconds=trainer.config.timeout), given
        distributed_c10d.Work.wait = lambda work: wait(work, timedelta(seconds=1))
    return train_step(trainer, guard)

if train_step.__name__ != "stopping":  # a recipe is read more than once
    Trainer._train_step = stopping
"""


def test_a_stopped_rank_is_named_by_collective_and_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    name = write_recipe(tmp_path, f"{ENDLESS}, timeout=321.0")
    with (tmp_path / "recipe.py").open("a") as recipe:
        recipe.write(STOPPING)
    ranks = fork_ranks("train", name, "--out", "run", cwd=tmp_path)
    wait_until((run / "error-rank0.txt").exists, ranks)
    os.kill(ranks.pids[1], signal.SIGKILL)
    code, _, err = ranks.finish()
    assert code != 0
    (line,) = [line for line in err.splitlines() if line.startswith("error: rank 0")]
    assert steps_done(run) == 3 and "step 4:" in line, line
    assert any(
        name in line for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    ), line
    assert "another rank" in line, line


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
    return sorted(before), kept, f"{trainer.skipped} dropped"


def test_a_nan_on_one_rank_drops_the_step_on_all(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    results = run_ranks(broken_gradient, 2, str(tmp_path / "run"), data, [2, 4, 5], 2)
    assert all(result == ([0, 1, 2, 3, 4, 5], True, "3 dropped") for result in results), results
    skipped = events_of(tmp_path / "run", "skip")
    assert [event["step"] for event in skipped] == [2, 4, 5]
    assert all("embedding.weight" in event["gradients"] for event in skipped)
    final = events_of(tmp_path / "run", "step")[-1]
    assert final["loss"] == final["loss"], "the run is sound again"


def test_too_many_in_a_row_end_the_run_on_every_rank(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    results = run_ranks(broken_gradient, 2, str(tmp_path / "run"), data, [3, 4, 5], 1)
    for steps, _, text in results:
        assert steps == [0, 1, 2, 3]
        assert "step 4" in text and "2 steps in a row; now in '" in text


def broken_weights(rank: int, world_size: int, folder: str, data: str) -> list[str]:
    """A weight of the last rank becomes infinite after step 3."""
    trainer = make_trainer(rank, world_size, folder, data=data, steps=6, save_every=1, keep=1)
    real = trainer._train_step

    def watched(guard: object) -> str | None:
        reason = real(guard)  # type: ignore[arg-type]
        if trainer.step == 3 and rank == world_size - 1:
            pieces: Any = (p.to_local() for p in trainer.parts.model.parameters())  # type: ignore[attr-defined]
            next(one for one in pieces if one.numel()).view(-1)[0] = float("inf")
        return reason

    trainer._train_step = watched  # type: ignore[method-assign, assignment]
    with pytest.raises(SaveError, match="step 6 was not saved: weights are not finite"):
        trainer.run()
    return [path.name for path in trainer.store.checkpoints()]


def test_weights_that_are_not_finite_push_out_no_checkpoint(tmp_path: Path) -> None:
    found = run_ranks(broken_weights, 2, str(tmp_path / "run"), write_text(tmp_path))
    assert found == [["step-000002"]] * 2


# ------------------------------------------------------------------------------ saves that fail


def failing_saves(rank: int, world_size: int, folder: str, data: str, fail: list[int]) -> str:
    trainer = make_trainer(rank, world_size, folder, data=data, save_every=2)
    real, error = trainer.store._write, OSError(28, "No space left on device")

    def write(save: Any, result: Any) -> None:
        if save.step in fail:
            save.meeting.fail(error)
            result.set_exception(error)
        else:
            real(save, result)

    trainer.store._write = write  # type: ignore[method-assign]
    try:
        trainer.run()
    except SaveError as failed:
        return str(failed)
    return "saved"


def test_a_full_disk_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    assert run_ranks(failing_saves, 2, str(tmp_path / "run"), data, [4]) == ["saved"] * 2
    saves = events_of(tmp_path / "run", "save")
    assert [event["step"] for event in saves] == [2, 6, 8]
    assert all(0 < event["stalled"] < 60 for event in saves)
    (warning,) = events_of(tmp_path / "run", "warning")
    assert "No space left" in warning["text"]
    said = run_ranks(failing_saves, 2, str(tmp_path / "last"), data, [TINY.steps])
    assert all("No space left" in text for text in said), "of the last save it is an error"


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
    load_corpus(data)  # the tokens are made before the disk is full
    found = run_ranks(on_a_small_disk, 2, str(run), data, 4000)
    (text,) = {text for text, _, _ in found}
    assert "File too large" in text and "rank-00000.safetensors" in text
    assert [step for _, step, _ in found] == [TINY.steps] * 2, "training went on to its end"
    assert [len(warnings) for _, _, warnings in found] == [1, 0], "its events are lost"
    assert list((run / "checkpoints").iterdir()) == [], "no temporary folder stays"
