# SPDX-License-Identifier: Apache-2.0
"""Products of matrices on a CPU without bf16: one set of kernels from the beginning to the end of a
process, and fast ones."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def keep_one_product() -> None:
    """Leave oneDNN out from the beginning where the CPU has no bf16: torch leaves it out from the
    first product of bf16 matrices on, and later fp32 products have other bits. What torch takes
    instead is 200 times slower than a product in fp32 (that of fp16 10 times): products of bf16 and
    fp16 matrices are computed in fp32 there and rounded once."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    torch.backends.mkldnn.set_flags(False)
    with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
        for name in ("mm", "bmm"):
            _products.impl(name, _widened(name), "CPU")
        for name in ("addmm", "baddbmm"):
            _products.impl(name, _widened_sum(name), "CPU")


_products = torch.library.Library("aten", "IMPL")
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_NARROW = (torch.bfloat16, torch.float16)


# Every product of every test comes through here, most of them in fp32.


def _widened(name: str) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed

    def product(a: Any, b: Any) -> Any:
        if (dtype := b.dtype) is torch.float32 or dtype not in _NARROW:
            return kernel(_CPU, a, b)
        return kernel(_CPU, a.float(), b.float()).to(dtype)

    return product


def _widened_sum(name: str) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed

    def product(c: Any, a: Any, b: Any, **factors: Any) -> Any:
        if (dtype := b.dtype) is torch.float32 or dtype not in _NARROW:
            return kernel(_CPU, c, a, b, **factors)
        return kernel(_CPU, c.float(), a.float(), b.float(), **factors).to(dtype)

    return product
