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
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError, DamagedError

MAX_ARRAY_BYTES = 1 << 20  # larger ones are tensors of the model or of the optimizer
_TAG = "$"


def encode(value: Any, where: str) -> Any:
    """JSON for ``value``; a ``CheckpointError`` names the place of what can't be."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        if _TAG not in value and all(type(key) is str for key in value):
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [
            [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "v": pairs}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
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
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedError(f"{where}: a value tagged {value.get(_TAG)!r} is broken") from error


def to_bytes(value: Any, where: str) -> bytes:
    """The JSON text of a value."""
    return json.dumps(encode(value, where)).encode()


def from_bytes(data: bytes, where: str) -> Any:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DamagedError(f"{where} is no JSON: {error}") from error
    return decode(value, where)


def dtype_of(name: Any, where: str) -> torch.dtype:
    """``torch.float32`` of ``"float32"``."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"{where}: {name!r} is no dtype of torch {torch.__version__}")
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
    if tag == "tuple":
        return tuple(decode(item, where) for item in content)
    if tag == "dict":
        return {decode(key, where): decode(item, where) for key, item in content}
    data = base64.b64decode(content, validate=True)
    if tag == "bytes":
        return data
    if tag == "tensor":
        dtype = dtype_of(value["dtype"], where)
        # frombuffer refuses nothing at all, and shares memory: copy.
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0).to(dtype)
        return flat.reshape(value["shape"]).clone()
    if tag in ("array", "number"):
        kind = numpy.dtype(str(value["dtype"]))
        if kind.hasobject:
            raise DamagedError(f"{where}: an array of Python objects is refused")
        array = numpy.frombuffer(data, dtype=kind).reshape(value["shape"]).copy()
        return array if tag == "array" else array[()]
    raise DamagedError(f"{where}: the tag {tag!r} is unknown")


def _check_size(nbytes: int, where: str) -> None:
    if nbytes > MAX_ARRAY_BYTES:
        raise CheckpointError(
            f"{where} holds {nbytes} bytes, more than the {MAX_ARRAY_BYTES} that fit into JSON: "
            f"make it a buffer of the model, or keep it in a file of its own"
        )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
