# SPDX-License-Identifier: Apache-2.0
"""The activations of compiled blocks: what the compiler's own division of a graph keeps.

    block --> one graph of forward and backward, on fake CPU tensors --> forward | backward
                                                        its results that backward reads: kept

Eager autograd keeps what every operation saves. ``torch.compile`` computes cheap results again, and
keeps less. In a plan a compiled block takes the place of its operations: it holds these bytes from
forward to backward. Blocks with experts, and blocks in fp8, are planned as eager ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.compat import fake_tensors, forward_graph

SEQUENCES = 2  # that are traced; a size of 1 is special to compilers


@dataclass(frozen=True)
class Kept:
    """What a compiled block holds, in bytes for each sequence."""

    nbytes: int  # from forward to backward
    passing: int  # results that backward computes and drops
    holds_input: bool  # whether backward reads the hidden states that the block was given
    place: int | None  # of the hidden states in what the block returns; None: it returns them alone


def kept_by(block: nn.Module, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Kept:
    """Trace a block; ``shapes``: of its inputs, hidden states [sequences, ...] first."""
    module = copy.deepcopy(block)
    with fake_tensors():
        for inner in module.modules():
            for name, value in inner._parameters.items():
                if value is not None:
                    tensor = torch.empty(value.shape, dtype=dtype, device="cpu")
                    inner._parameters[name] = nn.Parameter(tensor)
        inputs = [torch.empty(*shape, dtype=dtype, device="cpu") for shape in shapes]
        inputs[0].requires_grad_()
        # The forward of the class: that of the module may be compiled already.
        graph, made = forward_graph(type(module).forward, module, *inputs)
    given = {node.name for node in graph.graph.nodes if node.op == "placeholder"}
    (returned,) = next(node for node in graph.graph.nodes if node.op == "output").args
    kept = [
        node.meta["val"].untyped_storage()
        for node in returned[1:]
        if isinstance(getattr(node, "meta", {}).get("val"), Tensor) and node.name not in given
    ]
    sizes = {storage._cdata: storage.nbytes() // SEQUENCES for storage in kept}
    place = [isinstance(one, Tensor) for one in made].index(True) if type(made) is tuple else None
    holds_input = any(
        getattr(node, "name", None) in given and node.meta["val"].shape == inputs[0].shape
        for node in returned[1:]
    )
    return Kept(sum(sizes.values()), 2 * max(sizes.values(), default=0), holds_input, place)


def stand_in(module: nn.Module, kept: Kept, hidden: Tensor, *rest: Any) -> Any:
    """The forward of a compiled block in a plan."""
    out = _Compiled.apply(kept, hidden, *module.parameters())  # type: ignore[no-untyped-call]
    return out if kept.place is None else tuple(None if n != kept.place else out for n in range(2))


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Kept, hidden: Tensor, *parameters: Tensor) -> Tensor:
        count = hidden.shape[0]
        ctx.passing = kept.passing * count
        ctx.alike = [(p.shape, p.dtype, p.requires_grad) for p in (hidden, *parameters)]
        ctx.save_for_backward(_bytes(kept.nbytes * count), hidden if kept.holds_input else None)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        held = ctx.saved_tensors, _bytes(ctx.passing)
        grads = [
            torch.empty(shape, dtype=dtype, device="meta") if needed else None
            for shape, dtype, needed in ctx.alike
        ]
        del held
        return None, *grads


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")


def softmax(
    logits: Tensor, targets: Tensor, scored: Tensor, z_coefficient: float, learns: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The loss of a chunk of logits as a compiled graph computes it: at most two results in fp32
    besides the gradient."""
    loss, held = logits.new_empty((), dtype=torch.float32), logits.new_empty(2, logits.numel() * 4)
    gradient = torch.empty_like(logits) if learns else None
    del held
    return loss, gradient
