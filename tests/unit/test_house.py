# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that neither ruff nor import-linter can state.

Each rule reads one parsed file and names what breaks it. Each has a negative control: a few lines
that must be caught, so that a rule which sees nothing can't pass for a house in order.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "shardwise").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
EVERYTHING = sorted(
    path
    for folder in ("shardwise", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)

DEPENDENCIES = {"torch", "numpy", "rich", "tyro", "safetensors", "shardwise"}
OPTIONAL = {"transformers", "accelerate", "lightning", "tensorboard", "wandb", "triton"}
COLLECTIVES = (
    r"(i?send|i?recv|barrier|monitored_barrier|broadcast|scatter|gather|reduce|all_reduce"
    r"|all_gather|all_gather_into_tensor|reduce_scatter|reduce_scatter_tensor|all_to_all"
    r"|all_to_all_single|batch_isend_irecv|P2POp|_all_gather_base|_reduce_scatter_base"
    r"|(send|recv|broadcast|scatter|gather|all_gather)_object(_list)?|all_gather_coalesced"
    r"|all_reduce_coalesced|_coalescing_manager)"
)
COMMUNICATION = re.compile(
    rf"torch\.distributed(\.distributed_c10d)?\.{COLLECTIVES}$"
    r"|torch\.distributed\.(_functional_collectives|nn\.functional)(\.|$)"
    r"|torch\.ops\.(_?c10d(_functional)?)(\.|$)"
    # The methods of a ProcessGroup, whatever the variable is called.
    r"|.*\.(allreduce|allgather|_allgather_base|_reduce_scatter_base|alltoall_base)$"
)
STREAMS = re.compile(
    r"torch\.cuda\.(\w*[sS]tream\w*|Event|ExternalEvent|nvtx|synchronize)(\.|$)"
    r"|torch\.accelerator\.\w*stream\w*$|torch\.(Stream|Event)$|.*\.record_stream$"
)


# -------------------------------------------------------------------------------------- the rules


@cache
def dotted_names(tree: ast.Module) -> list[tuple[int, str]]:
    """Every name in the file as `torch.distributed.all_reduce`, whatever it was imported as."""
    return list(_dotted_names(tree))


def _dotted_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    meaning: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                meaning[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            parts.append(meaning.get(inner.id, inner.id))
            yield node.lineno, ".".join(reversed(parts))  # type: ignore[attr-defined]
        elif parts:  # an attribute of a call or an index: `groups[0].allreduce`
            yield node.lineno, ".".join(["?", *reversed(parts)])  # type: ignore[attr-defined]


def collectives(tree: ast.Module) -> list[str]:
    return [f"{line}: {name}" for line, name in dotted_names(tree) if COMMUNICATION.match(name)]


def streams(tree: ast.Module) -> list[str]:
    return [f"{line}: {name}" for line, name in dotted_names(tree) if STREAMS.match(name)]


def prints(tree: ast.Module) -> list[str]:
    return [f"{line}: print" for line, name in dotted_names(tree) if name == "print"]


def environment_reads_at_import(tree: ast.Module) -> list[str]:
    def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield child
                yield from outside_functions(child)

    return [
        f"{node.lineno}: {node.attr}"
        for node in outside_functions(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]


def imported_packages(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def undeclared_packages(tree: ast.Module) -> list[str]:
    return sorted(imported_packages(tree) - DEPENDENCIES - set(sys.stdlib_module_names))


def optional_packages_at_import(tree: ast.Module) -> list[str]:
    """Optional packages are for functions to import: `import shardwise` must do without them."""
    top_level = ast.Module(
        [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], []
    )
    return sorted(imported_packages(top_level) & OPTIONAL)


def not_from_the_standard_library(tree: ast.Module) -> list[str]:
    return sorted(imported_packages(tree) - set(sys.stdlib_module_names))


# --------------------------------------------------------------------- the rules, over the package


def test_there_is_something_to_check() -> None:
    names = {str(path.relative_to(ROOT / "shardwise")) for path in PACKAGE}
    assert {"core/comm.py", "core/streams.py", "core/layout.py", "cli.py"} <= names


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def broken(rule: Callable[[ast.Module], list[str]], paths: list[Path]) -> dict[str, list[str]]:
    """The findings of `rule`, by file; an empty dict when all is well."""
    found = {str(path.relative_to(ROOT)): rule(parsed(path)) for path in paths}
    return {name: lines for name, lines in found.items() if lines}


def package_without(*names: str) -> list[Path]:
    """Without these files and folders."""
    left_out = [ROOT / "shardwise" / name for name in names]
    assert all(path.exists() for path in left_out)
    return [path for path in PACKAGE if not {path, *path.parents} & set(left_out)]


def test_only_comm_calls_collectives() -> None:
    assert broken(collectives, package_without("core/comm.py")) == {}
    there = broken(collectives, [ROOT / "shardwise/core/comm.py"])
    assert there != {}, "the rule sees what is there"


def test_only_streams_names_streams_and_events() -> None:
    assert broken(streams, package_without("core/streams.py")) == {}
    assert broken(streams, [ROOT / "shardwise/core/streams.py"]) != {}


def test_only_the_command_line_and_reports_print() -> None:
    assert broken(prints, package_without("cli.py", "report")) == {}


def test_nothing_reads_the_environment_at_import() -> None:
    assert broken(environment_reads_at_import, PACKAGE) == {}


def test_layout_needs_the_standard_library_alone() -> None:
    assert broken(not_from_the_standard_library, [ROOT / "shardwise/core/layout.py"]) == {}


def test_the_package_imports_only_what_it_declares() -> None:
    core = package_without("integrations", "kernels")
    assert broken(undeclared_packages, core) == {}
    assert broken(optional_packages_at_import, package_without("kernels")) == {}


def test_every_file_is_licensed_and_finished() -> None:
    assert len(EVERYTHING) > 400
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in EVERYTHING}
    licence = "# SPDX-License-Identifier: Apache-2.0\n"
    bare = [name for name, text in texts.items() if not text.startswith(licence)]
    unfinished = re.compile(r"\b(?:TO" r"DO|FIX" r"ME)\b")
    left = [name for name, text in texts.items() if unfinished.search(text)]
    assert (bare, left) == ([], [])


# ------------------------------------------------------------------------------- negative controls


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (collectives, "import torch.distributed as dist\ndist.all_reduce(x)"),
        (collectives, "import torch.distributed as d\nsend = d.batch_isend_irecv"),
        (collectives, "import torch\ntorch.distributed.barrier()"),
        (collectives, "from torch import distributed\ndistributed.all_gather_object(a, b)"),
        (collectives, "from torch.distributed import reduce_scatter_tensor as hidden"),
        (collectives, "from torch.distributed import _functional_collectives"),
        (collectives, "import torch\ntorch.ops._c10d_functional.all_reduce(x)"),
        (collectives, "mesh.get_group(0).allreduce([x])"),
        (streams, "import torch\ntorch.cuda.current_stream().wait_event(e)"),
        (streams, "from torch.cuda import Stream"),
        (streams, "import torch\nwith torch.cuda.stream(s): pass"),
        (streams, "from torch import cuda\ncuda.nvtx.range_push('x')"),
        (streams, "weight.untyped_storage().record_stream(s)"),
        (streams, "import torch\ntorch.Event()"),
        (prints, "def f():\n    print('hello')"),
        (prints, "show = print"),
        (environment_reads_at_import, "import os\nFLAG = os.environ.get('FLAG')"),
        (environment_reads_at_import, "import os\nclass A:\n    flag = os.getenv('FLAG')"),
        (undeclared_packages, "def f():\n    import einops"),
        (undeclared_packages, "from pandas.core import frame"),
        (optional_packages_at_import, "import wandb"),
        (not_from_the_standard_library, "from torch import Tensor"),
        (not_from_the_standard_library, "from shardwise import placements"),
    ],
)
def test_a_rule_catches(rule: Callable[[ast.Module], list[str]], source: str) -> None:
    assert rule(ast.parse(source)) != []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (collectives, "from shardwise import comm\ncomm.all_reduce(x)"),
        (collectives, "import torch.distributed as dist\ndist.get_rank(group)"),
        (collectives, "from functools import reduce\nreduce(f, x)"),
        (streams, "import torch\ntorch.cuda.max_memory_allocated()"),
        (streams, "lanes.stream('gather')"),
        (prints, "log.info('print')"),
        (environment_reads_at_import, "import os\ndef f():\n    return os.environ['FLAG']"),
        (undeclared_packages, "import math\nimport torch\nfrom . import x"),
        (optional_packages_at_import, "def f():\n    import wandb"),
    ],
)
def test_a_rule_lets_pass(rule: Callable[[ast.Module], list[str]], source: str) -> None:
    assert rule(ast.parse(source)) == []
