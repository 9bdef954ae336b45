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
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.core.tensor_whole import WholeTensor
from shardwise.notices import warn_once

log = logging.getLogger(__name__)

MAX_JSON_BYTES = 1 << 26
# What reading a value of a wrong form raises (RecursionError is a RuntimeError). A reader turns
# these into a DamagedError that names the file.
DAMAGE = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError)
_TAG = "$"


def encode(value: Any, where: str) -> Any:
    """``value`` as JSON. A ``CheckpointError`` names the place of a value that can't be saved."""
    try:
        return _encode(value, where)
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deep, or contains itself") from None


def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the value of a StrEnum, not its name
    if isinstance(value, dict):
        pairs = [
            (_encode(key, f"a key of {where}"), _encode(item, f"{where}[{key!r}]"))
            for key, item in value.items()
        ]
        plain = _TAG not in value and all(type(key) is str for key in value)
        return dict(pairs) if plain else {_TAG: "dict", "v": pairs}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "v": items}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "v": _text(value)}
    if isinstance(value, numpy.generic):
        return _encode(value.item(), where)
    if isinstance(value, WholeTensor):
        value = value.full_tensor()  # such as a norm
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return _encode_tensor(torch.from_numpy(value.copy()), "array")
    if type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        return _encode_tensor(value, "tensor")
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON can't hold: pass numbers, strings, "
        f"lists, tuples, dictionaries, bytes or small plain tensors (its state_dict())"
    )


def _encode_tensor(value: Tensor, tag: str) -> Any:
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    form = {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    return {_TAG: tag, **form, "v": _text(data)}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


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
    data = base64.b64decode(content, validate=True)
    if tag == "bytes":
        return data
    if tag not in ("tensor", "array"):
        raise ValueError("an unknown tag")
    dtype, shape = dtype_of(value["dtype"], "a tensor"), value["shape"]
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not fill the shape")
    found = torch.empty(shape, dtype=dtype, device="cpu")
    if data:
        found.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return found if tag == "tensor" else found.numpy()


def to_json(value: Any, where: str) -> str:
    """The JSON text of a value."""
    return limited(json.dumps(encode(value, where)), where)


def limited(text: str, where: str) -> str:
    """Raise if a load would refuse a text of this length."""
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{where}: {len(text)} bytes of JSON, and a load reads at most {MAX_JSON_BYTES}: make "
            f"large values buffers of the model, or keep them in another file"
        )
    return text


def parse_json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def dtype_of(name: Any, where: str) -> torch.dtype:
    """``torch.float32`` for ``"float32"``."""
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"{where}: {shown(name)} is no dtype of torch {torch.__version__}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------ random states


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators. Draws no number."""
    of_numpy = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": of_numpy if isinstance(of_numpy, tuple) else None,  # None: not numpy's own default
        "torch": torch.get_rng_state(),
        # A process uses one device; asking would start a driver that is not in use yet.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def check_random(saved: Any) -> None:
    """Try random states on new generators; raises one of ``DAMAGE`` if they are none."""
    random.Random().setstate(saved["python"])
    torch.Generator().set_state(saved["torch"])
    if not isinstance(saved["python"][2], float | None):
        raise TypeError("no state of Python")
    if (cuda := saved["cuda"]) is not None:
        if cuda.dtype != torch.uint8 or cuda.dim() != 1:
            raise ValueError("no state of a GPU")
        if torch.cuda.is_available():
            torch.Generator("cuda").set_state(cuda)
    if saved["numpy"] is not None:
        # numpy checks neither these types nor whether the position is inside the key.
        _, key, position, has_gauss, gauss = saved["numpy"]
        if (type(position), type(has_gauss), type(gauss)) != (int, int, float):
            raise TypeError("no state of numpy")
        if not 0 <= position <= len(key):
            raise ValueError("a position outside the state of numpy")
        numpy.random.RandomState().set_state(saved["numpy"])


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
