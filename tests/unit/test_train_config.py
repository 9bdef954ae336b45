# SPDX-License-Identifier: Apache-2.0
"""Configurations and recipes, what a user can get wrong in them, and events."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from shardwise import cli
from shardwise.models.gpt_config import GPTConfig
from shardwise.report.html import read_events
from shardwise.train import run
from shardwise.train.config import TrainConfig
from shardwise.train.logs import Console, EventFile, Events, peak_flops
from shardwise.train.recipes import RECIPES, find_recipe, load_recipe

# ------------------------------------------------------------------------------ flags

ODD = {str: "odd", float: 0.25, int: 3, bool: True}


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str, **default: Any) -> TrainConfig:
    """The configuration that a rank gets from these words, over that of a saved run."""
    found: list[TrainConfig] = []

    def train(request: run.Request, sinks: Any) -> int:
        config = load_recipe(request.recipe)
        found.append(request.configure(dataclasses.replace(config, **default)))
        return 0

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.run(["train", *words]) == 0
    return found[0]


def test_every_field_of_the_configuration_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {}
    words = ["smoke"]
    for name, hint in get_type_hints(TrainConfig).items():
        kinds = [one for one in get_args(hint) if one is not type(None)] or [hint]
        if name in ("model", "module"):
            continue
        value = values[name] = ODD.get(kinds[0], kinds[-1])  # of a Literal the last
        if name == "recompute":
            value = values[name] = "block"
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    values["ep"] = words[words.index("--ep") + 1] = "1"
    values["ep"] = 1
    config = parsed(monkeypatch, *words, "--nproc", "2", "--resume")
    assert {name: getattr(config, name) for name in values} == values
    assert config.model == dataclasses.replace(load_recipe("smoke").model, recompute="block")
    own = parsed(monkeypatch, "smoke", "--model", "mine.py:build")
    assert own.module == "mine.py:build" and 35 <= len(values) + 6 <= 45, "about 40 flags"
    with pytest.raises(SystemExit):
        cli.run(["train", "smoke", "--model.dim", "64"])


def test_flags_change_what_they_name_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"steps": 99, "lr": 0.5, "deterministic": True, "microbatches": 4}
    config = parsed(monkeypatch, "smoke", "--steps", "7", "--no-deterministic", **saved)
    wanted = {**saved, "steps": 7, "deterministic": False}
    assert config == dataclasses.replace(load_recipe("smoke"), **wanted)
    for beside in ({"documents": "apart"}, {"ep": 2}, {"recompute": "block"}):
        with pytest.raises(ValueError, match=next(iter(beside))):
            TrainConfig(module="own.py:build", **beside)


def test_help_and_version_import_no_torch() -> None:
    """All in one process: none of them, and nothing between them, needs torch."""
    told = {
        "--version": "shardwise 0.",
        "--help": "shardwise verify",
        "train --help": "--keep-every",
        "train --recipes": "gpt_124m",
        "plan --help": "--memory",
        "data --help": "--tokenizer",
    }
    script = "import sys, shardwise; assert not {'tyro', 'rich'} & {*sys.modules}\n"
    script += "from shardwise import cli\nfor words in sys.argv[1:]:\n"
    script += (
        "    try: cli.main(words.split())\n    except SystemExit as end: assert not end.code\n"
    )
    script += "assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", script, *told], capture_output=True, text=True, check=True
    )
    assert all(word in done.stdout for word in told.values()), done.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_goes_to_json_and_back(name: str) -> None:
    config = load_recipe(name)
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong = {"steps": 0, "lr": -1, "decay": 2, "strategy": "zero9", "seed": 10**20, "final": 2}
    wrong |= {"clip": math.inf, "timeout": 1e308, "data": "", "schedule": "steps", "ep": 2}
    with pytest.raises(ValueError, match="cannot work") as caught:
        TrainConfig(**wrong)  # type: ignore[arg-type]
    assert all(f"{name}=" in str(caught.value) for name in wrong), caught.value
    with pytest.raises(ValueError, match="'warp'"):
        TrainConfig.from_json({"warp": 9})
    with pytest.raises(ValueError, match="dim=100"):
        TrainConfig(model=GPTConfig(dim=100, num_heads=3))


def test_what_does_not_fit_the_ranks_names_the_fix() -> None:
    config = TrainConfig(strategy="hsdp", replicas=2, batch=32, microbatches=2)
    assert config.mesh_shape(4) == {"dp_outer": 2, "dp": 2} and config.share(2) == 8
    flat = dataclasses.replace(config, strategy="zero3")
    for call, said in (
        (lambda: config.mesh_shape(3), "divisor of 3"),
        (lambda: flat.mesh_shape(4), "replicas=2"),
        (lambda: config.share(3), "--batch 30 or 36"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_learning_rates_rise_stay_and_fall() -> None:
    wsd = TrainConfig(steps=100, warmup=10, decay=0.5)
    cosine = TrainConfig(steps=110, warmup=10, schedule="cosine", final=0.2)
    for config, wanted in (
        (wsd, {0: 0.1, 9: 1.0, 50: 1.0, 75: 0.5, 100: 0.1}),
        (cosine, {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.6, 110: 0.2}),
        (dataclasses.replace(wsd, steps=110, decay=1.0, final=0.0), {55: 0.5}),
    ):
        assert {s: pytest.approx(config.factor(s)) for s in wanted} == wanted
    assert not wsd.unreached and not dataclasses.replace(wsd, steps=10, decay=0.0).unreached
    assert "warmup=30" in dataclasses.replace(wsd, steps=20, warmup=30).unreached


def test_own_recipes_are_found_by_file_and_by_module(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from shardwise.train.config import TrainConfig\n"
        "def large():\n    return TrainConfig(steps=7)\n"
        "def wrong():\n    return 3\n"
        "def asks(size):\n    return TrainConfig()\n"
    )
    assert load_recipe(f"{file}:large").steps == 7
    assert find_recipe("shardwise.train.recipes:default") is RECIPES["default"]
    names = [f"{file}:{function}" for function in ("wrong", "asks", "small")]
    for name in (*names, "none.py:large", "no.such.module:large", "tiny"):
        with pytest.raises(ValueError, match=name.rpartition("/")[2]):
            load_recipe(name)


# ------------------------------------------------------------------------------ events


def test_events_survive_a_torn_line_and_numbers_that_json_lacks(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = Events([EventFile(path)])
    events("step", step=1, loss=float("nan"), lr=[0.1, float("inf")])
    events.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 2, "lo')  # the power went
    events = Events([EventFile(path)])
    events("step", step=3, loss=1.5, path=tmp_path)
    events.close()
    found = read_events(path)
    assert [event["step"] for event in found] == [1, 3]
    assert found[0]["loss"] == "nan" and found[0]["lr"] == [0.1, "inf"]
    assert all("time" in event for event in found)


class Deaf:
    """A sink of some library that has lost its server."""

    def __init__(self) -> None:
        self.heard = 0

    def log(self, event: object) -> None:
        self.heard += 1
        raise RuntimeError("no connection")

    def close(self) -> None:
        raise RuntimeError("still none")

    def __str__(self) -> str:
        return "the tracker"


def test_logging_never_ends_a_run_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deaf, good = Deaf(), EventFile(tmp_path / "events.jsonl")
    with contextlib.ExitStack() as open_files:
        full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
        open_files.callback(full.buffer.close)
        sinks: list[Any] = [EventFile(Path("/dev/full")), deaf, Console(4, stream=full), good]
        events = Events(sinks)
        for step in range(1, 5):
            events(**{**step_event(step), "time": 0})
        events.close()
    assert deaf.heard == 4, "it may come back"
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == [1, 2, 3, 4]
    assert len(caplog.records) == 3, "each once"


def test_an_event_file_on_a_disk_that_fills_and_empties_loses_lines_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    events = Events([EventFile(path)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    events("step", step=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
    try:
        events("step", step=2)
        events("step", step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    events("step", step=4)
    events.close()
    assert [event["step"] for event in read_events(path)] == [1, 4]
    (record,) = caplog.records
    assert "events.jsonl" in record.message


def step_event(step: int) -> dict[str, object]:
    figures = {"loss": 2.0, "bits_per_byte": 2.9, "grad_norm": 0.5, "tokens_per_second": 12345.0}
    rest = {"mfu": 0.25, "memory": 3 << 29, "seconds": 0.1, "lr": [0.1], "time": 0.0}
    return {"kind": "step", "step": step, **figures, **rest}


def test_the_console_prints_thirty_lines_of_steps() -> None:
    stream = io.StringIO()
    console = Console(60, stream=stream)
    for step in range(1, 61):
        console.log(step_event(step))
    console.log({"kind": "skip", "step": 61, "grad_norm": "nan", "gradients": ["a.weight"]})
    console.log({"kind": "receipt", "step": 2, "differences": "peak: 3"})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 33 and "step  2/60  loss 2.000" in lines[1] and "25% mfu" in lines[1]
    assert "'a.weight'" in lines[-2] and lines[-1].endswith("peak: 3")


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA L40S", 362e12), ("NVIDIA L40", 181e12), ("a new one", None)]
)
def test_a_gpu_is_known_by_its_whole_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak and peak_flops(torch.device("cpu")) is None


def test_wrong_words_get_one_line_that_says_what_to_type(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[1]")
    Path("a").mkdir()
    Path("a", "events.jsonl").write_text('{"kind": "run"}\n')
    for words, said in (
        ("plan smoke --ranks 0", "--ranks 0"),
        ("plan smoke --batch 25 --ranks 2", "--batch 24 or 26"),
        ("plan list.json", "list.json holds a list"),
        ("report a --out c.html", "--out c.html"),
        ("report a a a", "a is named twice"),
        ("train smoke --nproc 0", "--nproc 0"),
        ("train smoke --max-restarts -1", "--max-restarts -1"),
        ("train smoke --resume --out nowhere", "leave --resume out to begin"),
        ("trian smoke", "did you mean train?"),
        ("dance", "there are train, data, plan"),
        ("verify", "there is no run under runs/"),
    ):
        assert cli.run(words.split()) == 2, words
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err
    assert cli.run(["plan", "smoke", "--ranks", "0", "--verbose"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and "error: --ranks 0" in err
    for words in ("plan --strategy zero4", "train --strategy zero4"):
        with pytest.raises(SystemExit):
            cli.run(words.split())
        err = " ".join(capsys.readouterr().err.replace("│", "").split())
        assert all(name in err for name in ("'zero0'", "'zero3'", "'hfsdp'")), err
