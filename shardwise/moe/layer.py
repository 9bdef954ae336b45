# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer: router, dispatch, experts, and a shared expert beside them.

    tokens --router--> routes --send--> ............. --> experts --collect--> + --> out
       '---------------------- shared expert ----------------------------------'
                               while rows are sent

With experts spread over an axis ``ep``, a rank holds num_experts / ep experts and computes them for
the tokens of every rank. The gradients of experts are then sums over the tokens of all ranks, while
the gradients of replicated parameters are means. So reduce the gradients of experts over the ranks
that hold the same experts, and divide them once by the number of *all* ranks that have tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core import comm
from shardwise.core.compat import disable_dynamo
from shardwise.moe.activation import Activation
from shardwise.moe.dispatch import check_share, collect, plan_dispatch, send
from shardwise.moe.grouped_mlp import FullPrecision, GroupedMLP
from shardwise.moe.router import Choices, Router, Routes, Routing


class MixtureOfExperts(nn.Module):
    """[..., hidden] -> the output [..., hidden], and the routes (``loss``, counts, statistics).

    ``axis``: the ranks over which experts are spread; ``shared``: a module for all tokens, computed
    while rows are sent; ``experts``: further arguments of :class:`GroupedMLP`. With
    ``delay_weight_gradient`` and an axis, weight gradients are computed while the gradients of the
    rows are sent; without an axis, :meth:`backward_dw` computes them.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **experts: Any,
    ) -> None:
        super().__init__()
        _check_axis("MixtureOfExperts(axis", axis)
        self.axis = axis if axis is not None and axis.size > 1 else None
        local = check_share(routing.num_experts, 1 if self.axis is None else self.axis.size)
        self.router = Router(routing, hidden, axis=self.axis, device=device, dtype=dtype)
        self.shared = shared  # in forward before the experts, so in backward after them
        self.experts = GroupedMLP(
            local, hidden, width, activation=activation, device=device, dtype=dtype, **experts
        )
        for linear in (self.experts.fc1, self.experts.fc2):
            linear.first_expert = 0 if self.axis is None else self.axis.rank * local
            linear.total_experts, linear.axis = routing.num_experts, self.axis

    def spread(self, axis: comm.Axis | None, tokens: comm.Axis | None = None) -> None:
        """Keep this rank's share of the experts. Call this method before sharding.

        ``tokens``: all ranks that have tokens of one batch, if these are more ranks than ``axis``
        has.
        """
        _check_axis("spread(axis", axis)
        _check_axis("spread(tokens", tokens)
        if axis is not None and axis.size > 1:
            self.keep_share(axis.size, axis.rank, axis)
            self.axis = axis
        tokens = tokens or axis
        self.router.axis = tokens if tokens is not None and tokens.size > 1 else None

    def keep_share(self, size: int, rank: int = 0, axis: comm.Axis | None = None) -> None:
        """Keep one of ``size`` equal shares of the experts. Without an axis the layer can only be
        planned: it has the size that it has on one rank of ``size``, and cannot send rows."""
        local = check_share(self.router.routing.num_experts, size, rank)
        self.experts.spread(rank * local, local, axis)

    @property
    def first_expert(self) -> int:
        """The number of this rank's first expert, among the experts of all ranks."""
        return self.experts.fc1.first_expert

    def init_weights(self, seed: int | None, *, out_scale: float = 1.0) -> None:
        """Draw fresh values for router and experts. The values of an expert do not depend on its
        rank.

        Products keep the scale of their inputs; the output of the experts has scale ``out_scale``.
        """
        device, weight = self.router.weight.device, self.router.weight
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=generator)
        self.router.reset_buffers()
        linears = ((1, self.experts.fc1, 1.0), (2, self.experts.fc2, out_scale))
        for number, linear, scale in linears:
            own_seed = None if seed is None else 3 * seed + number
            linear.draw(scale * linear.in_features**-0.5, own_seed)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routes]:
        spread = self.axis is not None and torch.compiler.is_compiling()
        return (_between_graphs if spread else MixtureOfExperts._compute)(self, hidden)

    def _compute(self, hidden: Tensor) -> tuple[Tensor, Routes]:
        width = self.router.weight.shape[-1]
        if hidden.dim() < 2 or hidden.shape[-1] != width:
            raise ValueError(
                f"hidden states of shape {list(hidden.shape)}: expected [..., tokens, {width}]"
            )
        tokens = hidden.flatten(0, -2)  # [tokens, hidden]
        length = hidden.shape[-2] if hidden.dim() > 2 else None
        choices: Choices = self.router(tokens)
        plan = plan_dispatch(choices, self.axis)
        arrival = send(tokens, choices.weights, plan)
        beside = None if self.shared is None else self.shared(tokens)
        delays: bool | None = None
        if self.axis is not None:  # delay only where backward sends gradients of rows
            sends = tokens.requires_grad and torch.is_grad_enabled()
            delays = self.experts.delay_weight_gradient and sends
        rows, weights = arrival(self.experts.backward_dw if delays else None)
        rows = self.experts(rows, plan.ends, FullPrecision(weights), delay=delays)
        mixed = collect(rows, plan)
        if beside is not None:
            mixed = mixed + beside
        return mixed.view_as(hidden), choices.routes(length)

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients that were not computed during an exchange."""
        self.experts.backward_dw()


_between_graphs = disable_dynamo(MixtureOfExperts._compute)


def _check_axis(what: str, axis: Any) -> None:
    if axis is not None and not isinstance(axis, comm.Axis):
        raise ValueError(
            f"{what}={type(axis).__name__}): give an axis of ranks, such as "
            f"sw.comm.as_axis(mesh.get_group('ep'), 'ep')"
        )


def mixtures_of(model: nn.Module) -> list[MixtureOfExperts]:
    """The mixtures inside a model, in order of registration."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
