# SPDX-License-Identifier: Apache-2.0
"""Every example runs, learns, and is short."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
# From 07 on they need other frameworks: test_framework_examples.py.
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("0[1-6]*.py")) + ["13_keep_fsdp2.py"]
RANKS = {"03_experts.py": 4, "04_tensor_parallel.py": 4}


def run_example(rank: int, world_size: int, name: str, *arguments: Any) -> float:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = sys.modules["example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["range"] = lambda count: range(min(count, 6))  # so many of its steps are enough
    return module.main(*arguments)  # type: ignore[no-any-return]


def test_examples_are_short() -> None:
    for path in EXAMPLES.rglob("*"):
        if path.suffix in (".py", ".sh"):
            most = 70 if path.parent != EXAMPLES else 80
            assert len(path.read_text().splitlines()) <= most, path.name


OPTIMIZERS = sorted(path.stem for path in (EXAMPLES / "optimizers").glob("*.py"))


def run_optimizer(rank: int, world_size: int, name: str) -> float:
    sys.path.insert(0, str(EXAMPLES / "optimizers"))
    return run_example(rank, world_size, f"optimizers/{name}.py")  # fails if it does not learn


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "common"])
def test_an_optimizer_learns_and_ranks_change_nothing(name: str) -> None:
    (one,), two = run_ranks(run_optimizer, 1, name), run_ranks(run_optimizer, 2, name)
    assert one == pytest.approx(two[0], rel=1e-4) and two[0] == two[1]


@pytest.mark.parametrize("name", SCRIPTS[1:])
def test_an_example_learns(name: str) -> None:
    losses = run_ranks(run_example, RANKS.get(name, 2), name)
    assert all(loss < 4.6 for loss in losses), losses  # log 256 is 5.5


def test_the_script_that_moved_computes_what_it_computed() -> None:
    ours, theirs = (
        run_ranks(run_example, 2, SCRIPTS[0], ["--steps", "10", *more])[0]
        for more in ([], ["--torch"])
    )
    assert ours == pytest.approx(theirs, rel=1e-5) and ours < 5.2


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    held = json.loads((EXAMPLES / "06_shard_map.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in held["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec("".join(cell["source"]), names)
    assert "blocks.0 and 1 alike" in (out := capsys.readouterr().out)
    assert "matrices 2" in out or out.count("4 shards") > 2, "whole matrices, in buckets"
