# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that neither ruff nor import-linter can state.

Each rule reads one parsed file and names what breaks it. Each is shown a few lines that it must
catch, and a few that it must let pass: a rule which sees nothing can't pass for a house in order.
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
FOLDERS = ("shardwise", "tests", "benchmarks", "examples")
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


def collectives(tree: ast.Module) -> list[str]:
    return [f"{line}: {name}" for line, name in dotted_names(tree) if COMMUNICATION.match(name)]


@cache
def dotted_names(tree: ast.Module) -> list[tuple[int, str]]:
    return list(_dotted_names(tree))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _dotted_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name in the file as `torch.distributed.all_reduce`, whatever it was imported as."""
    meaning: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                first = alias.name.split(".")[0]
                meaning[alias.asname or first] = alias.name if alias.asname else first
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
        # "?": an attribute of a call or an index, as in `groups[0].allreduce`.
        root = meaning.get(inner.id, inner.id) if isinstance(inner, ast.Name) else "?"
        if parts or isinstance(inner, ast.Name):
            yield getattr(node, "lineno", 0), ".".join([root, *reversed(parts)])


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
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return sorted(imported_packages(ast.Module(list(top), [])) & OPTIONAL)


def not_from_the_standard_library(tree: ast.Module) -> list[str]:
    return sorted(imported_packages(tree) - set(sys.stdlib_module_names))


Rule = Callable[[ast.Module], list[str]]
# (rule, what it leaves out, what it catches, what it lets pass)
RULES: list[tuple[Rule, tuple[str, ...], list[str], list[str]]] = [
    (
        collectives,
        ("core/comm.py",),
        [
            "import torch.distributed as dist\ndist.all_reduce(x)",
            "import torch.distributed as d\nsend = d.batch_isend_irecv",
            "from torch import distributed\ndistributed.all_gather_object(a, b)",
            "from torch.distributed import reduce_scatter_tensor as hidden",
            "from torch.distributed import _functional_collectives",
            "import torch\ntorch.ops._c10d_functional.all_reduce(x)",
            "mesh.get_group(0).allreduce([x])",
        ],
        [
            "from shardwise import comm\ncomm.all_reduce(x)",
            "import torch.distributed as dist\ndist.get_rank(group)",
            "from functools import reduce\nreduce(f, x)",
        ],
    ),
    (
        streams,
        ("core/streams.py",),
        [
            "import torch\ntorch.cuda.current_stream().wait_event(e)",
            "from torch.cuda import Stream",
            "from torch import cuda\ncuda.nvtx.range_push('x')",
            "weight.untyped_storage().record_stream(s)",
            "import torch\ntorch.Event()",
        ],
        ["import torch\ntorch.cuda.max_memory_allocated()", "lanes.stream('gather')"],
    ),
    (prints, ("cli.py", "report"), ["def f():\n    print('hello')"], ["log.info('print')"]),
    (
        environment_reads_at_import,
        (),
        ["import os\nFLAG = os.environ.get('F')", "import os\nclass A:\n    a = os.getenv('F')"],
        ["import os\ndef f():\n    return os.environ['FLAG']"],
    ),
    (
        undeclared_packages,
        ("integrations", "kernels"),
        ["def f():\n    import einops", "from pandas.core import frame"],
        ["import math\nimport torch\nfrom . import x"],
    ),
    (
        optional_packages_at_import,
        ("kernels",),
        ["import wandb"],
        ["def f():\n    import wandb"],
    ),
]


@pytest.mark.parametrize(("rule", "without", "caught", "fine"), RULES)
def test_a_rule_holds(
    rule: Rule, without: tuple[str, ...], caught: list[str], fine: list[str]
) -> None:
    assert all(rule(ast.parse(source)) for source in caught)
    assert not any(rule(ast.parse(source)) for source in fine)
    left_out = [ROOT / "shardwise" / name for name in without]
    assert all(path.exists() for path in left_out) and len(PACKAGE) > 50
    files = [path for path in PACKAGE if not {path, *path.parents} & set(left_out)]
    found = {str(path.relative_to(ROOT)): rule(parsed(path)) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_layout_needs_the_standard_library_alone() -> None:
    layout = (ROOT / "shardwise/core/layout.py").read_text()
    assert not_from_the_standard_library(ast.parse(layout)) == []
    assert not_from_the_standard_library(ast.parse("from torch import Tensor"))


def test_every_file_is_licensed_and_finished() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    licence = "# SPDX-License-Identifier: Apache-2.0\n"
    bare = [name for name, text in texts.items() if not text.startswith(licence)]
    unfinished = re.compile(r"\b(?:TO" r"DO|FIX" r"ME)\b")
    left = [name for name, text in texts.items() if unfinished.search(text)]
    assert texts and (bare, left) == ([], [])
