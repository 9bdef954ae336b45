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
    """Where the CPU has no bf16, leave oneDNN out from the beginning: torch leaves it out from the
    first product of bf16 matrices on, and later fp32 products have other bits. What torch takes
    instead is 200 times slower than a product in fp32 (that of fp16 10 times): products of bf16 and
    fp16 matrices are computed in fp32 there and rounded once."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    torch.backends.mkldnn.set_flags(False)
    with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            _products.impl(name, _widened(name), "CPU", with_keyset=True)


_products = torch.library.Library("aten", "IMPL")


def _widened(name: str) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: Any, *args: Any, **options: Any) -> Any:
        dtype = args[-1].dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return kernel.call_boxed(keys, *args, **options)
        wide = (one.float() for one in args)
        return kernel.call_boxed(keys, *wide, **options).to(dtype)

    return product
