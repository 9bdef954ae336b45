# SPDX-License-Identifier: Apache-2.0
"""The torch.optim.Optimizer behind ``sw.optimizer`` and ``sw.Muon``.

    kind "matrix"        Muon: lr, momentum, ...                state: momentum_buffer
    kind "function"      your own: lr, its options              state: its own, on the owners
    kind "elementwise"   AdamW: lr, betas, ...                  state: step, exp_avg, exp_avg_sq

States exist from the start, on every rank and stored like the parameter's gradient, so a checkpoint
has the same keys everywhere and reshards states like weights. Schedulers, hooks, closures and state
dicts are torch's.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from shardwise.agreement import raise_together
from shardwise.kernels.ahead import compile_ahead
from shardwise.notices import warn_once
from shardwise.optim import elementwise
from shardwise.optim.elementwise import AdamWSettings
from shardwise.optim.function_step import group_class
from shardwise.optim.gradients import (
    Clip,
    OptimizerGradients,
    divide,
    division_of,
    measure_clip,
    moved_state,
)
from shardwise.optim.matrix_function import FunctionSettings, function_of
from shardwise.optim.matrix_group import (
    MatrixGroup,
    MatrixParameter,
    matrix_groups,
    planned_settings,
)
from shardwise.optim.muon import MACHINE_SETTINGS, MuonSettings, convert_momentum
from shardwise.optim.routing import Route, as_matrix, recall_routes, recorded, route_problems
from shardwise.optim.settings import GroupSettings, group_of
from shardwise.optim.storage import (
    axes_of,
    cut_along_rows,
    local_of,
    mark_written,
    sharding_of,
    storage_problem,
    version_of,
)
from shardwise.uncompiled import uncompiled
from shardwise.words import quoted

logger = logging.getLogger(__name__)

SETTINGS: dict[str, Any] = {
    one.kind: one for one in (MuonSettings, FunctionSettings, AdamWSettings)
}
# Steps read .grad of hundreds of parameters and compute on plain pieces alone: not through
# __torch_function__, which some torch versions give our DTensors.
_plain_attributes = torch._C.DisableTorchFunctionSubclass


class ShardedOptimizer(torch.optim.Optimizer):
    """Parameter groups of two kinds, stepped together; see :func:`shardwise.optimizer`."""

    marks_writes = True  # buffer by buffer, as soon as each is done: its gather may begin then
    compares_gradients = True  # between ranks, before each step
    places_states = True  # those of matrices lie on owners, or are divided between replicas

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: dict[int, str],
        defaults: dict[str, Any] | None = None,
    ) -> None:
        """``names`` are by id of the parameter. Collective where parameters are sharded."""
        self._names = names
        self._settings = GroupSettings(SETTINGS)
        self.half_step: str | None = None  # the problem, once a step has raised half way
        self._matrix_groups: list[MatrixGroup] | None = None
        self._clip: Clip | None = None  # of the next step
        self.clipped = ""  # how, in words: ranks must clip alike
        self.frozen: list[tuple[str, Tensor]] = []  # by name: the model's that have no group
        self.routes: list[tuple[str, Tensor, Route]] = []  # that the groups were made by
        # By name, of the last clip: the norm of this rank's piece of each gradient, on the device.
        self.last_norms: list[tuple[str, Tensor]] = []
        if defaults is None and all(group["kind"] == "elementwise" for group in groups):
            defaults = {"betas": groups[0]["betas"]} if groups else {}  # schedulers look for them
        super().__init__(groups, defaults or {})
        self._plan()

    # ------------------------------------------------------------------ construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of ``kind`` "matrix", "function" or "elementwise". Settings that it leaves
        out are those of the first group of that kind. Collective where parameters are sharded."""
        kind = param_group.get("kind")
        if kind not in SETTINGS:
            raise ValueError(f"kind={kind!r}: a parameter group is one of {', '.join(SETTINGS)}")
        known = next((group for group in self.param_groups if group["kind"] == kind), {})
        filled = {key: value for key, value in known.items() if key not in ("params", "initial_lr")}
        group = filled | param_group
        if self._matrix_groups is not None:  # the constructor's groups were checked together
            group = self._checked(group, known)
        super().add_param_group(group)
        group = self.param_groups[-1]
        for parameter in group["params"] if kind == "elementwise" else ():
            divide(parameter, None)
            if group["fused"] is None:
                group["fused"] = parameter.device.type == "cuda"
        if self._matrix_groups is not None:
            self._plan()

    def _checked(self, group: dict[str, Any], alike: Iterable[str]) -> dict[str, Any]:
        """A group to add, with all its settings; raises before the optimizer is changed.
        ``alike``: names that other groups of its kind have, those of schedulers too."""
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        kind, problems = group["kind"], []
        own = self._settings.own(group)
        try:
            group = group_of(SETTINGS[kind](**own), params) | group
        except ValueError as error:
            problems.append(str(error))
        options = function_of(group).options if kind == "function" else {}
        known = {"params", "kind", "name", "initial_lr", *own, *options, *alike}
        if unknown := [key for key in group if key not in known]:
            problems.append(f"a group of kind {kind!r} does not know {', '.join(unknown)}")
        recall_routes()
        found = [(self._name(p), p) for p in params if isinstance(p, Tensor)]
        whole = kind != "elementwise"
        matrices = [(name, p, as_matrix(p, "added")) for name, p in found if whole]
        problems += parameter_problems(found, matrices)
        facts = [f"{own}", summary([(kind, tuple(p.shape)) for _, p in found])]
        raise_unless_same("a group to add cannot work", problems, facts, (p for _, p in found))
        return group | {"params": params}

    def _plan(self) -> None:
        """Assign owners, and store momenta accordingly (collective where parameters are
        sharded)."""
        self._warn_of_narrow_weights()
        members = [
            MatrixParameter(self._name(parameter), parameter, as_matrix(parameter, ""), group)
            for group in self.param_groups
            if group["kind"] != "elementwise"
            for parameter in group["params"]
        ]
        self._matrix_groups = matrix_groups(members, group_class)
        self._planned = self._planned_settings()
        self._make_states()
        every = [p for group in self.param_groups for p in group["params"]]
        self._divisions = [(p, division_of(p)) for p in every]
        self._gradients = OptimizerGradients(every, self._name)

    def _planned_settings(self) -> list[tuple[Any, ...]]:
        return [planned_settings(one) for one in self.param_groups if one["kind"] != "elementwise"]

    def _make_states(self) -> None:
        """The states of every parameter where they belong; new ones where it has none, also since
        somebody dropped them (``optimizer.state.clear()``)."""
        for group in self.param_groups:
            for parameter in group["params"] if group["kind"] == "elementwise" else ():
                state = self.state[parameter] or elementwise.new_state(parameter, group["fused"])
                self.state[parameter] = {k: moved_state(parameter, v) for k, v in state.items()}
        for matrices in self._matrix_groups or ():
            for one in matrices.members:
                self.state[one.parameter] = matrices.state_of(one, self.state[one.parameter])

    def _warn_of_narrow_weights(self) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        names = [self._name(p) for p in every if p.itemsize < 4 and not p.is_meta]
        if names:
            warn_once(
                logger,
                "%d parameters that an optimizer trains are stored in 16 bits (%s), which round "
                "away steps of less than 1/256 of a weight. sw.fully_shard and sw.data_parallel "
                "keep fp32 main weights of what is trainable when they wrap it; without them train "
                "model.float() under torch.autocast",
                len(names),
                quoted(names),
                mesh=getattr(every[0], "device_mesh", None),
            )

    def _check_divisions(self) -> None:
        """Gradients are reduced for the last optimizer that was built, and its matrices are owned
        by ranks since then."""
        lost = [self._name(p) for p, before in self._divisions if division_of(p) != before]
        if lost:
            raise RuntimeError(
                f"another optimizer was built for {quoted(lost)} after this one, and gradients are "
                f"reduced to where that one needs them: step that one, or build this one anew. (Or "
                f"a module was moved alone after backward: call .to() on the whole model.)"
            )
        if thawed := [(name, p) for name, p in self.frozen if p.requires_grad]:
            held = {id(p) for group in self.param_groups for p in group["params"]}
            if names := [name for name, p in thawed if id(p) not in held]:
                warn_once(
                    logger,
                    "%s were frozen when this optimizer was built: it leaves them alone, though "
                    "they are trainable now. Use add_param_group, or build it anew",
                    quoted(names),
                )
        routes = [(name, made, recorded(p) or made) for name, p, made in self.routes]
        matrices = ("kind", "split", "flat") if self._matrix_groups else ()
        steps = attrgetter("settings", *matrices)  # whatever the reason
        if names := [name for name, made, r in routes if r is not made and steps(r) != steps(made)]:
            warn_once(
                logger,
                "sw.route chose otherwise for %s after this optimizer was built, which keeps the "
                "routes that it was built with: build it anew",
                quoted(names),
            )
        members = (one for matrices in self._matrix_groups or () for one in matrices.members)
        planned = {id(one.parameter): id(one.group) for one in members}
        groups = [group for group in self.param_groups if group["kind"] != "elementwise"]
        found = {id(p): id(group) for group in groups for p in group["params"]}
        every = {id(p) for group in self.param_groups for p in group["params"]}
        if found != planned or not every <= set(map(id, self._gradients.parameters)):
            raise RuntimeError(
                "parameters were added to param_groups, taken out or moved by hand, and this "
                "optimizer would step those that it was built for: use add_param_group and "
                "requires_grad_(False), change the settings of a group, or build it anew"
            )
        if self._planned_settings() != self._planned:  # somebody changed them, or a load did
            self._plan()

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), f"a parameter of shape {list(parameter.shape)}")

    def compile_ahead(self) -> None:
        """Begin to compile the kernels that orthogonalise, on GPUs that have such; the first step
        waits for them."""
        for group in self._matrix_groups or ():
            if group.fused:
                compile_ahead(group.launch_ahead)

    # ------------------------------------------------------------------ a step

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; the others keep values and states.

        Compute weights are refreshed once, by the next gather.

        Elementwise groups come first, then matrices part by part. Weights that are updated may be
        gathered (``overlap_gather="step"``) while later matrices are orthogonalised.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        if self.half_step is not None:
            raise RuntimeError(self.half_step)
        problem = self._settings.problem(self.param_groups)
        if problem is None:
            self._check_divisions()
        if len(self.state) < len(self._gradients.parameters) or not all(self.state.values()):
            self._make_states()
        with _plain_attributes():
            self._gradients.check(problem)
            clip, moves = self._take_clip()
            if clip is None:
                self._gradients.widen()
        if not moves:
            return loss
        # (the parameters that a part may write, the iterator that runs it), in order; parts of
        # matrix groups side by side
        parts: list[tuple[list[Tensor], Iterator[list[Tensor]]]] = [
            (group["params"], _once(elementwise.step, group, self.state, clip))
            for group in self.param_groups
            if group["kind"] == "elementwise"
        ]
        running = [(group, group.step(self.state, clip)) for group in self._matrix_groups or ()]
        for number in range(max((len(group.parts) for group, _ in running), default=0)):
            for group, steps in running:
                if number < len(group.parts):
                    written = [group.members[at].parameter for at in group.parts[number]]
                    parts.append((written, steps))
        # A buffer is complete after the last part that writes to it.
        last = {
            id(version): number
            for number, (members, _) in enumerate(parts)
            for parameter in members
            if (version := version_of(parameter)) is not None
        }
        stepped: list[Tensor] = []
        try:
            for number, (_, steps) in enumerate(parts):
                with _plain_attributes(), torch._C._DisableAutocast():
                    stepped += next(steps)
                mark_written([p for p in stepped if last.get(id(version_of(p))) == number])
        except BaseException as error:
            self.half_step = (
                f"a step of the optimizer raised half way ({type(error).__name__}: {error}), so "
                f"some weights and states are updated and others are not. Load both: sw.load, or "
                f"load_state_dict of the model and of the optimizer"
            )
            for members, _ in parts:  # whatever was written, no gathered weight is trusted
                for version in map(version_of, members):
                    if version is not None:
                        version.count += 1
            raise
        return loss

    @uncompiled
    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        in_step: bool = False,
    ) -> Tensor:
        """Clip the gradients of all groups by one global norm, before anything is orthogonalised;
        returns the norm before clipping, the same on every rank.

        Args:
            in_step: the next step clips, while it reads the gradients, and ``.grad`` stays as it
                is. A norm that is not finite then makes that step change nothing. On GPUs neither
                costs a pass over the gradients nor a wait of the host.
        """
        with _plain_attributes():
            clip = measure_clip(self._gradients, max_norm, norm_type, error_if_nonfinite)
            self._clip = clip if in_step else None  # the last one counts
            if not in_step:
                clip.scale(self._gradients)
        self.last_norms = [(self._name(parameter), norm) for parameter, norm in clip.parts]
        self.clipped = f"max_norm={max_norm} norm_type={norm_type}; "
        return clip.norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and a clip that no step has used."""
        self._clip, self.clipped = None, ""
        super().zero_grad(set_to_none)

    def _take_clip(self) -> tuple[Tensor | None, bool]:
        """The clip for kernels, and whether this step moves anything as far as the host knows.

        Where a part of the step has no kernel that clips, the host waits for the norm.
        """
        clip, self._clip, self.clipped = self._clip, None, ""
        if clip is None:
            return None, True
        fused = all(group.fused for group in self._matrix_groups or ())
        fused = fused and clip.norm.device.type == "cuda"
        if fused and all(group.get("fused", True) for group in self.param_groups):
            return clip.on_device(), True
        if not bool(torch.isfinite(clip.norm)):
            return None, False
        clip.scale(self._gradients)
        return None, True

    # ------------------------------------------------------------------ state dicts

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} is neither copied nor pickled: owners and names belong to its "
            f"parameters. Build one for the copied model, and load the state_dict() of this one"
        )

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with the names of the parameters; of matrix optimizers the names."""
        made: dict[str, Any] = super().state_dict()
        for group, mine in zip(made["param_groups"], self.param_groups, strict=True):
            group |= {"function": str(group["function"])} if "function" in group else {}
            group["param_names"] = [self._name(parameter) for parameter in mine["params"]]
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch's; momentum that was saved in the other form is converted. Parameters
        that have the saved ones' names, in another order, get the states of their names."""
        mine = self.param_groups
        kinds = [group.get("function", group["kind"]) for group in mine]
        theirs = [group.get("function", group.get("kind")) for group in state_dict["param_groups"]]
        if kinds != theirs:
            raise ValueError(
                f"the state dict holds groups of kinds {theirs}, this optimizer {kinds}: build it "
                f"with the same matrix= and elementwise= as the one that was saved"
            )
        groups = self._by_name(state_dict)
        super().load_state_dict(state_dict | {"param_groups": groups})
        # The groups stay the same objects, which matrices know: ownership is not planned again.
        loaded, self.param_groups = self.param_groups, mine
        for group, new, saved in zip(mine, loaded, groups, strict=True):
            own = {key: group[key] for key in ("function", *MACHINE_SETTINGS) if key in group}
            group.clear()
            group.update(new | own)
            for one, index in zip(group["params"], saved["params"], strict=True):
                if group["kind"] == "function":  # torch cast its states to the parameter's dtype
                    self.state[one] = dict(state_dict["state"].get(index, {}))
        self._make_states()
        for group, new in zip(mine, loaded, strict=True):
            for parameter in group["params"] if group["kind"] == "matrix" else ():
                buffer = local_of(self.state[parameter]["momentum_buffer"])
                forms = (new["momentum_form"], group["momentum_form"])
                convert_momentum(buffer, group["momentum"], *forms)
        self.half_step = None

    def _by_name(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """The groups of a state dict, their parameters in the order of this optimizer's where the
        names are the same; raises where a state has another shape than its parameter."""
        found, problems, states = [], [], state_dict["state"]
        for mine, group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            names, params = [self._name(p) for p in mine["params"]], group["params"]
            saved = dict(zip(group.get("param_names", ()), params, strict=False))
            if saved.keys() == set(names) and len(saved) == len(names):
                params = [saved[name] for name in names]
            without = {key: value for key, value in group.items() if key != "param_names"}
            own = {key: mine[key] for key in self._settings.names(mine) if key in mine}
            trained = [p.requires_grad for p in mine["params"]]
            stateless = [
                name
                for name, at, moves in zip(names, params, trained, strict=False)
                if moves and at not in states
            ]
            self._warn_of_gaps(
                [key for key in own if key not in (*group, *MACHINE_SETTINGS)],
                stateless if states else [],  # else it was taken before a step
            )
            found.append(own | without | {"params": params})
            of_parameters = mine["kind"] != "function"
            problems += [
                f"'{name}' of shape {list(parameter.shape)} would get {key} of {list(value.shape)}"
                for name, parameter, index in zip(names, mine["params"], params, strict=False)
                for key, value in state_dict["state"].get(index, {}).items()
                if isinstance(value, Tensor) and value.ndim and of_parameters
                if value.shape != parameter.shape
            ]
        if problems:
            raise ValueError(
                "the state dict is of other parameters, or of these in another order; nothing was "
                "loaded: " + "; ".join(problems[:4]) + ". sw.save and sw.load go by names"
            )
        return found

    def _warn_of_gaps(self, settings: list[str], parameters: list[str]) -> None:
        if settings:
            text = "the state dict lacks %s, which stay as this optimizer has them"
            warn_once(logger, text, quoted(settings))
        if parameters:
            text = "the state dict has no states of %s, which begin anew with zeros"
            warn_once(logger, text, quoted(parameters))


def _once(step: Callable[..., list[Tensor]], *args: Any) -> Iterator[list[Tensor]]:
    yield step(*args)


# ------------------------------------------------------------------------------ checks


def raise_unless_same(
    what: str, problems: Sequence[str], facts: Sequence[str], parameters: Iterable[Tensor]
) -> None:
    """Raise on every rank the problems of any rank, or that ranks build different optimizers
    (collective over the axes of ``parameters``)."""
    axes = axes_of(parameters)
    raise_together(what, problems, facts, axes, same="build the same optimizer")


def summary(facts: Sequence[Any]) -> str:
    """A short text that differs where the fact of one parameter differs."""
    return f"{len(facts)} parameters (checksum {zlib.crc32(repr(facts).encode()):08x})"


def parameter_problems(
    found: Iterable[tuple[str, Tensor]], matrices: Iterable[tuple[str, Tensor, Route]]
) -> list[str]:
    """Why these parameters cannot be optimized, or the matrices among them orthogonalised."""
    problems = [storage_problem(name, parameter) for name, parameter in found]
    for name, parameter, chosen in matrices:
        shape = tuple(parameter.shape)
        wrong = route_problems(name, shape, chosen)
        problems += wrong or [storage_problem(name, parameter, matrix=True)]
        if not parameter.is_floating_point():
            problems.append(f"'{name}' is {parameter.dtype}, which has no orthogonal form")
        sharding = sharding_of(parameter)
        if chosen.flat and not wrong and not cut_along_rows(parameter):
            problems.append(
                f"'{name}' of shape {list(shape)} is one matrix [out, rest], and "
                f"{parameter.placements} cut it otherwise than along its first dimension"  # type: ignore[attr-defined]
            )
        elif not wrong and chosen.split is not None and any(sharding.blocked):
            side, count = sharding.block_dim, sharding.count(sharding.blocked)
            if chosen.split.within(shape, side, count, sharding.block) is None:
                what = ("rows", "columns")[side]
                problems.append(
                    f"'{name}' has a split {chosen.split}, and tensor parallelism cuts its "
                    f"{shape[-2 + side]} {what} into {count} blocks inside of it: choose a size "
                    f"whose cuts fall between the matrices, or store them apart"
                )
    return list(dict.fromkeys(problem for problem in problems if problem))
