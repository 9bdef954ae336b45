# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that a matrix optimizer adds to a step: Newton-Schulz, rank by rank.

One iteration on X of m rows and n columns (m <= n, else transposed):

    A = X X^T          2 m m n
    B = b A + c A A    2 m m m
    X = a X + B X      2 m m n        together 4 m^2 n + 2 m^3, as dense products

A matrix is orthogonalised by one rank, its owner. With fewer matrices than ranks some ranks have
nothing to do, and the step takes as long as the busiest one: that is the balance.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

ITERATIONS = 5
Shape = tuple[int, ...]


def newton_schulz_flops(shape: Shape, iterations: int = ITERATIONS) -> int:
    """Dense FLOPs to orthogonalise a matrix, or each matrix of a stack ``[count, rows, columns]``.

    >>> newton_schulz_flops((2, 3), 1)
    64
    """
    if len(shape) < 2:
        return 0
    count, small, large = 1, min(shape[-2:]), max(shape[-2:])
    for length in shape[:-2]:
        count *= length
    return count * iterations * (4 * small * small * large + 2 * small**3)


@dataclass(frozen=True, kw_only=True)
class Orthogonalisation:
    """Newton-Schulz work of one optimizer step over the ranks that share it."""

    num_matrices: int
    num_ranks: int
    total: int  # FLOPs of all ranks together
    busiest: int
    idlest: int

    @property
    def balance(self) -> float:
        """1.0: every rank computes as long as the busiest one."""
        return self.total / (self.busiest * self.num_ranks) if self.busiest else 1.0


def share_out(
    shapes: Mapping[Shape, int], num_ranks: int, *, iterations: int = ITERATIONS
) -> Orthogonalisation:
    """Whole matrices to ranks, the costliest first, each to the rank with least to do.

    ``shapes`` maps the shape of one matrix to how many there are. Runs of one shape are dealt out
    in whole rounds while ranks are equally loaded, so a thousand layers cost as much as one.
    """
    costs = sorted(
        ((newton_schulz_flops(shape, iterations), count) for shape, count in shapes.items()),
        reverse=True,
    )
    base, heap = 0, [0] * num_ranks  # base: what every rank has beside its entry of the heap
    for cost, count in costs:
        if not any(heap):
            rounds, count = divmod(count, num_ranks)
            base += rounds * cost
        for _ in range(count):
            heapq.heapreplace(heap, heap[0] + cost)
        least = heap[0]
        if least:
            base, heap = base + least, [load - least for load in heap]
            heapq.heapify(heap)
    return Orthogonalisation(
        num_matrices=sum(shapes.values()),
        num_ranks=num_ranks,
        total=sum(cost * count for cost, count in costs),
        busiest=base + max(heap),
        idlest=base + min(heap),
    )


def matrices_of(shapes: Mapping[Shape, int]) -> Counter[Shape]:
    """Single matrices of 2-D parameters and of stacks, by shape: how many of each."""
    found: Counter[Shape] = Counter()
    for shape, count in shapes.items():
        for length in shape[:-2]:
            count *= length
        found[shape[-2:]] += count
    return found


_HEADS = ("lm_head", "head", "output", "unembed", "unembedding", "embed_out")


def matrix_parameters(model: nn.Module) -> set[int]:
    """The ids of parameters for a matrix optimizer: 2-D or stacked, no embedding, no output head.

    A head is known by its name at the top of the model, or because it is tied to an embedding.
    """
    found: set[int] = set()
    apart: set[int] = set()
    for path, module in model.named_modules():
        parts = path.split(".")
        # "head" at the top or one below it ("model.lm_head"); inside a block it is anything
        heads = len(parts) <= 2 and parts[-1] in _HEADS
        for name, parameter in module.named_parameters(recurse=False):
            if heads or isinstance(module, nn.Embedding | nn.EmbeddingBag) or "embed" in name:
                apart.add(id(parameter))
            elif parameter.ndim in (2, 3):
                found.add(id(parameter))
    return found - apart
