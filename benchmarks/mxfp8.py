# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench mxfp8``: the MXFP8 kernels against copy bandwidth, a training step beside bf16.

Every rate is bytes that must move (each input read once, each output written once) over time; the
copy that it is compared with is measured in the same command, on memory many times the cache.
Without a GPU there are no such rates: ``--tiny`` then runs the training step alone, very small.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from benchmarks import mxfp8_steps, report
from shardwise.precision.fp8 import BLOCKS, COLUMN, ROW, Block, Format, decode, empty_planes, encode
from shardwise.precision.fp8_weight import Coded

SHAPES = ((8192, 28672), (14336, 4096), (4096, 4096), (2048, 2048))
TOKENS = 16384
BAR, GOAL = 0.70, 0.85
PARTS = ("kernels", "linear", "step")
# Strips, warps, registers at most: the tiles that --sweep tries.
SWEPT: tuple[tuple[int, int, int | None], ...] = (
    (2, 1, None), (4, 1, None), (2, 2, None), (4, 2, None), (8, 2, None), (4, 4, None),
    (8, 4, None), (8, 4, 96), (8, 8, None), (8, 8, 64), (16, 8, None), (16, 16, None),
    (32, 16, None),
)  # fmt: skip


def milliseconds(work: Callable[[], object], repeat: int) -> float:
    """Median over ``repeat`` ms of runs, the cache emptied before each."""
    from triton.testing import do_bench

    return float(do_bench(work, warmup=25, rep=repeat, return_mode="median"))


def copy_rate(repeat: int) -> float:
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), repeat) * 1e-9  # TB/s


class Case:
    """One shape's tensors, and the work done on them."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
        self.wide = self.x.float()
        self.out = torch.empty_like(self.x)

    def encode(self, x: Tensor, blocks: tuple[Block, ...]) -> tuple[Callable[[], object], int]:
        planes = empty_planes(self.shape, blocks, "cuda")
        nbytes = x.nbytes + sum(plane.nbytes for plane in planes)
        return lambda: encode(x, blocks, out=planes), nbytes

    def decode(self, block: Block) -> tuple[Callable[[], object], int]:
        (plane,) = encode(self.x, (block,))
        return lambda: decode(plane, out=self.out), plane.nbytes + self.out.nbytes

    def works(self) -> dict[str, tuple[Callable[[], object], int]]:
        return {
            "copy of this size": (lambda: self.out.copy_(self.x), 2 * self.x.nbytes),
            "encode row + column": self.encode(self.x, (ROW, COLUMN)),
            "encode row": self.encode(self.x, (ROW,)),
            "encode column": self.encode(self.x, (COLUMN,)),
            "encode row + column, from fp32": self.encode(self.wide, (ROW, COLUMN)),
            "decode row": self.decode(ROW),
            "decode column": self.decode(COLUMN),
        }


def bandwidth(copy: float, repeat: int, shapes: Sequence[tuple[int, int]]) -> report.Table:
    rows: list[report.Row] = []
    for shape in shapes:
        for name, (work, nbytes) in Case(shape).works().items():
            time = milliseconds(work, repeat)
            rate = nbytes / time * 1e-9
            rows.append({
                "work": name, "shape": "{}x{}".format(*shape), "us": 1e3 * time, "rate": rate,
                "share": 100 * rate / copy,
            })  # fmt: skip
    return report.Table(
        title="Encode and decode against copy bandwidth",
        note=f"Copy of 2 GiB: {copy:.2f} TB/s, read and written. Bar: {BAR:.0%} of it for large "
        f"shapes, goal {GOAL:.0%}. Small shapes are mostly launch.",
        columns={
            "work": ("work", ""),
            "shape": ("shape", ""),
            "us": ("µs", ".1f"),
            "rate": ("TB/s", ".2f"),
            "share": ("% of copy", ".1f"),
        },
        rows=rows,
    )


def linear_step(shape: tuple[int, int], format: str, tokens: int) -> Callable[[], object]:
    """Forward and backward of one linear."""
    weight = torch.empty(shape, device="cuda").normal_(std=0.02)
    x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, shape[0], device="cuda", dtype=torch.bfloat16)
    if format == "bf16":
        plain = torch.nn.Parameter(weight.bfloat16())

        def step() -> None:
            x.grad = plain.grad = None
            torch.nn.functional.linear(x, plain).backward(grad)

        return step
    block = BLOCKS[format]  # type: ignore[index]
    (plane,) = encode(weight, (block,))
    codes = plane.codes, plane.scales
    products = "fp8" if format == "fp8_block" else "emulated"
    stored = Coded.of(shape, codes, None, products, requires_grad=True)

    def fp8_step() -> None:
        x.grad = stored.grad = None
        torch.nn.functional.linear(x, stored).backward(grad)

    return fp8_step


def linears(repeat: int, shapes: Sequence[tuple[int, int]], tokens: int) -> report.Table:
    rows: list[report.Row] = []
    for shape in shapes:
        base = 0.0
        for format in ("bf16", *get_args(Format)):
            time = milliseconds(linear_step(shape, format, tokens), repeat)
            base = base or time
            rows.append({
                "format": format, "shape": "{}x{}".format(*shape), "ms": time,
                "ratio": time / base, "tflops": 6 * tokens * shape[0] * shape[1] / time * 1e-9,
            })  # fmt: skip
    return report.Table(
        title=f"One linear, forward and backward, {tokens} tokens",
        note="bf16: F.linear with bf16 gradients. MXFP8: decoded to bf16 for each product.",
        columns={
            "format": ("weight", ""),
            "shape": ("shape", ""),
            "ms": ("ms", ".3f"),
            "ratio": ("x bf16", ".3f"),
            "tflops": ("TFLOP/s", ".0f"),
        },
        rows=rows,
    )


def sweep(copy: float, repeat: int, shape: tuple[int, int]) -> report.Table:
    """How much a program takes, for each kernel; the best are in ``kernels/mxfp8.py``."""
    from shardwise.kernels import mxfp8 as kernels

    case = Case(shape)
    rows: list[report.Row] = []
    tiles = [kernels.StripTile(strips=s, warps=w, registers=r) for s, w, r in SWEPT]
    for blocks in ((ROW, COLUMN), (ROW,), (COLUMN,)):
        planes = empty_planes(shape, blocks, "cuda")
        by_block = {plane.block: (plane.codes, plane.scales) for plane in planes}
        nbytes = case.x.nbytes + sum(plane.nbytes for plane in planes)
        for tile in tiles:
            time = milliseconds(lambda: kernels.encode(case.x, by_block, tile=tile), repeat)  # noqa: B023
            rows.append(_swept(f"encode {blocks}", tile, time, nbytes, copy))
    for block in (ROW, COLUMN):
        (plane,) = encode(case.x, (block,))
        parts = plane.codes, plane.scales, block
        nbytes = plane.nbytes + case.out.nbytes
        for tile in (tile for tile in tiles if tile.registers is None):
            time = milliseconds(lambda: kernels.decode(*parts, case.out, tile=tile), repeat)  # noqa: B023
            rows.append(_swept(f"decode {block}", tile, time, nbytes, copy))
    return report.Table(
        title="Tiles",
        note=f"Shape {shape[0]}x{shape[1]}.",
        columns={
            "kernel": ("kernel", ""),
            "strips": ("strips", ""),
            "warps": ("warps", ""),
            "registers": ("registers", ""),
            "us": ("µs", ".1f"),
            "share": ("% of copy", ".1f"),
        },
        rows=rows,
    )


def _swept(name: str, tile: object, time: float, nbytes: int, copy: float) -> report.Row:
    share = 100 * nbytes / time * 1e-9 / copy
    return {"kernel": name, **vars(tile), "us": 1e3 * time, "share": share}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mxfp8", description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder to write to")
    parser.add_argument("--sweep", action="store_true", help="also try other tiles")
    parser.add_argument("--repeat", type=int, default=60, help="milliseconds of runs each")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="tables")
    parser.add_argument("--tiny", action="store_true", help="a dry run of the training step")
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    if not gpu and not options.tiny:
        parser.error("no GPU: these are rates of a GPU's memory; --tiny runs what a CPU can")
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench mxfp8 " + shlex.join(arguments)
    wanted = set(options.only) if gpu else {"step"}
    where = torch.cuda.get_device_name().lower().split() if gpu else ["cpu"]
    parts = [] if wanted == set(PARTS) else [part for part in PARTS if part in wanted]
    name = "-".join(["mxfp8", *parts, *where])
    tables: dict[str, report.Table] = {}
    for table in made(wanted, options, gpu):
        tables[table.title] = table
        # At once: what comes later may fail, or run out of time.
        paths = report.write(list(tables.values()), facts, name, options.results)
    print(paths[0].read_text())
    print("written:", *paths)


def made(wanted: set[str], options: argparse.Namespace, gpu: bool) -> Iterator[report.Table]:
    """Tables as they come; one that grows comes again with every row."""
    copy = copy_rate(options.repeat) if options.sweep or "kernels" in wanted else 0.0
    if options.sweep and gpu:
        yield sweep(copy, options.repeat, SHAPES[0])
    if "kernels" in wanted:
        yield bandwidth(copy, options.repeat, SHAPES)
    if "linear" in wanted:
        yield linears(options.repeat, ((14336, 4096), (4096, 4096)), TOKENS)
    if "step" in wanted:
        if gpu:
            torch.cuda.empty_cache()  # the processes of the steps need the memory
        yield from mxfp8_steps.run(options.tiny)


if __name__ == "__main__":
    main(sys.argv[1:])
