# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, each beside the torch function that defines it.

``import shardwise`` imports no kernel, and only modules with kernels import Triton:
``newton_schulz`` (the entry) is plain torch and ``forms`` (the choice) holds plain values; both
import the other modules for the first CUDA tensor.

    newton_schulz   orthogonalise a batch: the entry, the choice of path, the torch definition
    forms           the best form for a shape, and its measured cost
    iterate         the direct and Gram iterations over the two products below
    symmetric       a·A·Bᵀ + b·C + d·I where the result is symmetric: half the tiles, mirrored
    product         Q·X and X·Q
    factors         the numbers of each matrix that an iteration begins with
    normalise       sum of squares, then scaling into the packed 16-bit batch
    block           a whole Newton-Schulz of a small matrix in one program
    momentum        momentum, Nesterov, norm, cast and pack in one pass (two for fp16)
    update          unpack, weight decay and update in one pass
    adamw           AdamW and a clip in one pass
    launch          a launch without Triton's search for the compiled form
    ahead           compilation before the first launch, while something else is done
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
