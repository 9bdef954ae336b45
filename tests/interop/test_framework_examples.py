# SPDX-License-Identifier: Apache-2.0
"""The examples over other frameworks run as they stand, on two ranks, in at most 60 lines each."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from tests.interop.frameworks import accelerate_reset, launched
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {
    "07_accelerate": ["accelerate", "transformers"],
    "08_transformers_trainer": ["accelerate", "transformers"],
    "09_lightning_fabric": ["lightning"],
    "10_torchtitan": [],
    "11_lora": ["peft", "transformers"],
    "12_hugging_face_muon": ["transformers"],
    "14_keep_fsdp2_accelerate": ["accelerate", "transformers"],
    "15_keep_fsdp2_trainer": ["accelerate", "transformers"],
    "16_keep_fsdp2_torchtitan": [],
}


def run_example(rank: int, world_size: int, name: str) -> str:
    said = io.StringIO()
    with launched(), contextlib.redirect_stdout(said):
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
        finally:
            accelerate_reset()
    return said.getvalue()


@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_learns(name: str) -> None:
    for package in PACKAGES[name]:
        pytest.importorskip(package)
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
    said = run_ranks(run_example, 2, name)[0]
    losses = [float(found) for found in re.findall(r"loss\W+([\d.]+)", said)]
    assert len(losses) >= 8 and losses[7] < losses[0], said


def test_every_example_is_run() -> None:
    every = {path.stem for path in EXAMPLES.glob("*.py")}
    others = {name for name in every if int(name[:2]) < 7} | {"13_keep_fsdp2"}  # test_examples.py
    assert every - others == set(PACKAGES)
