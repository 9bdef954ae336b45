# SPDX-License-Identifier: Apache-2.0
"""Launch a kernel in its compiled form, which is kept.

``kernel[grid](...)`` of Triton binds the arguments, describes each to find the compiled form, and
reads its settings from the environment: several times what the launch itself takes the host. Here
that is done once for arguments of one kind, and the compiled form launches from then on.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import FutureKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # what Triton compiles for: addresses and integers that are multiples of it

# How to launch, what comes before the arguments, and the constants, which come after them.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
# By kernel: its forms that are compiled ahead of a launch (ahead.py), until one is needed.
_ahead: dict[int, list[Any]] = {}
_boxes: dict[tuple[Any, ...], dict[str, Any]] = {}


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``. ``args`` are the kernel's first parameters, and
    ``constants`` all its others, with Triton's options. For tensors without memory the kernel is
    compiled and not launched."""
    if not isinstance(kernel, JITFunction):  # the interpreter's
        kernel[grid](*args, **constants)
        return
    passed, kinds = _described(args)
    device = torch.cuda.current_device()
    key = (id(kernel), device, *kinds, *constants.values())
    found = _compiled.get(key)
    if found is None and any(isinstance(value, Tensor) and value.is_meta for value in args):
        _ahead.setdefault(id(kernel), []).append(kernel.warmup(*args, grid=grid, **constants))
    elif found is None:
        for form in _ahead.pop(id(kernel), ()):  # perhaps for these arguments
            if isinstance(form, FutureKernel):
                form.result()
        compiled = kernel[grid](*args, **constants)
        rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        # As ``compiled[grid](...)`` does, but for the hooks of Triton's own profiler.
        _compiled[key] = (
            compiled.run,
            (compiled.function, compiled.packed_metadata, None, None, None),
            rest,
        )
    else:
        launch, fixed, rest = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        launch(*(*grid, 1, 1)[:3], stream, *fixed, *passed, *rest)


def _described(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The arguments as a compiled kernel takes them, tensors as addresses; and of each what another
    form would be compiled for. It is never less than Triton's own description."""
    passed: list[Any] = []
    kinds: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is int:
            sort = (value == 1) + 2 * (value % ALIGNMENT == 0) + 4 * (value.bit_length() >> 5)
            kinds.append(sort)
        elif kind is float:
            kinds.append(float)
        elif isinstance(value, Tensor):
            kinds += (value.dtype, value.is_meta)
            value = value.data_ptr()
            kinds.append(value % ALIGNMENT == 0)
        elif hasattr(value, "block_shape"):  # a descriptor, of Triton or of Gluon
            kinds += (value.base.dtype, *value.block_shape)
        else:
            kinds += kind, value
        passed.append(value)
    return passed, kinds


def boxes(tensor: Tensor, shape: list[int]) -> TensorDescriptor:
    """``tensor``, to be read and written in boxes of ``shape``. Triton's checks are made once for
    tensors that are alike."""
    key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT, *shape)
    known = _boxes.get(key)
    if known is None:
        made = TensorDescriptor.from_tensor(tensor, shape)
        _boxes[key] = {**vars(made), "base": None}  # or the memory would never be freed
        return made
    made = TensorDescriptor.__new__(TensorDescriptor)
    vars(made).update(known)
    made.base = tensor
    return made
