# SPDX-License-Identifier: Apache-2.0
"""The grouped kernels compile for compute capability 9.0 with the tiles the library ships."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="the kernels are an extra")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's kernels can't be compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from shardwise.kernels import (  # noqa: E402
    fp8_fused,
    grouped_activation,
    grouped_fc1,
    grouped_weight,
)
from shardwise.kernels.grouped import (  # noqa: E402
    FC1_TILE,
    WEIGHT_TILE,
    WEIGHT_TILE_16,
    GroupedTile,
)

SHARED_MEMORY = 227 * 1024


def built(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    *,
    source: Any = ASTSource,
    **options: int,
) -> Any:
    """Compile a kernel. Arguments that are neither constant nor typed are 32-bit integers."""
    known = types | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in kernel.arg_names}
    made = source(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)


def compiled(kernel: Any, tile: Any, constants: dict[str, Any], types: dict[str, str]) -> Any:
    result = built(kernel, constants, types, num_warps=tile.warps, num_stages=tile.stages)
    assert result.metadata.shared <= SHARED_MEMORY, result.metadata.shared
    assert "wgmma.mma_async" in result.asm["ptx"]
    return result


def box(*shape: int, kind: str = "bf16") -> str:
    return f"tensordesc<{kind}[{', '.join(map(str, shape))}]>"


@pytest.mark.parametrize("block", [0, 32], ids=["stacked", "interleaved"])
@pytest.mark.parametrize("tile", [FC1_TILE, FC1_TILE.narrow], ids=["wide", "narrow"])
def test_fc1(block: int, tile: GroupedTile) -> None:
    half = tile.columns // 2
    types = {
        "x_desc": box(tile.rows, tile.step),
        "w_desc": box(tile.columns, tile.step) if block else box(2, half, tile.step),
        "z_desc": box(1, 1, tile.rows, half),
        "h_desc": box(1, 1, tile.rows, half),
        "bias_ptr": "*bf16",
        "p_ptr": "*fp32",
        **dict.fromkeys(("ends_ptr", "schedule_ptr", "blocks_ptr"), "*i32"),
    }
    constants = {
        "rows": tile.rows,
        "columns": tile.columns,
        "step": tile.step,
        "block": block,
        "gated": True,
        "alpha": 1.0,
        "limit": 7.0 if block else None,
        "offset": 0.0,
        "has_bias": bool(block),
        "flatten": tile.flatten,
        "assembly": True,
    }
    ptx = compiled(grouped_fc1._fc1_kernel, tile, constants, types).asm["ptx"]
    # The epilogue: a tile's 128 values of z and 64 of h a thread, converted two at a time, and no
    # division among 64 sigmoids. Either costs some 3 % of the product.
    assert ptx.count("cvt.rn.bf16.f32") < 16 and "div" not in ptx.replace("div.s32", "")


@pytest.mark.parametrize("limit", [None, 7.0])
def test_passes(limit: float | None) -> None:
    types = dict.fromkeys(("z_ptr", "h_ptr", "bias_ptr", "dh_ptr", "dz_ptr"), "*bf16")
    types |= dict.fromkeys(("p_ptr", "dp_ptr"), "*fp32") | {"expert_ptr": "*i32"}
    constants = {
        "gated": True,
        "alpha": 1.702,
        "limit": limit,
        "offset": 1.0,
        "block": 32,
        "chunk": 512,
        "assembly": True,
    }
    for kernel, more in (
        (grouped_activation._forward_kernel, {"rows": 4, "has_bias": limit is not None}),
        (grouped_activation._backward_kernel, {}),
    ):
        result = built(kernel, constants | more, types, num_warps=4)
        assert "rcp.approx.ftz" in result.asm["ptx"]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_weight_gradient(kind: str) -> None:
    tile = WEIGHT_TILE if kind == "fp32" else WEIGHT_TILE_16
    types = {
        "a_desc": box(1, 1, tile.step, tile.rows),
        "b_desc": box(1, 1, tile.step, tile.columns),
        "out_desc": box(1, tile.rows, tile.columns // 2, kind=kind),
        "ends_ptr": "*i32",
    }
    constants = {
        "rows": tile.rows,
        "columns": tile.columns,
        "step": tile.step,
        "add": kind == "fp32",
    }
    compiled(grouped_weight._weight_kernel, tile, constants, types)


POINTERS = dict.fromkeys(("p_ptr", "dp_ptr", "a_ptr", "b_ptr", "factors_ptr"), "*fp32")
POINTERS |= dict.fromkeys(("scales_ptr", "dz_scales_ptr", "h_scales_ptr", "largest_ptr"), "*fp32")
POINTERS |= dict.fromkeys(("turned_scales_ptr", "w_scales_ptr"), "*fp32")
POINTERS |= dict.fromkeys(("ends_ptr", "first_ptr", "blocks_ptr", "schedule_ptr"), "*i32")
POINTERS |= dict.fromkeys(("codes_ptr", "out_ptr", "turned_ptr", "dz_ptr", "h_ptr"), "*u8")


def test_passes_that_write_codes() -> None:
    raw = dict.fromkeys(("dh_ptr", "gate_ptr", "up_ptr", "turned_ptr"), "*i32")
    raw["codes_ptr"] = "*i16"
    for half in ("gate", "up"):
        raw |= {f"{half}_codes_ptr": "*i16", f"{half}_turned_ptr": "*i32"}
        raw |= dict.fromkeys((f"{half}_scales_ptr", f"{half}_turned_scales_ptr"), "*fp32")
    constants = {"even": True, "assembly": True}
    built(fp8_fused._swiglu_kernel, constants, POINTERS | raw, num_warps=16)
    constants |= {"stages": fp8_fused.STAGES}
    made = built(
        fp8_fused._swiglu_backward_kernel, constants, POINTERS | raw, num_warps=fp8_fused.WARPS
    )
    assert made.metadata.shared <= SHARED_MEMORY, made.metadata.shared
