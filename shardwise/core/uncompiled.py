# SPDX-License-Identifier: Apache-2.0
"""Keep code out of torch.compile. Hooks that gather or count, and operations on parameters at rest,
run as written, between the compiled graphs. Operators run as written inside a graph, each as one
node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

from shardwise.core.compat import compiling, disable_dynamo

Function = TypeVar("Function", bound=Callable[..., Any])


def skip_frames(function: Any) -> None:
    """Compile no frame of ``function``, nor of the functions that it calls."""
    if hasattr(eval_frame, "_FrameExecStrategy"):  # not in every torch that we support
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)


def uncompiled(hook: Function) -> Function:
    """``hook`` (or a method) as a function that torch.compile does not trace."""
    skipped = disable_dynamo(hook)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Outside a trace, call the plain hook: `skipped` imports the compiler, which takes seconds.
        return (skipped if torch.compiler.is_compiling() else hook)(*args, **kwargs)

    skip_frames(run)
    return cast(Function, functools.update_wrapper(run, hook))


# Not ``torch.library.custom_op``, which takes three times as much host time for each call.
library = torch.library.Library("shardwise", "FRAGMENT")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make the decorated function an operator in graphs. Its results share no memory with its
    inputs, and ``fake`` computes their shapes. Outside of a trace the function itself is called."""

    def register(function: Function) -> Function:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardwise::{name}", fake, lib=library)
        node = getattr(torch.ops.shardwise, name).default

        def call(*args: Any) -> Any:
            return (node if compiling() else function)(*args)

        return cast(Function, call)

    return register
