# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for compute capability 9.0 with the tiles the library uses; no GPU needed.

What only the compiler can say: that products become wgmma, and that what a program keeps on chip
fits.
"""

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton", reason="the kernels are an extra")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's kernels can't be compiled", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from shardwise.kernels import adamw, fp8_codes, iterate, muon, products  # noqa: E402
from shardwise.kernels.products import WIDE  # noqa: E402

SHARED_MEMORY = 227 * 1024
SCALARS = dict.fromkeys(
    ("alpha", "alpha_0", "shift", "safety", "beta", "weight", "step", "decay"), "fp32"
)
POINTERS = {
    "scales_ptr": "*fp32",
    "squares_ptr": "*fp32",
    "inverse_ptr": "*fp32",
    "table_ptr": "*fp32",
    "samples_ptr": "*fp64",
    "partials_ptr": "*fp64",
    "values_ptr": "*fp16",
    "out_ptr": "*fp16",
}


def compiled(kernel: object, constants: dict[str, object], types: dict[str, str]) -> object:
    """Compile for an H200; what is neither constant nor typed is a 32-bit integer."""
    known = SCALARS | POINTERS | types | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in kernel.arg_names}  # type: ignore[attr-defined]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": 8, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def box(*shape: int) -> str:
    return f"tensordesc<fp16[{', '.join(map(str, shape))}]>"


def check(result: object, *, products: bool) -> None:
    assert result.metadata.shared <= SHARED_MEMORY, result.metadata.shared  # type: ignore[attr-defined]
    ptx = result.asm["ptx"]  # type: ignore[attr-defined]
    assert ("wgmma.mma_async" in ptx) == products
    if products:
        assert "f32.f16.f16" in ptx, "fp16 operands, fp32 sums"


@pytest.mark.parametrize("tall", [False, True], ids=["wide", "tall"])
def test_symmetric_product(tall: bool) -> None:
    rows, columns, step = WIDE.rows, WIDE.columns, WIDE.step
    types = {
        "a_desc": box(1, step, rows) if tall else box(1, rows, step),
        "b_desc": box(1, step, columns) if tall else box(1, columns, step),
        "square_desc": box(1, step, rows) if tall else box(1, rows, step),
        "c_desc": box(1, rows, rows),
        "d_desc": box(1, rows, rows),
    }
    constants = {
        "block": rows,
        "step": step,
        "tall": tall,
        "has_scales": True,
        "has_beta": not tall,
        "has_shift": not tall,
        "has_squares": tall,
    }
    check(compiled(products._symmetric_kernel, constants, types), products=True)


def test_product() -> None:
    rows, columns, step = WIDE.rows, WIDE.columns, WIDE.step
    types = {
        "a_desc": box(1, rows, step),
        "b_desc": box(1, step, columns),
        "d_desc": box(1, rows, rows),
    }
    constants = {
        "rows": rows,
        "columns": columns,
        "step": step,
        "band": products.BAND,
        "transposed": False,
        "has_scales": True,
    }
    check(compiled(products._product_kernel, constants, types), products=True)


def test_fused_passes() -> None:
    types = {"table_ptr": "*i64", "clip_ptr": "*fp32"}
    shared = {"aligned": True, "rim": False, "block": 4096, "chunk": 32768, "clipped": True}
    constants = shared | {
        "grad_type": tl.bfloat16,
        "out_type": tl.float16,
        "moves": True,
        "nesterov": True,
        "width": 128,
    }
    for work in range(4):
        check(
            compiled(muon._momentum_kernel, constants | {"work": work}, types),
            products=False,
        )
    constants = shared | {
        "weight_type": tl.float32,
        "update_type": tl.float16,
        "batched": True,
        "cautious": True,
    }
    check(compiled(muon._update_kernel, constants, types), products=False)
    wide = {"out_ptr": "*fp32", "scale": "fp32", "bound": "fp32"}
    for squares in (True, False):
        constants = {"has_squares": squares, "width": 128}
        check(compiled(iterate._factors_kernel, constants, wide), products=False)
    constants = {"grad_type": tl.float32, "aligned": True, "block": adamw.BLOCK}
    scalars = dict.fromkeys(("beta_1", "beta_2", "fresh_1", "fresh_2", "eps"), "fp32")
    types |= scalars | {"rates_ptr": "*fp32"}
    constants |= {"chunk": adamw.CHUNK}
    made = compiled(adamw._adamw_kernel, constants, types)
    check(made, products=False)
    assert "ld.global.v4" in made.asm["ptx"], "wide loads"  # type: ignore[attr-defined]


def test_fp8_in_blocks_of_128() -> None:
    pointers = {"x_ptr": "*i32", "codes_ptr": "*i16", "turned_ptr": "*i32"}
    pointers |= {"turned_scales_ptr": "*fp32", "tiles_ptr": "*i64"}
    # Which planes, whether the turned one is in squares, whether tokens fill tiles.
    for rows, columns, square, even in (
        (True, True, True, True),
        (True, True, True, False),
        (True, False, False, True),
        (False, True, False, False),
    ):
        constants = {"rows": rows, "columns": columns, "square": square}
        constants |= {"native": True, "even": even}
        check(compiled(fp8_codes._quantise_kernel, constants, pointers), products=False)
    for listed, wide in ((False, True), (True, False)):  # one matrix, and a list of tiles
        constants = {"listed": listed, "wide": wide, "native": True}
        types = pointers | {"x_ptr": "*i64" if wide else "*i32"}
        check(compiled(fp8_codes._encode_kernel, constants, types), products=False)
    pointers |= {"codes_ptr": "*u8", "out_ptr": "*u8", "out_scales_ptr": "*fp32"}
    check(compiled(fp8_codes._turn_kernel, {}, pointers), products=False)
