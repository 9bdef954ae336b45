# SPDX-License-Identifier: Apache-2.0
"""The kernels of fp8 in blocks of 128 in Triton's interpreter, bit for bit against the definition.

They compute with integers and fp32, which the interpreter has right; see test_mxfp8_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.precision import fp8_block
from shardwise.precision.fp8 import SQUARE_128, encode_reference
from shardwise.precision.fp8_block import empty, quantise
from tests.interpreter import INSIDE, inside

pytest.importorskip("triton", reason="the kernels are an extra: pip install shardwise[triton]")

if INSIDE:
    from shardwise.kernels import fp8_codes as kernels
    from shardwise.kernels import fp8_fused


def values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes; a zero row, tiny ones, NaN and infinity, each in its own tile."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-12, 12, (rows, columns), generator=generator)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(powers)
    x[7] = 0.0
    x[7, 3] = -0.0
    x[9, :128] = 1e-35
    x[3, 5], x[20, 200] = float("nan"), float("-inf")
    if dtype == torch.float32:
        x[11] = (x[11].bfloat16().float().view(torch.int32) + 0x8000).view(torch.float32)  # ties
    return x.to(dtype)


@inside
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((256, 256), torch.bfloat16), ((128, 256), torch.float32)],
    ids=str,
)
def test_every_plane_has_the_bits_of_the_definition(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    high, wide = shape
    x = values(150, wide, dtype)  # 22 tokens of the second tile
    for rows, turned in ((True, 1), (True, 128), (True, 0), (False, 1)):
        expected = quantise(x, rows, turned)
        found = empty(x, rows, turned)
        for part in found:
            part.fill_(7)
        kernels.quantise(
            x.to(torch.bfloat16),
            found[:2] if rows else None,
            found[2:] if turned else None,
            square=turned == 128,
        )
        checked = [
            torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
            for a, b in zip(found, expected, strict=True)
            if a.numel()
        ]
        assert checked == [True] * 2 * (rows + (turned > 0))
    x = values(high, wide, dtype)
    codes, scales = encode_reference(x, SQUARE_128)
    mine, my_scales = torch.full_like(codes, 7), torch.full_like(scales, 7)
    kernels.encode(x, mine, my_scales)
    assert torch.equal(mine, codes)
    assert torch.equal(my_scales.nan_to_num(-1), scales.nan_to_num(-1))
    turned, turned_scales = kernels.turn(codes, my_scales)
    assert torch.equal(turned, codes.t())
    assert torch.equal(turned_scales.nan_to_num(-1), scales.t().nan_to_num(-1))


@inside
def test_tiles_of_many_matrices_are_encoded_in_one_launch() -> None:
    first, second = values(256, 256, torch.float32), values(128, 384, torch.float32) * 3
    gap = torch.full((128,), 9.0)
    flat = torch.cat([gap, second.view(-1), gap, first.view(-1)])
    matrices = [
        kernels.Matrix(256, 256, 256 + second.numel(), scale=5),
        kernels.Matrix(128, 384, 128, scale=50),
    ]
    codes, scales = torch.full((flat.numel(),), 7, dtype=torch.uint8), torch.full((60,), 7.0)
    tiles = kernels.list_tiles(matrices, flat.device)
    kernels.encode(flat, codes, scales, tiles=tiles)
    for value, matrix in zip((first, second), matrices, strict=True):
        expected, expected_scales = encode_reference(value, SQUARE_128)
        mine = codes[matrix.start :][: value.numel()].view(value.shape)
        assert torch.equal(mine, expected)
        mine.fill_(7)
        there = scales[matrix.scale :][: expected_scales.numel()].view(expected_scales.shape)
        assert torch.equal(there.nan_to_num(-1), expected_scales.nan_to_num(-1))
        there.fill_(7)
    assert (codes == 7).all() and (scales == 7).all(), "nothing else was written"


@inside
@pytest.mark.parametrize("tokens", [128, 150])
def test_swiglu_and_its_gradient_write_both_planes(tokens: int) -> None:
    """For rows that lie apart, as slices of one product do; but for the last bit of exp."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(tokens, 512, generator=generator).bfloat16()
    both[9, 3], both[20] = float("nan"), 0.0
    gate, up = both[:, :256], both[:, 256:]
    dh = torch.randn(tokens, 256, generator=generator).bfloat16()
    expected = fp8_block.quantise_swiglu(gate, up)
    found = [torch.full_like(part, 7) for part in expected]
    fp8_fused.swiglu(gate, up, found)
    halves = fp8_block.quantise_swiglu_backward(dh, gate, up)
    written = [[torch.full_like(part, 7) for part in half] for half in halves]
    fp8_fused.swiglu_backward(dh, gate, up, *written)
    for made, wanted in ((found, expected), *zip(written, halves, strict=True)):
        for index, (mine, theirs) in enumerate(zip(made, wanted, strict=True)):
            if index % 2:  # scales
                torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=0.0, equal_nan=True)
            else:
                apart = (mine.int() - theirs.int()).abs()
                apart[(mine | theirs) & 0x7F == 0] = 0  # zeros of either sign
                assert apart.max() <= 1 and (apart > 0).double().mean() < 5e-3, index
