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

from shardwise.kernels import grouped_fc1, grouped_weight  # noqa: E402
from shardwise.kernels.grouped import FC1_TILE, WEIGHT_TILE, WEIGHT_TILE_16  # noqa: E402

SHARED_MEMORY = 227 * 1024


def compiled(kernel: Any, tile: Any, constants: dict[str, object], types: dict[str, str]) -> Any:
    known = types | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert result.metadata.shared <= SHARED_MEMORY, result.metadata.shared
    assert "wgmma.mma_async" in result.asm["ptx"]
    return result


def box(*shape: int, kind: str = "bf16") -> str:
    return f"tensordesc<{kind}[{', '.join(map(str, shape))}]>"


@pytest.mark.parametrize("block", [0, 32], ids=["stacked", "interleaved"])
def test_fc1(block: int) -> None:
    tile = FC1_TILE
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
    compiled(grouped_fc1._fc1_kernel, tile, constants, types)


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
        "engine": True,
    }
    compiled(grouped_weight._weight_kernel, tile, constants, types)
