# SPDX-License-Identifier: Apache-2.0
"""mkdocs hooks: pages that are made when the site is built, and links that leave docs/.

README.md                  index.md
docstrings of sw.__all__   api.md
help of each command       command.md
benchmarks/results/*.md    results/*.md
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">'
    r'\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>'
)
COMMANDS = ("train", "data", "plan", "report", "verify", "export")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {"index.md": index(), "api.md": api(), "command.md": commands()}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        pages[f"results/{path.name}"] = path.read_text()
    for name, text in pages.items():
        made = File.generated(config, name, content=text)
        if name.startswith("results/"):
            made.inclusion = made.inclusion.NOT_IN_NAV
        files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Results are pages of the site; other files outside docs/ are named, not linked. A picture
    follows the colours of the page, which a reader may have switched, not those of the system."""
    markdown = PICTURE.sub(
        r'<img alt="\2" src="\3#only-light">\n<img alt="\2" src="\1#only-dark">', markdown
    )
    markdown = re.sub(r"\]\(\.\./benchmarks/results/([\w-]+\.md)\)", r"](results/\1)", markdown)
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (\2)", markdown)


def index() -> str:
    """README.md, as a page in docs/."""
    text = re.sub(r'(\]\(|src(?:set)?=")docs/', r"\1", (ROOT / "README.md").read_text())
    here = {path.name for path in (ROOT / "docs").glob("*.md")}
    return re.sub(
        r"\]\((?!https?:|#)([^)#]+)",
        lambda found: found[0] if found[1] in here else f"](../{found[1]}",
        text,
    )


def api() -> str:
    """Every public name with its signature and docstring."""
    import shardwise as sw

    groups: dict[str, list[str]] = {}
    for name in sw.__all__:
        groups.setdefault(kind_of(getattr(sw, name)), []).append(name)
    parts = ["# Public names\n\n`import shardwise as sw`. Made from the docstrings.\n"]
    for kind in ("Functions", "Classes", "Values and modules"):
        parts.append(f"## {kind}\n")
        parts += [entry(name, getattr(sw, name)) for name in groups.get(kind, [])]
    return "\n".join(parts)


def kind_of(value: Any) -> str:
    if inspect.isclass(value):
        return "Functions" if value.__name__.endswith("Settings") else "Classes"
    return "Functions" if callable(value) else "Values and modules"


def entry(name: str, value: Any) -> str:
    lines = [f"### sw.{name}\n"]
    if callable(value):
        with contextlib.suppress(ValueError, TypeError):
            lines.append(f"```text\nsw.{name}{signature(value)}\n```\n")
    own = inspect.ismodule(value) or callable(value) or "shardwise" in type(value).__module__
    words = inspect.getdoc(value) if own else None
    lines.append(prose(words or f"A value: `{value!r}`.") + "\n")
    return "\n".join(lines)


def signature(value: Any) -> str:
    parameters: list[str] = []
    for one in inspect.signature(value).parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        kind = "" if one.annotation is one.empty else f": {one.annotation}"
        default = "" if one.default is one.empty else f" = {one.default!r}"
        parameters.append(f"{stars}{one.name}{kind}{default}")
    return "(\n    " + ",\n    ".join(parameters) + ",\n)" if parameters else "()"


def prose(words: str) -> str:
    """A docstring as Markdown: roles and double backticks as code, arguments as a list."""
    words = re.sub(r":\w+:`~?([^`]+)`", lambda m: f"`{m[1].rsplit('.', 1)[-1]}`", words)
    words = words.replace("``", "`").replace("<", "&lt;") if "    " not in words[:4] else words
    head, found, arguments = words.partition("\nArgs:\n")
    if not found:
        return pictures_kept(head)
    listed, rest = [], []
    for line in inspect.cleandoc("x\n" + arguments).splitlines()[1:]:
        if rest or (line and not line.startswith(" ") and not re.match(r"[\w, ]+:", line)):
            rest.append(line)
        elif match := re.match(r"([\w, ]+): (.*)", line):
            listed.append(f"- **{match[1].strip()}**: {match[2]}")
        elif line.strip():
            listed.append("  " + line.strip())
        else:
            rest.append("")
    return pictures_kept(head) + "\n\n" + "\n".join(listed) + "\n" + pictures_kept("\n".join(rest))


def pictures_kept(text: str) -> str:
    """Indented lines are pictures or code: Markdown keeps them as they are."""
    return re.sub(r"(?m)^(    .*)$", lambda m: m[1].replace("&lt;", "<"), text)


def commands() -> str:
    """The help of every subcommand."""
    from shardwise import cli

    os.environ["COLUMNS"] = "110"
    parts = ["# Commands\n\nThe help of each command, as `shardwise COMMAND --help` prints it.\n"]
    for name in COMMANDS:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            cli.run([name, "--help"])
        text = re.sub(r"\x1b\[[\d;]*m", "", shown.getvalue())
        parts.append(f"## shardwise {name}\n\n```text\n{text.rstrip()}\n```\n")
    return "\n".join(parts)
