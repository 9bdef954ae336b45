# SPDX-License-Identifier: Apache-2.0
"""``sw.optimizer`` for a whole model, and ``sw.Muon`` for given matrices.

    opt = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-4))
    opt = sw.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)

Plain parameters are updated in place. The matrices of sharded parameters, torch's DTensors included
(FSDP2, tensor parallelism), go to their owners and back in one exchange.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from shardwise.kernels.polynomials import PRESETS, Polynomial
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.notices import warn_once
from shardwise.optim.elementwise import AdamWSettings
from shardwise.optim.gradients import OTHERS_ELSEWHERE
from shardwise.optim.matrix_function import MatrixOptimizer
from shardwise.optim.muon import SCALES, MuonSettings
from shardwise.optim.routing import Routed, as_matrix, recall_routes, routes_of
from shardwise.optim.rules import Rule
from shardwise.optim.settings import changed, group_of, parameter_problems, raise_unless_same
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.words import count_text, quoted

logger = logging.getLogger(__name__)


def optimizer(
    model: nn.Module,
    *,
    matrix: Rule | None,
    elementwise: AdamWSettings | None,
) -> ShardedOptimizer:
    """One optimizer for all trainable parameters of a model, sharded or not.

    Args:
        matrix: ``sw.muon(...)``, or an optimizer of your own (:func:`matrix_optimizer`), for
            parameters that :func:`route` sends to the matrices; None: ``elementwise`` updates all.
        elementwise: ``sw.adamw(...)`` for the rest.

    Collective where parameters are sharded. All problems are raised together, here.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"sw.optimizer takes the model, not a {type(model).__name__}: it decides by modules "
            f"which parameters are matrices. sw.Muon takes parameters"
        )
    problems = []
    if matrix is not None and not isinstance(matrix, Rule):
        called = f", called: {matrix.name}(lr=...)" if isinstance(matrix, MatrixOptimizer) else ""
        problems.append(f"matrix={matrix!r}: use sw.muon(...), your own{called}, or None")
    if elementwise is not None and not isinstance(elementwise, AdamWSettings):
        problems.append(f"elementwise={elementwise!r}: use sw.adamw(...)")
    for module in model.modules():
        if isinstance(module, GroupedLinear) and module.total_experts > module.num_experts:
            for parameter in module.parameters(recurse=False):
                setattr(parameter, OTHERS_ELSEWHERE, module.axis or True)
    routed = routes_of(model)
    trained = [entry for entry in routed if entry.parameter.requires_grad]
    whole = matrix is not None
    matrices = [entry for entry in trained if whole and entry.route.kind == "matrix"]
    rest = [entry for entry in trained if not whole or entry.route.kind == "elementwise"]
    if not trained:
        problems.append("the model has no trainable parameters")
    elif whole and not matrices:
        problems.append(
            "matrix=..., but the model has no matrices to orthogonalise (see sw.routing_report); "
            "pass matrix=None, or route some with sw.route"
        )
    if rest and elementwise is None:
        names = quoted([entry.name for entry in rest])
        problems.append(f"{names} belong to no optimizer: pass elementwise=sw.adamw(...)")
    problems += parameter_problems(
        [(entry.name, entry.parameter) for entry in trained],
        [(entry.name, entry.parameter, entry.route) for entry in matrices],
    )
    groups = _groups(matrix, matrices, problems) + _groups(elementwise, rest, problems)
    kinds = [(entry.name, entry.route.kind, entry.route.settings) for entry in trained]
    parameters = (entry.parameter for entry in routed)
    facts = [f"{matrix=}", f"{elementwise=}", kinds]
    raise_unless_same("this optimizer cannot work", problems, facts, parameters)
    if fused := [entry.name for entry in matrices if entry.looks_fused]:
        warn_once(
            logger,
            "%s look like fused weights and have no split, so Muon would mix their parts: "
            "sw.route(model, split=...) splits them; sw.routing_report(model) lists all parameters",
            quoted(fused),
            mesh=getattr(matrices[0].parameter, "device_mesh", None),
        )
    for kind, entries in (("matrices", matrices), ("the rest", rest)):
        elements = count_text(sum(entry.parameter.numel() for entry in entries))
        logger.info("%s: %d parameters of %s elements", kind, len(entries), elements)
    return ShardedOptimizer(groups, {id(entry.parameter): entry.name for entry in trained})


def _groups(settings: Any, members: Sequence[Routed], problems: list[str]) -> list[dict[str, Any]]:
    """A parameter group for the members of each combination of settings by ``sw.route``.
    ``lr_scale`` multiplies the learning rate."""
    if not hasattr(settings, "kind"):  # a problem that is known
        return []
    members_of: dict[str, list[Routed]] = {}
    for member in members:
        members_of.setdefault(repr(sorted(member.route.settings)), []).append(member)
    groups = []
    for same in members_of.values():
        changes = dict(same[0].route.settings)
        scale = changes.pop("lr_scale", 1.0)
        try:
            if not isinstance(scale, int | float) or not scale >= 0:
                raise ValueError(f"lr_scale={scale!r} must be a number, 0 or more")
            if changes or scale != 1.0:
                changes["lr"] = changes.get("lr", settings.lr) * scale
            rule = changed(settings, changes)
        except (TypeError, ValueError) as error:
            names = quoted([member.name for member in same])
            problems.append(f"settings of {names} by sw.route: {error}")
        else:
            groups.append(group_of(rule, [member.parameter for member in same]))
    return groups


class Muon(ShardedOptimizer):
    """``torch.optim.Muon`` for sharded matrices: parameters, (name, parameter) pairs, or groups.

    The arguments have torch's names, meaning and defaults. ``eps`` has no effect on norms above it:
    matrices are scaled exactly before they are normalised. Settings of :func:`shardwise.muon` can
    be given too, as ``preset="nonic"`` in the place of ``ns_coefficients`` and ``ns_steps``, or
    ``scale="unit_rms_norm"`` in the place of ``adjust_lr_fn``.

    It cannot tell spread experts under torch's FSDP2 from other DTensors, so its ``clip_grad_norm``
    counts the experts of one rank alone. ``sw.optimizer`` knows spread experts by the model.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **settings: Any,
    ) -> None:
        entries = list(params)
        if not entries:
            raise ValueError("sw.Muon got no parameters")
        self._given = given = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        defaults = MuonSettings(**_settings_of(given, given) | settings)
        known = {entry.name for entry in fields(MuonSettings)} | given.keys()
        groups: list[dict[str, Any]] = []
        named: dict[int, tuple[str, Tensor]] = {}
        problems: list[str] = []
        for number, group in enumerate(
            entries if isinstance(entries[0], dict) else [{"params": entries}]
        ):
            own = {key: value for key, value in group.items() if key in known}
            if unknown := [key for key in group if key not in known and key != "params"]:
                problems.append(f"group {number} has {unknown}, which Muon does not know")
            members = []
            params = group["params"]
            for place, entry in enumerate([params] if isinstance(params, Tensor) else params):
                pair = isinstance(entry, tuple) and len(entry) == 2
                name, parameter = entry if pair else (f"parameter {place} of group {number}", entry)
                if not isinstance(parameter, Tensor):
                    problems.append(f"{name} is a {type(parameter).__name__}, not a tensor")
                elif id(parameter) in named:
                    problems.append(f"{name} is given twice")
                else:
                    named[id(parameter)] = name, parameter
                    members.append(parameter)
            try:
                groups.append(group_of(changed(defaults, _settings_of(own, given)), members))
            except ValueError as error:
                problems.append(f"group {number}: {error}")
        recall_routes()
        matrices = [(name, p, as_matrix(p, "given to sw.Muon")) for name, p in named.values()]
        problems += parameter_problems(named.values(), matrices)
        facts = [group | {"params": len(group["params"])} for group in groups]
        shapes = [tuple(parameter.shape) for _, parameter, _ in matrices]
        parameters = (parameter for _, parameter, _ in matrices)
        raise_unless_same("sw.Muon cannot work", problems, [*facts, shapes], parameters)
        # torch's schedulers look for momentum among the defaults.
        filled = group_of(defaults, [])
        filled = {key: value for key, value in filled.items() if key not in ("params", "rule")}
        super().__init__(groups, {key: name for key, (name, _) in named.items()}, filled)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices; the constructor's settings fill in missing ones."""
        if param_group.get("kind", "matrix") != "matrix":
            raise ValueError("sw.Muon is for matrices: sw.optimizer has groups of other kinds")
        super().add_param_group(self.defaults | _settings_of(param_group, self._given))


def _settings_of(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Options in which torch's names are replaced by those of :class:`MuonSettings`. ``defaults``:
    for the one of ``ns_coefficients`` and ``ns_steps`` that is not given."""
    own = dict(options)
    torchs = [key for key in ("ns_coefficients", "ns_steps") if key in own]
    iteration: dict[str, Any] = {key: own.pop(key) for key in torchs}
    if iteration and "preset" not in own:
        both: dict[str, Any] = {**defaults, **iteration}
        steps = (tuple(both["ns_coefficients"]),) * both["ns_steps"]
        same = [name for name, preset in PRESETS.items() if preset.coefficients == steps]
        own["preset"] = same[0] if same else Polynomial(name="ns_coefficients", coefficients=steps)
    if "adjust_lr_fn" in own:
        rule = own.pop("adjust_lr_fn")
        if rule not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn={rule!r}: one of 'original', 'match_rms_adamw'; or scale= with one "
                f"of {', '.join(SCALES)}"
            )
        own.setdefault("scale", rule or "original")
    eps = own.pop("eps", 0.0)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not eps >= 0:
        raise ValueError(f"eps={eps!r} must be 0 or more")
    return own
