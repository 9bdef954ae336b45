# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, each beside the torch function that defines it.

``import shardwise`` imports no kernel, and only modules with kernels import Triton.
``newton_schulz`` (the entry) is plain torch, and ``forms`` (the choice of an algorithm) holds plain
values. Modules with kernels are imported for the first CUDA tensor.
"""

from __future__ import annotations

import importlib.util
import os
import shutil


def has_triton() -> bool:
    """Whether Triton can be imported. This function does not import it."""
    return importlib.util.find_spec("triton") is not None


def missing_compiler(device_type: str) -> str | None:
    """The fix if ``torch.compile`` and kernels would find no compiler, or None.

    Triton builds its launchers with a C compiler; torch builds code for CPUs with a C++ compiler.
    """
    variable, usual = ("CXX", ("g++",)) if device_type == "cpu" else ("CC", ("clang", "gcc", "cc"))
    chosen = os.environ.get(variable)
    if any(shutil.which(name) for name in ((chosen,) if chosen else usual)):
        return None
    where = f"{variable}={chosen!r} is not there" if chosen else f"there is no {' or '.join(usual)}"
    return f"install a compiler (apt-get install g++), or name one in {variable}: {where}"
