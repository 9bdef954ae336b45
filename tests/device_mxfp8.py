# SPDX-License-Identifier: Apache-2.0
"""MXFP8 on an accelerator: ``python -m tests.device_mxfp8`` on a machine with a GPU.

CI has none, so pytest does not collect this. Bit for bit: the CPU's definition on this machine's
torch against what was recorded from another, every kernel against the CPU's definition, and models
that train on real streams against weights that are quantised at use.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.kernels import mxfp8 as kernels
from shardwise.precision.fp8 import (
    COLUMN,
    ROW,
    Block,
    Plane,
    decode,
    decode_reference,
    encode,
    encode_reference,
    scale_shape,
)
from shardwise.precision.fp8_codec import FP8
from shardwise.precision.fp8_linear import weight_gradient
from shardwise.precision.fp8_native import _encode_rows, native_problem
from tests.parity import mxfp8_helpers as helpers
from tests.reference import mxfp8 as reference

logger = logging.getLogger("device_mxfp8")
DEVICE = torch.device("cuda")
# Strips, warps, registers at most: tiles of which one was chosen.
SWEPT: tuple[tuple[int, int, int | None], ...] = (
    (2, 1, None), (4, 1, None), (2, 2, None), (4, 2, None), (8, 2, None), (4, 4, None),
    (8, 4, None), (8, 4, 96), (8, 8, None), (8, 8, 64), (16, 8, None), (16, 16, None),
    (32, 16, None),
)  # fmt: skip


def check_planes(
    x: Tensor,
    blocks: tuple[Block, ...],
    native: bool | None = None,
    offset: int = 0,
    tile: kernels.StripTile | None = None,
) -> None:
    """Kernel against definition; ``offset`` puts the codes at an unaligned address."""
    planes = []
    for block in blocks:
        memory = torch.full((x.numel() + offset,), 0xAB, dtype=torch.uint8, device=DEVICE)
        scales = memory.new_full(scale_shape(x.shape, block), 0xAB)
        planes.append(Plane(memory[offset:].view(x.shape), scales, block))
    by_block = {plane.block: (plane.codes, plane.scales) for plane in planes}
    kernels.encode(x.to(DEVICE), by_block, native=native, tile=tile)
    for plane in planes:
        codes, scales = encode_reference(x.cpu(), plane.block)
        what = f"{tuple(x.shape)} {x.dtype} {plane.block} of {blocks} {native=} {tile=}"
        wrong = int((plane.scales.cpu() != scales).sum()), int((plane.codes.cpu() != codes).sum())
        assert wrong == (0, 0), f"{what}: {wrong[0]} scales and {wrong[1]} codes differ"
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.full(x.shape, 7.0, dtype=dtype, device=DEVICE)
            kernels.decode(plane.codes, plane.scales, plane.block, out, native=native, tile=tile)
            same_values(out, decode_reference(codes, scales, plane.block, dtype), what)


def same_values(found: Tensor, expected: Tensor, what: str) -> None:
    found = found.cpu()
    assert found.dtype == expected.dtype and found.shape == expected.shape
    bits = {2: torch.int16, 4: torch.int32}[found.element_size()]
    both_nan = found.isnan() & expected.isnan()
    same = (found.view(bits) == expected.view(bits)) | both_nan
    assert same.all(), f"{what}: {int((~same).sum())} of {same.numel()} decoded values differ"


# ----------------------------------------------------------------------------------------- checks


def definition_on_this_torch() -> None:
    for device in ("cpu", DEVICE):
        found = reference.digest(
            part for _, x in reference.exhaustive() for part in encode_reference(x.to(device), ROW)
        )
        assert found == reference.ROW_DIGEST, f"{device}: {found}"


def every_value_under_every_scale() -> None:
    x = torch.cat([x for _, x in reference.exhaustive()])  # [blocks, 32]
    assert x.numel() > 8_000_000
    wide = x[: len(x) // 8 * 8].view(-1, 256)  # the same blocks, eight to a row
    wide = wide[: len(wide) // 32 * 32]
    tall = x.t().contiguous()
    check_planes(wide, (ROW, COLUMN))
    check_planes(tall, (COLUMN,))
    check_planes(wide, (ROW, COLUMN), native=False)
    check_planes(wide.float(), (ROW, COLUMN))


def every_value_with_nan_among_them() -> None:
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(3))
    x = reference.every_value()[order].view(256, 256)
    sparse = torch.randn(256, 256).bfloat16()
    sparse[::37, ::41] = reference.bf16(torch.arange(0x7F70, 0x7F70 + 7 * 7)).view(7, 7)
    for values in (x, sparse):
        check_planes(values, (ROW, COLUMN))


def any_fp32() -> None:
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31, (2048, 1024), generator=generator, dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    check_planes(x, (ROW, COLUMN))
    near = torch.randn(1024, 1024, generator=generator) * 0.02
    check_planes(near, (ROW, COLUMN))
    halfway = near.bfloat16().float().view(torch.int32) + 0x8000  # ties of the bf16 rounding
    check_planes(halfway.view(torch.float32), (ROW, COLUMN))


def any_shape_and_address() -> None:
    for rows, columns in ((32, 32), (96, 160), (64, 1056), (32, 8224)):
        x = torch.randn(rows, columns).bfloat16()
        check_planes(x, (ROW, COLUMN))
    x = torch.randn(96, 256).bfloat16()
    check_planes(x, (ROW,))
    check_planes(x, (COLUMN,))
    check_planes(x, (ROW, COLUMN), offset=1)
    check_planes(x, (ROW,), offset=4)


def every_tile_that_is_used_or_swept() -> None:
    x = torch.cat([x for _, x in reference.exhaustive()][::9])  # every ninth scale
    x = x[: len(x) // 2048 * 2048].view(-1, 2048)
    x[7, 5::97] = float("nan")
    swept = [kernels.StripTile(strips=s, warps=w, registers=r) for s, w, r in SWEPT]
    for tile in {*kernels.TILES.values(), kernels.DECODE_TILE, *swept}:
        check_planes(x, (ROW, COLUMN), tile=tile)
        check_planes(x[:, : 2048 - 32].contiguous(), (COLUMN,), tile=tile)  # a rim


def every_code_under_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 8).contiguous()
    turned = codes.t().contiguous(), scales[:, :1].t().expand(8, -1).contiguous()
    for block, (c, s) in ((ROW, (codes, scales)), (COLUMN, turned)):
        for dtype in (torch.bfloat16, torch.float32):
            for native in (True, False):
                out = torch.full(c.shape, 7.0, dtype=dtype, device=DEVICE)
                kernels.decode(c.to(DEVICE), s.to(DEVICE), block, out, native=native)
                expected = decode_reference(c, s, block, dtype)
                same_values(out, expected, f"{block} {dtype} native={native}")


def more_elements_than_31_bits_count() -> None:
    rows, columns = 65536, 40960  # 2.7e9
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE).normal_()
    whole = encode(x)
    for start in (0, 52416, rows - 32):  # 52428.8 is where 2^31 elements end
        part = encode(x[start : start + 32])
        for plane, piece in zip(whole, part, strict=True):
            high = plane.block[0]
            assert torch.equal(plane.codes[start : start + 32], piece.codes)
            at = start // high
            assert torch.equal(plane.scales[at : at + 32 // high], piece.scales)
    decoded = decode(whole[0])
    assert torch.equal(decoded[-32:], decode(encode(decoded[-32:])[0]))


def linear() -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    weight = torch.randn(1024, 512, device=DEVICE, generator=generator) / 23
    x = torch.randn(4, 100, 512, device=DEVICE, generator=generator).bfloat16()
    grad = torch.randn(4, 100, 1024, device=DEVICE, generator=generator).bfloat16()
    for planes in (1, 2):
        kind: helpers.Kind = "native" if planes == 2 else "mxfp8"
        stored = helpers.coded(weight, kind).requires_grad_()
        here = helpers.parts_of("", stored)
        there = helpers.parts_of("", helpers.coded(weight.cpu(), kind))
        assert all(torch.equal(here[name].cpu(), there[name]) for name in {*here, *there})
        stored.products = "emulated"
        leaf = x.clone().requires_grad_()
        y = F.linear(leaf, stored)
        y.backward(grad)
        assert torch.equal(y, F.linear(x, stored.decode()))
        assert leaf.grad is not None and stored.grad is not None
        expected = grad.view(-1, 1024) @ stored.decode("backward")
        assert torch.equal(leaf.grad, expected.view_as(x))
        exact = grad.view(-1, 1024).double().t() @ x.view(-1, 512).double()
        error = (stored.grad.double() - exact).norm() / exact.norm()
        assert stored.grad.dtype == torch.bfloat16 and error < 4e-3, error
    # In either dtype, rounded once.
    flat, flat_grad = x.view(-1, 512), grad.view(-1, 1024)
    exact = flat_grad.double().t() @ flat.double()
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        found = weight_gradient(flat_grad, flat, dtype)
        assert found.dtype == dtype and (found.double() - exact).norm() / exact.norm() < bound
    rounded = decode(_encode_rows(flat[:100]), dtype=flat.dtype)[:100]
    codes, scales = encode_reference(F.pad(flat[:100].cpu(), (0, 0, 0, 28)), ROW)
    assert torch.equal(rounded.cpu(), decode_reference(codes, scales, ROW, flat.dtype)[:100])


def native_products_are_refused_below_capability_10() -> None:
    problem = native_problem(DEVICE)
    capability = torch.cuda.get_device_capability()
    assert (problem is None) == (capability >= (10, 0) and hasattr(F, "scaled_mm")), problem
    logger.info("native: %s", problem)


# ------------------------------------------------------------------------ models, on real streams

MEMORIES: tuple[dict[str, Any], ...] = ({}, {"memory": "trace"})


@contextmanager
def one_rank(device: torch.device) -> Iterator[DeviceMesh]:
    """A process group of this process alone; over NCCL where there is a GPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def keep_gradient(found: dict[str, Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: found.__setitem__("gradient", grad.detach().clone()))


def eight_ranks_pretended(device: torch.device = DEVICE) -> None:
    """As rank 0 of 8, where a gather repeats this rank's shard: every way brings the same bytes,
    prefetched on streams of their own, kept in parts, staged or direct."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh(device.type, (8,), mesh_dim_names=("dp",))
        cases: list[tuple[str, dict[str, Any]]] = [("codes", each) for each in MEMORIES]
        cases += [("codes", {"reshard_after_forward": 2}), ("bf16", {})]
        for format in ("mxfp8", "fp8_block"):
            seen: list[dict[str, Tensor]] = []
            for travels, options in cases:
                model = helpers.make(True, format)  # type: ignore[arg-type]
                precision = helpers.precision_of(True, format)  # type: ignore[arg-type]
                # Whatever the layout allows, or bf16 whatever it allows.
                staged = mock.patch.object(FP8, "staged_because", return_value="a test")
                with staged if travels == "bf16" else nullcontext():
                    for module in (*model.layers, model):
                        sw.fully_shard(module, mesh=mesh, precision=precision, **options)
                    model.unshard()  # builds what depends on the layout
                    model.reshard()
                found: dict[str, Tensor] = {}
                keep = partial(keep_gradient, found)
                model.embedding.register_forward_hook(keep)  # its gradient went through all planes
                for step in range(3):
                    loss, output = helpers.loss_of(model, helpers.tokens(step, 0, 0).to(device))
                    loss.backward()
                    found[f"output {step}"] = output
                    found[f"gradient {step}"] = found.pop("gradient")
                    model.zero_grad()
                seen.append(found)
            for (travels, options), found in zip(cases[1:], seen[1:], strict=True):
                if "reshard_after_forward" in options:
                    # Half a plane, repeated, is no plane: here it must only come to its end.
                    found |= {name: seen[0][name] for name in found if "gradient" in name}
                helpers.assert_same_bits(found, seen[0], f"{format} {travels} {options}")
    finally:
        dist.destroy_process_group()


CHECKS: tuple[Callable[[], None], ...] = (
    definition_on_this_torch,
    every_value_under_every_scale,
    every_value_with_nan_among_them,
    any_fp32,
    any_shape_and_address,
    every_tile_that_is_used_or_swept,
    every_code_under_every_scale,
    more_elements_than_31_bits_count,
    linear,
    native_products_are_refused_below_capability_10,
    eight_ranks_pretended,
)


def run(checks: Sequence[Callable[[], None]]) -> int:
    """Run one check after another, with a line for each; the exit status of the process."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logger.info("torch %s, %s", torch.__version__, torch.cuda.get_device_name())
    failed = 0
    for check in checks:
        began = time.perf_counter()
        try:
            check()
            torch.cuda.synchronize()
            result = "ok"
        except Exception:
            failed += 1
            result = "FAILED\n" + traceback.format_exc()
        torch.cuda.empty_cache()
        logger.info("%-55s %5.1f s  %s", check.__name__, time.perf_counter() - began, result)
    logger.info("%d of %d checks passed", len(checks) - failed, len(checks))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(CHECKS))
