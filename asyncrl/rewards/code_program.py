"""The two sides of a test by assertions, each in a sandbox of its own: ``python code_program.py solution|tests FD``.

The ``solution`` executes a program and lets the other side use what it defines; the ``tests`` execute assertions in
which the program's names stand for that. So the program never sees what is expected of it, and only data of built-in
types come back: nothing of the program takes part in a comparison. Built-ins and modules are the tests' own, whatever
the program calls so (:func:`names_of`). Imports only the standard library.

On the socket FD each message is one line of JSON. Either side may send ``{"do": operation, "on": handle, "with":
data}`` and gets ``{"value": data, "changed": [data, ...]}`` or ``{"error": [type, text]}``; while it waits it answers
requests of the other: a function of a test can be passed to the program, which may call it, and nothing else.

Data: None, booleans, numbers and texts as in JSON; others as ``[kind, content]``, with the kinds ``list``, ``tuple``,
``dict``, ``set``, ``frozenset``, ``bytes``, ``complex``, ``Decimal``, ``Fraction``, ``yours`` and ``mine`` (a handle).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.util
import json
import os
import socket
import symtable
import sys
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_SHORT = {"np": "numpy", "pd": "pandas", "nx": "networkx"}
"""Modules by the short names that they usually have."""
_OF_THE_TESTS = (AssertionError, StopIteration, StopAsyncIteration)
"""What ends a test, or a loop in one as if nothing were left: no exception of a program does."""


class Peer:
    """One side of the socket. ``serves_all``: the other may do more than call the functions that it was passed."""

    def __init__(self, descriptor: int, *, serves_all: bool) -> None:
        connection = socket.socket(fileno=descriptor)
        self._reader, self._writer = (
            connection.makefile("r", encoding="utf-8"),
            connection.makefile("w", encoding="utf-8"),
        )
        self._serves_all = serves_all
        self._mine: list[Any] = []
        self._theirs: dict[int, Remote] = {}

    def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message) + "\n")
        self._writer.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next message; raise EOFError at the end."""
        line = self._reader.readline()
        if not line:
            raise EOFError
        message = json.loads(line)
        if not isinstance(message, dict):
            raise TypeError("not a message")
        return message

    def ask(self, operation: str, handle: int, *arguments: Any, **options: Any) -> Any:
        """Let the other side do something and return the result; its exception is raised as the built-in one."""
        given = [arguments, options]
        self.send({"do": operation, "on": handle, "with": self.encode(given)})
        while "do" in (message := self.receive()):
            self.answer(message)
        if "error" in message:
            kind, text = message["error"]
            error = getattr(builtins, str(kind), Exception)
            is_error = isinstance(error, type) and issubclass(error, Exception)
            raise (error if is_error and error not in _OF_THE_TESTS else RuntimeError)(str(text))
        for argument, now in zip(arguments, message.get("changed", ()), strict=False):
            _become(argument, self.decode(now))
        return self.decode(message["value"])

    def answer(self, message: dict[str, Any]) -> None:
        try:
            arguments, options = self.decode(message["with"])
            thing = self._mine[message["on"]]
            if message["do"] != "call" and not self._serves_all:
                raise TypeError("functions of a test can only be called")
            value = _OPERATIONS[message["do"]](thing, *arguments, **options)
            reply = {"value": self.encode(value), "changed": [self.encode(each) for each in arguments]}
        except BaseException as error:  # noqa: BLE001  a program may raise anything
            reply = {"error": [type(error).__name__, str(error)[:1000]]}
        self.send(reply)

    def encode(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return ["yours", value._handle]  # noqa: SLF001
        if value is None or isinstance(value, bool):
            return value
        for kind, convert in ((int, int), (float, float), (str, str)):
            if isinstance(value, kind):
                return convert(value)
        if isinstance(value, dict):
            return ["dict", [[self.encode(key), self.encode(each)] for key, each in dict.items(value)]]
        for name, container in _CONTAINERS.items():
            if isinstance(value, container):
                return [name, [self.encode(each) for each in value]]
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, complex):
            return ["complex", [value.real, value.imag]]
        if isinstance(value, Decimal | Fraction):
            return [type(value).__name__, str(value)]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist())
        return ["mine", self.handle_of(value)]

    def handle_of(self, value: Any) -> int:
        for handle, known in enumerate(self._mine):
            if known is value:
                return handle
        self._mine.append(value)
        return len(self._mine) - 1

    def decode(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        kind, content = data
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self.decode(each) for each in content)
        if kind == "dict":
            return {self.decode(key): self.decode(each) for key, each in content}
        if kind == "yours":
            return self._mine[content]
        if kind == "mine":
            return self._theirs.setdefault(content, Remote(self, content))
        if kind == "bytes":
            return bytes.fromhex(content)
        return complex(*content) if kind == "complex" else {"Decimal": Decimal, "Fraction": Fraction}[kind](content)


class Remote:
    """An object of the other side: it can be called and read. It equals itself alone."""

    def __init__(self, peer: Peer, handle: int) -> None:
        self.__dict__.update(_peer=peer, _handle=handle)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._peer.ask("call", self._handle, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("attribute", self._handle, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._handle, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("item", self._handle, key)

    def __iter__(self) -> Any:
        return iter(self._peer.ask("list", self._handle))

    def __len__(self) -> int:
        return len(self._peer.ask("list", self._handle))

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self._peer.ask("text", self._handle))

    __repr__ = __str__


_OPERATIONS: dict[str, Any] = {
    "call": lambda thing, *arguments, **options: thing(*arguments, **options),
    "attribute": getattr,
    "set": setattr,
    "item": lambda thing, key: thing[key],
    "list": list,
    "text": str,
}


def _become(argument: Any, now: Any) -> None:
    """Give a mutable argument the content that the call left it with."""
    if type(argument) is type(now) and isinstance(argument, list | dict | set):
        argument.clear()
        (argument.extend if isinstance(argument, list) else argument.update)(now)


def serve_solution(peer: Peer, program: str) -> None:
    scope: dict[str, Any] = {"__name__": "solution"}
    exec(compile(program, "solution.py", "exec"), scope)  # noqa: S102  the purpose of this program
    peer.send({"names": {name: peer.encode(value) for name, value in scope.items() if not name.startswith("__")}})
    while True:
        peer.answer(peer.receive())


def run_tests(peer: Peer, texts: Sequence[str]) -> None:
    """Execute assertions, the last of the texts, behind the statements of definitions, of which some may fail.

    What a statement defines is the tests'. An import that fails, of the program's own module for one, leaves its names
    to the program.
    """
    scope: dict[str, Any] = {"__name__": "tests"}
    given = peer.receive()["names"]
    *definitions, assertions = texts
    statements = [each for text in definitions for each in ast.parse(text).body if not _of_the_future(each)]
    own, starred = set[str](), set[str]()
    for each in statements:
        if not isinstance(each, ast.Import | ast.ImportFrom):
            own |= bound_in(symtable.symtable(ast.unparse(each), "tests.py", "exec"))
            continue
        before = set(scope)
        with contextlib.suppress(Exception):
            _execute([each], scope)
            starred |= scope.keys() - before if any(name.name == "*" for name in each.names) else set()
            own |= {name.asname or name.name.partition(".")[0] for name in each.names if name.name != "*"}
    wanted, modules = names_of(assertions, definitions, own=own, starred=starred & given.keys(), given=given)
    for name, attributes in modules.items():
        with contextlib.suppress(Exception):  # not for everyone; a test that needs it fails
            module = importlib.import_module(_SHORT.get(name, name))
            if all(hasattr(module, attribute) for attribute in attributes):
                scope[name] = module
            else:
                wanted.add(name)  # an object of the program, like `datetime` of the module `datetime`
    scope |= {name: peer.decode(given[name]) for name in wanted if name in given}
    for each in statements:
        if not isinstance(each, ast.Import | ast.ImportFrom):
            with contextlib.suppress(Exception):  # a test that needs it fails
                _execute([each], scope)
    _execute(ast.parse(assertions).body, scope)


def _execute(statements: list[ast.stmt], scope: dict[str, Any]) -> None:
    exec(compile(ast.Module(statements, []), "tests.py", "exec"), scope)  # noqa: S102  the purpose of this program


def _of_the_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def bound_in(table: symtable.SymbolTable) -> set[str]:
    return {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}


def names_of(
    assertions: str,
    definitions: Sequence[str] = (),
    *,
    own: Collection[str] = (),
    starred: Collection[str] = (),
    given: Collection[str] = (),
) -> tuple[set[str], dict[str, set[str]]]:
    """Return names that assertions take from the program, and modules that they use without an import.

    A module is a name of which they only read attributes, here with these, if there is one to import that has them. A
    built-in is the program's only where nothing else can be: ``assert sum(10, 15) == 6``. So is what an import with a
    star has ``starred``, of what is ``given``. ``own`` are names of the tests' ``definitions``.
    """
    nodes = [node for text in (*definitions, assertions) for node in ast.walk(ast.parse(text))]
    table = symtable.symtable(assertions, "tests.py", "exec")
    tables = [*(symtable.symtable(text, "tests.py", "exec") for text in definitions), table]
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    others = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in owners}
    read = {name for each in tables for name in _globals_in(each)}.difference(own)
    modules: dict[str, set[str]] = {
        name: set() for name in read - others if name in _SHORT or importlib.util.find_spec(name)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            modules[node.value.id].add(node.attr)
    wanted = read.difference(modules, dir(builtins), starred)
    free = read.intersection(_globals_in(table)).difference(modules, bound_in(table))
    if len(free) == 1:
        return wanted | free, modules
    hidden = read.intersection(starred)
    return wanted | (hidden if len(hidden) == 1 and not wanted.intersection(given) else set()), modules


def _globals_in(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that are read as global ones, inside functions too."""
    yield from (each.get_name() for each in table.get_symbols() if each.is_referenced() and each.is_global())
    for child in table.get_children():
        yield from _globals_in(child)


def main() -> None:
    side, descriptor = sys.argv[1], int(sys.argv[2])
    text = sys.stdin.read()
    os.dup2(2, 1)  # what a program prints is no result
    peer = Peer(descriptor, serves_all=side == "solution")
    try:
        if side == "solution":
            serve_solution(peer, text)
        else:
            run_tests(peer, json.loads(text))
    except EOFError:
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
