# SPDX-License-Identifier: Apache-2.0
"""The grouped MLP of experts with fp8 products beside bf16's, and each of its passes by itself: the
parts ``--only grouped passes`` of ``python -m benchmarks.fp8_steps``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import grouped_mlp
from benchmarks.measure import milliseconds
from benchmarks.report import Row, Table
from shardwise.moe.activation import Form, swiglu
from shardwise.moe.coded import CodedRows, expert_codes
from shardwise.moe.weights import ExpertTensor
from shardwise.precision.fp8 import SQUARE_128, Plane, encode

KEYS = ("shape", "name", "forward", "forward_speed", "backward", "backward_speed", "peak")
TORCH = {
    "forward_torch": ("forward x torch", ".2f"),
    "backward_torch": ("backward x torch", ".2f"),
}


class CodedTensor(ExpertTensor):
    """Weights of experts as a gather leaves them: codes, encoded beforehand."""

    planes: ClassVar[dict[int, Plane]] = {}
    is_coded = True  # type: ignore[assignment]

    def value(self, dtype: torch.dtype, phase: Any = "forward") -> Any:
        (weight,) = self.parameters
        plane = self.planes.get(id(weight))
        if plane is None:
            high = weight.detach().reshape(-1, weight.shape[-1])
            (plane,) = encode(high, (SQUARE_128,), sharing=len(weight))
            self.planes[id(weight)] = plane
        return expert_codes(plane.codes, plane.scales, weight.shape, phase)


class Coded(grouped_mlp.Ours):
    def __init__(self, w1: Tensor, w2: Tensor, kind: type[CodedTensor]) -> None:
        super().__init__(w1, w2, 0, None)
        bundles = self.mlp._bundles
        self.mlp._bundles = lambda: [kind(**vars(one)) for one in bundles()]  # type: ignore[method-assign]


def grouped_rows(experts: int, hidden: int, width: int, rows: int) -> Iterator[Row]:
    """The grouped MLP with fp8 products beside bf16's, ours and what one writes with torch alone,
    gradients added to fp32 main gradients."""
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    w1 = torch.randn(experts, 2 * width, hidden, device="cuda", dtype=bf16) / hidden**0.5
    w2 = torch.randn(experts, hidden, width, device="cuda", dtype=bf16) / width**0.5
    x = torch.randn(rows, hidden, device="cuda", dtype=bf16).requires_grad_()
    p = torch.rand(rows, device="cuda").requires_grad_()
    dy = torch.randn(rows, hidden, device="cuda", dtype=bf16)
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
    systems: dict[str, Any] = {"bf16": grouped_mlp.Ours(w1, w2, 0, "fused")}
    systems["fp8"] = Coded(w1, w2, CodedTensor)
    for system in systems.values():
        for parameter in system.parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    peer = grouped_mlp.Peer(w1.requires_grad_(), w2.requires_grad_())
    peer.main_grads = [torch.zeros_like(each, dtype=torch.float32) for each in (w1, w2)]
    systems[grouped_mlp.PEER] = peer
    found = grouped_mlp.measure(systems, (x, ends, p, dy), 10, True)
    for name, figures in found.items():
        row: Row = {"shape": f"{experts}, {hidden}, {width}, {rows}", "name": name, **figures}
        for key in ("forward", "backward"):
            row[f"{key}_speed"] = found["bf16"][key] / figures[key]
            row[f"{key}_torch"] = found[grouped_mlp.PEER][key] / figures[key]
        yield row
    CodedTensor.planes.clear()


def mlp_tables() -> Iterator[Table]:
    rows: list[Row] = []
    for shape in grouped_mlp.SHAPES:
        try:
            rows += grouped_rows(*shape)
        except Exception as error:
            rows.append({"shape": str(shape), "name": f"FAILED {type(error).__name__}: {error}"})
        yield Table(
            title="Grouped MLP",
            note="Balanced rows, weights as codes, weight gradients added to fp32 main gradients.\n"
            "Speed: this library's bf16's time over this one's; x torch: torch's own bf16's\n"
            f"(`{grouped_mlp.PEER}`) over this one's.",
            columns={key: grouped_mlp.COLUMNS[key] for key in KEYS} | TORCH,
            rows=rows,
        )


def pass_tables() -> Iterator[Table]:
    rows: list[Row] = []
    for shape in grouped_mlp.SHAPES:
        for name, work, run in passes(*shape):
            row: Row = {"shape": ", ".join(map(str, shape)), "name": name}
            rows.append(row)
            try:
                time = milliseconds(run, 8)
                row |= {"us": 1e3 * time, work[0]: work[1] / time * 1e-9}
            except Exception as error:
                row["name"] = f"{name} FAILED {type(error).__name__}: {str(error)[:200]}"
        yield Table(
            title="Passes of the grouped MLP",
            note="Each by itself, cache flushed. TB/s: of bytes read and written.",
            columns={
                "shape": grouped_mlp.COLUMNS["shape"],
                "name": ("pass", "s"),
                "us": ("us", ".1f"),
                "flops": ("TFLOP/s", ".0f"),
                "bytes": ("TB/s", ".2f"),
            },
            rows=rows,
        )
        torch.cuda.empty_cache()


Pass = tuple[str, tuple[str, int], Callable[[], object]]  # name, flops or bytes, the pass


def passes(experts: int, hidden: int, width: int, count: int) -> Iterator[Pass]:
    from shardwise.kernels import grouped_activation as plain

    form = Form(swiglu(), 0)
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (count // experts)
    sizes = {"x": hidden, "dy": hidden, "z": 2 * width, "h": width}
    x, dy, z, h = (torch.randn(count, each, device="cuda").bfloat16() for each in sizes.values())
    p = torch.rand(count, device="cuda")
    for name, source in (("x", x), ("z", z)):
        yield f"rows of {name}", ("bytes", source.nbytes * 3 // 2), partial(CodedRows.of, source)
    both, codes = z.nbytes + h.nbytes, h.nbytes // 2
    run: Callable[[], object] = partial(CodedRows.activated, z, p, form)
    yield "activation to codes", ("bytes", z.nbytes + codes), run
    run = partial(plain.forward, z, p, **form.numbers)
    yield "activation to bf16", ("bytes", both), run
    run = partial(CodedRows.activation_backward, h, z, p, form)
    yield "activation backward to codes", ("bytes", both + both // 2), run
    run = partial(plain.backward, h.clone(), z, p, **form.numbers)
    yield "activation backward to bf16", ("bytes", 2 * both), run
    yield from _layer("fc1", x, z, p, ends, form)
    yield from _layer("fc2", h, dy, p, ends, form)


def _layer(name: str, x: Tensor, dy: Tensor, p: Tensor, ends: Tensor, form: Form) -> Iterator[Pass]:
    """The products of one linear, of torch and of our kernels with some tiles."""
    from shardwise.kernels import grouped_codes, grouped_fc1, grouped_fp8, grouped_weight

    experts, out, deep = len(ends), dy.shape[1], x.shape[1]
    work = ("flops", 2 * len(x) * out * deep)
    weight = torch.randn(experts, out, deep, device="cuda", dtype=torch.bfloat16) / deep**0.5
    (plane,) = encode(weight.view(-1, deep), (SQUARE_128,), sharing=experts)
    coded = plane.codes, plane.scales
    yield f"{name} bf16, torch", work, partial(F.grouped_mm, x, weight.mT, offs=ends)
    if name == "fc1":
        run: Callable[[], object] = partial(
            grouped_fc1.fc1, x, weight, None, p, ends, **form.numbers
        )
        yield "fc1 bf16 and activation", work, run
    for phase, source in (("forward", x), ("backward", dy)):
        codes, rows = expert_codes(*coded, weight.shape, phase), CodedRows.of(source)
        yield f"{name} {phase}", work, partial(codes.product, rows, ends)
        run = partial(
            torch._scaled_grouped_mm,
            rows.codes.view(torch.float8_e4m3fn),
            codes.codes.view(torch.float8_e4m3fn).mT,
            rows.scales,
            codes.scales[:, None].expand(codes.codes.shape[:2]).contiguous(),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        yield f"{name} {phase}, torch", work, run
    run = partial(expert_codes, *coded, weight.shape, "backward")
    yield f"{name} weights turned", ("bytes", 2 * plane.codes.nbytes), run
    into = torch.zeros(weight.shape, device="cuda")
    del codes, weight, plane
    run = partial(grouped_weight.weight_gradient, dy, x, ends, into, add=True)
    yield f"{name} dW bf16, added", work, run
    left, right = ((rows.codes, rows.scales) for rows in (CodedRows.of(dy), CodedRows.of(x)))
    run = partial(grouped_codes.Folded, left, right, ends)
    yield f"{name} dW, turned", ("bytes", 2 * (left[0].nbytes + right[0].nbytes)), run
    folded = grouped_codes.Folded(left, right, ends)
    run = partial(grouped_fp8.weight_gradient, folded, into, add=True)
    yield f"{name} dW, added", work, run
    run = partial(
        torch._scaled_grouped_mm,
        folded.left.view(torch.float8_e4m3fn),
        folded.right.view(torch.float8_e4m3fn).t(),
        *(torch.ones(experts * side, device="cuda") for side in (out, deep)),
        offs=folded.first[1:] * 128,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    yield f"{name} dW, torch, not added", work, run
