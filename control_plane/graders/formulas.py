"""Formulas of graders: numbers, names, ``+ - * / ^`` and a few functions. They are parsed with Python's parser but never executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping

MAX_LENGTH = 1000
OPERATORS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil, "exp": math.exp, "sqrt": math.sqrt, "log": math.log,
}  # fmt: skip


class FormulaError(ValueError):
    """The formula is not valid; the message says why."""


def parse(text: str, names: Collection[str]) -> ast.expr:
    """Parse a formula over `names`; raises ``FormulaError`` if it is not valid."""
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"it has {len(text)} characters, the limit is {MAX_LENGTH}")
    try:
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise FormulaError("not a valid formula") from e
    try:
        _check(tree, names)
    except RecursionError as e:
        raise FormulaError("it is nested too deeply") from e
    return tree


def value(tree: ast.expr, names: Mapping[str, float]) -> float:
    """Evaluate a parsed formula; raises ``ArithmeticError`` or ``ValueError`` if it has no value, such as 1/0."""
    found = _value(tree, names)
    if not math.isfinite(found):
        raise ArithmeticError(f"the formula has no finite value: {found}")
    return found


def _check(node: ast.expr, names: Collection[str]) -> None:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return
        case ast.Name(id=name):
            if name not in names:
                raise FormulaError(f"{name[:80]!r} is not the name of a grader; there are {', '.join(sorted(names)) or 'none'}")
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            _check(operand, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            _check(left, names)
            _check(right, names)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if name in FUNCTIONS:
            if len(args) > 1 and name not in ("min", "max"):
                raise FormulaError(f"{name} takes one number")
            for arg in args:
                _check(arg, names)
        case _:
            raise FormulaError(f"allowed are numbers, names, + - * / ^, and {', '.join(FUNCTIONS)}")


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)  # an OverflowError is an ArithmeticError
        case ast.Name(id=name):
            return float(names[name])
        case ast.UnaryOp(op=op, operand=operand):
            return _real(OPERATORS[type(op)](_value(operand, names)))
        case ast.BinOp(left=left, op=op, right=right):
            return _real(OPERATORS[type(op)](_value(left, names), _value(right, names)))
        case ast.Call(func=ast.Name(id=name), args=args):
            found = [_value(arg, names) for arg in args]
            return _real(FUNCTIONS[name](*found)) if len(found) > 1 or name not in ("min", "max") else found[0]
        case _:
            raise AssertionError(f"{type(node).__name__} passed the check")


def _real(found: complex) -> float:
    """Convert a result to float: powers of integers, such as those from ``floor``, could grow without limit and take hours."""
    if isinstance(found, complex):
        raise ArithmeticError(f"a step of the formula has no real value: {found}")
    return float(found)
