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
import hashlib
import json
import logging
import math
import random
import re
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.core.tensor_whole import WholeTensor
from shardwise.notices import warn_once

MAX_ARRAY_BYTES = 1 << 20  # larger arrays belong to the model or the optimizer
MAX_JSON_BYTES = 1 << 26
MAX_DEPTH = 40  # of a value
# What reading a value of a wrong form raises.
DAMAGE = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError)
_TAG = "$"
_NUMPY_DTYPE = re.compile(r"[<>|=][a-zA-Z][0-9]{0,4}(\[[0-9]{0,3}[a-zA-Z]{1,2}\])?")


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` as JSON. A ``CheckpointError`` names the place of a value that can't be saved."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the value of a StrEnum, not its name
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"{where:.200}... is nested more than {MAX_DEPTH} levels deep, or contains itself: "
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
    """The value whose JSON is ``value``: the inverse of ``encode``."""
    try:
        return _decode(value)
    except DAMAGE as error:  # RuntimeError: also of a value that is nested too deep
        raise DamagedError(f"{where} holds a value that is not what shardwise writes") from error


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item) for key, item in value.items()}
    tag, content = value[_TAG], value["v"]
    if tag == "tuple":
        return tuple(_decode(_typed_list(content)))
    if tag == "dict":
        return {_decode(key): _decode(item) for key, item in _typed_list(content)}
    data = base64.b64decode(content, validate=True)
    if tag == "bytes":
        return data
    shape = _typed_list(value["shape"])
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("the shape is no list of sizes")
    if tag == "tensor":
        dtype = dtype_of(value["dtype"], "a tensor")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes do not fill the shape")
        if not data:  # frombuffer refuses an empty buffer
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone()
    if tag not in ("array", "number") or not _NUMPY_DTYPE.fullmatch(value["dtype"]):
        raise ValueError("an unknown tag, or a dtype that is none of numpy")
    kind = numpy.dtype(value["dtype"])
    if kind.hasobject or math.prod(shape) * kind.itemsize != len(data):
        raise ValueError("an array of objects, or bytes that do not fill the shape")
    array = numpy.frombuffer(data, dtype=kind).reshape(shape).copy()
    return array if tag == "array" else array[()]


def _typed_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError("a list belongs here")
    return value


def to_bytes(value: Any, where: str) -> bytes:
    """The JSON text of a value."""
    data = json.dumps(encode(value, where)).encode()
    check_length(data, where)
    return data


def check_length(data: bytes, where: str) -> None:
    """Raise if ``parse_json`` would refuse a text of this length."""
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{where}: {len(data)} bytes of JSON, and a load reads at most {MAX_JSON_BYTES}: make "
            f"large values buffers of the model, or keep them in another file"
        )


def from_bytes(data: bytes, where: str) -> Any:
    return decode(parse_json(data, where), where)


def parse_json(data: bytes, where: str) -> Any:
    """The value of a JSON text."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is no JSON that can be read: {error}") from error


def dtype_of(name: Any, where: str) -> torch.dtype:
    """``torch.float32`` for ``"float32"``."""
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"{where}: {shown(name)} is no dtype of torch {torch.__version__}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _encode_tensor(value: Tensor, where: str) -> Any:
    value = value.full_tensor() if isinstance(value, WholeTensor) else value  # such as a norm
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, and only plain tensors can be stored here: "
            f"shards belong to the model or the optimizer"
        )
    _check_size(value.nbytes, where)
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    form = {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    return {_TAG: "tensor", **form, "v": _text(data)}


def _check_size(nbytes: int, where: str) -> None:
    if nbytes > MAX_ARRAY_BYTES:
        raise CheckpointError(
            f"{where} holds {nbytes} bytes, and at most {MAX_ARRAY_BYTES} can be stored as JSON: "
            f"make it a buffer of the model, or keep it in another file"
        )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


# ------------------------------------------------------------------------------ random states

log = logging.getLogger(__name__)


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators. Draws no number."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        # A process uses one device; asking would start a driver that is not in use yet.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


class RandomStates:
    """The states of one rank's generators in a checkpoint: checked, not yet set.

    With the number of ranks of the save, each rank gets its states back and continues its streams
    of random numbers. With another number this is impossible. Every rank is then seeded from the
    saved state of rank 0, its rank and the number of ranks. That is deterministic, different on
    every rank, and different from the numbers of a new run with the same seed.
    """

    def __init__(self, saved: Any, where: str) -> None:
        self._saved, self._where = saved, where
        try:
            _try(saved)
        except DAMAGE as error:
            raise DamagedError(f"{where}: the random states can't be used: {error}") from error

    def restore(self) -> None:
        """Set the generators to the saved states."""
        saved = self._saved
        random.setstate(saved["python"])
        numpy.random.set_state(saved["numpy"])
        torch.set_rng_state(saved["torch"])
        if saved["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
        elif saved["cuda"] is not None:
            warn_once(log, "%s holds the random state of a GPU, and there is no GPU", self._where)

    def reseed(self, rank: int, world_size: int) -> int:
        """Seed all generators for another number of ranks; return the seed, the same every time."""
        basis = to_bytes([self._saved, rank, world_size], "the random states")
        seed = int.from_bytes(hashlib.sha256(basis).digest()[:8], "big")
        random.seed(seed)
        numpy.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)  # of the device as well
        return seed


def _try(saved: Any) -> None:
    """Try the states on new generators; raise if they are no states."""
    random.Random().setstate(saved["python"])
    torch.Generator().set_state(saved["torch"])
    if (cuda := saved["cuda"]) is not None:
        if cuda.dtype != torch.uint8 or cuda.dim() != 1:
            raise ValueError("no state of a GPU")
        if torch.cuda.is_available():
            torch.Generator("cuda").set_state(cuda)
    if not isinstance(saved["python"][2], float | None):
        raise TypeError("no state of Python")
    if type(state := saved["numpy"]) is tuple:
        # numpy checks neither the types nor whether the position is inside the key.
        _, key, position, has_gauss, gauss = state
        if type(has_gauss) is not int or type(gauss) not in (int, float):
            raise TypeError("no state of numpy")
        if type(position) is not int or not 0 <= position <= len(key):
            raise ValueError(f"a position outside the state of numpy: {shown(position)}")
    elif state["bit_generator"] not in ("PCG64", "PCG64DXSM", "SFC64"):
        raise ValueError("an unknown generator of numpy")
    generator = type(numpy.random.get_bit_generator())()  # type: ignore[attr-defined]
    numpy.random.RandomState(generator).set_state(state)
