# SPDX-License-Identifier: Apache-2.0
"""Curves of runs are read from events as a reader means them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learns import Curve, curve_of, reached, table


def step(number: int, seconds: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "seconds": seconds, "tokens": 100 * number}


WHOLE = [
    *(step(1, 30.0), step(2, 1.0), {"kind": "eval", "step": 2, "bits_per_byte": 3.0}),
    *(step(3, 1.0), step(4, 2.0), {"kind": "eval", "step": 4, "bits_per_byte": 2.0}),
    {"kind": "end", "step": 4, "reason": "finished"},
]


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    return folder


def test_a_curve_is_a_run_without_its_compilation(tmp_path: Path) -> None:
    found = curve_of(written(tmp_path / "a", WHOLE))
    assert found.bits == [3.0, 2.0] and found.tokens == 400
    assert found.seconds == [2.5, 5.5], "the median (1.5) stands for the first step"
    for name, events in (("b", WHOLE[:-1]), ("c", [*WHOLE[:2], WHOLE[-1]])):
        with pytest.raises(RuntimeError, match="ended before its last step"):
            curve_of(written(tmp_path / name, events))


def test_variants_are_compared_seed_by_seed() -> None:
    def run(bits: float) -> Curve:
        return Curve(seconds=[1.0, 3.0], bits=[4.0, bits], tokens=1e6)

    made = table({"muon": [run(2.0), run(2.2)], "adamw": [run(2.1), run(2.2)]}, "words")
    first, second = made.rows
    assert first["off"] == 0 and second["off"] == pytest.approx(100 * (2.15 / 2.1 - 1))
    assert second["seeds"] == "+0.00 to +5.00" and second["there"] is None
    assert reached(run(2.0), 3.0) == 2.0 and reached(run(2.0), 1.0) is None
