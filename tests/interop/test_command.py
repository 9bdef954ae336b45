# SPDX-License-Identifier: Apache-2.0
"""The command that people type: what it says, what it refuses, and how it starts ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import run
from tests.train_runs import (
    environment,
    events_of,
    fork_launcher,
    forked,
    free_port,
    inside,
    stop_all,
    write_text,
)

# Machines are sometimes busy, and a run is four processes that import torch.

SMALL = ("smoke", "--steps", "4", "--nproc", "2")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    stop_all()


def refused(*words: str, cwd: Path, run: Callable[..., Any] = inside) -> str:
    """The command's refusal: one message, no traceback, no exit code 0."""
    done = run(*words, cwd=cwd)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    assert not [*cwd.glob("runs/*/events.jsonl")], "nothing was begun"
    return done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --strategy zero4", "hfsdp"),
        ("train --stratgy zero3", "--stratgy"),
        ("train gpt_900t", "gpt_900t"),
        ("train smoke --strategy hsdp --nproc 3", "3 ranks cannot form 2 replicas"),
        ("train smoke --batch 5 --nproc 2", "use --batch 4 or 6"),
        ("train --resume", "no such checkpoint or run"),
        ("plan smoke --ep 2", "ep=2"),
        ("plan moe_tiny --ranks 3 --ep 2 --batch 3", "does not divide the 3 ranks"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_begins(
    words: str, said: str, tmp_path: Path
) -> None:
    assert said in refused(*words.split(), cwd=tmp_path)


def test_data_that_is_not_there_is_said_once_by_one_rank(tmp_path: Path) -> None:
    said = refused("train", *SMALL, "--data", "nowhere/*.txt", cwd=tmp_path, run=forked)
    assert said.count("error:") == 1 and "nowhere" in said, said


# ------------------------------------------------------------------------------ from run to export


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in it, by two agents, each of which takes itself for a machine.
    (The command's own launcher: faults/test_launch.)"""
    folder = tmp_path_factory.mktemp("trained")
    words = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "test"]
    words += ["-m", "shardwise.cli", "train", "smoke", "--steps", "4", "--strategy", "hsdp"]
    words += ["--data", write_text(folder), "--out", "run"]
    code, out, err = fork_launcher(*words, cwd=folder, count=2).finish(300)
    assert code == 0, err
    assert out.count("a text that the model generates") == 1, "one rank speaks for all"
    assert "step 4/4" in out
    assert "sha256" in out
    assert "shardwise" not in err and "Warning" not in err, err
    return folder


def test_two_nodes_train_one_model_and_leave_pictures_and_a_checkpoint(trained: Path) -> None:
    run = trained / "run"
    (begun,) = events_of(run, "run")
    assert begun["num_nodes"] == 2 and begun["mesh"] == {"dp_outer": 2, "dp": 1}
    for name in ("config.json", "events.jsonl", "report.html"):
        assert (run / name).stat().st_size > 100, name
    page = (run / "report.html").read_text()
    assert "Exposed communication" in page and "Shard map" in page and "default-src 'none'" in page
    assert [event["step"] for event in events_of(run, "step")] == [1, 2, 3, 4]
    (profile,) = events_of(run, "profile")
    assert profile["step"] == 4, "too short for its profile step: the last one is recorded"


def test_a_second_run_does_not_touch_the_first(trained: Path) -> None:
    done = inside("train", *SMALL, "--out", "run", cwd=trained)
    assert done.returncode == 2 and "holds a run already" in done.stderr


def test_verify_says_what_is_wrong(trained: Path) -> None:
    good = inside("verify", "run/checkpoints/step-000004", cwd=trained)
    assert good.returncode == 0 and "sound" in good.stdout
    whole = inside("verify", "run", cwd=trained)
    assert whole.returncode == 0 and "step-000004" in whole.stdout
    shutil.copytree(trained / "run", trained / "damaged")
    next((trained / "damaged/checkpoints/step-000004").glob("*.safetensors")).unlink()
    damaged = inside("verify", "damaged", cwd=trained)
    assert damaged.returncode == 1 and ".safetensors" in damaged.stdout
    (trained / "nothing").mkdir()
    bad = inside("verify", "nothing", cwd=trained)
    assert bad.returncode == 1 and "manifest" in bad.stdout


def test_export_and_plan_and_report(trained: Path) -> None:
    done = inside("export", "run", "hub", cwd=trained)
    assert done.returncode == 0, done.stderr
    assert json.loads((trained / "hub" / "config.json").read_text())["model_type"] == "qwen3"
    assert (
        json.loads((trained / "hub" / "generation_config.json").read_text())["eos_token_id"] == 256
    )
    again = inside("export", "run", "hub", cwd=trained)
    assert again.returncode == 2 and "exists already" in again.stderr
    planned = inside("plan", "hub", "--ranks", "4", cwd=trained)
    assert planned.returncode == 0, planned.stderr
    assert " parameters, zero3 over dp=4" in planned.stdout
    drawn = inside("report", "run", cwd=trained)
    assert drawn.returncode == 0 and drawn.stdout.strip() == "run/report.html"
    assert inside("report", "hub", cwd=trained).returncode == 2


def test_tokens_are_made_once_and_trained_on(trained: Path) -> None:
    words = ("data", "text.txt", "--out", "tokens", "--held-out", "0.1")
    for _ in range(2):
        done = inside(*words, cwd=trained)
        assert done.returncode == 0 and "held out, 257 different" in done.stdout, done.stderr
    taken = inside("data", "text.txt", "--out", "run", cwd=trained)
    assert taken.returncode == 2 and "holds something else" in taken.stderr
    more = ("--data", "tokens", "--eval-data", "text.txt", "--keep-every", "2", "--out", "second")
    done = forked("train", "smoke", "--steps", "4", "--save-every", "1", *more, cwd=trained)
    assert done.returncode == 0, done.stderr
    kept, left = (sorted((trained / "second" / one).iterdir()) for one in ("kept", "checkpoints"))
    assert [path.name[-1] for path in kept] == ["2", "4"]
    assert [path.name[-1] for path in left] == ["3", "4"]
    newest = inside("verify", "second/kept/step-000002", cwd=trained)
    assert newest.returncode == 0 and "sound" in newest.stdout


def test_plans_by_the_flags_of_train(tmp_path: Path) -> None:
    spread = inside("plan", "moe_tiny", "--ranks", "4", "--ep", "2", cwd=tmp_path)
    assert spread.returncode == 0, spread.stderr
    for words in (
        "zero3 over dp=4 (4 ranks), experts over ep=2, muon",
        "all_to_all over ep (2 ranks), if routed evenly",
        "blocks.1 and 2 alike (one of 2 shares)",
        "ranks 2, 3 | feed_forward.experts.f",
    ):
        assert words in spread.stdout, words


def test_whoever_reads_may_stop_reading(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, contextlib.redirect_stdout(pipe):
        assert run(["plan", "smoke"]) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


STREAMS = """
import os, sys
import shardwise.cli as cli
def run(words):
    print("caf\\xe9 \\u2588", file=sys.stderr)
    print("caf\\xe9")
    return 0
cli.run = run
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_stream_that_lacks_characters_ends_no_command(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "streams.py").write_text(STREAMS)
    done = subprocess.run(
        [sys.executable, "streams.py"],
        cwd=tmp_path,
        env=environment(PYTHONIOENCODING=encoding),
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    expected = b"caf\\xe9" if encoding == "ascii" else "caf\xe9".encode()
    assert done.stdout.strip() == expected


# ------------------------------------------------------------------------------ SLURM


def test_a_requeued_slurm_job_goes_on_wherever_it_was_killed(tmp_path: Path) -> None:
    """The example with SLURM's commands replaced: what it asks for, first and after each kill."""
    tools = tmp_path / "bin"
    tools.mkdir()
    said = tmp_path / "said"
    for name, text in {
        "scontrol": "echo node1",
        "srun": '"$@"',
        "torchrun": f'echo "$@" >> {said}; [ -z "$SLOW" ] || while [ ! -e "$SHARDWISE_STOP" ]; '
        "do sleep 0.05; done",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    script = Path(__file__).parents[2] / "examples" / "02_slurm.sh"
    job = {"JOB_NAME": "j", "JOB_ID": "7", "JOB_NODELIST": "node1", "NNODES": "1"}
    variables = {f"SLURM_{name}": value for name, value in job.items()}
    variables |= {"SLURM_GPUS_ON_NODE": "1", "PATH": f"{tools}:{os.environ['PATH']}", "SLOW": ""}

    def submit(**more: str) -> subprocess.Popen[bytes]:
        words = ["bash", str(script), "smoke", "--steps", "4"]
        return subprocess.Popen(words, cwd=tmp_path, env={**os.environ, **variables, **more})

    def asked() -> bool:
        assert submit().wait(60) == 0
        return said.read_text().splitlines()[-1].endswith("--out runs/j-7 --resume")

    assert not asked(), "the first time"
    run = tmp_path / "runs" / "j-7"
    assert not run.exists() and not asked(), "killed before its folder was made"
    (run / "checkpoints" / "step-000001.tmp-1a2b3c4d-1-1-9f8e7d6c").mkdir(parents=True)
    (run / ".lock").touch()
    assert asked(), "killed in its first save: --resume begins anew"
    words = said.read_text().splitlines()[-1].partition("shardwise.cli ")[2].split()
    settled = inside(*words, "--nproc", "5", cwd=tmp_path)  # smoke's batch of 24 does not fit
    assert "a batch of 24 sequences cannot be cut" in settled.stderr, settled.stderr
    slow = submit(SLOW="yes")
    while len(said.read_text().splitlines()) < 4:
        assert slow.poll() is None
    slow.send_signal(signal.SIGTERM)  # two minutes before the time limit
    assert slow.wait(60) == 0
    assert (tmp_path / "runs" / "j-7.stop").exists()
