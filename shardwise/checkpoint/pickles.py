# SPDX-License-Identifier: Apache-2.0
"""Pickles read as data: nothing in a pickle is imported, called, hashed or compared.

torch's index and tensors are pickles, and ``pickle`` runs what it reads. Here it knows only the
instructions that torch's files have, and an object becomes an inert record:

    c torch Size, (4, 3) R     ->  Record of "torch.Size", args=((4, 3),)
    {"fqn": "w"} b             ->  the state of a record: Pairs("fqn", "w")
    c os system                ->  UnsafeError: only names of the reader's table exist

An instruction costs a bounded amount of time and memory, and nothing here recurses: a value that
holds itself, or others a million deep, is as cheap as any. Readers of the result must not walk it
without a bound: ``Record.get``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container, Iterator
from typing import Any, ClassVar

from shardwise.checkpoint.errors import DamagedError, UnsafeError, shown

MAX_BYTES = 1 << 27
_MAX_FIELDS = 32
# Instructions of one byte that make a value: less than every other byte of a file (torch's: 0.33).
_VALUES: tuple[bytes, ...] = (
    pickle.MARK,
    pickle.EMPTY_LIST,
    pickle.EMPTY_DICT,
    pickle.MEMOIZE,
    pickle.NEWOBJ,
)
_VALUES += (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.REDUCE)


class Pairs(list[Any]):
    """A dictionary as key, value, key, value... Keys may be equal, and are never hashed."""

    def entries(self) -> Iterator[tuple[Any, Any]]:
        return zip(self[::2], self[1::2], strict=True)


class Record:
    """A call that did not happen: the name, the arguments, and the state set afterwards. A class or
    a function that is named and not called is a subclass, and so is a constant."""

    __slots__ = ("args", "state")
    name = ""
    args: Any
    state: Any

    def __new__(cls, *args: Any) -> Record:
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """One entry of the state; a ``LookupError`` if there is none."""
        if type(self.state) is Pairs and len(self.state) <= 2 * _MAX_FIELDS:
            for key, value in self.state.entries():
                if type(key) is str and key == field:
                    return value
        raise LookupError(f"{self.name} without '{field}'")


def name_of(value: Any) -> str:
    """The whole name that a value stands for; "" where it is no name."""
    return value.name if isinstance(value, type) and issubclass(value, Record) else ""


def read(data: bytes, where: str, names: Container[str]) -> Any:
    """The value of a pickle that refers to no other names than ``names``.

    Raises ``UnsafeError`` for any other name, ``DamagedError`` for other bytes.
    """
    if len(data) > MAX_BYTES:
        raise DamagedError(f"{where} has {len(data)} bytes, more than the {MAX_BYTES} it may have")
    if 2 * sum(map(data.count, _VALUES)) > len(data) + 128:
        raise DamagedError(f"{where} holds more values than one of its size can")
    try:
        return _Reader(data, where, names).load()
    except DamagedError:
        raise
    except Exception as error:  # bytes can be wrong in any way
        raise DamagedError(f"{where} is no pickle of torch: {error!s:.200}") from error


# In Python: the one in C makes room for any number that a pickle gives to a value.
_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Reader(_Unpickler):  # type: ignore[misc]
    """Python's own reader, with the instructions of torch's files alone."""

    def __init__(self, data: bytes, where: str, names: Container[str]) -> None:
        super().__init__(io.BytesIO(data))
        self.where, self.names = where, names
        self.known: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> type[Record]:
        whole = f"{module}.{name}"
        if whole not in self.names:
            raise UnsafeError(
                f"{self.where} asks for {shown(whole)}, which no checkpoint needs: "
                f"it was not written by shardwise, and loading it elsewhere could run code"
            )
        if whole not in self.known:
            self.known[whole] = type("Record", (Record,), {"name": whole, "__slots__": ()})
        return self.known[whole]

    def persistent_load(self, key: Any) -> Record:
        storage = Record()
        storage.args = key
        return storage

    def load_empty_dict(self) -> None:
        self.append(Pairs())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._extend([key, value])

    def load_setitems(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not Pairs:
            raise TypeError("a key of no dictionary")
        self.stack[-1].extend(items)

    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: _Unpickler.dispatch[code[0]]
        for code in (
            *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE),
            *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
            *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
            *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
            *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
            *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
            *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
            *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
            pickle.BINPERSID,
        )
    } | {
        pickle.EMPTY_DICT[0]: load_empty_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }
