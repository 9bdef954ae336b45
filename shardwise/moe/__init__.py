# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, dispatch over ranks, and the experts as grouped products.

router          which experts each token goes to, with what weight, and how evenly
dispatch        rows sorted by expert; over ranks where experts are spread; and back
grouped_mlp     all experts' feed-forwards at once (grouped_linear: one of its halves)
activation      what stands between the halves; the order of gate and up
inputs          what experts are given, and whether it can be computed
products        three ways to compute the same
weights         expert parameters in memory, and where their gradients go
delayed         weight gradients later than those of the inputs
keys            names of expert weights in state dicts
layer           all of it as one module
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
