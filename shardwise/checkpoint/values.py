# SPDX-License-Identifier: Apache-2.0
"""Values that are no large tensors: JSON that comes back as it was, and random states.

JSON alone turns tuples into lists and integer keys into strings, which a scheduler or a random
generator notices late. Values that JSON lacks are tagged:

    (1, 2)               {"$": "tuple", "v": [1, 2]}
    {30: 0.1}            {"$": "dict", "v": [[30, 0.1]]}
    a generator's state  {"$": "tensor", "dtype": "uint8", "shape": [5056], "v": "<base64>"}

Floats survive exactly (NaN and infinities too). Objects do not: a checkpoint never runs code.
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
from shardwise.notices import warn_once
from shardwise.tensor_whole import WholeTensor

MAX_ARRAY_BYTES = 1 << 20  # larger ones are tensors of the model or of the optimizer
MAX_JSON_BYTES = 1 << 26
MAX_DEPTH = 40  # of a value; JSON spends up to three levels on one of its
_MAX_JSON_DEPTH = 3 * MAX_DEPTH + 10
_TAG = "$"
_NUMPY_DTYPE = re.compile(r"[<>|=][a-zA-Z][0-9]{0,4}(\[[0-9]{0,3}[a-zA-Z]{1,2}\])?")


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """JSON for ``value``; a ``CheckpointError`` names the place of a value that can't be saved."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration its value, not its name
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
    """The value that ``encode`` was given."""
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
    """Raise if ``parse_json`` would refuse a text of this length."""
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{where}: {len(data)} bytes of JSON, and a load reads at most {MAX_JSON_BYTES}: make "
            f"large values buffers of the model, or keep them in a file of their own"
        )


def from_bytes(data: bytes, where: str) -> Any:
    return decode(parse_json(data, where), where)


def parse_json(data: bytes, where: str) -> Any:
    """The value of a JSON text of bounded depth, so that its readers may recurse."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is no JSON that can be read: {error}") from error
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
    """``torch.float32`` for ``"float32"``."""
    found = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"{where}: {shown(name)} is no dtype of torch {torch.__version__}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _encode_tensor(value: Tensor, where: str) -> Any:
    value = value.full_tensor() if isinstance(value, WholeTensor) else value  # such as a norm
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
        # frombuffer refuses an empty buffer, and shares memory: copy.
        none = torch.empty(0, dtype=dtype, device="cpu")
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else none
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


# ------------------------------------------------------------------------------ random states

log = logging.getLogger(__name__)


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, drawing from none."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        # A process uses one device; asking would start a driver that is not in use yet.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


class RandomStates:
    """The states of one rank's generators in a checkpoint: checked, not yet set.

    With as many ranks as at the save, each rank gets its own states back and the streams go on.
    With another number no stream can go on: every rank is then seeded from rank 0's saved state,
    its own rank and the number of ranks. That is deterministic, different on every rank, and
    different from what a fresh run with the same seed would draw.
    """

    def __init__(self, saved: Any, where: str) -> None:
        self._saved, self._where = saved, where
        try:
            sound = _try(saved)
        except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise DamagedError(f"{where}: the random states can't be used: {error}") from error
        if not sound:
            raise DamagedError(f"{where}: the random states are not what shardwise writes")

    def restore(self) -> None:
        """Put the generators back."""
        saved = self._saved
        random.setstate(saved["python"])
        numpy.random.set_state(saved["numpy"])
        torch.set_rng_state(saved["torch"])
        if saved["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
        elif saved["cuda"] is not None:
            text = "%s holds a GPU's random state; there is no GPU here for it"
            warn_once(log, text, self._where)

    def reseed(self, rank: int, world_size: int) -> int:
        """Seed all generators for another number of ranks; return the seed, the same every time."""
        basis = to_bytes([self._saved, rank, world_size], "the random states")
        seed = int.from_bytes(hashlib.sha256(basis).digest()[:8], "big")
        random.seed(seed)
        numpy.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)  # of the device as well
        return seed


def _try(saved: Any) -> bool:
    """Set the states of new generators; False, or any error, if they are no states."""
    if type(saved) is not dict:
        return False
    random.Random().setstate(saved["python"])
    torch.Generator().set_state(saved["torch"])
    if (cuda := saved["cuda"]) is not None:
        if type(cuda) is not torch.Tensor or cuda.dtype != torch.uint8 or cuda.dim() != 1:
            return False
        if torch.cuda.is_available():
            torch.Generator("cuda").set_state(cuda)
    *_, next_gauss = saved["python"]
    return (next_gauss is None or type(next_gauss) is float) and _try_numpy(saved["numpy"])


def _try_numpy(state: Any) -> bool:
    """Check what numpy does not: it reads at any position in its key, also outside."""
    if type(state) is tuple:
        _, key, position, has_gauss, gauss = state
        numbers = (position, has_gauss)
        if any(type(n) is not int for n in numbers) or type(gauss) not in (int, float):
            return False
        if not isinstance(key, numpy.ndarray) or not 0 <= position <= len(key):
            return False
    elif type(state) is not dict or state["bit_generator"] not in ("PCG64", "PCG64DXSM", "SFC64"):
        return False
    generator = type(numpy.random.get_bit_generator())()  # type: ignore[attr-defined]
    numpy.random.RandomState(generator).set_state(state)
    return True
