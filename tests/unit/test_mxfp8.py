# SPDX-License-Identifier: Apache-2.0
"""The MXFP8 codec against its definition: every bf16 value under every scale, every code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.precision.fp8 import (
    COLUMN,
    ROW,
    Block,
    FP8Error,
    Plane,
    decode,
    decode_reference,
    encode,
    encode_reference,
)
from tests.reference import mxfp8 as reference

BLOCKS = [ROW, COLUMN]
NAN, INFINITY = float("nan"), float("inf")


def mixed(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Values over many powers of two, as bf16."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-20, 20, (rows, columns), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * torch.exp2(powers)).bfloat16()


def plane_of(x: Tensor, block: Block) -> Plane:
    return encode(x, (block,))[0]


# ------------------------------------------------------------------------------- exhaustive


def test_the_scale_of_every_largest_magnitude() -> None:
    largest = torch.arange(0x8000)  # NaN and infinity too
    x = reference.bf16(largest)[:, None].expand(-1, 32).clone()
    x[:, 1:] = 0
    plane = plane_of(x, ROW)
    _, scales = reference.encode(x)
    assert len(scales.unique()) == 249
    assert torch.equal(plane.scales[:, 0], scales)


def test_every_value_under_every_scale() -> None:
    count, parts = 0, []
    for scale, x in reference.exhaustive():
        codes, scales = encode_reference(x, ROW)
        assert (scales == scale).all()
        expected_codes, expected_scales = reference.encode(x)
        assert torch.equal(codes, expected_codes), f"scale {scale}"
        assert torch.equal(scales[:, 0], expected_scales), f"scale {scale}"
        parts += [codes, scales]
        count += x.numel()
    assert count > 8_000_000
    # What other machines and torch versions are compared with (tests/device_mxfp8.py).
    assert reference.digest(iter(parts)) == reference.ROW_DIGEST


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_code_under_every_scale_is_decoded(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # [scales, codes]
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 8).contiguous()
    found = decode(Plane(codes=codes, scales=scales, block=ROW), dtype=dtype)
    expected = reference.decode(codes.long().numpy(), scales.long().numpy()[:, :1])
    assert torch.equal(found.isnan(), torch.from_numpy(expected).isnan())
    assert int(found.isnan().sum()) == 256 + 2 * 255
    with np.errstate(over="ignore"):
        rounded = torch.from_numpy(expected.astype(np.float32)).to(dtype)
    assert torch.equal(found.nan_to_num(nan=0), rounded.nan_to_num(nan=0))
    exact = torch.from_numpy(expected)[3:247]  # every code of these scales is a bf16 number
    assert torch.equal(found[3:247].double().nan_to_num(nan=0), exact.nan_to_num(nan=0))


@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_encoded_is_decoded_exactly(block: Block) -> None:
    """bf16 holds the value of everything that encode makes: nothing is rounded a second time."""
    for scale, x in reference.exhaustive():
        if scale % 16 and 4 < scale < 244:
            continue
        x = x.t().contiguous() if block == COLUMN else x
        codes, scales = encode_reference(x, block)
        wide = decode_reference(codes, scales, block, torch.float64)
        assert torch.equal(decode_reference(codes, scales, block, torch.bfloat16).double(), wide)


# ------------------------------------------------------------------------------- the two blocks


def test_a_column_plane_is_the_row_plane_of_the_transpose() -> None:
    x = mixed(96, 160)
    row, column = encode(x)
    turned = plane_of(x.t().contiguous(), ROW)
    assert torch.equal(column.codes, turned.codes.t())
    assert torch.equal(column.scales, turned.scales.t())
    assert row.scales.shape == (96, 5) and column.scales.shape == (3, 160)
    assert not torch.equal(row.codes, column.codes)  # two roundings, not one


@pytest.mark.parametrize("block", BLOCKS)
def test_rows_cut_on_32_encode_where_they_lie(block: Block) -> None:
    x = mixed(128, 96)
    whole = plane_of(x, block)
    parts = [plane_of(part, block) for part in (x[:32], x[32:32], x[32:96], x[96:])]
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    assert torch.equal(torch.cat([part.scales for part in parts]), whole.scales)


@pytest.mark.parametrize("block", BLOCKS)
def test_fp32_is_rounded_to_bf16_first(block: Block) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    plane = plane_of(x, block)
    staged = plane_of(x.bfloat16(), block)
    assert torch.equal(plane.codes, staged.codes) and torch.equal(plane.scales, staged.scales)
    if block == ROW:  # and it matters: straight from fp32 one code in thirty is another
        straight, _ = reference.encode(x.view(-1, 32))
        assert 0.01 < float((straight.view(256, 256) != plane.codes).float().mean()) < 0.1


# ------------------------------------------------------------------------------- special values


@pytest.mark.parametrize("bad", [NAN, -NAN, INFINITY, -INFINITY, 3.4e38])
def test_a_nan_or_an_infinity_makes_its_block_nan_and_no_other(bad: float) -> None:
    x = torch.randn(64, 64)
    x[5, 40] = bad  # 3.4e38 is finite in fp32 and infinite in bf16
    for plane, rows, columns in zip(
        encode(x, BLOCKS),
        (slice(5, 6), slice(0, 32)),
        (slice(32, 64), slice(40, 41)),
        strict=True,
    ):
        lost = torch.zeros(64, 64, dtype=torch.bool)
        lost[rows, columns] = True
        assert torch.equal(decode(plane).isnan(), lost)
        assert (plane.codes[lost] == 0x7F).all()
        assert int((plane.scales == 255).sum()) == 1


def test_zeros_keep_their_signs_and_take_the_smallest_scale() -> None:
    x = torch.zeros(32, 64)
    x[:, ::2] = -0.0
    for plane in encode(x, BLOCKS):
        assert (plane.scales == 0).all()
        assert (plane.codes[:, ::2] == 0x80).all() and (plane.codes[:, 1::2] == 0).all()
        assert torch.equal(decode(plane).signbit(), x.signbit())


def test_subnormals_survive() -> None:
    bits = torch.arange(1, 129).clamp(max=127).view(4, 32)  # every subnormal bf16
    x = torch.cat([reference.bf16(bits), -reference.bf16(bits)]).repeat(4, 1)
    plane = plane_of(x, ROW)
    assert (plane.scales == 0).all()
    error = (decode(plane).double() - x.double()).abs() / x.double().abs()
    assert 0 < float(error.max()) <= 2.0**-4  # 4 significant bits of 7, and none flushed


def test_what_rounds_to_two_to_the_128_comes_back_infinite() -> None:
    x = reference.bf16(torch.tensor([0x7F77, 0x7F78, 0x7F7F, 0xFF7F]))[:, None].repeat(8, 32)
    found = decode(plane_of(x, ROW))[:4, 0]
    assert found.tolist() == [1.875 * 2.0**127, INFINITY, INFINITY, -INFINITY]


def test_nothing_saturates() -> None:
    x = mixed(512, 512)
    plane = plane_of(x, ROW)
    largest = x.double().abs().view(512, 16, 32).amax(2)
    assert (largest <= 448 * torch.exp2(plane.scales.double() - 127)).all()
    gaussian = torch.randn(512, 512).bfloat16()
    error = decode(plane_of(gaussian, ROW)).double() - gaussian.double()
    assert 0.026 < float(error.norm() / gaussian.double().norm()) < 0.027


class Casts(TorchDispatchMode):
    """Sees every cast to e4m3: torch up to 2.12 makes NaN of what is above 448, 2.13 does not."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.float8_e4m3fn in (kwargs.get("dtype"), *args[1:]) and args[0].is_floating_point():
            self.largest.append(float(args[0].nan_to_num(nan=0).abs().max()))
        return func(*args, **kwargs)


def test_nothing_above_448_is_cast_to_e4m3() -> None:
    x = torch.full((32, 32), 511.0)
    x[0, 0] = INFINITY
    with Casts() as casts:
        for block in BLOCKS:
            encode_reference(x, block)
    assert len(casts.largest) == 2 and max(casts.largest) <= 448.0


def test_decoded_values_encode_to_themselves_though_their_codes_may_not() -> None:
    """Why codes are always made from the main weights: bytes made from decoded values differ."""
    x = mixed(512, 512)
    once = plane_of(x, ROW)
    again = plane_of(decode(once), ROW)
    assert torch.equal(decode(once), decode(again))
    assert not torch.equal(once.scales, again.scales)


# ------------------------------------------------------------------------------- the verbs


def test_planes_are_written_into_the_memory_given() -> None:
    x = mixed(64, 96)
    flat = torch.full((2 * 64 * 96 + 64 * 3 + 2 * 96 + 1,), 0xAB, dtype=torch.uint8)
    pieces = flat[1:].split([64 * 96, 64 * 96, 64 * 3, 2 * 96])
    out = (
        Plane(codes=pieces[0].view(64, 96), scales=pieces[2].view(64, 3), block=ROW),
        Plane(codes=pieces[1].view(64, 96), scales=pieces[3].view(2, 96), block=COLUMN),
    )
    found = encode(x, out=out)
    assert all(mine is theirs for mine, theirs in zip(found, out, strict=True))
    for plane, fresh in zip(out, encode(x), strict=True):
        assert torch.equal(plane.codes, fresh.codes) and torch.equal(plane.scales, fresh.scales)


@pytest.mark.parametrize("block", BLOCKS)
def test_no_rows_are_no_trouble(block: Block) -> None:
    plane = plane_of(torch.empty(0, 64), block)
    assert plane.codes.shape == (0, 64)
    assert decode(plane).shape == (0, 64)


@pytest.mark.parametrize("shape", [(2, 32, 32), (33, 63), (32, 40)])
def test_what_can_not_hold_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(FP8Error, match=str(shape[-2])):
        encode(torch.zeros(shape))


def test_the_reference_knows_its_own_numbers() -> None:
    """Negative control of the oracle: well-known codes, and a tie that goes to the even one."""
    assert reference.E4M3[1] == 2.0**-9 and reference.E4M3[0x38] == 1 and reference.E4M3[126] == 448
    assert math.isclose(float(reference.MIDDLES[0x38]), 1.0625)
    x = torch.tensor([[448.0, 1.0625, 1.1875, 1.1, -1.0] + [0.0] * 27])
    codes, scales = reference.encode(x)
    assert scales.tolist() == [127]
    assert codes[0, :5].tolist() == [0x7E, 0x38, 0x3A, 0x39, 0xB8]
