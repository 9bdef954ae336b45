# SPDX-License-Identifier: Apache-2.0
"""Curves are read from events as a reader means them; a machine's text holds each text once."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fp8_learns import optimizer_words, paired, table, words_of_precisions
from benchmarks.machine_text import gather
from benchmarks.runs import Job, curve_of, finished, mean_of
from benchmarks.shown_results import Shown
from benchmarks.shown_run import SMOKE, beyond, same_losses, stage


def event(kind: str, step: int = 0, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, **values}


def step(number: int, seconds: float, loss: float = 1.0) -> dict[str, Any]:
    return event("step", number, seconds=seconds, tokens=100 * number, loss=loss)


RUN = {"kind": "run", "corpus": {"bigram": 3.5}}
KILLED = [
    RUN,
    *(step(1, 30.0), step(2, 1.0), event("eval", 2, bits_per_byte=3.0), step(3, 1.0, 1.25)),
    *(RUN, event("resume", 2), step(3, 40.0, 1.25), step(4, 1.5)),
    event("eval", 4, bits_per_byte=2.0),
]


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    return folder


def test_a_resumed_run_is_one_curve_without_its_compilations(tmp_path: Path) -> None:
    found = curve_of("a", written(tmp_path / "a", KILLED))
    assert found is not None and found.tokens == [200, 400] and found.bits == [3.0, 2.0]
    # The median (15.75 of 30, 1, 40, 1.5) stands for the first step of either process.
    assert found.seconds == [15.75 + 1.0, 15.75 + 1.0 + 15.75 + 1.5]
    assert curve_of("b", tmp_path / "nowhere") is None
    assert curve_of("c", written(tmp_path / "c", KILLED[:3])) is None, "never evaluated"


def test_runs_are_compared_where_all_of_them_came(tmp_path: Path) -> None:
    whole = curve_of("a", written(tmp_path / "a", KILLED))
    short = curve_of("b", written(tmp_path / "b", KILLED[:4]))
    assert whole is not None and short is not None
    mean = mean_of("mean", [whole, short])
    assert mean.tokens == [200] and mean.low == mean.high == mean.bits == [3.0]
    jobs = [Job(name=one, words=(), folder=tmp_path / one) for one in "ab"]
    with pytest.raises(RuntimeError, match="without a result: a, b"):  # both ended before their end
        finished(jobs, {"a": whole, "b": short})
    ended = curve_of("c", written(tmp_path / "c", [*KILLED, event("end", 4, reason="finished")]))
    assert ended is not None and finished(jobs[:1], {"a": ended}) == [ended]
    runs = paired({"bf16": whole, "x": short}, {"bf16": tmp_path / "a", "x": tmp_path / "b"})
    assert [run.bits for run in runs.values()] == [3.0, 3.0]
    made = table({name: {0: run} for name, run in runs.items()}, "muon", "words")
    assert "x within it (seeds +0.00 to +0.00 %)" in made.note


def test_a_rate_of_matrices_is_for_optimizers_that_read_it() -> None:
    """A run with another refuses it."""
    assert optimizer_words("adamw", 0.04) == ["--optimizer", "adamw"]
    assert optimizer_words("muon", 0.04) == ["--optimizer", "muon", "--matrix-lr", "0.04"]
    assert optimizer_words("muon", None) == ["--optimizer", "muon"]


def test_formats_run_once_more_with_their_last_steps_in_bf16() -> None:
    assert list(words_of_precisions(["fp8_block"], None)) == ["bf16", "fp8_block"]
    words = words_of_precisions(["fp8_block"], 0.1)
    assert words["fp8_block, bf16 at last"] == ["--precision", "fp8_block", "--final-bf16", "0.1"]


def test_steps_that_were_done_twice_are_compared() -> None:
    assert "1 of 1 steps" in same_losses(KILLED)
    changed = [{**one, "loss": 1.5} if one.get("seconds") == 40.0 else one for one in KILLED]
    assert "0 of 1 steps" in same_losses(changed)  # the negative control


def test_a_machine_text_holds_each_text_once(tmp_path: Path) -> None:
    text = "".join(f"line {number}: {number**7 % 9973} of some text\n" for number in range(40))
    (tmp_path / "doc").mkdir()
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.h").write_text(text.replace("9", "3"))  # alike but for digits
    (tmp_path / "c.py").write_bytes(text.encode() + b"\xff")  # no text
    (tmp_path / "d.txt").write_text("0" * 3000)  # a table
    (tmp_path / "e.so").write_text(text + "another suffix")
    (tmp_path / "doc" / "f.1.gz").write_bytes(gzip.compress((text + "a manual").encode()))
    out = tmp_path / "out"
    found = gather(out, roots=[str(tmp_path)], sample=1, workers=1)
    names = [
        json.loads(line)["name"]
        for file in ("sample.jsonl", "rest.jsonl")
        for line in (out / file).read_text().splitlines()
    ]
    assert len(names) == found.documents == 2 and found.bytes > 2 * len(text)
    assert {Path(name).name for name in names} in ({"a.py", "f.1.gz"}, {"b.h", "f.1.gz"})
    assert gather(out, roots=[str(tmp_path)], most=1, workers=1).documents == 1


def test_a_best_rate_at_an_end_asks_for_the_next_one() -> None:
    assert beyond(0.04, (0.02, 0.04, 0.08)) is None
    assert beyond(0.08, (0.02, 0.04, 0.08)) == 0.16
    assert beyond(0.02, (0.02, 0.04, 0.08)) == 0.01


def test_a_stage_without_time_or_with_an_error_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    shown = Shown(
        size=SMOKE,
        scratch=tmp_path,
        results=tmp_path / "out",
        seeds=1,
        parts=(),
        until=time.monotonic() + 50,  # less than the first stage takes
        facts={"command": "none"},
    )
    done: list[str] = []
    stage(shown, "late", 60, lambda: done.append("late"))
    stage(shown, "wrong", 0, lambda: 1 / 0)
    stage(shown, "right", 0, lambda: done.append("right"))
    assert done == ["right"]
    text = (tmp_path / "out" / "shown-run-smoke.md").read_text()
    assert "late: TimeoutError: left out" in text and "wrong: ZeroDivisionError" in text
