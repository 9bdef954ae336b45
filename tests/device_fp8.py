# SPDX-License-Identifier: Apache-2.0
"""fp8 in blocks of 128 on a GPU: ``python -m tests.device_fp8``.

CI has none, so pytest does not collect this. Kernels bit for bit against the CPU's definition;
products of hardware against fp64 of the same operands; compiled blocks against eager ones. Models
that train on real streams: ``pytest --device cuda tests/parity/test_mxfp8.py``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.kernels import fp8_codes as kernels
from shardwise.precision import fp8_block
from shardwise.precision.fp8 import (
    ROW_128,
    SQUARE_128,
    WIDE,
    decode_reference,
    encode,
    encode_reference,
)
from tests.device_mxfp8 import one_rank, run
from tests.parity import mxfp8_helpers as helpers
from tests.reference import mxfp8 as reference

logger = logging.getLogger("device_fp8")
DEVICE = torch.device("cuda")


def same(found: Tensor, expected: Tensor, what: str) -> None:
    found = found.cpu()
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    equal = (found == expected) | (found.isnan() & expected.isnan())
    if found.dtype == torch.float32:
        bits = found.view(torch.int32) == expected.view(torch.int32)
        equal = bits | (found.isnan() & expected.isnan())
    assert equal.all(), f"{what}: {int((~equal).sum())} of {equal.numel()} differ"


def check_quantised(x: Tensor) -> None:
    """Both planes, and each by itself, against the definition on the CPU."""
    on_gpu = x.to(DEVICE)
    for rows, turned in ((True, 1), (True, 128), (True, 0), (False, 1)):
        expected = fp8_block.quantise(x.cpu(), rows, turned)
        found = fp8_block.empty(on_gpu, rows, turned)
        for part in found:
            part.fill_(7)
        kernels.quantise(
            on_gpu,
            found[:2] if rows else None,
            found[2:] if turned else None,
            square=turned == WIDE,
        )
        names = ("codes", "scales", "turned codes", "turned scales")
        for name, part, value in zip(names, found, expected, strict=True):
            if part.numel():
                same(part, value, f"{name} of {tuple(x.shape)} {turned}")


def every_value_quantised() -> None:
    x = torch.cat([x for _, x in reference.exhaustive()][::7])  # [blocks, 32]
    x = x[: len(x) // 512 * 512].view(-1, 512)
    sparse = torch.randn(384, 512).bfloat16()
    sparse[::37, ::41] = reference.bf16(torch.arange(0x7F70, 0x7F70 + 11 * 13)).view(11, 13)
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(3))
    shuffled = reference.every_value()[order].view(256, 256)
    for values in (x, sparse, shuffled):
        check_quantised(values)


def any_number_of_tokens() -> None:
    for tokens in (1, 127, 128, 200, 520, 1024):
        check_quantised(torch.randn(tokens, 640).bfloat16())


def swiglu_writes_the_codes_of_its_values() -> None:
    for tokens in (300, 512):
        both = torch.randn(tokens, 2 * 640, device=DEVICE).bfloat16()
        gate, up = both[:, :640], both[:, 640:]
        dh = torch.randn(tokens, 640, device=DEVICE).bfloat16()
        makes: list[Callable[..., Sequence[Tensor]]] = [
            lambda dh, gate, up: fp8_block.quantise_swiglu(gate, up),
            lambda *values: fp8_block.quantise_swiglu_backward(*values)[0],
            lambda *values: fp8_block.quantise_swiglu_backward(*values)[1],
        ]
        for number, made in enumerate(makes):
            pairs = zip(made(dh, gate, up), made(dh.cpu(), gate.cpu(), up.cpu()), strict=True)
            for index, (mine, theirs) in enumerate(pairs):
                differ = float((mine.cpu() != theirs).double().mean())
                most = 0.02 if index % 2 else 5e-3  # approximate exp moves some to neighbours
                assert differ < most, f"{tokens} {number} {index}: {differ} differ"


def weights_encoded() -> None:
    rows, columns = 512, 640
    generator = torch.Generator().manual_seed(4)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(rows, columns, generator=generator) * 0.02
        x[3, 5], x[rows - 1, columns - 1] = float("nan"), float("inf")
        x[128:256, -128:] = 0.0
        x = x.to(dtype)
        (plane,) = encode(x.to(DEVICE), (SQUARE_128,))
        codes, scales = encode_reference(x, SQUARE_128)
        same(plane.codes, codes, f"codes {dtype}")
        same(plane.scales, scales, f"scales {dtype}")
        turned, turned_scales = kernels.turn(plane.codes, plane.scales)
        same(turned, codes.t().contiguous(), "turned")
        same(turned_scales, scales.t().contiguous(), "turned scales")


def many_weights_encoded_in_one_launch() -> None:
    values = [torch.randn(shape) * 0.02 for shape in ((512, 640), (128, 128), (256, 1408))]
    values[2][5, 7] = float("inf")
    area = WIDE**2
    for dtype in (torch.bfloat16, torch.float32):
        matrices, parts, start = [], [], 0
        for value in values:  # a tile between neighbours stays as it is
            matrices.append(kernels.Matrix(*value.shape, start, start // area))
            parts += [value.view(-1).to(dtype), torch.ones(area, dtype=dtype)]
            start += value.numel() + area
        flat = torch.cat(parts).to(DEVICE)
        codes = torch.full((start,), 7, dtype=torch.uint8, device=DEVICE)
        scales = torch.full((start // area,), 7.0, device=DEVICE)
        kernels.encode(flat, codes, scales, tiles=kernels.list_tiles(matrices, DEVICE))
        untouched = torch.ones_like(codes, dtype=torch.bool)
        for value, matrix in zip(values, matrices, strict=True):
            expected, expected_scales = encode_reference(value.to(dtype), SQUARE_128)
            mine = slice(matrix.start, matrix.start + value.numel())
            same(codes[mine].view(value.shape), expected, f"codes of {tuple(value.shape)} {dtype}")
            found = scales[matrix.scale :][: expected_scales.numel()]
            same(found.view(expected_scales.shape), expected_scales, f"scales {dtype}")
            untouched[mine] = False
        assert (codes[untouched] == 7).all()


def more_elements_than_31_bits_count() -> None:
    rows, columns = 65536, 40960  # 2.7e9
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE).normal_()
    for turned in (1, WIDE):
        found = fp8_block.quantise(x, True, turned)
        for start in (0, 52352, rows - 128):  # 52428.8 is where 2^31 elements end
            part = fp8_block.quantise(x[start : start + 128], True, turned)
            assert torch.equal(found[0][start : start + 128], part[0])
            assert torch.equal(found[1][:, start : start + 128], part[1])
            assert torch.equal(found[2][:, start : start + 128], part[2])
            scales = found[3] if turned == 1 else found[3].t()
            assert torch.equal(scales[start // 128], part[3].view(-1))
        del found, part, scales
    (plane,) = encode(x, (SQUARE_128,))
    (tail,) = encode(x[-128:], (SQUARE_128,))
    assert torch.equal(plane.codes[-128:], tail.codes)
    turned, _ = kernels.turn(plane.codes, plane.scales)
    assert torch.equal(turned[:, -128:], tail.codes.t())


def off_by(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def products_are_those_of_the_decoded_operands() -> None:
    """All three, at sides whose scales cuBLAS reads as they are (multiples of 512), and others."""
    check_products(
        (512, 512, 1024), (200, 640, 384), (128, 128, 128), (1000, 896, 2048), (4096, 2048, 5632)
    )


def check_products(*sizes: tuple[int, int, int]) -> None:
    logger.info("products of hardware: %s", fp8_block.scaled_problem(DEVICE) or "yes")
    worst = 0.0
    for tokens, columns, rows in sizes:
        x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
        grad = torch.randn(tokens, rows, device=DEVICE).bfloat16()
        weight = torch.randn(rows, columns, device=DEVICE).bfloat16() / 23
        (plane,) = encode(weight, (SQUARE_128,))
        coded = plane.codes, plane.scales
        xs = fp8_block.quantise(x, True, WIDE)
        gs = fp8_block.quantise(grad, True, 1)
        w = decode_reference(plane.codes, plane.scales, SQUARE_128, torch.float64)
        a, g, gt = (
            decode_reference(codes, scales.t(), ROW_128, torch.float64)
            for codes, scales in (xs[:2], gs[:2], gs[2:])
        )
        at = decode_reference(*xs[2:], SQUARE_128, torch.float64)
        for name, found, expected in (
            ("y", fp8_block.multiply(*xs[:2], *coded, "forward", torch.bfloat16), a @ w.t()),
            ("dx", fp8_block.multiply(*gs[:2], *coded, "backward", torch.bfloat16), g @ w),
            ("dw", fp8_block.weight_gradient(*gs[2:], *xs[2:], torch.bfloat16), gt @ at.t()),
            ("dw32", fp8_block.weight_gradient(*gs[2:], *xs[2:], torch.float32), gt @ at.t()),
        ):
            error = off_by(found, expected)
            worst = max(worst, error)
            assert error < 5e-3, f"{name} of {tokens} x {columns} x {rows}: {error}"
    logger.info("products: off by %.1e of the norm at most", worst)


def a_linear_layer_is_that_of_the_cpu() -> None:
    rows, columns = 1024, 640
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, columns, generator=generator) / 23
    bias = torch.randn(rows, generator=generator).bfloat16()
    x = torch.randn(3, 100, columns, generator=generator).bfloat16()
    grad = torch.randn(3, 100, rows, generator=generator).bfloat16()
    results = []
    for device in (torch.device("cpu"), DEVICE):
        leaf = x.clone().to(device).requires_grad_()
        shift = bias.clone().to(device).requires_grad_()
        stored = helpers.coded(weight.to(device), "fp8_block").requires_grad_()
        y = nn.functional.linear(leaf, stored, shift)
        y.backward(grad.to(device))
        results.append([y.detach(), leaf.grad, stored.grad, shift.grad])
    for name, ours, theirs in zip(("y", "dx", "dw", "db"), *results[::-1], strict=True):
        error = off_by(ours.cpu(), theirs.double())
        assert error < 5e-3, f"{name}: {error}"


# ------------------------------------------------------------------------ models, on real streams


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def compiled_blocks_are_one_graph_and_learn_as_eager_ones() -> None:
    width, hidden = 256, 512
    with one_rank(DEVICE) as mesh:
        losses = []
        for compiled in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            blocks = [Block(width, hidden) for _ in range(4)]
            model = nn.Sequential(*blocks, nn.Linear(width, 17))
            precision = sw.Precision(weights="fp8_block", reduce="fp32")
            for module in (*model, model):
                sw.fully_shard(module, mesh=mesh, precision=precision)
            if compiled:
                for index in range(4):
                    model[index] = torch.compile(model[index], fullgraph=True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
            seen = []
            for _ in range(12):
                generator = torch.Generator(device=DEVICE).manual_seed(7)
                x = torch.randn(4, 96, width, device=DEVICE, generator=generator)
                y = torch.randint(17, (4 * 96,), device=DEVICE, generator=generator)
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.detach())
            losses.append(torch.stack(seen).cpu())
        eager, compiled_losses = losses
        assert eager[-1] < 0.8 * eager[0], f"nothing was learned: {eager}"
        apart = ((compiled_losses - eager).abs() / eager)[:6].max()  # then all is learnt
        assert apart < 0.03, f"{eager} {compiled_losses}"


CHECKS: tuple[Callable[[], None], ...] = (
    every_value_quantised,
    any_number_of_tokens,
    swiglu_writes_the_codes_of_its_values,
    weights_encoded,
    many_weights_encoded_in_one_launch,
    products_are_those_of_the_decoded_operands,
    a_linear_layer_is_that_of_the_cpu,
    compiled_blocks_are_one_graph_and_learn_as_eager_ones,
    more_elements_than_31_bits_count,
)


if __name__ == "__main__":
    named = [check for check in CHECKS if check.__name__ in sys.argv[1:]]
    sys.exit(run(named or CHECKS))
