# SPDX-License-Identifier: Apache-2.0
"""The MXFP8 kernels in Triton's interpreter, bit for bit against the definition.

They work on the bits of bf16 as integers, which the interpreter has right; bf16 arithmetic and fp8
casts it has not. The hardware's cast is for tests/device_mxfp8.py. Triton decides at import whether
it interprets, so the tests run in a process of their own, as in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.precision.fp8 import (
    COLUMN,
    ROW,
    Block,
    decode_reference,
    encode,
    encode_reference,
)
from tests.interpreter import INSIDE, inside
from tests.reference import mxfp8 as reference

pytest.importorskip("triton", reason="the kernels are an extra: pip install shardwise[triton]")


if INSIDE:
    from shardwise.kernels import mxfp8 as kernels


def guarded(like: Tensor) -> Tensor:
    """Memory of this shape, with more behind it that nobody may write to."""
    return torch.full((like.numel() + 8192,), 0xAB, dtype=torch.uint8)[: like.numel()].view_as(like)


def check(x: Tensor, blocks: tuple[Block, ...], strips: int = 4) -> None:
    tile = kernels.StripTile(strips=strips, warps=4)
    planes = encode(x, blocks)
    by_block = {plane.block: (guarded(plane.codes), guarded(plane.scales)) for plane in planes}
    kernels.encode(x, by_block, native=False, tile=tile)
    for plane in planes:
        for target, memory in zip((plane.codes, plane.scales), by_block[plane.block], strict=True):
            whole = memory._base
            assert whole is not None and (whole[memory.numel() :] == 0xAB).all()  # and no further
            target.copy_(memory)
    for plane in planes:
        codes, scales = encode_reference(x, plane.block)
        assert torch.equal(plane.scales, scales), plane.block
        assert torch.equal(plane.codes, codes), plane.block
        out = torch.full(x.shape, 7.0)
        kernels.decode(codes, scales, plane.block, out, native=False, tile=tile)
        expected = decode_reference(codes, scales, plane.block, torch.float32)
        same = (out.view(torch.int32) == expected.view(torch.int32)) | (
            out.isnan() & expected.isnan()
        )
        assert same.all(), plane.block


@inside
def test_every_bf16_value() -> None:
    """Sorted, so that a block holds neighbours; NaN and infinities have blocks of their own."""
    check(reference.every_value().view(2048, 32), (ROW,))


@inside
@pytest.mark.parametrize("scale", [0, 1, 2, 7, 127, 246, 247])
def test_small_beside_large(scale: int) -> None:
    """The values that a scale still tells from zero, beside the largest it has."""
    x = reference.every_value_under(scale)
    size = x[:, 1:].abs().amax(1)
    kept = x[size >= x[0, 0].abs().double() * 2.0**-20]
    rows = kept[torch.linspace(0, len(kept) - 1, 96).long()]
    check(rows, (ROW,))
    check(rows.t().contiguous(), (COLUMN,))


@inside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(64, 256), (32, 160)], ids=["whole tiles", "a rim"])
def test_all_planes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-12, 12, shape, generator=generator)
    x = (torch.randn(shape, generator=generator) * torch.exp2(powers)).to(dtype)
    x[3, 5], x[20, 70], x[31, 140] = float("nan"), float("-inf"), -0.0
    if dtype == torch.float32:
        x[0, :2] = torch.tensor([3.4e38, 1e-45])  # infinite in bf16; nothing in bf16
        x[9] = (x[9].bfloat16().float().view(torch.int32) + 0x8000).view(torch.float32)  # ties
    check(x, (ROW, COLUMN))


@inside
def test_every_code_under_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 8).contiguous()
    out = torch.full((256, 256), 7.0)
    kernels.decode(codes, scales, ROW, out, native=False)
    expected = decode_reference(codes, scales, ROW, torch.float32)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(nan=0), expected.nan_to_num(nan=0))
