"""How large the house is, and how its parts hold together: ``python -m tools.house`` prints the figures as JSON.

Counting rules, over the files that git tracks:

1. ``source``: Python files of the packages in :data:`core.telemetry.logs.PACKAGES`; lines are all lines, blank ones and comments included.
   ``tests``: Python files under ``tests/``. ``docs_words``: words, split at white space, of ``docs/*.md`` and ``docs/operations/*.md``
   without ``errors.md``, which is generated.
2. An import is a module named by ``import`` or ``from``, at any depth of a file; those under ``if TYPE_CHECKING:`` do not count, since they
   do not run. ``from package import name`` counts as the module ``package.name`` if there is one, else as ``package``.
3. ``largest_cycle``: modules of the largest strongly connected component of that graph.
4. ``doors``: for each package of the engine, how many of its modules anything outside of it imports.
5. ``assets_into_control_plane``: modules of ``ft_assets`` that import the control plane, without ``assets``, ``step``,
   ``reevaluation_step`` and ``platform_resource``; ``control_plane_into_assets``: the imports the other way.
6. ``small_modules``: modules below 80 lines with one importer, ``__init__`` and ``__main__`` apart.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.telemetry.logs import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
STEPS = frozenset({"assets", "step", "reevaluation_step", "platform_resource"})


def main() -> int:
    sys.stdout.write(json.dumps(measured(), indent=2) + "\n")
    return 0


def measured() -> dict[str, Any]:
    """Return every figure by name."""
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    sources = [path for path in tracked if path.endswith(".py") and path.split("/")[0] in PACKAGES]
    tests = [path for path in tracked if path.endswith(".py") and path.startswith("tests/")]
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in (*sources, *tests)}
    pages = [p for folder in ("docs", "docs/operations") for p in (ROOT / folder).glob("*.md") if p.name != "errors.md"]
    modules = {_module(path): path for path in sources}
    edges = {name: set(_imports(ROOT / path, name, modules)) for name, path in modules.items()}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, targets in edges.items():
        for target in targets:
            importers[target].add(name)
    source, tested = sum(lines[p] for p in sources), sum(lines[p] for p in tests)
    return {
        "source": {"files": len(sources), "lines": source},
        "tests": {"files": len(tests), "lines": tested, "to_source": round(tested / source, 3)},
        "docs_words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "largest_cycle": max(map(len, _components(edges))),
        "doors": {
            package: len({t for name, targets in edges.items() if not _inside(name, package) for t in targets if _inside(t, package)})
            for package in sorted({".".join(m.split(".")[:2]) for m in modules if m.startswith("engine.")})
        },
        "assets_into_control_plane": sorted(
            name
            for name, targets in edges.items()
            if _inside(name, "ft_assets") and name.rpartition(".")[2] not in STEPS and any(_inside(t, "control_plane") for t in targets)
        ),
        "control_plane_into_assets": sum(
            _inside(t, "ft_assets") for name, targets in edges.items() if _inside(name, "control_plane") for t in targets
        ),
        "small_modules": sum(
            lines[path] < 80 and len(importers[name]) == 1 and not path.endswith(("__init__.py", "__main__.py"))
            for name, path in modules.items()
        ),
    }


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _imports(path: Path, own: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules of the house that a file imports."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        pending += ast.iter_child_nodes(node)
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != own:
                yield target


def _components(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components, by Tarjan's algorithm without recursion."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in edges:
        work = [(root, iter(sorted(edges[root])))] if root not in order else []
        if work:
            order[root] = low[root] = len(order)
            stack.append(root)
        while work:
            name, targets = work[-1]
            for target in targets:
                if target not in order:
                    order[target] = low[target] = len(order)
                    stack.append(target)
                    work.append((target, iter(sorted(edges[target]))))
                    break
                if target in stack:
                    low[name] = min(low[name], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == order[name]:
                    component: list[str] = []
                    while not component or component[-1] != name:
                        component.append(stack.pop())
                    found.append(component)
    return found


if __name__ == "__main__":
    sys.exit(main())
