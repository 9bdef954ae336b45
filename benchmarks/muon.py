# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.muon MODE``: what Muon costs, beside its peers.

mode            where      what
step            one GPU    step of a 0.96B GPT with Muon and with AdamW, beside torch's and dion's
peers           one GPU    the same as rank 0 of 8 (`fake`), with the bytes that it sends: Muon of
                           torch and dion, every matrix gathered on every rank, and ours
newton_schulz   one GPU    Newton-Schulz over 1.007B parameters, beside batched cuBLAS in bf16

dion is measured where ``from dion import Muon`` works (a checkout on PYTHONPATH is enough).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import report
from benchmarks.measure import GIB, StepClock, milliseconds, step_row
from benchmarks.models import GPTConfig, gpt_and_tokens, token_loss
from benchmarks.report import Row, Table
from benchmarks.systems import BF16_COMPUTE, wrap_fsdp2, wrap_zero
from benchmarks.workers import FAKE_RANKS, Options, in_processes
from shardwise.kernels.newton_schulz import orthogonalise
from shardwise.kernels.polynomials import DEFAULT, PRESETS, Polynomial, Triple

WARMUPS, STEPS = 3, 10
MIB = 2**20
Steps = Callable[[], None]


def wrap_buckets(model: nn.Module, mesh: DeviceMesh, policy: Any) -> nn.Module:
    import shardwise as sw

    precision = sw.Precision(weights=policy.param_dtype, reduce=policy.reduce_dtype)
    return sw.data_parallel(model, mesh=mesh, placements=sw.zero(1), precision=precision)


def ours(model: nn.Module, preset: str | None) -> Steps:
    import shardwise as sw

    made = sw.optimizer(
        model,
        matrix=sw.muon(lr=1e-3, preset=preset) if preset else None,
        elementwise=sw.adamw(lr=1e-4),
    )
    return lambda: (made.step(), made.zero_grad())[1]


class Gathered(torch.optim.Optimizer):
    """Muon as trainers write it over FSDP2: momentum on this rank's rows, then every rank gathers
    every matrix, orthogonalises all of it, and keeps its rows."""

    def __init__(self, params: Sequence[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.05)
                update = parameter.grad.lerp(momentum, 0.95).bfloat16()
                split = isinstance(update, DTensor)
                whole = update.full_tensor() if split else update
                found = cublas(whole[None], KELLER)[0]
                scale = max(1.0, found.shape[0] / found.shape[1]) ** 0.5
                if split:
                    mesh = update.device_mesh
                    rows = found.chunk(mesh.size())[mesh.get_local_rank()]
                    parameter.to_local().add_(rows, alpha=-group["lr"] * scale)
                else:
                    parameter.add_(found, alpha=-group["lr"] * scale)


def dions(whole: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    from dion import Muon

    return Muon(whole, distributed_mesh=getattr(whole[0], "device_mesh", None), lr=lr)  # type: ignore[no-any-return]


def shardwises(whole: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    import shardwise as sw

    return sw.Muon(whole, lr=lr, preset=DEFAULT)


MATRICES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": torch.optim.Muon,
    "dion": dions,
    "gather": Gathered,
    "ours": shardwises,
}


def torchs(model: nn.Module, matrix: str | None) -> Steps:
    """Fused AdamW, and one of ``MATRICES`` for the matrices of the blocks."""
    named = list(model.named_parameters())
    whole = [p for name, p in named if matrix and p.ndim == 2 and "blocks" in name]
    chosen = {id(p) for p in whole}
    rest = [p for _, p in named if id(p) not in chosen]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-4, fused=True)]
    if matrix:
        made.append(MATRICES[matrix](whole, lr=1e-3))

    def step() -> None:
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()

    return step


wrap_zero3 = partial(wrap_zero, stage=3)
# What a case is called, how the model is wrapped, and whose optimizer with which choice.
CASES: dict[str, tuple[str, Callable[..., nn.Module], Callable[..., Steps], str | None]] = {
    "fsdp2-adamw": ("torch FSDP2, AdamW", wrap_fsdp2, torchs, None),
    "fsdp2-muon": ("torch FSDP2, torch.optim.Muon", wrap_fsdp2, torchs, "torch"),
    "fsdp2-dion": ("torch FSDP2, Muon of dion", wrap_fsdp2, torchs, "dion"),
    "fsdp2-gather": ("torch FSDP2, every matrix on every rank", wrap_fsdp2, torchs, "gather"),
    "fsdp2-ours": ("torch FSDP2, sw.Muon", wrap_fsdp2, torchs, "ours"),
    "zero3-adamw": ("shardwise zero(3), AdamW", wrap_zero3, ours, None),
    "zero3-muon": ("shardwise zero(3), Muon", wrap_zero3, ours, DEFAULT),
    "buckets-adamw": ("shardwise data_parallel, AdamW", wrap_buckets, ours, None),
    "buckets-muon": ("shardwise data_parallel, Muon", wrap_buckets, ours, DEFAULT),
}
ALONE = tuple(case for case in CASES if case not in ("fsdp2-gather", "fsdp2-ours"))
AMONG_8 = tuple(case for case in CASES if not case.startswith("buckets"))


class Sent(TorchDispatchMode):
    """Counts the bytes that leave rank 0 under bandwidth-optimal algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0.0

    @classmethod
    def is_infra_mode(cls) -> bool:  # so that compiled parts (dion's) run under it
        return True

    def __torch_dispatch__(  # type: ignore[override]
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives come by themselves
        if function.namespace in ("c10d", "_c10d_functional"):
            name, size = function._schema.name, dist.get_world_size()
            found = [sum(one.nbytes for one in tensors_of(given)) for given in args]
            share = max(found) * (size - 1) / size  # of the whole, gathered or scattered
            if "alltoall" in name or "all_to_all" in name:
                self.nbytes += sent_to_peers(name, args)
            elif "gather" in name or "scatter" in name:
                functional = function.namespace == "_c10d_functional" and "gather" in name
                self.nbytes += share * (size if functional else 1)  # given the part alone
            elif "reduce" in name:
                self.nbytes += 2 * share
            elif "broadcast" in name:
                self.nbytes += max(found)
        return function(*args, **(kwargs or {}))


def tensors_of(given: Any) -> list[Tensor]:
    """The tensors in an argument of a collective, which may be a list of lists."""
    if isinstance(given, list | tuple):
        return [tensor for one in given for tensor in tensors_of(one)]
    return [given] if isinstance(given, Tensor) else []


def sent_to_peers(name: str, args: tuple[Any, ...]) -> int:
    """The bytes of an all-to-all that rank 0 sends, without those that it keeps."""
    lists = isinstance(args[1], list | tuple)
    sources = tensors_of(args[1] if lists or "functional" not in name else args[0])
    if lists and len(sources) > 1:
        return sum(one.nbytes for one in sources[1:])
    (source,) = sources
    sizes = next((one for one in reversed(args) if isinstance(one, list) and one), None)
    own = sizes[0] if sizes and isinstance(sizes[0], int) else len(source) // dist.get_world_size()
    return source.nbytes - own * source[:1].nbytes if len(source) else 0


def pretend_equal_ranks() -> None:
    """Let collectives of torch's `fake` backend bring what equal ranks would: products of NaN, or
    of what was in memory, take another time."""
    size, reduce = dist.get_world_size(), funcol.all_reduce
    single, several = dist.all_to_all_single, dist.all_to_all

    def reduced(tensor: Tensor, reduceOp: str, *args: Any, **kwargs: Any) -> Tensor:  # noqa: N803
        factor = size if reduceOp == "sum" else 1
        return reduce(tensor, reduceOp, *args, **kwargs) * factor

    def filled_single(out: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        fill(out, source)
        return single(out, source, *args, **kwargs)

    def filled(outs: list[Tensor], sources: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        for out, source in zip(outs, sources, strict=True):
            fill(out, source)
        return several(outs, sources, *args, **kwargs)

    def fill(out: Tensor, source: Tensor) -> None:
        repeats = -(-out.numel() // max(1, source.numel()))
        out.view(-1).copy_(source.reshape(-1).repeat(repeats)[: out.numel()])

    funcol.all_reduce = reduced  # of DTensor's partial sums
    arrived = torch.full((size,), float("nan"))
    single(arrived, torch.zeros_like(arrived))
    if arrived.isnan().any():  # releases in which all-to-alls bring nothing
        dist.all_to_all_single, dist.all_to_all = filled_single, filled


def worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    """One case alone in its process. The clock never makes the host wait for the device."""
    (case,) = options.systems
    _, wrap, make, choice = CASES[case]
    device = torch.device(options.device)
    if dist.get_backend() == "fake":
        pretend_equal_ranks()
    config = GPTConfig.tiny() if options.tiny else GPTConfig()
    bare, inputs, targets = gpt_and_tokens(config, device)
    model = wrap(bare, mesh, BF16_COMPUTE)
    step = make(model, choice)
    clock = StepClock(device)
    for index in range(WARMUPS + STEPS):
        if index == WARMUPS and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        clock.start()
        loss = token_loss(model(inputs), targets)
        clock.mark()
        loss.backward()
        clock.mark()
        step()
        clock.mark()
    parts = clock.intervals()[WARMUPS:]
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    with Sent() as before:
        token_loss(model(inputs), targets).backward()
    with Sent() as sent:
        step()
    if not loss.isfinite():
        raise RuntimeError(f"the loss is {loss.item()}: such steps take another time")
    sends = {"sent": (before.nbytes + sent.nbytes) / MIB, "sent_matrices": sent.nbytes / MIB}
    return {"parts": parts, "peak": peak, "loss": loss.item(), **sends}


def table(options: Options, backend: str) -> Table:
    rows: list[Row] = []
    for case in options.systems:
        try:
            done = in_processes(worker, 1, backend, replace(options, systems=(case,)))
        except Exception as error:  # dion may not be installed, or refuse this torch
            rows.append({"case": f"{CASES[case][0]}: {str(error).strip().splitlines()[-1][:100]}"})
            continue
        row: Row = {"case": CASES[case][0], **{key: done[key] for key in done if key != "parts"}}
        rows.append(row | step_row(done["parts"]))
    by_case = dict(zip(options.systems, rows, strict=True))
    for case, row in by_case.items():
        base = by_case.get(f"{case.split('-')[0]}-adamw", {})
        if "step" in base and "step" in row:
            row["ratio"] = row["step"] / base["step"]  # type: ignore[operator]
    note = (
        "0.96B GPT (16 x 2048, 16 heads, SwiGLU 5632, vocab 32768 untied, 8 x 2048 tokens), bf16\n"
        "compute, fp32 main weights and grads. x AdamW: the step over that of the same wrapping\n"
        "with AdamW. Newton-Schulz takes five steps of degree 5; ours 5, 9, 5 and 9. A fresh\n"
        "process per row; 3 warm-up and 10 timed steps. Sent: MiB that leave the rank in a step,\n"
        "and in its optimizer, under bandwidth-optimal algorithms."
    )
    columns = {
        "case": ("case", "s"),
        "step": ("step ms", ".1f"),
        "ratio": ("x AdamW", ".3f"),
        "step_spread": ("spread %", ".1f"),
        "forward": ("forward", ".1f"),
        "backward": ("backward", ".1f"),
        "optimizer": ("optimizer", ".1f"),
        "peak": ("peak GiB", ".2f"),
        "sent": ("sent MiB", ".1f"),
        "sent_matrices": ("by the optimizer", ".1f"),
        "loss": ("last loss", ".4f"),
    }
    where = f"rank 0 of {FAKE_RANKS} (`fake`)" if backend == "fake" else f"1 {backend} rank"
    return Table(title=f"GPT step, {where}" + options.mark, note=note, columns=columns, rows=rows)


def run_step(options: Options) -> list[Table]:
    return [table(options, "nccl" if options.device == "cuda" else "gloo")]


def run_peers(options: Options) -> list[Table]:
    return [table(options, "fake")]


# ---------------------------------------------------------------------------------- Newton-Schulz

KELLER: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),) * 5
# Coefficients do not change the cost: five quintic steps, those of the Polar Express.
QUINTIC: tuple[Triple, ...] = (
    (7.892582874424408, -20.38301415435285, 13.555306149406924),
    (3.9114848681354313, -2.5464739591298257, 0.42689954058143335),
    (3.760657955697423, -2.512830895346026, 0.43236535460157),
    (3.160399673686287, -2.149649016147391, 0.3996367039126013),
    (2.1910971618617303, -1.4416619672826074, 0.3281467022519697),
)
# (matrices, rows, columns); the first two are the 1.007B parameters of the GPT's blocks.
BATCHES = (
    (60, 2048, 2048),
    (45, 8192, 2048),
    (16, 4096, 4096),
    (8, 4096, 14336),
    (256, 512, 2048),
    (1024, 128, 7168),
    (1, 2048, 2048),
)


def cublas(batch: Tensor, steps: Sequence[Triple] = QUINTIC) -> Tensor:
    """The peer: batched cuBLAS in bf16, the loop that torch, torchtitan and Moonlight run."""
    x = batch.mT if batch.shape[1] > batch.shape[2] else batch
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if batch.shape[1] > batch.shape[2] else x


def run_newton_schulz(options: Options) -> list[Table]:
    rows: list[Row] = []
    for count, height, width in [(2, 48, 48), (2, 96, 32)] if options.tiny else BATCHES:
        batch = torch.randn(count, height, width, device=options.device)
        runs = {
            "peer": partial(cublas, batch),
            "ours": partial(orthogonalise, batch, Polynomial(coefficients=QUINTIC)),
            "default": partial(orthogonalise, batch, PRESETS[DEFAULT]),
        }
        row: Row = {"batch": f"{count} x ({height}, {width})"}
        row |= {name: milliseconds(run) for name, run in runs.items()}
        rows.append(row | {"ratio": row["peer"] / row["ours"]})  # type: ignore[operator]
    note = (
        "Milliseconds from an fp32 batch to the orthogonalised one, norm and cast included.\n"
        "cuBLAS: bf16, batched, five quintic steps. Ours: the same steps in fp16; default:\n"
        "those of degrees 5, 9, 5 and 9. The first two batches are the GPT's 1.007B parameters."
    )
    columns = {
        "batch": ("batch", ""),
        "peer": ("cuBLAS", ".2f"),
        "ours": ("ours", ".2f"),
        "ratio": ("cuBLAS / ours", ".2f"),
        "default": ("ours, default", ".2f"),
    }
    title = "Newton-Schulz" + options.mark
    return [Table(title=title, note=note, columns=columns, rows=rows)]


MODES = {"step": run_step, "peers": run_peers, "newton_schulz": run_newton_schulz}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.muon",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("mode", choices=MODES)
    add("--cases", help=f"of step and peers, separated by commas: {', '.join(CASES)}")
    add("--tiny", action="store_true", help="a dry run; no figure means much")
    add("--results", type=Path, default=report.RESULTS, help="folder for .md and .json")
    asked = parser.parse_args(arguments)
    default = AMONG_8 if asked.mode == "peers" else ALONE
    cases = tuple(asked.cases.split(",")) if asked.cases else default
    if unknown := set(cases) - set(CASES):
        parser.error(f"--cases {', '.join(unknown)}: choose from {', '.join(CASES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not asked.tiny:
        parser.error("no GPU here: add --tiny for a dry run")
    facts = report.circumstances(arguments, "muon")
    tables = MODES[asked.mode](Options(device=device, systems=cases, rounds=1, tiny=asked.tiny))
    report.publish(tables, facts, f"muon-{asked.mode}", asked.results, tiny=asked.tiny)


if __name__ == "__main__":
    main(sys.argv[1:])
