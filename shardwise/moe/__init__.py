# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, dispatch over ranks, and the experts as grouped products.

router          the experts and weights of each token, and how evenly experts are used
dispatch        rows sorted by expert, sent to other ranks where experts are spread, and sent back
grouped_mlp     the feed-forwards of all experts at once
grouped_linear  one linear layer for each expert; a grouped MLP has two
activation      the function between the two linears; the order of gate and up
products        three implementations of the same grouped products; checks of their inputs
coded           the same products of rows and weights in fp8
weights         expert parameters in memory, and the destination of their gradients
delayed         weight gradients that are computed after the backward
keys            names of expert weights in state dicts
layer           router, dispatch and experts as one module
"""

from __future__ import annotations

from shardwise.moe.activation import (
    Activation,
    clamped_quick_geglu,
    clamped_swiglu,
    convert_gate_up,
    squared_relu,
    swiglu,
)
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.moe.grouped_mlp import FullPrecision, GroupedMLP
from shardwise.moe.keys import declare_gate_up
from shardwise.moe.layer import MixtureOfExperts, mixtures_of
from shardwise.moe.router import Router, Routes, Routing

__all__ = [
    "Activation",
    "FullPrecision",
    "GroupedLinear",
    "GroupedMLP",
    "MixtureOfExperts",
    "Router",
    "Routes",
    "Routing",
    "clamped_quick_geglu",
    "clamped_swiglu",
    "convert_gate_up",
    "declare_gate_up",
    "mixtures_of",
    "squared_relu",
    "swiglu",
]
