"""Ways through a command that write no JSON though ``--json`` was given: found in its source, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

FLAG = "as_json"
WRITES_TEXT = ("print", "table", "fields")
"""Functions that write to stdout, unless a file is named."""


def faults(source: str) -> list[str]:
    """``LINE FUNCTION: reason`` for each function with a parameter `as_json` that may end without JSON, or that writes text as well.

    A function that is given `as_json` counts as one that writes JSON, because it is looked at itself. A loop counts as run, so that no
    objects may be no lines.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and FLAG in {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}:
            paths = _Paths()
            paths.end(function, paths.block(function.body, {False}))
            found += [f"{line} {function.name}: {reason}" for line, reason in sorted(paths.faults)]
    return found


class _Paths:
    """Follows a function from the top with `as_json` true. A state is whether JSON has been written; a block takes and returns all."""

    def __init__(self) -> None:
        self.faults = set[tuple[int, str]]()
        self._left = list[set[bool]]()
        """For each loop around: states in which ``continue`` or ``break`` leave its body."""

    def end(self, node: ast.stmt, states: Iterable[bool]) -> None:
        if not all(states):
            self.faults.add((node.lineno, "ends without JSON"))

    def block(self, body: Sequence[ast.stmt], states: set[bool]) -> set[bool]:
        for statement in body:
            states = self._after(statement, states) if states else states
        return states

    def _after(self, node: ast.stmt, states: set[bool]) -> set[bool]:
        match node:
            case ast.Return():
                self.end(node, self._run(node, states))
            case ast.Raise():
                if node.exc is not None and ast.unparse(node.exc).startswith("typer.Exit"):  # every other one is shown as an error
                    self.end(node, states)
            case ast.If():
                states, value = self._run(node.test, states), _value(node.test)
                yes = self.block(node.body, states) if value is not False else set()
                return yes | (self.block(node.orelse, states) if value is not True else set())
            case ast.For() | ast.While():
                states = self._run(node.iter if isinstance(node, ast.For) else node.test, states)
                self._left.append(set())
                return self.block(node.body, states) | self._left.pop() or states
            case ast.With():
                return self.block(node.body, {state for item in node.items for state in self._run(item, states)})
            case ast.Try():
                ends = [self.block(node.body, states), *(self.block(handler.body, states) for handler in node.handlers)]
                return self.block(node.finalbody, set().union(*ends))
            case ast.Continue() | ast.Break():
                self._left[-1] |= states
            case ast.FunctionDef():  # called by what it is given to, or a view for people
                return {True} if any(map(_writes_json, _calls(node))) else states
            case _:
                return self._run(node, states)
        return set()

    def _run(self, node: ast.AST, states: set[bool]) -> set[bool]:
        for call in _calls(node):
            name = ast.unparse(call.func)
            if _writes_json(call):
                states = {True}
            elif name == "sys.stdout.write" or (name in WRITES_TEXT and "file" not in {k.arg for k in call.keywords}):
                self.faults.add((call.lineno, f"{name} writes text"))
        return states


def _writes_json(call: ast.Call) -> bool:
    given = (*call.args, *(keyword.value for keyword in call.keywords))
    return ast.unparse(call.func) == "print_json" or FLAG in map(ast.unparse, given)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls that happen when `node` runs."""
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)


def _value(test: ast.expr) -> bool | None:
    """Value of a condition if `as_json` is true; None if that does not decide it."""
    match test:
        case ast.Name(id=name):
            return True if name == FLAG else None
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _value(operand)
            return None if value is None else not value
        case ast.BoolOp(op=op, values=values):
            known, decisive = {_value(value) for value in values}, isinstance(op, ast.Or)
            return decisive if decisive in known else not decisive if known == {not decisive} else None
    return None
