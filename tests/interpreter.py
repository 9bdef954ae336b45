# SPDX-License-Identifier: Apache-2.0
"""Tests in Triton's interpreter: it decides at import, so they run in a process of their own, which
tests/unit/test_interpreter.py starts."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
_HERE = importlib.util.find_spec("triton") is not None
_OLD = _HERE and tuple(map(int, version("triton").split(".")[:2])) < (3, 7)

inside = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter's own process")
loops = pytest.mark.skipif(
    _OLD, reason="Triton 3.6's interpreter cannot count to a bound that NumPy 2 holds"
)


def _look_up_once() -> None:
    """The interpreter looks through all of ``triton.language`` at every launch, a fifth of the time
    of these tests, and makes a table of all dtypes for every value, a tenth. What it finds is
    always the same. It patches the language again for every function that a kernel calls, an
    eighth, and computes whether integers overflow, a quarter, for an assertion that it makes in its
    debug mode alone. Every value finds out its shape and the name of its type anew, a quarter of
    what is left then."""
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug, "overflows are reported: leave them on"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    tl, patched = interpreter.tl, set[int]()  # modules of the language, in this launch
    patch_lang = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        held = {id(one) for one in fn.__globals__.values() if one is tl or one is tl.core}
        if held <= patched:
            return None  # inside of a launch, which keeps what it has patched until it ends
        scope = patch_lang(fn)
        if not patched:  # this is the launch
            restore = scope.restore

            def end() -> None:
                patched.clear()
                restore()

            scope.restore = end
        patched.update(held)
        return scope

    interpreter._patch_lang = patch_once
    dtypes: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def dtype_of(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = find(kind)
        return dtypes[kind.name]

    interpreter._get_np_dtype = dtype_of
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}  # of values
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    make_tensor, make_type = tl.core.tensor.__init__, tl.core.block_type.__init__

    def init_tensor(value: Any, handle: Any, kind: Any) -> None:
        shape = (*kind.shape.values,) if kind.is_block() else ()
        if shape not in shapes:
            make_tensor(value, handle, kind)
            shapes[shape] = {name: getattr(value, name) for name in ("numel", "shape")}
        vars(value).update(shapes[shape], handle=handle, type=kind, dtype=kind.scalar)

    def init_type(kind: Any, element: Any, shape: Any) -> None:
        key = (element.name, *(getattr(side, "value", side) for side in shape))
        if key not in types:
            make_type(kind, element, shape)
            types[key] = {name: getattr(kind, name) for name in ("shape", "numel", "name")}
        vars(kind).update(types[key], element_ty=element)

    tl.core.tensor.__init__, tl.core.block_type.__init__ = init_tensor, init_type
    names: dict[Any, list[str]] = {}
    is_builtin = tl.core.is_builtin

    def patch_builtin(package: Any, *rest: Any) -> None:
        if package not in names:
            held = inspect.getmembers(package)
            names[package] = [name for name, member in held if is_builtin(member)]
        for name in names[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtin


if INSIDE and _HERE:
    _look_up_once()


def run_inside(*files: str) -> None:
    """Run files of tests in which some are ``inside``; all of them in one process."""
    command = [sys.executable, "-m", "pytest", "-v", "-x", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *files],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent / "unit",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    # A file that collects nothing is no green one, nor one that skips.
    assert all(f"{file}::" in done.stdout for file in files), done.stdout[-500:]
    assert _OLD or " skipped" not in done.stdout, done.stdout[-500:]
