# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled in threads ahead of their first launch, while a model is compiled.

    compile_ahead(work)      ``work`` launches on tensors without memory (device "meta"): Triton
                             describes the arguments, and a thread compiles for them
    the first real launch    waits for its kernel, and raises the errors of the compilation

Triton releases Python's lock for nearly all of a compilation. The thread that launches loads the
kernel and its launcher. All launchers of Triton 3.6 have one module name, so two threads that load
launchers at the same time could get each other's, with other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context

from torch import Tensor

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def planned(tensor: Tensor) -> bool:
    """Whether work on this tensor is only planned: no kernel is launched or compiled."""
    return tensor.is_meta and not _compiling.get()


def compile_ahead(work: Callable[[], None]) -> None:
    """Compile for the launches of ``work`` in threads."""
    from triton import AsyncCompileMode

    def run() -> None:
        _compiling.set(True)
        AsyncCompileMode(threads).__enter__()  # without an exit, which would wait
        work()

    threads = ThreadPoolExecutor(4)
    copy_context().run(run)
    threads.shutdown(wait=False)
