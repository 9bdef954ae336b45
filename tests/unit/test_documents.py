# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/ say what is true now.

Pictures are those of the code. Files, links and anchors exist. Commands parse. Python runs, on as
many ranks as the comment before a block says:

    <!-- run: gpt, 4 ranks, "dp=8" as "dp=4" -->     a model and tokens are there; dp=8 is replaced
    <!-- continues -->                               after the block before it, in its namespace
    <!-- not run: REASON -->                         it must compile all the same

Figures come from benchmarks/results: every number with a decimal point, or with a unit, between
``<!-- figures: NAME ... -->`` and ``<!-- end -->`` stands in one of the files named there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import cli
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


# ------------------------------------------------------------------------------------ pictures


def test_pictures_are_those_of_the_code() -> None:
    maker, found = module("pictures"), 0
    for page in PAGES:
        text = page.read_text()
        found += len(maker.PLACE.findall(text))
        assert maker.drawn(text) == text, f"{page.name} is old: run python docs/pictures.py"
        assert (
            maker.drawn(text.replace("pre_forward  ", "forward_pre  ")) == text
        )  # the negative control
    assert found == len(maker.PICTURES) >= 4


# ------------------------------------------------------------------------------ files and links


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", page.read_text())
    missing = [name for name in named if not any((ROOT / top / name).exists() for top in TOPS)]
    assert not missing


TOPS = ("shardwise", "shardwise/shard", "tests", "benchmarks", "examples", "docs", "")
LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)\"")
# Pages that `make docs` writes: from README.md, docstrings and the command's help (docs/site.py).
GENERATED = {DOCS / "index.md", DOCS / "api.md", DOCS / "command.md"}


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"\s+", "-", heading) for heading in words}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in (a or b for a, b in LINK.findall(text)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        known = there.exists() or there in GENERATED
        if not known or (anchor and there.exists() and anchor not in anchors(there.read_text())):
            broken.append(target)
    return broken


@every_page
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert not broken_links(page, page.read_text())
    assert broken_links(page, "[a](nowhere.md) [b](#no-such-heading)") == [
        "nowhere.md",
        "#no-such-heading",
    ]


def test_every_page_is_in_the_site() -> None:
    named = re.findall(r"[\w]+\.md", (ROOT / "mkdocs.yml").read_text().split("nav:")[1])
    assert sorted(named) == sorted({page.name for page in PAGES[1:]} | {p.name for p in GENERATED})


# ------------------------------------------------------------------------------------- commands

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def refused(line: str) -> str | None:
    """Why a line of a shell block cannot be typed, or None."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if words[:1] == ["torchrun"] and "shardwise.cli" in words:
        words = ["shardwise", *words[words.index("shardwise.cli") + 1 :]]
    if words[:1] == ["make"]:
        known = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if set(words[1:2]) <= set(known) else line
    if words[:2] == ["python", "-m"]:
        return None if importlib.util.find_spec(words[2]) is not None else line
    if words[:1] == ["shardwise"]:
        if ":" in "".join(words[2:3]) and words[1] == "train":  # a recipe of the reader
            del words[2]
        try:
            cli.parse(words[1:])
        except (KeyError, ValueError):
            return line
        except SystemExit as stopped:
            return line if stopped.code else None
    return None


@every_page
def test_commands_parse(page: Path) -> None:
    blocks = [code for kind, code in FENCE.findall(page.read_text()) if kind in ("bash", "")]
    lines = [line for code in blocks for line in code.replace("\\\n", " ").splitlines()]
    assert not [line for line in lines if line.strip() and refused(line)]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_helps_and_its_examples_can_be_typed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {*cli.COMMANDS} == {*module("site").COMMANDS}
    with contextlib.suppress(SystemExit):
        cli.run([name, "--help"])
    assert f"usage: shardwise {name}" in capsys.readouterr().out
    lines = (cli.COMMANDS[name][0].__doc__ or "").splitlines()
    shown = [
        line.strip() for line in lines[1:] if line.strip().startswith(("shardwise", "torchrun"))
    ]
    assert not [line for line in shown if refused(line)]


def test_commands_that_cannot_be_typed_are_found() -> None:
    wrong = ("shardwise train --no-such-flag 3", "shardwise bench fsdp", "make nothing")
    assert all(refused(line) for line in (*wrong, "python -m benchmarks.nothing"))


# ----------------------------------------------------------------------------------------- code

MARK = re.compile(
    r"(?:<!-- (run|continues|not run)(?:: ([^>]*?))? -->\n)?^```python\n(.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    code: str
    ranks: int = 1
    names: list[str] = field(default_factory=list)
    skipped: bool = False


def blocks_of(text: str) -> list[Block]:
    found: list[Block] = []
    for kind, words, code in MARK.findall(text):
        if kind == "continues":
            found[-1].code += code
            continue
        block = Block(code, skipped=kind == "not run")
        assert not block.skipped or words, "say why a block is not run"
        for word in re.findall(r'"[^"]+" as "[^"]+"|[^,"]+', words) if kind == "run" else ():
            word = word.strip()
            if not word:
                continue
            if match := re.fullmatch(r"(\d+) ranks?", word):
                block.ranks = int(match[1])
            elif match := re.fullmatch(r'"(.+)" as "(.+)"', word):
                assert match[1] in block.code
                block.code = block.code.replace(match[1], match[2])
            else:
                block.names.append(word)
        found.append(block)
    return found


def setup(names: list[str]) -> dict[str, Any]:
    """The names that the text around a block has already spoken of."""
    there: dict[str, Any] = {"__name__": "__page__", "torch": torch, "sw": sw}
    experts: dict[str, Any] = {"num_experts": 4, "expert_hidden_dim": 32}
    for name in names:
        config = GPTConfig(
            vocab_size=64, dim=32, num_layers=2, num_heads=2, context=8,
            **(experts if name == "moe" else {}),
        )  # fmt: skip
        assert name in ("gpt", "moe", "mesh"), name
        if name == "mesh":
            there["mesh"] = sw.init_mesh(device_type="cpu")
        else:
            there["model"] = GPT(config)
            there["model"].init_weights(0)
            there["tokens"] = torch.randint(64, (2, 8))
    return there


def run_block(rank: int, world_size: int, code: str, names: list[str], folder: str) -> None:
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(compile(code, "page", "exec"), setup(names))
    finally:
        os.chdir(before)


@every_page
def test_python_runs(page: Path, tmp_path: Path) -> None:
    for block in blocks_of(page.read_text()):
        compile(block.code, page.name, "exec")
        if not block.skipped:
            run_ranks(run_block, block.ranks, block.code, block.names, str(tmp_path))


def test_python_that_fails_is_found(tmp_path: Path) -> None:
    (block,) = blocks_of(
        '<!-- run: 1 rank, "sw.zero" as "sw.nought" -->\n```python\nsw.zero(3)\n```'
    )
    with pytest.raises(Exception, match="nought"):
        run_ranks(run_block, 1, block.code, block.names, str(tmp_path))


# -------------------------------------------------------------------------------------- figures

TRACED = re.compile(r"<!-- figures: ([^>]+?) -->\n(.*?)<!-- end -->", re.DOTALL)
UNIT = r"(?:x|ms|µs|s|GiB|MiB|TFLOP/s|bits/byte)"
FIGURE = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:(?= ?%)|(?=\s?{UNIT}\b))|(?<![\w.])\d+\.\d+")
# A model's size and versions are names, not measurements.
NAMES = re.compile(r"\d+(\.\d+)?[BMk]\b|torch \d\.\d+|Python \d\.\d+|capability \d+\.\d|--\w+ \S+")


def untraced(names: str, text: str) -> list[str]:
    """Figures that stand in none of the result files."""
    held = "\n".join((RESULTS / f"{name}.md").read_text() for name in names.split())
    plain = NAMES.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))
    return [figure for figure in FIGURE.findall(plain) if not stands_in(figure, held)]


def stands_in(figure: str, held: str) -> bool:
    """Whether a file has the number, or one that is rounded to it."""
    wanted = figure.replace(",", "")
    digits = len(wanted.partition(".")[2])
    for number in re.findall(r"\d[\d,]*(?:\.\d+)?", held):
        value = number.replace(",", "")
        if value == wanted or f"{float(value):.{digits}f}" == wanted:
            return True
    return False


@every_page
def test_figures_come_from_result_files(page: Path) -> None:
    text = page.read_text()
    for names, part in TRACED.findall(text):
        assert untraced(names, part) == []
    rest = re.sub(r"```.*?```", "", TRACED.sub("", text), flags=re.DOTALL)
    rest = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", rest, flags=re.DOTALL)
    measured = re.findall(r"\d+(?:\.\d+)? (?:ms|µs|GiB|TFLOP/s|bits/byte)\b|\d\.\d+x", rest)
    assert not measured, "put them between <!-- figures: FILE --> and <!-- end -->"


def test_figures_of_nowhere_are_found() -> None:
    assert untraced("replicas", "1.020 and 3.21x and 12.27 GiB and 77 ms") == ["3.21", "77"]


def test_each_invariant_has_its_test_and_its_negative_control() -> None:
    rows = re.findall(
        r"^\| (I\d+) \|.*\|(.+)\|(.+)\|$", (ROOT / "docs/promises.md").read_text(), re.M
    )
    assert [name for name, *_ in rows] == [f"I{number}" for number in range(1, 17)]
    for name, *columns in rows:
        for column in columns:
            found = re.findall(r"`([^`:]+)::(\w+)`", column)
            assert found, f"{name} has no test"
            for path, test in found:
                assert f"def {test}(" in (ROOT / "tests" / path).read_text(), (name, path, test)
