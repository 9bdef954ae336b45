# SPDX-License-Identifier: Apache-2.0
"""Launch kernels with little work on the host, by caching compiled kernels.

For each launch, ``kernel[grid](...)`` of Triton binds the arguments, describes each to find the
compiled kernel, and reads its settings from the environment. This takes the host several times as
long as the launch. :func:`run` does it once for arguments of one kind, and then launches the
compiled kernel directly.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # Triton compiles other code for addresses and integers that are multiples of 16

# The function that launches, its arguments before those of the kernel, and the constants after.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
_boxes: dict[tuple[Any, ...], dict[str, Any]] = {}


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``. ``args``: the first parameters of the kernel;
    ``constants``: all its other parameters, and Triton's options."""
    if not isinstance(kernel, JITFunction):  # a kernel of Triton's interpreter
        kernel[grid](*args, **constants)
        return
    passed, kinds = _described(args)
    device = torch.cuda.current_device()
    key = (id(kernel), device, *kinds, *constants.values())
    known = _compiled.get(key)
    if known is not None:
        launch, fixed, rest = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        launch(*(*grid, 1, 1)[:3], stream, *fixed, *passed, *rest)
    else:
        compiled = kernel[grid](*args, **constants)
        rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        # The arguments of ``compiled[grid](...)``, without the hooks of Triton's profiler.
        fixed = (compiled.function, compiled.packed_metadata, None, None, None)
        _compiled[key] = (compiled.run, fixed, rest)


def _described(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The arguments in the form that a compiled kernel takes, with addresses for tensors; and a key
    of all properties for which Triton would compile another kernel."""
    passed: list[Any] = []
    kinds: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is int:
            kinds.append(
                (value == 1) + 2 * (value % ALIGNMENT == 0) + 4 * (value.bit_length() >> 5)
            )
        elif kind is float:
            kinds.append(float)
        elif isinstance(value, Tensor):
            kinds.append(value.dtype)
            value = value.data_ptr()
            kinds.append(value % ALIGNMENT == 0)
        elif hasattr(value, "block_shape"):  # a descriptor of Triton or of Gluon
            kinds += (value.base.dtype, *value.block_shape)
        else:
            kinds += kind, value
        passed.append(value)
    return passed, kinds


def boxes(tensor: Tensor, shape: list[int]) -> TensorDescriptor:
    """A descriptor of ``tensor``, which kernels read and write in boxes of ``shape``. Triton checks
    only the first of several similar tensors."""
    key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT, *shape)
    known = _boxes.get(key)
    if known is None:
        descriptor = TensorDescriptor.from_tensor(tensor, shape)
        _boxes[key] = {**vars(descriptor), "base": None}  # without the tensor, so that it is freed
        return descriptor
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(descriptor).update(known)
    descriptor.base = tensor
    return descriptor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    # 3 in the interpreter: few, and seldom a divisor of the tiles, so that programs differ in work.
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
