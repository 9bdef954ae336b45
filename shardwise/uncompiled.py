# SPDX-License-Identifier: Apache-2.0
"""Code that torch.compile leaves alone: hooks that gather or count, operations of parameters at
rest. It runs as written, between the graphs of what was compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo


def skip_frames(function: Any) -> None:
    """Compile no frame of ``function``, nor of what it calls."""
    if hasattr(eval_frame, "_FrameExecStrategy"):  # not in every torch that we support
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, which is not traced with what it is a hook of."""
    skipped = _disable_dynamo(hook)

    def run(*args: Any) -> Any:
        # Outside a trace, call the plain hook: `skipped` imports the compiler, which takes seconds.
        return (skipped if torch.compiler.is_compiling() else hook)(*args)

    skip_frames(run)
    return functools.update_wrapper(run, hook)
