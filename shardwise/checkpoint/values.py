# SPDX-License-Identifier: Apache-2.0
"""All values but large tensors: JSON that is read back unchanged, and random states.

JSON alone turns tuples into lists and integer keys into strings, which breaks a scheduler or a
random generator much later. Values that JSON lacks are tagged:

    (1, 2)               {"$": "tuple", "v": [1, 2]}
    {30: 0.1}            {"$": "dict", "v": [[30, 0.1]]}
    a generator's state  {"$": "tensor", "dtype": "uint8", "shape": [5056], "v": "<base64>"}

Floats are exact (also NaN and infinities). Objects are refused: a checkpoint never runs code.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import logging
import math
import random
import typing
from collections.abc import Callable
from types import UnionType
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError, shown
from shardwise.core.tensor_whole import WholeTensor
from shardwise.notices import warn_once

log = logging.getLogger(__name__)

MAX_JSON_BYTES = 1 << 26
# What reading a value of a wrong form raises. A reader turns these into a DamagedError that names
# the file. (RecursionError is a RuntimeError.)
DAMAGE = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError)
_TAG = "$"
_TOO_MANY = 1 << 62  # elements or bytes


def to_json(value: Any, where: str) -> str:
    """``value`` as JSON. A ``CheckpointError`` names the place of a value that can't be saved."""
    return limited(json.dumps(encode(value, where)), where)


def limited(text: str, where: str) -> str:
    """Raise if a load would refuse a text of this length."""
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{where}: {len(text)} bytes of JSON, and a load reads at most {MAX_JSON_BYTES}: make "
            f"large values buffers of the model, or keep them in another file"
        )
    return text


def encode(value: Any, where: str) -> Any:
    """``value`` in the types of JSON."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the value of a StrEnum, not its name
    if isinstance(value, numpy.generic):
        return encode(value.item(), where)
    if isinstance(value, WholeTensor):
        value = value.full_tensor()  # such as a norm
    try:
        if isinstance(value, dict):
            pairs = [
                (encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]"))
                for key, item in value.items()
            ]
            plain = _TAG not in value and all(type(key) is str for key in value)
            return dict(pairs) if plain else {_TAG: "dict", "v": pairs}
        if isinstance(value, list | tuple):
            items = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {_TAG: "tuple", "v": items}
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deep, or contains itself") from None
    if type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        form = {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        return {_TAG: "tensor", **form, "v": base64.b64encode(data).decode("ascii")}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON can't hold: pass numbers, strings, "
        f"lists, tuples, dictionaries or small plain tensors (its state_dict())"
    )


def decode(value: Any) -> Any:
    """The value whose JSON is ``value``; raises one of ``DAMAGE`` if it is none."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item) for key, item in value.items()}
    tag, content = value[_TAG], value["v"]
    if tag == "tuple" and type(content) is list:
        return tuple(decode(content))
    if tag == "dict" and type(content) is list:
        return {decode(key): decode(item) for key, item in content}
    if tag != "tensor":
        raise ValueError("an unknown tag")
    data = bytearray(base64.b64decode(content, validate=True))
    dtype, shape = dtype_of(value["dtype"]), value["shape"]
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not fill the shape")
    found = torch.empty(shape, dtype=dtype, device="cpu")
    if data:
        found.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
    return found


def parse_json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


@functools.cache
def typed(hint: Any) -> Callable[[Any], Any]:
    """A function that takes a value from a file as its annotation says, else raises one of
    ``DAMAGE``: tuples and named tuples from lists, dataclasses from dictionaries of their fields.
    """
    kind: Any = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if kind is Any:
        return lambda value: value
    if kind is UnionType:  # of one type and None
        return lambda value: None if value is None else typed(inner[0])(value)
    if kind is torch.dtype:
        return dtype_of
    if hasattr(kind, "__dataclass_fields__"):
        known = {name: typed(one) for name, one in typing.get_type_hints(kind).items()}
        return lambda value: kind(**{name: known[name](item) for name, item in value.items()})
    if inner == (int, ...):
        return _numbers
    if issubclass(kind, tuple) and not inner:  # a named tuple
        fields = typing.get_type_hints(kind)
        read = _numbers if {*fields.values()} == {int} else typed(tuple[*fields.values()])  # type: ignore[misc]
        return lambda value: kind(*read(value))
    each = [typed(one) for one in inner if one is not ...]

    def read_plain(value: Any) -> Any:
        if type(value) is not (list if kind is tuple else kind):
            raise TypeError(f"{shown(value)} is no value that shardwise writes there")
        if kind is int:
            [value] = _numbers([value])
        if kind is dict:
            return {each[0](key): each[1](item) for key, item in value.items()}
        if kind is list or inner[1:] == (...,):
            return kind(map(each[0], value))
        if kind is tuple:
            return tuple(one(item) for one, item in zip(each, value, strict=True))
        return value

    return read_plain


def _numbers(value: Any) -> tuple[int, ...]:
    if type(value) is not list or {*map(type, value)} - {int}:
        raise TypeError(f"{shown(value)} in the place of numbers")
    if value and not 0 <= min(value) <= max(value) < _TOO_MANY:
        raise ValueError("a number that is too large, or below 0")
    return tuple(value)


def dtype_of(name: Any) -> torch.dtype:
    """``torch.float32`` for ``"float32"``."""
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{shown(name)} is no dtype of torch {torch.__version__}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------ random states


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators. Draws no number."""
    numpys: Any = numpy.random.get_state()
    known = isinstance(numpys, tuple)  # else somebody has replaced numpy's own generator
    return {
        "python": random.getstate(),
        "numpy": (numpys[0], numpys[1].tolist(), *numpys[2:]) if known else None,
        "torch": torch.get_rng_state(),
        # A process uses one device; asking would start a driver that is not in use yet.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def check_random(saved: Any) -> None:
    """Try random states on new generators; raises one of ``DAMAGE`` if they are none."""
    random.Random().setstate(saved["python"])
    torch.Generator().set_state(saved["torch"])
    sound = isinstance(saved["python"][2], float | None)
    if (cuda := saved["cuda"]) is not None:
        sound &= cuda.dtype == torch.uint8 and cuda.dim() == 1
        if sound and torch.cuda.is_available():
            torch.Generator("cuda").set_state(cuda)
    if saved["numpy"] is not None:
        numpy.random.RandomState().set_state(saved["numpy"])
        # numpy checks neither these types nor whether the position is inside the key.
        _, key, *rest = saved["numpy"]
        sound &= [*map(type, rest)] == [int, int, float] and 0 <= rest[0] <= len(key)
    if not sound:
        raise ValueError("no random states")


def restore_random(saved: Any) -> None:
    """Set this rank's generators to its saved states, after ``check_random``."""
    random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if saved["numpy"] is not None:
        numpy.random.set_state(saved["numpy"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    elif saved["cuda"] is not None:
        warn_once(log, "the checkpoint holds the random state of a GPU, and there is no GPU")


def reseed(saved: Any, rank: int, world_size: int) -> None:
    """Seed all generators from the saved states of rank 0, for another number of ranks: the same
    every time, different on every rank, and different from a new run with the same seed."""
    basis = to_json([saved, rank, world_size], "the random states").encode()
    seed = int.from_bytes(hashlib.sha256(basis).digest()[:8], "big")
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)  # of the device as well
