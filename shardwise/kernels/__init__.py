# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, each beside the torch function that defines it.

``import shardwise`` imports no kernel, and only modules with kernels import Triton:
``newton_schulz`` (the entry) is plain torch and ``forms`` (the choice) holds plain values; both
import the other modules for the first CUDA tensor.
"""

from __future__ import annotations

import importlib.util
import os
import shutil


def has_triton() -> bool:
    """Whether Triton can be imported; it is not imported to find out."""
    return importlib.util.find_spec("triton") is not None


def missing_compiler(device_type: str) -> str | None:
    """The fix where ``torch.compile`` and kernels find no compiler to build with, or None.

    Triton builds its launchers with a C compiler, torch the code for CPUs with a C++ compiler.
    """
    variable, usual = ("CXX", ("g++",)) if device_type == "cpu" else ("CC", ("clang", "gcc", "cc"))
    named = os.environ.get(variable)
    if any(shutil.which(name) for name in ((named,) if named else usual)):
        return None
    where = f"{variable}={named!r} is not there" if named else f"there is no {' or '.join(usual)}"
    return f"install a compiler (apt-get install g++), or name one in {variable}: {where}"
