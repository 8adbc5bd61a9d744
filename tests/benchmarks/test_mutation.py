"""The mutants that the tests are measured with: what is drawn, and what no test could tell and is therefore not."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.mutation import __main__ as report
from benchmarks.mutation.areas import PLANTED, Area, Defect, likeliest_first, planted
from benchmarks.mutation.drawing import draw, from_defect
from benchmarks.mutation.trials import CAUGHT, SURVIVED, Copy

AREA = Area(name="pure", modules=("pure.py",), tests=("test_*.py",))
UNTOLD = '''"""A module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    x: int | None


def same(a: int | None, *, b: str | int) -> int | None:
    return a
'''
TOLD = "def grown(n):\n    return n + 3 if n > 2 else n\n"


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str], Path]:
    def make(text: str) -> Path:
        (tmp_path / "pure.py").write_text(text)
        return tmp_path

    return make


def test_the_same_seed_draws_the_same_mutants_and_each_is_another_program(tree: Callable[[str], Path]) -> None:
    root = tree(TOLD)
    drawn = draw(AREA, root, num=60, seed=1)
    assert drawn == draw(AREA, root, num=60, seed=1)
    assert [m.key for m in drawn] != [m.key for m in draw(AREA, root, num=60, seed=2)]
    assert len({ast.dump(ast.parse(m.source)) for m in drawn} | {ast.dump(ast.parse(TOLD))}) == len(drawn) + 1
    assert {m.line for m in drawn} == {2}
    assert len(draw(AREA, root, num=2, seed=1)) == 2


def test_annotations_and_how_a_dataclass_is_made_are_not_mutated(tree: Callable[[str], Path]) -> None:
    drawn = draw(AREA, tree(UNTOLD), num=60, seed=1)
    assert [m.what for m in drawn] == [" -> class Point:"]  # without its decorator


def test_a_planted_defect_is_put_where_its_text_stands_and_left_out_where_that_has_gone(tree: Callable[[str], Path]) -> None:
    root = tree(TOLD)
    defect = Defect(name="d1", path="pure.py", before="n > 2", after="n >= 2", tests=())
    made = from_defect(defect, root, area="planted")
    assert made is not None
    assert (made.line, made.source) == (2, TOLD.replace("n > 2", "n >= 2"))
    assert from_defect(Defect(name="d2", path="pure.py", before="n < 2", after="", tests=()), root, area="planted") is None
    assert from_defect(Defect(name="d3", path="gone.py", before="n", after="", tests=()), root, area="planted") is None


def test_files_named_like_the_module_are_run_first(tmp_path: Path) -> None:
    for name in ("test_a.py", "test_pure.py", "test_z.py"):
        (tmp_path / name).touch()
    assert likeliest_first(tmp_path, ("test_*.py",), of="src/pure.py") == ["test_pure.py", "test_a.py", "test_z.py"]
    with pytest.raises(FileNotFoundError, match="nothing matches"):
        likeliest_first(tmp_path, ("none_*.py",), of="src/pure.py")


@pytest.mark.slow
def test_a_mistake_is_caught_by_a_test_that_looks_and_the_copy_is_whole_again(tree: Callable[[str], Path], tmp_path: Path) -> None:
    root = tree(TOLD)
    (root / "test_pure.py").write_text("from pure import grown\n\n\ndef test_grown():\n    assert grown(3) == 6\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    by = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *by, "commit", "-q", "-m", "a tree"], cwd=root, check=True)
    copy = Copy(root, tmp_path / "copies")
    for after, outcome in (("n + 4 if", CAUGHT), ("3 + n if", SURVIVED), ("__import__('os').abort() if", CAUGHT)):
        mutant = from_defect(Defect(name="d", path="pure.py", before="n + 3 if", after=after, tests=()), root, area="planted")
        assert mutant is not None
        with copy.with_mistake(mutant):
            assert copy.run(["test_pure.py"])[0] == outcome
    assert (copy.path / "pure.py").read_text() == TOLD


def test_no_planted_defect_is_out_of_date() -> None:
    outdated = [defect.name for defect in planted() if from_defect(defect, report.ROOT, area=PLANTED) is None]
    assert not outdated, "adapt `before` and `after` in benchmarks/mutation/planted.json to the code as it is now"


def test_report_names_planted_defects_that_are_out_of_date() -> None:
    result = report._result([], outdated=["cm1"])
    assert result["outdated"] == ["cm1"]
    assert "- cm1" in report.as_markdown(result).splitlines()
