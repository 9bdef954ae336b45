# SPDX-License-Identifier: Apache-2.0
"""Code that torch.compile leaves alone. Hooks that gather or count, and operations of parameters at
rest, run as written, between the graphs of what was compiled; operators run so inside a graph, each
a node of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo

Function = TypeVar("Function", bound=Callable[..., Any])


def skip_frames(function: Any) -> None:
    """Compile no frame of ``function``, nor of what it calls."""
    if hasattr(eval_frame, "_FrameExecStrategy"):  # not in every torch that we support
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)


def uncompiled(hook: Function) -> Function:
    """``hook`` (or a method), which is not traced with what it is a hook of (or called by)."""
    skipped = _disable_dynamo(hook)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Outside a trace, call the plain hook: `skipped` imports the compiler, which takes seconds.
        return (skipped if torch.compiler.is_compiling() else hook)(*args, **kwargs)

    skip_frames(run)
    return cast(Function, functools.update_wrapper(run, hook))


# Not ``torch.library.custom_op``, which takes the host three times as long for each call.
library = torch.library.Library("shardwise", "FRAGMENT")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make the decorated function an operator in graphs, of results that share no memory with its
    inputs; ``fake`` knows their shapes. Outside of a trace the function itself is called."""

    def register(function: Function) -> Function:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardwise::{name}", fake, lib=library)
        node = getattr(torch.ops.shardwise, name).default

        def call(*args: Any) -> Any:
            return (node if torch.compiler.is_compiling() else function)(*args)

        return cast(Function, call)

    return register
