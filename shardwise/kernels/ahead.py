# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of their first launch, side by side, while a model is compiled.

    compile_ahead(work)      ``work`` launches on tensors without memory (the device "meta"):
                             Triton describes the arguments, and a thread compiles for them
    the first real launch    waits for its kernel, and raises what the compilation raised

Triton compiles outside of Python's lock for nearly all of the time. The thread that launches loads
the kernel and its launcher: to Python all launchers of Triton 3.6 are one module, so a thread that
loads one while another thread does can get the other's, with other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context

from torch import Tensor

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def planned(tensor: Tensor) -> bool:
    """Whether work on tensors like this is only planned: no kernel is launched or compiled."""
    return tensor.is_meta and not _compiling.get()


def compile_ahead(work: Callable[[], None]) -> None:
    """Compile for the launches of ``work`` in threads."""
    from triton import AsyncCompileMode

    def run() -> None:
        _compiling.set(True)
        AsyncCompileMode(threads).__enter__()  # never left, which would wait
        work()

    threads = ThreadPoolExecutor(4)
    copy_context().run(run)
    threads.shutdown(wait=False)
