# SPDX-License-Identifier: Apache-2.0
"""Pictures in docs/ are what the code says now; files that pages name exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_those_of_the_code() -> None:
    maker, found = pictures(), 0
    for page in PAGES:
        text = page.read_text()
        found += len(maker.PLACE.findall(text))
        assert maker.drawn(text) == text, f"{page.name} is old: run python docs/pictures.py"
        assert maker.drawn(text.replace("resting", "asleep")) == text  # the negative control
    assert found == len(maker.PICTURES) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", page.read_text())
    missing = [name for name in named if not any((ROOT / top / name).exists() for top in TOPS)]
    assert not missing


TOPS = ("shardwise", "shardwise/shard", "tests", "benchmarks", "examples", "docs", "")
