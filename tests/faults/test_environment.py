# SPDX-License-Identifier: Apache-2.0
"""A broken environment gets one line, which begins with what to do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

import shardwise
from shardwise.integrations.fsdp2 import in_place_of_torch
from shardwise.kernels import missing_compiler
from shardwise.notices import warn_once
from shardwise.train import build
from shardwise.train import launch as world
from shardwise.train.config import TrainConfig
from tests.ranks import run_ranks
from tests.train_runs import environment, inside, make_world

ROOT = Path(__file__).parents[2]


# ------------------------------------------------------------------------------ torch


def old_torch(folder: Path) -> dict[str, str]:
    """An environment whose torch is 2.8, and may not be imported."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (package / "version.py").write_text("__version__ = '2.8.0+cpu'\n")
    return environment(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


def test_an_old_torch_is_named_before_it_fails(tmp_path: Path) -> None:
    said = "pip install 'torch>=2.11': shardwise needs it, and torch 2.8.0+cpu is installed\n"
    variables = old_torch(tmp_path)

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, env=variables, capture_output=True, text=True)

    done = python("-m", "shardwise", "plan", "smoke")
    assert (done.returncode, done.stderr) == (2, f"error: {said}"), done.stderr
    done = python("-c", "import shardwise as sw; sw.zero(3)")
    assert done.stderr.endswith(f"ImportError: {said}"), done.stderr
    assert python("-m", "shardwise", "--help").returncode == 0


def test_the_oldest_torch_is_that_of_the_package() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={shardwise.TORCH[0]}.{shardwise.TORCH[1]}" in needed
    shardwise.check_torch()


# ------------------------------------------------------------------------------ compiler and GPU


@pytest.mark.parametrize(("device", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_no_compiler(device: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv(variable, raising=False)
    said = missing_compiler(device)
    assert said is not None and said.startswith("install a compiler") and variable in said
    monkeypatch.setenv(variable, sys.executable)
    assert missing_compiler(device) is None
    monkeypatch.setenv(variable, "no-such-compiler")
    assert "no-such-compiler" in (missing_compiler(device) or "")


def test_a_run_that_compiles_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"^install a compiler .*--compile off"):
        build.check_compiler(TrainConfig(compile="on"), make_world(0, 1))
    build.check_compiler(TrainConfig(compile="off"), make_world(0, 1))


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    world.check_gpus()  # hidden on purpose

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match=r"a GPU that torch .* cannot use"):
        world.check_gpus()
    monkeypatch.setattr(world, "glob", lambda pattern: [])
    world.check_gpus()


# ------------------------------------------------------------------------------ files and ports


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = inside("data", "stdlib", "--out", "file/tokens", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: file"), done.stderr


def test_modules_get_torchs_verb_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was imported inside the block."""
    theirs, late = fsdp.fully_shard, ModuleType("late")
    with in_place_of_torch():
        exec("from torch.distributed.fsdp import fully_shard", vars(late))
        monkeypatch.setitem(sys.modules, "late", late)
        assert late.fully_shard is fsdp.fully_shard is not theirs
    assert late.fully_shard is fsdp.fully_shard is theirs


# ------------------------------------------------------------------------------ warnings


def warned(rank: int, world_size: int) -> list[str]:
    heard: list[str] = []
    logger = logging.getLogger("shardwise.test")
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for number in (1, 1, 2):
            warn_once(logger, "%d of something", number)
            warn_once(logger, "first %d", number, about="the first")
            warn_once(logger, "only the second rank knows", first=rank == 1)
    finally:
        logger.removeHandler(handler)
    return heard


def test_warnings_come_once_and_from_the_first_rank() -> None:
    first, second = run_ranks(warned, 2)
    assert first == ["1 of something", "first 1", "2 of something"]
    assert second == ["only the second rank knows"]


def test_the_first_rank_of_a_mesh_speaks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    class Mesh:
        def __init__(self, *coordinate: int) -> None:
            self.get_coordinate = lambda: list(coordinate) or None

    logger = logging.getLogger("shardwise.test")
    meshes: list[Any] = [Mesh(0, 1), Mesh(), Mesh(0, 0), Mesh(0, 0)]
    for number, mesh in enumerate(meshes):
        warn_once(logger, "narrow %d", min(number, 2), mesh=mesh)
    assert [record.getMessage() for record in caplog.records] == ["narrow 2"]
