# SPDX-License-Identifier: Apache-2.0
"""Pickles read as data: nothing in a pickle is imported, called, hashed or compared.

torch's index and tensors are pickles, and ``pickle`` runs what it reads. Here each instruction only
moves values, and an object becomes an inert record:

    c torch Size, (4, 3) R     ->  Record("torch.Size", args=((4, 3),))
    {"fqn": "w"} b             ->  the state of a record: Pairs("fqn", "w")
    c os system                ->  UnsafeError: only names of the reader's table exist

An instruction costs a bounded amount of time and memory, the number of values is bounded by the
length of the file, and nothing here recurses: a value that holds itself, or others a million deep,
is as cheap as any. Readers of the result must not walk it without a bound: ``Record.get``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

from shardwise.checkpoint.errors import DamagedError, UnsafeError, shown

MAX_BYTES = 1 << 27
# Bytes of a file for each tuple, list, dictionary, record or name in it; torch writes about 7.
_BYTES_PER_VALUE = 4
_MAX_FIELDS = 32
_MAX_INTEGER_BYTES = 9  # all of int64 and uint64


class Name(str):
    """The whole name of a class or a function that the pickle refers to."""

    __slots__ = ()


class Pairs(list[Any]):
    """A dictionary as key, value, key, value... Keys may be equal, and are never hashed."""

    __slots__ = ()

    def entries(self) -> Iterator[tuple[Any, Any]]:
        return zip(self[::2], self[1::2], strict=True)


class Record:
    """A call that did not happen: the name, the arguments, and the state set afterwards."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: Any) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def get(self, field: str) -> Any:
        """One entry of the state; a ``LookupError`` if there is none."""
        if type(self.state) is Pairs and len(self.state) <= 2 * _MAX_FIELDS:
            for key, value in self.state.entries():
                if type(key) is str and key == field:
                    return value
        raise LookupError(f"{self.name} without '{field}'")


def read(data: bytes, where: str, names: Container[str]) -> Any:
    """The value of a pickle that refers to no other names than ``names``.

    Raises ``UnsafeError`` for any other name, ``DamagedError`` for other bytes.
    """
    if len(data) > MAX_BYTES:
        raise DamagedError(f"{where} has {len(data)} bytes, more than the {MAX_BYTES} it may have")
    machine = _Machine(data, where, names)
    try:
        return machine.run()
    except (IndexError, UnicodeDecodeError, TypeError) as error:
        raise DamagedError(f"{where} is no pickle of torch: byte {machine.at}") from error


class _Machine:
    """The stack, the marks on it, and the values that instructions name by number."""

    def __init__(self, data: bytes, where: str, names: Container[str]) -> None:
        self.data, self.where, self.names = data, where, names
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.values_left = len(data) // _BYTES_PER_VALUE + 64

    def run(self) -> Any:
        data, stack, memo, actions = self.data, self.stack, self.memo, _ACTIONS
        while (code := data[self.at]) != _STOP:
            self.at += 1
            if code == _MEMOIZE:  # this and the next two are half of all instructions
                memo.append(stack[-1])
            elif code == _LONG_GET:
                stack.append(memo[int.from_bytes(data[self.at : self.at + 4], "little")])
                self.at += 4
            elif code == _GET:
                stack.append(memo[data[self.at]])
                self.at += 1
            elif (action := actions.get(code)) is not None:
                action(self)
            else:
                raise TypeError(f"instruction {code:#x}")
        return stack.pop()

    # ------------------------------------------------------------------ bytes

    def take(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise IndexError("the end of the file")
        return self.data[begin : self.at]

    def number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "little", signed=signed)

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise IndexError("the end of the file")
        return self.take(end + 1 - self.at)[:-1].decode()

    # ------------------------------------------------------------------ values

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def count(self) -> None:
        """Count one more value that holds others."""
        self.values_left -= 1
        if self.values_left < 0:
            raise DamagedError(f"{self.where} holds more values than one of its size can")

    def new(self, value: Any) -> None:
        self.count()
        self.stack.append(value)

    def last(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
        return value

    def mark(self) -> None:
        self.count()
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        if begin > len(self.stack):
            raise IndexError("a mark above the stack")
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("an empty stack")
        found = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.new(found)

    def append(self, items: list[Any]) -> None:
        self.last(list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise TypeError("a key without a value")
        self.last(Pairs).extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def name(self, module: Any, name: Any) -> None:
        whole = f"{module}.{name}" if type(module) is str and type(name) is str else ""
        if whole not in self.names:
            raise UnsafeError(
                f"{self.where} asks for {shown(whole)}, which no checkpoint needs: "
                f"it was not written by shardwise, and loading it elsewhere could run code"
            )
        self.new(Name(whole))

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Name or type(args) is not tuple:
            raise TypeError("a call of no name")
        self.new(Record(function, args))

    def build(self) -> None:
        state, record = self.stack.pop(), self.last(Record)
        if record.state is not None:
            raise TypeError("a second state")
        record.state = state

    def persistent(self) -> None:
        self.new(Record("a storage", self.stack.pop()))

    def put(self, index: int) -> None:
        """Number a value. Pickles number their values in order; any other number is refused."""
        if index != len(self.memo):
            raise TypeError(f"value {index} after {len(self.memo)}")
        self.memo.append(self.stack[-1])

    def integer(self) -> None:
        size = self.number(1)
        if size > _MAX_INTEGER_BYTES:
            raise TypeError("a number beyond 64 bits")
        self.push(self.number(size, signed=True))


_STOP, _MEMOIZE, _GET, _LONG_GET = ord("."), 0x94, ord("h"), ord("j")
_ACTIONS: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # protocol
    0x95: lambda m: m.take(8),  # frame
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    ord("J"): lambda m: m.push(m.number(4, signed=True)),
    0x8A: _Machine.integer,
    0x8C: lambda m: m.push(m.take(m.number(1)).decode()),
    ord("X"): lambda m: m.push(m.take(m.number(4)).decode()),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("("): _Machine.mark,
    ord("t"): lambda m: m.new(tuple(m.since_mark())),
    ord("]"): lambda m: m.new([]),
    ord("a"): lambda m: m.append([m.stack.pop()]),
    ord("e"): lambda m: m.append(m.since_mark()),
    ord("}"): lambda m: m.new(Pairs()),
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: _Machine.stack_name,
    0x81: _Machine.call,
    ord("R"): _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
}
