# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of their first launch, side by side, while a model is compiled.

    compile_ahead(work)      ``work`` launches on tensors without memory (the device "meta"):
                             Triton describes the arguments, and a thread compiles for them
    the first real launch    waits for its kernel, and raises what the compilation raised

Triton compiles outside of Python's lock for nearly all of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import torch
from torch import Tensor

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def planned(tensor: Tensor) -> bool:
    """Whether work on tensors like this is only planned: no kernel is launched or compiled."""
    return tensor.is_meta and not _compiling.get()


def compile_ahead(work: Callable[[], None], device: torch.device) -> None:
    """Compile for the launches of ``work`` in threads, which load the kernels to ``device``."""
    from triton import AsyncCompileMode

    class Loading(AsyncCompileMode):  # type: ignore[misc, no-any-unimported]
        def submit(self, key: Any, compile: Callable[[], Any], *others: Any) -> Any:
            def loaded() -> Any:
                kernel = compile()
                kernel.run  # noqa: B018  builds the launcher and loads the kernel
                return kernel

            return super().submit(key, loaded, *others)

    def run() -> None:
        _compiling.set(True)
        Loading(threads).__enter__()  # never left, which would wait: it goes with its context
        work()

    threads = ThreadPoolExecutor(4, initializer=torch.cuda.set_device, initargs=(device,))
    copy_context().run(run)
    threads.shutdown(wait=False)
