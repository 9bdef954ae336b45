# SPDX-License-Identifier: Apache-2.0
"""Everything that is no big tensor, as JSON that comes back as it was.

JSON alone turns tuples into lists and integer keys into strings, which a scheduler or a random
generator notices late. What JSON can't say is tagged:

    (1, 2)               {"$": "tuple", "v": [1, 2]}
    {30: 0.1}            {"$": "dict", "v": [[30, 0.1]]}
    a generator's state  {"$": "tensor", "dtype": "uint8", "shape": [5056], "v": "<base64>"}

Floats survive exactly (NaN and infinities too). Objects do not: a checkpoint never runs code.
"""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown

MAX_ARRAY_BYTES = 1 << 20  # larger ones are tensors of the model or of the optimizer
MAX_JSON_BYTES = 1 << 26
MAX_DEPTH = 40  # of a value; JSON spends up to three levels on one of its
_MAX_JSON_DEPTH = 3 * MAX_DEPTH + 10
_TAG = "$"
_NUMPY_DTYPE = re.compile(r"[<>|=][a-zA-Z][0-9]{0,4}(\[[0-9]{0,3}[a-zA-Z]{1,2}\])?")


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """JSON for ``value``; a ``CheckpointError`` names the place of what can't be."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"{where:.200}... is more than {MAX_DEPTH} deep inside other values (or holds itself): "
            f"make it flatter"
        )
    inside = depth + 1
    if isinstance(value, dict):
        if _TAG not in value and all(type(key) is str for key in value):
            return {key: encode(item, f"{where}[{key!r}]", inside) for key, item in value.items()}
        pairs = [
            [encode(key, f"a key of {where}", inside), encode(item, f"{where}[{key!r}]", inside)]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "v": pairs}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{index}]", inside) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "v": items}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "v": _text(value)}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where)
    if isinstance(value, numpy.ndarray | numpy.generic):
        if value.dtype.hasobject:
            raise CheckpointError(f"{where} is an array of Python objects: store numbers")
        _check_size(value.nbytes, where)
        kind = "array" if isinstance(value, numpy.ndarray) else "number"
        form = {"dtype": value.dtype.str, "shape": list(value.shape)}
        return {_TAG: kind, **form, "v": _text(value.tobytes())}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON can't hold: pass numbers, strings, "
        f"lists, tuples, dictionaries, bytes or small tensors (its state_dict())"
    )


def decode(value: Any, where: str) -> Any:
    """What ``encode`` was given."""
    if isinstance(value, list):
        return [decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, where) for key, item in value.items()}
    try:
        return _decode_tagged(value, where)
    except DamagedError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DamagedError(f"{where}: a value tagged {shown(value[_TAG])} is broken") from error


def to_bytes(value: Any, where: str) -> bytes:
    """The JSON text of a value."""
    data = json.dumps(encode(value, where)).encode()
    check_length(data, where)
    return data


def check_length(data: bytes, where: str) -> None:
    """That ``parse_json`` will take it."""
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{where}: {len(data)} bytes of JSON, more than the {MAX_JSON_BYTES} that are read: "
            f"make large values buffers of the model, or keep them in a file of their own"
        )


def from_bytes(data: bytes, where: str) -> Any:
    return decode(parse_json(data, where), where)


def parse_json(data: bytes, where: str) -> Any:
    """JSON of a bounded depth: whatever walks through the result may recurse."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is no JSON that is read here: {error}") from error
    level = [value]
    for _ in range(_MAX_JSON_DEPTH):
        if not level:
            return value
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
    raise DamagedError(f"{where} is nested more than {_MAX_JSON_DEPTH} levels deep")


def dtype_of(name: Any, where: str) -> torch.dtype:
    """``torch.float32`` of ``"float32"``."""
    found = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"{where}: {shown(name)} is no dtype of torch {torch.__version__}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _encode_tensor(value: Tensor, where: str) -> Any:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}: only plain tensors go here; "
            f"shards belong to the model or the optimizer"
        )
    _check_size(value.nbytes, where)
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    form = {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    return {_TAG: "tensor", **form, "v": _text(data)}


def _decode_tagged(value: dict[str, Any], where: str) -> Any:
    tag, content = value[_TAG], value["v"]
    if tag in ("tuple", "dict") and type(content) is not list:
        raise TypeError("a list belongs here")
    if tag == "tuple":
        return tuple(decode(item, where) for item in content)
    if tag == "dict":
        pairs = [(decode(key, where), decode(item, where)) for key, item in content]
        if 2 * len({hash(key) for key, _ in pairs}) < len(pairs):
            raise ValueError("keys whose hashes are equal, which takes forever")
        return dict(pairs)
    if tag not in ("bytes", "tensor", "array", "number"):
        raise DamagedError(f"{where}: the tag {shown(tag)} is unknown")
    data = base64.b64decode(content, validate=True)
    if tag == "bytes":
        return data
    shape, name = value["shape"], value["dtype"]
    if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("a shape is a list of sizes")
    if tag == "tensor":
        dtype = dtype_of(name, where)
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError("as many bytes as the shape has")
        # frombuffer refuses nothing at all, and shares memory: copy.
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0).to(dtype)
        return flat.reshape(shape).clone()
    if type(name) is not str or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError("a dtype of numpy")
    kind = numpy.dtype(name)
    if kind.hasobject:
        raise DamagedError(f"{where}: an array of Python objects is refused")
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError("as many bytes as the shape has")
    array = numpy.frombuffer(data, dtype=kind).reshape(shape).copy()
    return array if tag == "array" else array[()]


def _check_size(nbytes: int, where: str) -> None:
    if nbytes > MAX_ARRAY_BYTES:
        raise CheckpointError(
            f"{where} holds {nbytes} bytes, more than the {MAX_ARRAY_BYTES} that fit into JSON: "
            f"make it a buffer of the model, or keep it in a file of its own"
        )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
