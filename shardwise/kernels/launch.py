# SPDX-License-Identifier: Apache-2.0
"""Launch a kernel in its compiled form, which is kept.

``kernel[grid](...)`` of Triton binds the arguments, describes each to find the compiled form, and
reads its settings from the environment: several times what the launch itself takes the host. Here
that is done once for arguments of one kind, and ``compiled[grid](...)`` launches from then on.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # what Triton compiles for: addresses and integers that are multiples of it

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_boxes: dict[tuple[Any, ...], dict[str, Any]] = {}


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``. ``args`` are the kernel's first parameters, and
    ``constants`` all its others, with Triton's options."""
    if not isinstance(kernel, JITFunction):  # the interpreter's
        kernel[grid](*args, **constants)
        return
    passed, kinds = _described(args)
    key = (id(kernel), torch.cuda.current_device(), *kinds, *constants.values())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = compiled, rest
    else:
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*passed, *rest)


def _described(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The arguments as a compiled kernel takes them, tensors as addresses; and of each what another
    form would be compiled for. It is never less than Triton's own description."""
    passed: list[Any] = []
    kinds: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is int:
            kinds += value == 1, value % ALIGNMENT == 0, value.bit_length() >> 5
        elif kind is float:
            kinds.append(float)
        elif isinstance(value, Tensor):
            kinds.append(value.dtype)
            value = value.data_ptr()
            kinds.append(value % ALIGNMENT == 0)
        elif kind is TensorDescriptor:
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
