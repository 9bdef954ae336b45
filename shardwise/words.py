# SPDX-License-Identifier: Apache-2.0
"""Text for people: bytes, counts, FLOPs and seconds as text, ``80GiB`` as a number, tables, and
sentences about wrong values of settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_LARGE = ("", "K", "M", "B", "T")  # a billion parameters is 1B


def size_text(nbytes: float) -> str:
    """
    >>> size_text(0), size_text(1536), size_text(80 * 2**30)
    ('0 B', '1.50 KiB', '80.0 GiB')
    """
    value, unit = _scaled(nbytes, 1024, _BINARY)
    return f"{int(value)} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def count_text(count: float) -> str:
    """
    >>> count_text(17), count_text(405_000_000_000)
    ('17', '405B')
    """
    value, unit = _scaled(count, 1000, _LARGE)
    return f"{_three_digits(value)}{unit}" if unit else f"{int(value)}"


def flops_text(flops: float) -> str:
    """
    >>> flops_text(2.5e12)
    '2.50 TFLOP'
    """
    value, unit = _scaled(flops, 1000, ("", "K", "M", "G", "T", "P", "E"))
    return f"{_three_digits(value)} {unit}FLOP"


def _scaled(value: float, base: int, units: Sequence[str]) -> tuple[float, str]:
    """The value in the largest unit in which it is 1 or more."""
    value, step = float(value), 0
    while abs(value) >= base and step < len(units) - 1:
        value, step = value / base, step + 1
    return value, units[step]


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(0.0042), seconds_text(3.2), seconds_text(4000), seconds_text(10**6)
    ('4.20 ms', '3.20 s', '67 min', '12 days')
    """
    if abs(seconds) < 1e-3:
        return f"{_three_digits(seconds * 1e6)} µs"
    if abs(seconds) < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 600:
        return f"{_three_digits(seconds)} s"
    hours = seconds / 3600
    long = f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"
    return f"{seconds / 60:.0f} min" if hours < 2 else long


def parse_size(text: str | int) -> int:
    """
    >>> parse_size("80GiB") == 80 * 2**30, parse_size("1.5 MB"), parse_size("4096")
    (True, 1500000, 4096)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = match.group(2).lower() if match else "?"
    for names, base in ((_BINARY, 1024), (_DECIMAL, 1000)):
        for power, name in enumerate(names):
            if match and unit in (name.lower(), "" if power == 0 else name.lower()):
                return round(float(match.group(1)) * float(base**power))
    raise ValueError(f"{text!r} is no amount of memory: write 80GiB, 24GB, 512MiB or bytes")


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"


def aligned(rows: Iterable[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """A line for each row, with aligned columns. ``numbers``: all but the first column are aligned
    on the right.

    >>> aligned([("a", "b"), ("1.00", "2")], numbers=True)
    ['a     b', '1.00  2']
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if numbers and position else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def quoted(names: Sequence[str]) -> str:
    """The first four of many names, and the number of the rest.

    >>> quoted("ab"), quoted("abcdef")
    ("'a', 'b'", "'a', 'b', 'c', 'd' and 2 more")
    """
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"'{name}'" for name in names[:4]) + more


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> flattened({"model": {"dim": 512}, "seed": 0})
    {'model.dim': 512, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def bound_problems(
    settings: Any, least: float, *names: str, above: bool = False, whole: bool = False
) -> list[str]:
    """A sentence for each field of ``settings`` that is not a finite number of ``least`` or more
    (``above``: more than ``least``; ``whole``: an integer). A field may be None."""
    bound = f"more than {least:g}" if above else f"{least:g} or more"
    bound = bound if whole else f"{bound}, and finite"

    def fits(value: Any) -> bool:
        if whole and type(value) is not int:
            return False
        return bool(least < value < math.inf if above else least <= value < math.inf)

    values = {name: getattr(settings, name) for name in names}
    return [
        f"{name}={value!r} must be {bound}"
        for name, value in values.items()
        if value is not None and not fits(value)
    ]


def choice_problems(settings: Any) -> list[str]:
    """A sentence for each field of a dataclass with a value that its Literal type does not list."""
    return [
        f"{name}={getattr(settings, name)!r}: one of {', '.join(choices)}"
        for name, choices in _choices(type(settings)).items()  # type: ignore[arg-type]
        if getattr(settings, name) not in choices
    ]


def type_problems(settings: Any) -> list[str]:
    """A sentence for each field of a dataclass whose value has another type than the field, as
    values from JSON may have. An int is a float too, and True is no number. Fields with a Literal
    type are left to ``choice_problems``."""
    return [
        f"{name}={value!r} is a {type(value).__name__}: give {' or '.join(map(_word, kinds))}"
        for name, kinds in _kinds(type(settings)).items()  # type: ignore[arg-type]
        if not any(_fits(value := getattr(settings, name), kind) for kind in kinds)
    ]


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    kind = {float: (float, int)}.get(kind, kind)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(kind, "null" if kind is type(None) else kind.__name__)


@cache
def _kinds(kind: type) -> dict[str, tuple[Any, ...]]:
    """The types that each field allows, for fields without a Literal type."""
    unions, chosen = (Union, UnionType), _choices(kind)
    hints = [(name, hint) for name, hint in get_type_hints(kind).items() if name not in chosen]
    return {n: get_args(hint) if get_origin(hint) in unions else (hint,) for n, hint in hints}


@cache
def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(kind).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}
