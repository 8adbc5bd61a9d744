"""The checklist of a release: each item passes on a repository that is ready, and fails by name on one that is not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import release_check
from tools.lock import ROOT
from tools.release_check import CHECKLIST, Failed, check

FILES = {
    "pyproject.toml": '[project]\nname = "x"\nversion = "1.2.0"\n',
    "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2026-12-01\n",
    release_check.CHART: "version: 1.2.0\nappVersion: 1.2.0\n",
    "requirements.lock": f"a==1 \\\n    --hash=sha256:{'a' * 64}\n",
    "requirements-cuda.lock": f"b==1 \\\n    --hash=sha256:{'a' * 64}\n",
    "requirements-cpu.lock": f"c==1 \\\n    --hash=sha256:{'a' * 64}\n",
}
OF_FILES = ("tree is clean", "tag is the version", "changelog has the version", "chart has the version", "lock has hashes")


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.com", *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A repository that is ready to be released."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    git(tmp_path, "tag", "v1.2.0")
    return tmp_path


def rewrite(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text((root / name).read_text().replace(old, new))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "tree is clean": (lambda root: (root / "left.txt").write_text("x"), "left.txt"),
    "tag is the version": (lambda root: git(root, "tag", "--delete", "v1.2.0"), "v1.2.0"),
    "changelog has the version": (rewrite("CHANGELOG.md", "## 1.2.0 - 2026-12-01", "## 1.2.0rc1"), "## 1.2.0"),
    "chart has the version": (rewrite(release_check.CHART, "appVersion: 1.2.0", "appVersion: 1.1.0"), "1.1.0"),
    "lock has hashes": (lambda root: (root / "requirements.lock").write_text("a==1\n"), "a==1"),
}


def test_a_ready_repository_passes_and_every_item_is_printed(ready: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(ready, {name: CHECKLIST[name] for name in OF_FILES})
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [f"pass  {name}" for name in OF_FILES]


@pytest.mark.parametrize("name", OF_FILES)
def test_an_item_that_does_not_hold_fails_by_name_and_the_others_are_still_checked(
    ready: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, named = BROKEN[name]
    change(ready)
    assert not check(ready, {item: CHECKLIST[item] for item in (name, "lock has hashes", "chart has the version")})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"FAIL  {name}: ") and named in lines[0]
    assert len(lines) == len({name, "lock has hashes", "chart has the version"})


def test_an_item_that_breaks_fails(ready: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ready / "CHANGELOG.md").unlink()
    assert not check(ready, {"changelog has the version": CHECKLIST["changelog has the version"]})
    assert "CHANGELOG.md" in capsys.readouterr().out


def test_this_repository_has_hashes_and_one_version() -> None:
    assert release_check.lock_has_hashes(ROOT) and release_check.chart_has_the_version(ROOT)


@pytest.mark.slow
def test_the_wheel_installs_into_a_new_environment() -> None:
    assert release_check.wheel_works(ROOT).startswith("ft_platform-")


def test_a_failing_command_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="not a git repository"):
        release_check.tree_is_clean(tmp_path)
