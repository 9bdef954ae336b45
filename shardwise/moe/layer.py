# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer: router, dispatch, experts, and a shared expert beside them.

    tokens --router--> routes --send--> ............. --> experts --collect--> + --> out
       '---------------------- shared expert ----------------------------------'
                               while rows travel

With experts spread over an axis ``ep``, a rank holds num_experts / ep of them and computes for the
tokens of every rank. The gradients of its experts are then sums over all ranks' tokens, where those
of replicated parameters are means: reduce experts over the ranks that hold the same ones, and
divide by *all* ranks that feed tokens (``gradient_divisor``), once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.moe.activation import Activation
from shardwise.moe.dispatch import Dispatcher, check_axis, plan_dispatch
from shardwise.moe.grouped_linear import LayoutName
from shardwise.moe.grouped_mlp import FullPrecision, GroupedMLP
from shardwise.moe.products import PathName
from shardwise.moe.router import Router, Routes, Routing


class MixtureOfExperts(nn.Module):
    """[..., hidden] -> the same, and the routes (their ``loss``, counts and statistics).

    ``axis``: where experts are spread over ranks; ``shared``: a module for all tokens, computed
    while rows travel. ``delay_weight_gradient``: experts' weight gradients are computed while the
    gradients of their rows travel back; with no axis, by :meth:`backward_dw`.
    """

    def __init__(
        self,
        routing: Routing,
        hidden: int,
        width: int,
        *,
        activation: Activation,
        axis: comm.Axis | None = None,
        shared: nn.Module | None = None,
        gate_up_block: int = 0,
        bias: bool = False,
        weight_layout: LayoutName = "grouped",
        bias_layout: LayoutName | None = None,
        path: PathName | None = None,
        delay_weight_gradient: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        local = check_axis(routing.num_experts, axis)
        self.axis = axis if axis is not None and axis.size > 1 else None
        self.first_expert = 0 if self.axis is None else self.axis.rank * local
        self.router = Router(routing, hidden, axis=self.axis, device=device, dtype=dtype)
        self.experts = GroupedMLP(
            local,
            hidden,
            width,
            activation=activation,
            gate_up_block=gate_up_block,
            bias=bias,
            weight_layout=weight_layout,
            bias_layout=bias_layout,
            path=path,
            delay_weight_gradient=delay_weight_gradient,
            device=device,
            dtype=dtype,
        )
        self.shared = shared
        self._dispatcher = Dispatcher(self.axis)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routes]:
        tokens = hidden.flatten(0, -2)  # [tokens, hidden]
        routes: Routes = self.router(tokens)
        plan = plan_dispatch(routes, self.axis)
        arrival = self._dispatcher.send(tokens, routes, plan)
        beside = None if self.shared is None else self.shared(tokens)
        delayed = self.axis is not None and self.experts.delay_weight_gradient
        rows, weights = arrival.wait(self.experts.backward_dw if delayed else None)
        rows = self.experts(rows, plan.ends, FullPrecision(weights))
        mixed = self._dispatcher.collect(rows, plan)
        if beside is not None:
            mixed = mixed + beside
        return mixed.view_as(hidden), routes

    def backward_dw(self) -> None:
        """Delayed weight gradients that no exchange has covered."""
        self.experts.backward_dw()

    def gradient_divisor(self, data_ranks: int) -> float:
        """What to divide expert gradients by, after the sum over ranks with the same experts."""
        return float(data_ranks)
