# SPDX-License-Identifier: Apache-2.0
"""One torch.optim.Optimizer for a whole model: Muon for its matrices, AdamW for the rest.

    opt = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-4))

    param_groups[0]   kind "matrix"        lr, momentum, ...     state: momentum_buffer
    param_groups[1]   kind "elementwise"   lr, betas, ...        state: step, exp_avg, exp_avg_sq

States exist from the start, on every rank and where the parameter's gradient lies, so a
checkpoint has the same keys everywhere and reshards them like weights. Schedulers, hooks, closures
and state dicts are torch's.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.agreement import raise_together
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.optim import adamw as elementwise_step
from shardwise.optim import clip, matrices
from shardwise.optim.adamw import AdamWSettings
from shardwise.optim.gradients import Gradients, quoted
from shardwise.optim.matrices import Fleet, Matrix, fleets_of
from shardwise.optim.muon import MuonSettings, convert_momentum
from shardwise.optim.routing import (
    Route,
    Routed,
    as_matrix,
    recall_routes,
    route_problems,
    routes_of,
)
from shardwise.optim.storage import (
    axes_of,
    buffer_of,
    cut_along_rows,
    home_of,
    local_of,
    problem_of,
    written,
)
from shardwise.optim.turns import take_turns, turns_of

logger = logging.getLogger(__name__)

# Steps read .grad of hundreds of parameters and compute on plain pieces alone: not through
# __torch_function__, which some torch versions give our DTensors.
_plain_attributes = torch._C.DisableTorchFunctionSubclass


class ShardedOptimizer(torch.optim.Optimizer):
    """Parameter groups of two kinds, stepped together; see :func:`optimizer`."""

    counts_writes = True  # by ``written``, buffer by buffer, as soon as each is done

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: dict[int, str],
        defaults: dict[str, Any] | None = None,
    ) -> None:
        self._names = names  # by id of the parameter
        self._fleets: list[Fleet] | None = None
        super().__init__(groups, defaults or {})
        self._warn_of_narrow_weights()
        self._launch()

    # ------------------------------------------------------------------ construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of ``kind`` "matrix" or "elementwise"; what it leaves out is as in the first
        group of that kind. Collective where parameters are sharded."""
        kind = param_group.get("kind")
        if kind not in _SETTINGS:
            raise ValueError(f"kind={kind!r}: a parameter group is 'matrix' or 'elementwise'")
        known = next((group for group in self.param_groups if group["kind"] == kind), {})
        filled = {key: value for key, value in known.items() if key not in ("params", "initial_lr")}
        group = filled | param_group
        if self._fleets is not None:  # what came with the constructor was checked together
            group = self._checked(group)
        super().add_param_group(group)
        group = self.param_groups[-1]
        for parameter in group["params"] if kind == "elementwise" else ():
            take_turns(parameter, None)
            if group["fused"] is None:
                group["fused"] = parameter.device.type == "cuda"
            self.state[parameter] = elementwise_step.new_state(parameter, group["fused"])
        if self._fleets is not None:
            self._launch()

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group to add, with all its settings; refused while the optimizer is as it was."""
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        kind, problems = group["kind"], []
        known = {entry.name for entry in fields(_SETTINGS[kind])}
        own = {key: value for key, value in group.items() if key in known}
        try:
            group = _plain(_SETTINGS[kind](**own)) | group
        except ValueError as error:
            problems.append(str(error))
        recall_routes()
        found = [(self._name(p), p) for p in params if isinstance(p, Tensor)]
        whole = [(name, p, as_matrix(p, "added")) for name, p in found if kind == "matrix"]
        problems += parameter_problems(found, whole)
        mine = [f"{own}", summary([(kind, tuple(p.shape)) for _, p in found])]
        raise_together(
            "a group to add cannot work",
            problems,
            mine,
            axes_of(p for _, p in found),
            same=SAME,
        )
        return group | {"params": params}

    def _launch(self) -> None:
        """Plan who computes what, and put momenta there (collective where parameters are
        sharded)."""
        found = [
            Matrix(self._name(parameter), parameter, as_matrix(parameter, ""), group)
            for group in self.param_groups
            if group["kind"] == "matrix"
            for parameter in group["params"]
        ]
        self._fleets = fleets_of(found)
        for matrix in found:
            before = self.state.get(matrix.parameter, {})
            self.state[matrix.parameter] = matrices.state_of(matrix.parameter, before)
        every = [p for group in self.param_groups for p in group["params"]]
        self._turns = [(p, turns_of(p)) for p in every]
        self._gradients = Gradients(every, self._name)

    def _warn_of_narrow_weights(self) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        names = [self._name(p) for p in every if p.itemsize < torch.float32.itemsize]
        if names:
            logger.warning(
                "%d parameters that an optimizer trains are stored in 16 bits (%s), which round "
                "away steps of less than 1/256 of a weight, and momenta likewise. sw.fully_shard "
                "and sw.data_parallel keep fp32 main weights of what is trainable when they wrap "
                "it, unless Precision(main=...) says otherwise; without them train model.float() "
                "under torch.autocast",
                len(names),
                quoted(names),
            )

    def _check_turns(self) -> None:
        """Gradients are reduced for one optimizer: the last that was built."""
        lost = [self._name(p) for p, turns in self._turns if turns_of(p) != turns]
        if lost:
            raise RuntimeError(
                f"another optimizer was built for {quoted(lost)} after this one, and gradients are "
                f"reduced to where that one needs them: step that one, or build this one anew"
            )

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), f"a parameter of shape {list(parameter.shape)}")

    # ------------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient, and leave the others alone, states and all;
        compute weights are refreshed once, by the next gather.

        Elementwise groups come first, then matrices in waves. Weights of what is done may be on
        their way (``overlap_gather="step"``) while the matrices after it are orthogonalised.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._fleets is not None
        self._check_turns()
        with _plain_attributes():
            self._gradients.settle()
        groups = [group for group in self.param_groups if group["kind"] == "elementwise"]
        # (what a stage may write, who advances it), in order; the waves of fleets side by side
        stages: list[tuple[list[Tensor], Iterator[list[Tensor]]]] = [
            (group["params"], _once(elementwise_step.step, group, self.state)) for group in groups
        ]
        running = [(fleet.waves, fleet.step(self.state)) for fleet in self._fleets]
        for number in range(max((len(waves) for waves, _ in running), default=0)):
            for waves, steps in running:
                if number < len(waves):
                    stages.append(([matrix.parameter for matrix in waves[number]], steps))
        # A buffer is settled by the last of the stages that write to it.
        last = {
            id(buffer): number
            for number, (members, _) in enumerate(stages)
            for parameter in members
            if (buffer := buffer_of(parameter)) is not None
        }
        stepped: list[Tensor] = []
        for number, (_, steps) in enumerate(stages):
            with _plain_attributes():
                stepped += next(steps)
            settled = [p for p in stepped if last.get(id(buffer_of(p))) == number]
            written(settled)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those of microbatches that still wait to be reduced too."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = buffer_of(parameter)
                if buffer is not None and buffer.waiting is not None:
                    buffer.waiting()

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of all groups by one global norm, before anything is orthogonalised;
        the norm before clipping, the same on every rank."""
        with _plain_attributes():
            return clip.clip_grad_norm(self._gradients, max_norm, norm_type, error_if_nonfinite)

    # ------------------------------------------------------------------ state dicts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; momentum that was saved in the other form is converted to this one's."""
        wanted = [group.get("momentum_form", "") for group in self.param_groups]
        kinds = [group["kind"] for group in self.param_groups]
        saved = [group.get("kind") for group in state_dict["param_groups"]]
        if kinds != saved:
            raise ValueError(
                f"the state dict holds groups of kinds {saved}, this optimizer {kinds}: build it "
                f"with the same matrix= and elementwise= as the one that was saved"
            )
        super().load_state_dict(state_dict)
        for form, group in zip(wanted, self.param_groups, strict=True):
            if group["kind"] != "matrix":
                continue
            for parameter in group["params"]:
                own = matrices.state_of(parameter, self.state[parameter])
                self.state[parameter] = own
                buffer = local_of(own["momentum_buffer"])
                convert_momentum(buffer, group["momentum"], group["momentum_form"], form)
            group["momentum_form"] = form
        # The groups are new objects; plans are not made anew, which would be collective.
        by_parameter = {
            id(parameter): group for group in self.param_groups for parameter in group["params"]
        }
        for fleet in self._fleets or ():
            for matrix in fleet.matrices:
                matrix.group = by_parameter[id(matrix.parameter)]


def optimizer(
    model: nn.Module,
    *,
    matrix: MuonSettings | None,
    elementwise: AdamWSettings | None,
) -> ShardedOptimizer:
    """The optimizer of a model, sharded or not: one object for all trainable parameters.

    Args:
        matrix: ``sw.muon(...)`` for what :func:`route` calls a matrix; None: ``elementwise`` takes
            all.
        elementwise: ``sw.adamw(...)`` for the rest.

    Collective where parameters are sharded. What can't work is refused here, all at once.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"sw.optimizer takes the model itself, whose modules say what is a matrix, not a "
            f"{type(model).__name__}; sw.Muon takes parameters"
        )
    problems = []
    if matrix is not None and not isinstance(matrix, MuonSettings):
        problems.append(f"matrix={matrix!r}: use sw.muon(...) or None")
    if elementwise is not None and not isinstance(elementwise, AdamWSettings):
        problems.append(f"elementwise={elementwise!r}: use sw.adamw(...)")
    for module in model.modules():
        if isinstance(module, GroupedLinear) and module.total_experts > module.num_experts:
            for parameter in module.parameters(recurse=False):
                setattr(parameter, clip.SPREAD, True)
    routed = routes_of(model)
    found = [one for one in routed if one.parameter.requires_grad]
    if not found:
        problems.append("the model has no trainable parameters")
    whole = [one for one in found if matrix is not None and one.route.kind == "matrix"]
    rest = [one for one in found if matrix is None or one.route.kind == "elementwise"]
    if matrix is not None and found and not whole:
        problems.append(
            "matrix=sw.muon(...), but the model has no matrices to orthogonalise (see "
            "sw.routing_report); pass matrix=None, or route some with sw.route"
        )
    if rest and elementwise is None:
        names = quoted([one.name for one in rest])
        problems.append(f"{names} belong to no optimizer: pass elementwise=sw.adamw(...)")
    problems += parameter_problems(
        [(one.name, one.parameter) for one in found],
        [(one.name, one.parameter, one.route) for one in whole],
    )
    kinds = [(one.name, one.route.kind) for one in found]
    mine = [f"{matrix=}", f"{elementwise=}", summary(kinds)]
    raise_together(
        "this optimizer cannot work",
        problems,
        mine,
        axes_of(one.parameter for one in routed),
        same=SAME,
    )
    if matrix is not None:
        _warn_of_routes(found)
    groups = []
    if matrix is not None:
        groups.append(matrix_group(matrix, [one.parameter for one in whole]))
    if rest and elementwise is not None:
        groups.append(elementwise_group(elementwise, [one.parameter for one in rest]))
    return ShardedOptimizer(groups, {id(one.parameter): one.name for one in found})


def _warn_of_routes(found: Sequence[Routed]) -> None:
    """One warning of what looks as if it were with the wrong optimizer, and was not chosen."""
    names: dict[str, list[str]] = {}
    for one in found:
        for warning in () if one.route.reason.startswith("chosen") else one.warnings:
            names.setdefault(warning, []).append(one.name)
    if names:
        logger.warning(
            "parameters that may be with the wrong optimizer: %s. Decide with sw.route(model, "
            "matrix=..., elementwise=..., split=...), by name; sw.routing_report(model) lists all",
            "; ".join(f"{quoted(members)} {warning}" for warning, members in names.items()),
        )


def matrix_group(settings: MuonSettings, parameters: Sequence[Tensor]) -> dict[str, Any]:
    return {"params": list(parameters)} | matrix_defaults(settings)


def matrix_defaults(settings: MuonSettings) -> dict[str, Any]:
    return {"kind": "matrix", **_plain(settings)}


def elementwise_group(settings: AdamWSettings, parameters: Sequence[Tensor]) -> dict[str, Any]:
    return {"params": list(parameters), "kind": "elementwise", **_plain(settings)}


SAME = "build the same optimizer"
_SETTINGS = {"matrix": MuonSettings, "elementwise": AdamWSettings}


def _plain(settings: MuonSettings | AdamWSettings) -> dict[str, Any]:
    """The settings as a parameter group holds them: values that a checkpoint can keep."""
    return {entry.name: getattr(settings, entry.name) for entry in fields(settings)}


def summary(facts: Sequence[Any]) -> str:
    """Of one fact for each parameter: small, and different where one of them is."""
    return f"{len(facts)} parameters (checksum {zlib.crc32(repr(facts).encode()):08x})"


def parameter_problems(
    found: Iterable[tuple[str, Tensor]], whole: Iterable[tuple[str, Tensor, Route]]
) -> list[str]:
    """Why these parameters can't be optimized, or the matrices among them orthogonalised."""
    problems = [problem_of(name, parameter) for name, parameter in found]
    for name, parameter, chosen in whole:
        shape = tuple(parameter.shape)
        wrong = route_problems(name, shape, chosen)
        problems += wrong or [problem_of(name, parameter, matrix=True)]
        if not parameter.is_floating_point():
            problems.append(f"'{name}' is {parameter.dtype}, which has no orthogonal form")
        home = home_of(parameter)
        if chosen.flat and not wrong and not cut_along_rows(parameter):
            problems.append(
                f"'{name}' of shape {list(shape)} is taken as one matrix [out, rest], and "
                f"{parameter.placements} cut it otherwise than along its first dimension"  # type: ignore[attr-defined]
            )
        elif not wrong and chosen.split is not None and any(home.tensor):
            side, count = home.tensor_dim, home.num_blocks
            if chosen.split.within(shape, side, count, home.block) is None:
                what = ("rows", "columns")[side]
                problems.append(
                    f"'{name}' has a split {chosen.split}, and tensor parallelism cuts its "
                    f"{shape[-2 + side]} {what} into {count} blocks inside of it: choose a size "
                    f"whose cuts fall between the matrices, or store them apart"
                )
    return list(dict.fromkeys(problem for problem in problems if problem))


def _once(step: Callable[..., list[Tensor]], *args: Any) -> Iterator[list[Tensor]]:
    yield step(*args)
