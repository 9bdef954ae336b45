# SPDX-License-Identifier: Apache-2.0
"""The collectives that routers and rows on their way to experts add to a step.

    router     counts of all ranks for the balance term, and for biases     all_reduce over world
    dispatch   how many rows come                                           all_to_all over ep
               rows and their weights, there; rows back; gradients the other way

Sizes are exact at run time, so how many bytes of rows leave a rank depends on what its tokens
choose. What is known beforehand is kept apart from what is planned as if every expert got as many.
"""

from __future__ import annotations

from torch import nn

from shardwise.comm import Call
from shardwise.moe import MixtureOfExperts, mixtures_of
from shardwise.precision import Precision
from shardwise.report.planned import Mesh, Traffic
from shardwise.report.units import recomputed_modules

COUNT, WEIGHT = 8, 4  # bytes of a count of rows, and of a router's weight


def traffic_of(
    model: nn.Module, mesh: Mesh, precision: Precision, tokens: int, microbatches: int
) -> Traffic:
    """``tokens``: of one microbatch on one rank. Routers count over all ranks of the mesh, as
    ``MixtureOfExperts.spread(axis, tokens)`` has them do in the trainer."""
    found = Traffic()
    again = recomputed_modules(model)
    for layer in mixtures_of(model):
        forwards = microbatches * (2 if id(layer) in again else 1)
        routing, ep = layer.router.routing, layer.experts.ep
        balances = forwards * bool(routing.balance_loss) + bool(routing.bias_rate)
        if mesh.num_ranks > 1 and balances:
            nbytes = 4 * routing.num_experts
            found.known[Call("all_reduce", "world", mesh.num_ranks, nbytes)] += balances
        if ep > 1:
            leaving = routing.num_experts - layer.experts.num_experts
            found.known[Call("all_to_all", "ep", ep, COUNT * leaving)] += forwards
            row, rows = _row_bytes(layer, precision), tokens * routing.experts_per_token
            away = rows - rows // ep
            found.even[Call("all_to_all", "ep", ep, away * row)] += 2 * (forwards + microbatches)
            found.even[Call("all_to_all", "ep", ep, away * WEIGHT)] += forwards + microbatches
    return found


def _row_bytes(layer: MixtureOfExperts, precision: Precision) -> int:
    return layer.experts.hidden * precision.compute_dtype(layer.router.weight.dtype).itemsize
