# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, dispatch over ranks, and the experts as grouped products."""

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
