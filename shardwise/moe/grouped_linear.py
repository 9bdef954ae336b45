# SPDX-License-Identifier: Apache-2.0
"""The parameters of one of the two linear layers of all experts, and their names in state dicts.

A ``GroupedMLP`` reads them; a linear is not called. Weights and biases have a layout each:

    grouped    weight [experts, out, in]         bias [experts, out]
    indexed    weight0, weight1, ... [out, in]   bias0, bias1, ... [out]

A state dict in the other layout is converted on loading (``moe/keys.py``). The state dict of a
first linear holds the order of gate and up in its rows. Another order is converted on loading, and
a state dict without an order is refused.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from shardwise.core import comm
from shardwise.moe import keys
from shardwise.moe.activation import check_block, convert_gate_up
from shardwise.moe.products import check_sizes
from shardwise.moe.weights import (
    ExpertShare,
    ExpertTensor,
    as_neighbours,
    as_one,
    declare_matrices,
)

LayoutName = Literal["grouped", "indexed"]


class GroupedLinear(nn.Module):
    """The weights (and biases) of ``y = x·W[e]ᵀ + b[e]`` for each expert ``e``."""

    writes_main_grad = True  # gradients are added to ``main_grad`` of parameters that have one
    multiplies_decoded = True  # weights may be stored in fp8: they are decoded, or codes multiply

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        weight_layout: LayoutName = "grouped",
        bias_layout: LayoutName | None = None,  # None: the layout of the weight
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if bias_layout is not None and not bias:
            raise ValueError(f"bias_layout={bias_layout!r}, but there is no bias: pass bias=True")
        for layout in (weight_layout, bias_layout or weight_layout):
            if layout not in get_args(LayoutName):
                raise ValueError(f"layout {layout!r}: choose 'grouped' or 'indexed'")
        check_sizes(
            "GroupedLinear",
            num_experts=num_experts,
            in_features=in_features,
            out_features=out_features,
        )
        if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
            raise ValueError(
                f"dtype={dtype}: expert parameters are floating point of 16 bits or more "
                f"(for MXFP8, wrap with sw.Precision(weights='mxfp8'))"
            )
        self.num_experts = num_experts
        self.in_features, self.out_features = in_features, out_features
        # Where experts are spread over ranks: the number of the first expert on this rank, the
        # number of all experts, and the ranks that exchange tokens.
        self.first_expert, self.total_experts = 0, num_experts
        self.axis: comm.Axis | None = None
        self.has_bias = bias
        self.layouts: dict[str, LayoutName] = {"weight": weight_layout}
        if bias:
            self.layouts["bias"] = bias_layout or weight_layout
        options = {"device": device, "dtype": dtype}
        shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        for name in self.layouts:
            self._register(name, torch.empty(num_experts, *shapes[name], **options))  # type: ignore[arg-type]
        self._declare()
        self.reset_parameters()

    def _register(self, name: str, values: Tensor) -> None:
        if self.layouts[name] == "grouped":
            self.register_parameter(name, nn.Parameter(values))
        else:
            for index, value in enumerate(values):  # views of one storage
                self.register_parameter(f"{name}{index}", nn.Parameter(value))

    def _declare(self) -> None:
        """Declare to optimizers which parameters are matrices: grouped biases [experts, out] are
        not."""
        for name, blocks in (("weight", self.row_blocks), ("bias", ())):
            for parameter in self.experts(name).parameters if name in self.layouts else ():
                if name == "bias" or blocks:
                    declare_matrices(parameter, blocks)

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks of rows that are separate matrices; (): all rows form one matrix."""
        return ()

    def reset_parameters(self) -> None:
        self.draw(self.in_features**-0.5)

    @torch.no_grad()
    def draw(self, deviation: float, seed: int | None = None) -> None:
        """Draw fresh weights and zero the biases. With a seed, the values of an expert depend on
        its number alone, not on its rank or on the layout. Without a seed, torch's generator is
        used."""
        weights = self.experts("weight")
        device = weights.parameters[0].device
        if device.type == "meta":
            return  # torch would take a third of a millisecond for each expert
        values = torch.empty(
            self.num_experts,
            self.out_features,
            self.in_features,
            device=device,
            dtype=weights.dtype,
        )
        for index, value in enumerate(values):
            generator = None
            if seed is not None:
                number = seed * self.total_experts + self.first_expert + index
                generator = torch.Generator(device).manual_seed(number)
            nn.init.normal_(value, std=deviation, generator=generator)
        parts = [values] if weights.grouped else list(values)
        for parameter, part in zip(weights.parameters, parts, strict=True):
            parameter.copy_(part)
        for parameter in self.experts("bias").parameters if self.has_bias else ():
            parameter.zero_()

    @property
    def is_spread(self) -> bool:
        """Whether other ranks have other experts."""
        return self.num_experts < self.total_experts

    def spread(self, first: int, count: int, axis: comm.Axis | None = None) -> None:
        """Keep ``count`` experts, beginning with number ``first``; other ranks of ``axis`` keep the
        other experts."""
        if self.is_spread:
            raise ValueError(
                f"this rank has {self.num_experts} of {self.total_experts} experts, from number "
                f"{self.first_expert} on: they are spread already (axis=, spread or keep_share). "
                f"Spread a module once, while it has all experts"
            )
        if first < 0 or count < 1 or first + count > self.total_experts:
            raise ValueError(
                f"spread(first={first}, count={count}): the module has experts 0 to "
                f"{self.total_experts - 1}, and at least one must stay. Choose a range of these"
            )
        kept = {}
        for name in self.layouts:
            bundle = self.experts(name)
            whole = bundle.parameters[0].detach() if bundle.grouped else as_one(bundle.parameters)
            trained = [parameter.requires_grad for parameter in bundle.parameters]
            trained = trained if bundle.grouped else trained[first : first + count]
            kept[name] = whole[first : first + count].clone(), trained
        for name in list(self._parameters):
            delattr(self, name)
        self.num_experts, self.first_expert, self.axis = count, first, axis
        for name, (values, trained) in kept.items():
            self._register(name, values)
            for parameter, trains in zip(self.experts(name).parameters, trained, strict=True):
                parameter.requires_grad_(trains)
        self._declare()

    def experts(self, name: str) -> ExpertTensor:
        """The parameters ``name`` that are registered now. A wrapper may swap parameters."""
        if self.layouts[name] == "grouped":
            return ExpertTensor(parameters=(getattr(self, name),), grouped=True)
        members = tuple(getattr(self, f"{name}{index}") for index in range(self.num_experts))
        return ExpertTensor(parameters=members, grouped=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if any(parameter is None for parameter in self._parameters.values()):
            return self  # a unit moves the parameters, and they stay the same objects
        self._declare()  # on parameters that torch has replaced
        for name, layout in self.layouts.items():
            if layout == "indexed":
                as_neighbours(self.experts(name).parameters)  # type: ignore[arg-type]
        return self

    def extra_repr(self) -> str:
        layouts = ", ".join(f"{name} {layout}" for name, layout in self.layouts.items())
        return f"{self.num_experts} x {self.in_features} -> {self.out_features}, {layouts}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._declare()  # a copied parameter has lost its declaration

    # ------------------------------------------------------------------ state dicts

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._parameters if self.is_spread and not keep_vars else ():
            destination[f"{prefix}{name}"] = ExpertShare.of(destination[f"{prefix}{name}"])

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        problem = self._other_experts(state_dict, prefix)
        if problem is not None and strict:
            errors.append(problem)
            return
        for key, value in state_dict.items():
            if isinstance(value, ExpertShare) and key.startswith(prefix):
                state_dict[key] = value.as_subclass(Tensor)  # ``assign=True`` keeps the type
        self._normalise(state_dict, prefix)
        self._load_normal(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        self._declare()  # ``assign=True`` replaces parameters

    def _load_normal(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load from keys in the layout of this module."""
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _other_experts(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        """An error message where a state dict has another number of experts; else None."""
        here = str(self.num_experts)
        if self.is_spread:
            here += f" of {self.total_experts} (from number {self.first_expert} on)"
        for name in self.layouts:
            bundle = self.experts(name)
            ndim = bundle.parameters[0].dim() - (1 if bundle.grouped else 0)
            count = keys.num_experts(state_dict, prefix, name, ndim)
            if count not in (None, self.num_experts, self.total_experts):
                return f"'{prefix}{name}' has {count} experts, this module has {here}"
        return None

    def _normalise(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Convert the keys to this layout, and keep only this rank's experts."""
        for name, layout in self.layouts.items():
            if self.is_spread and keys.holds(state_dict, prefix, name, self.total_experts):
                keys.to_indexed(state_dict, prefix, name, self.total_experts)
                keys.from_one_by_one(
                    state_dict, prefix, name, self.num_experts,
                    first_expert=self.first_expert, layout=layout,
                )  # fmt: skip
            else:
                keys.normalise(state_dict, prefix, name, self.num_experts, layout)


class GateUpLinear(GroupedLinear):
    """A first linear whose rows are gates and ups; its state dict holds their order."""

    gate_up_block: int = 0

    def __init__(self, *args: Any, gate_up_block: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.out_features % 2:
            raise ValueError(f"out_features={self.out_features}: gate and up need an even number")
        check_block(gate_up_block, self.out_features // 2)
        self.gate_up_block = gate_up_block
        self._declare()

    @property
    def row_blocks(self) -> tuple[int, ...]:
        return (self.gate_up_block or self.out_features // 2,) * 2

    def extra_repr(self) -> str:
        return super().extra_repr() + f", gate_up_block={self.gate_up_block}"

    def get_extra_state(self) -> dict[str, int]:
        return {"gate_up_block": self.gate_up_block}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Raise where the loaded tensors have another order. ``load_state_dict`` converts tensors
        before it calls this method."""
        stored = state["gate_up_block"]
        if stored != self.gate_up_block:
            raise ValueError(
                f"gate and up are stored in blocks of {stored} (0: stacked), and this module has "
                f"gate_up_block={self.gate_up_block}: build it with gate_up_block={stored}, or "
                f"convert weights and optimizer states with shardwise.moe.convert_gate_up"
            )

    def _load_normal(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        names = {f"{prefix}{name}" for name, _ in self.named_parameters(recurse=False)}
        given = [key for key in state_dict if key in names]
        extra = state_dict.get(f"{prefix}_extra_state")
        stored = extra.get("gate_up_block") if isinstance(extra, dict) else None
        if given and stored is None:
            errors.append(
                f"'{prefix}_extra_state' does not hold the order of gate and up in "
                f"'{given[0]}': add it with shardwise.moe.declare_gate_up(state_dict, "
                f"'{prefix}', block) (0: stacked)"
            )
            return
        if given and stored != self.gate_up_block:
            assert stored is not None
            state_dict = dict(state_dict)  # the caller's tensors stay as they are
            for key in given:
                dim = -1 if key.removeprefix(prefix).startswith("bias") else -2
                value = state_dict[key]
                if value.shape[dim] != self.out_features:
                    continue  # torch reports the shape
                state_dict[key] = convert_gate_up(value, stored, self.gate_up_block, dim)
            state_dict[f"{prefix}_extra_state"] = self.get_extra_state()
        super()._load_normal(state_dict, prefix, *rest)
