# SPDX-License-Identifier: Apache-2.0
"""Variants of a run are compared seed by seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.learns import scored, table


def test_variants_are_compared_seed_by_seed(tmp_path: Path) -> None:
    ends = [{"kind": "eval", "step": 4, "bits_per_byte": 2.0}, {"kind": "end", "reason": "stop"}]
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join(map(json.dumps, ends)))
    with pytest.raises(RuntimeError, match="ended before its last step"):
        scored(tmp_path)
    file.write_text(file.read_text().replace("stop", "finished"))
    assert scored(tmp_path) == 2.0
    first, second = table({"muon": [2.0, 2.2], "adamw": [2.1, 2.2]}, "words").rows
    assert first["off"] == 0 and second["off"] == pytest.approx(100 * (2.15 / 2.1 - 1))
    assert second["seeds"] == "+0.00 to +5.00"
