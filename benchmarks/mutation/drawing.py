"""Mutants of an area: where one can be made, what it is, and which are drawn."""

from __future__ import annotations

import ast
import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from benchmarks.mutation.areas import Area, Defect

Place = tuple[str, tuple[int, int]]
"""File, and (line, column) where the mutated node starts."""
SAME = ("_Is_Eq", "_Eq_Is", "_IsNot_NotEq", "_NotEq_IsNot")
"""Operators whose mutants compare by identity what is compared by value, or the other way: with None and members of enums the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A file with one mistake in it."""

    area: str
    path: str
    line: int
    what: str
    source: str
    """The whole file, with the mistake."""

    @property
    def key(self) -> str:
        """Changes with anything in the file: a result holds for exactly this text."""
        return hashlib.sha256(f"{self.area}\0{self.path}\0{self.source}".encode()).hexdigest()[:16]


def draw(area: Area, root: Path, *, num: int, seed: int) -> list[Mutant]:
    """`num` mutants at different places, one kind at each; the same seed draws the same from the same files.

    Places are drawn before kinds: otherwise an addition, which has a dozen replacements, would be drawn a dozen times as often as a
    condition. Not drawn is what no caller can tell: other annotations or docstrings, ``==`` for ``is``, a dataclass that is not frozen
    or has no slots, a parameter that may be given in another way than before.
    """
    rng = random.Random(f"{area.name}/{seed}")
    places: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    texts = {str(path): (root / path).read_text() for path in area.sources(root)}
    for path, text in texts.items():
        for start, name, occurrence in _positions(text):
            places[path, start].append((name, occurrence))
    order = sorted(places)
    rng.shuffle(order)
    drawn = list[Mutant]()
    for path, start in order:
        if len(drawn) == num:
            break
        kinds = rng.sample(places[path, start], len(places[path, start]))
        mutants = (_mutant(area, path, texts[path], start[0], name, occurrence) for name, occurrence in kinds)
        drawn += [mutant for mutant in mutants if mutant][:1]
    return drawn


def from_defect(defect: Defect, root: Path, *, area: str) -> Mutant | None:
    """The file with the planted defect in it; None, with a line on the terminal, where the code it was written for has gone."""
    file = root / defect.path
    text = file.read_text() if file.exists() else ""
    if (count := text.count(defect.before)) != 1:
        print(f"planted defect {defect.name} is out of date: its text stands {count} times in {defect.path}, not once")
        return None
    line = text[: text.index(defect.before)].count("\n") + 1
    what = f"{defect.name}: {defect.before.strip()} -> {defect.after.strip() or 'nothing'}"
    return Mutant(area=area, path=defect.path, line=line, what=what, source=text.replace(defect.before, defect.after))


def _positions(text: str) -> Iterator[tuple[tuple[int, int], str, int]]:
    """(start, operator, which of its occurrences) of all mutants of a file."""
    nodes = list(ast_nodes(get_ast(text)))
    for name in sorted(cosmic_ray.plugins.operator_names()):
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments() or name.endswith(SAME):
            continue
        operator = kind()
        found = (start for node in nodes for start, _ in operator.mutation_positions(node))
        yield from ((start, name, occurrence) for occurrence, start in enumerate(found))


def _mutant(area: Area, path: str, text: str, line: int, name: str, occurrence: int) -> Mutant | None:
    """None where the program stays the same or is none."""
    source = mutate_code(text, cosmic_ray.plugins.get_operator(name)(), occurrence)
    if source is None or _program(source) in (None, _program(text)):
        return None
    before, after = text.splitlines(), source.splitlines()
    changed = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), line - 1)
    what = f"{before[changed].strip()} -> {after[changed].strip() if changed < len(after) else 'nothing'}"
    return Mutant(area=area.name, path=path, line=changed + 1, what=what, source=source)


def _program(text: str) -> str | None:
    """What runs and a caller can tell. None if it is not Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    return ast.dump(_Bare().visit(tree))


class _Bare(ast.NodeTransformer):
    """Takes out what :func:`draw` leaves out."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> Any:
        node.args, node.posonlyargs, node.kwonlyargs = [*node.posonlyargs, *node.args, *node.kwonlyargs], [], []
        node.defaults, node.kw_defaults = [*node.defaults, *(default for default in node.kw_defaults if default)], []
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> Any:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.returns = None
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        node.decorator_list = [d.func if isinstance(d, ast.Call) and ast.unparse(d.func) == "dataclass" else d for d in node.decorator_list]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)
