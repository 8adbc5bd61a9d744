"""Which mistakes the tests catch, by area: 60 mutants of each, and defects planted by hand.

    python -m benchmarks.mutation [--area NAME ...] [--workers 2] [--out benchmarks/mutation_202611.json]        (``make mutation``)

Each mutant is run against the tests of its area only, slow tests left out. Results are kept in ``build/mutation.jsonl``, one line a
mutant: one that was caught holds for as long as the mutated file and the test's file stay as they are, one that survived for as long as
all tests of the area do. Started again, the command goes on where it stopped. A survivor that no test could tell from the original
stands in ``equivalent.json`` with the reason. A planted defect whose code has changed is out of date: it is not tried, and listed by name.

Exit code 1 if an area's tests catch less than 95 %, if they fail without a mistake, or if a planted defect is out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import queue
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from benchmarks.mutation import drawing
from benchmarks.mutation.areas import AREAS, HERE, PLANTED, likeliest_first, planted
from benchmarks.mutation.drawing import Mutant
from benchmarks.mutation.trials import CAUGHT, SURVIVED, TIMEOUT, Copy

ROOT = HERE.parent.parent
KEPT = ROOT / "build" / "mutation.jsonl"
OUT = ROOT / "benchmarks" / "mutation_202611.json"
SEED, NUM_MUTANTS = 20261122, 60
WANTED = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    mutant: Mutant
    tests: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [area.name for area in AREAS] + [PLANTED]
    parser.add_argument("--area", action="append", choices=names, help="default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(argv)
    defects, outdated = _planted() if PLANTED in (given.area or names) else ([], [])
    tasks = [task for name in given.area or names for task in (defects if name == PLANTED else _tasks(name))]
    done = _kept()
    left = [task for task in tasks if not _holds(done.get(task.mutant.key), task)]
    print(f"{len(tasks)} mutants, {len(tasks) - len(left)} with a result already", flush=True)
    _run(left, workers=given.workers)
    done = _kept()
    result = _result([done[task.mutant.key] for task in tasks], outdated=outdated)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    given.out.with_suffix(".md").write_text(as_markdown(result))
    print(as_markdown(result))
    return 1 if outdated or any(area["share"] < WANTED for area in result["areas"].values()) else 0


def _planted() -> tuple[list[Task], list[str]]:
    """The planted defects, and the names of those that are out of date."""
    found = [(defect, drawing.from_defect(defect, ROOT, area=PLANTED)) for defect in planted()]
    return [_task(mutant, defect.tests) for defect, mutant in found if mutant], [defect.name for defect, mutant in found if not mutant]


def _tasks(name: str) -> list[Task]:
    area = next(area for area in AREAS if area.name == name)
    return [_task(mutant, area.tests) for mutant in drawing.draw(area, ROOT, num=NUM_MUTANTS, seed=SEED)]


def _task(mutant: Mutant, globs: Sequence[str]) -> Task:
    return Task(mutant=mutant, tests=tuple(likeliest_first(ROOT, globs, of=mutant.path)))


def _kept() -> dict[str, dict[str, Any]]:
    """By the mutant's key, the results that still hold."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return {found["mutant"]: found for found in map(json.loads, lines) if found["digest"] == _digest(found["tests"])}


def _holds(found: Mapping[str, Any] | None, task: Task) -> bool:
    """Whether it is known how `task` ends; what has survived some tests may be caught by one that its area has gained."""
    return found is not None and (found["outcome"] != SURVIVED or found["tests"] == sorted(task.tests))


def _digest(tests: Iterable[str]) -> str:
    """Of the bytes of these files; another one where any is gone."""
    digest = hashlib.sha256()
    for test in sorted(tests):
        digest.update((ROOT / test).read_bytes() if (ROOT / test).exists() else test.encode())
    return digest.hexdigest()[:16]


def _deciding(task: Task, outcome: str, by: str) -> list[str]:
    """The test files on which the outcome rests: the one that caught the mutant, or all."""
    caught = [test for test in task.tests if outcome == CAUGHT and f" {test}::" in f"{by}::"]
    return caught or sorted(task.tests)


def _run(tasks: Sequence[Task], *, workers: int) -> None:
    """All tasks, several at a time; each worker first sees the tests of an area pass without a mistake."""
    KEPT.parent.mkdir(exist_ok=True)
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    writing, failures = threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="ft-mutation-") as directory:
                copy, green = Copy(ROOT, Path(directory)), set[frozenset[str]]()
                while not failures:
                    task = waiting.get_nowait()
                    if frozenset(task.tests) not in green:
                        if copy.run(task.tests)[0] != SURVIVED:
                            raise RuntimeError(f"the tests of {task.mutant.area} fail without a mistake:\n{copy.said}")
                        green.add(frozenset(task.tests))
                    with copy.with_mistake(task.mutant):
                        outcome, line, seconds = copy.run(task.tests)
                    with writing, KEPT.open("a") as file:
                        file.write(json.dumps(_line(task, outcome, line, seconds)) + "\n")
        except queue.Empty:
            return
        except BaseException as error:  # the others stop, and the command ends with it
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _line(task: Task, outcome: str, by: str, seconds: float) -> dict[str, Any]:
    mutant = task.mutant
    tests = _deciding(task, outcome, by)
    line = {"mutant": mutant.key, "area": mutant.area, "path": mutant.path, "line": mutant.line, "what": mutant.what}
    found = {**line, "outcome": outcome, "by": by, "seconds": round(seconds, 1), "tests": tests, "digest": _digest(tests)}
    print(f"{outcome:9} {mutant.area:11} {mutant.path}:{mutant.line}  {mutant.what}", flush=True)
    return found


def _result(found: Iterable[dict[str, Any]], *, outdated: Sequence[str]) -> dict[str, Any]:
    reasons = {(e["path"], e["what"]): e["reason"] for e in json.loads((HERE / "equivalent.json").read_text())}
    areas: dict[str, dict[str, Any]] = {}
    for line in found:
        area = areas.setdefault(line["area"], {"caught": 0, "survived": [], "equivalent": [], "seconds": 0.0})
        area["seconds"] = round(area["seconds"] + line["seconds"], 1)
        if line["outcome"] in (CAUGHT, TIMEOUT):
            area["caught"] += 1
        elif reason := reasons.get((line["path"], line["what"])):
            area["equivalent"].append({"path": line["path"], "line": line["line"], "what": line["what"], "reason": reason})
        else:
            area["survived"].append({"path": line["path"], "line": line["line"], "what": line["what"]})
    for area in areas.values():
        num = area["caught"] + len(area["survived"])
        interval = binomtest(area["caught"], num).proportion_ci(0.95, method="exact")
        area.update(num=num, share=round(area["caught"] / num, 4), low=round(interval.low, 4), high=round(interval.high, 4))
    return {"seed": SEED, "python": platform.python_version(), "machine": platform.machine(), "areas": areas, "outdated": list(outdated)}


def as_markdown(result: dict[str, Any]) -> str:
    """A table by area, then the survivors, the mutants that no test could catch, and the planted defects that are out of date."""
    lines = [
        "# Mistakes that the tests catch", "",
        "Mutants made by cosmic-ray's operators, drawn by a fixed seed, and defects planted by somebody who had not read the tests.",
        "Each ran against the tests of its area, slow ones left out. The interval is Clopper and Pearson's, 95 %. Made by `make mutation`.",
        "",
        "| area | mutants | caught | share | interval | equivalent | minutes of one core |", "|--|--|--|--|--|--|--|",
    ]  # fmt: skip
    for name, area in result["areas"].items():
        shares = f"{area['share']:.1%} | {area['low']:.1%} to {area['high']:.1%}"
        lines.append(f"| {name} | {area['num']} | {area['caught']} | {shares} | {len(area['equivalent'])} | {area['seconds'] / 60:.0f} |")
    for title, kind in (("Survived", "survived"), ("Equivalent", "equivalent")):
        found = [entry for area in result["areas"].values() for entry in area[kind]]
        lines += ["", f"## {title}", ""] + [_entry(entry) for entry in found] if found else []
    if result["outdated"]:
        lines += ["", "## Planted defects that are out of date", ""] + [f"- {name}" for name in result["outdated"]]
    return "\n".join(lines) + "\n"


def _entry(entry: dict[str, Any]) -> str:
    reason = f": {entry['reason']}" if "reason" in entry else ""
    return f"- `{entry['path']}:{entry['line']}` `{entry['what']}`{reason}"


if __name__ == "__main__":
    raise SystemExit(main())
